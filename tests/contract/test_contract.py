"""Every clause of the contract, on every op, on its composite, and on the cases that its kernels leave to it."""

import pytest

from safeops.testing import CHECKS, run_check
from tests.contract.common import REPEATS
from tests.ops import RECORDS
from tests.ops.record import firsts

# The clauses for the composites of ops and variants. The others are marked exhaustive.
OF_COMPOSITES = (
    "value gradient dtypes masked_garbage masked_upstream kept_nonfinite kept_upstream gradgradcheck".split()
)


def cases():
    """Every op through every clause once. Slow is what Inductor compiles. Exhaustive is what only repeats a clause of
    an op, and what traces an op that is not the first of its family."""
    firsts_of_families = firsts()
    for record in RECORDS.values():
        for subject in record.subjects():
            for check in (name for name in CHECKS if name not in subject.skip):
                repeats = subject.name != record.name and check not in OF_COMPOSITES
                traces = CHECKS[check].slow and record.name not in firsts_of_families
                marks = REPEATS if repeats or traces else [pytest.mark.slow] if check == "inductor" else ()
                yield pytest.param(subject, check, marks=marks, id=f"{subject.name}-{check}")


@pytest.mark.parametrize("subject, check", list(cases()))
@pytest.mark.filterwarnings("ignore:.* is broadcast with")  # (some samples do so on purpose)
def test_contract(subject, check):
    run_check(subject, check)
