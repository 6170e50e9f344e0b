"""Every clause of the contract on every op, on its composite, and on what its kernels do not compute."""

import pytest

from safeops._op import registry
from safeops.testing import CHECKS, run_check
from tests.ops import RECORDS

# What a variant, which the composite computes, is asked at once. The rest it shares with its op, and is a slow test.
OF_VARIANTS = "value gradient dtypes masked_garbage masked_upstream kept_nonfinite kept_upstream gradgradcheck".split()


def cases():
    """Every op through every clause once; what only repeats a compilation, or an op's clause, is a slow test. So is
    what Inductor makes of an op whose sibling it has compiled: it takes the time of all other clauses together."""
    siblings = set()
    for record in RECORDS.values():
        kind = type(registry.get(record.name, record.name))
        compiled = {"inductor"} if kind in siblings else set()
        siblings.add(kind)
        for subject in record.subjects():
            for check in (name for name in CHECKS if name not in subject.skip):
                repeats = subject.name.removesuffix(" (composite)") != record.name and check not in OF_VARIANTS
                marks = [pytest.mark.slow] if check in compiled or repeats else []
                if CHECKS[check].slow:
                    compiled.add(check)
                yield pytest.param(subject, check, marks=marks, id=f"{subject.name}-{check}")


@pytest.mark.parametrize("subject, check", list(cases()))
@pytest.mark.filterwarnings("ignore:.* is broadcast with")  # samples that mean to
def test_contract(subject, check):
    run_check(subject, check)
