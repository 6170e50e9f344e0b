"""Every clause of the contract, on every op, on its composite, and on the cases that its kernels leave to it."""

import pytest

from safeops.testing import CHECKS, run_check
from tests.contract.common import REPEATS
from tests.ops import RECORDS
from tests.ops.record import firsts

# Clauses that are run on composites and variants, too. All other clauses of theirs are marked exhaustive.
OF_COMPOSITES = (
    "value gradient dtypes masked_garbage masked_upstream kept_nonfinite kept_upstream gradgradcheck".split()
)
# These clauses take half of the time, so `make test` runs them on the first op of a kind alone. An op's siblings share
# the code that the repeated ones test, and run them in `make test-all`; the slow ones test each op's own formula, and
# its siblings run them in `make test-slow`.
OF_SIBLINGS_REPEATED = "layouts upstream_layouts vmap torch_func accumulation uninitialized".split()
OF_SIBLINGS_SLOW = "gradgradcheck forward_ad opcheck kept_nonfinite kept_upstream".split()
COMPOSITES_SLOW = "masked_garbage kept_nonfinite kept_upstream gradgradcheck".split()


def cases():
    """Yields every op and its variants with every clause. Marked slow: clauses that trace or compile, and clauses that
    take long, for an op that is not the first of its kind. Marked exhaustive, too: clauses that a variant or a sibling
    repeats, and clauses that trace an op that is not the first of its kind."""
    firsts_of_kinds = firsts()
    kinds = [(RECORDS[name].kind.partition(".")[0], name) for name in RECORDS if name in firsts_of_kinds]
    of_families = dict(reversed(kinds)).values()
    for record in RECORDS.values():
        for subject in record.subjects():
            for check in (name for name in CHECKS if name not in subject.skip):
                first = record.name in firsts_of_kinds
                traced = CHECKS[check].slow
                again = subject.name != record.name and check not in OF_COMPOSITES
                again = again or not first and (traced or check in OF_SIBLINGS_REPEATED)
                again = again or check == "inductor" and record.name not in of_families
                slow = traced or check in OF_SIBLINGS_SLOW and not first
                slow = slow or check in COMPOSITES_SLOW and subject.name != record.name
                marks = REPEATS if again else [pytest.mark.slow] if slow else ()
                yield pytest.param(subject, check, marks=marks, id=f"{subject.name}-{check}")


@pytest.mark.parametrize("subject, check", list(cases()))
@pytest.mark.filterwarnings("ignore:.* is broadcast with")  # some samples broadcast on purpose
def test_contract(subject, check):
    run_check(subject, check)
