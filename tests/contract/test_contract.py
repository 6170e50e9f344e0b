"""Every clause of the contract on every op, on its composite, and on what its kernels do not compute."""

import pytest

from safeops.testing import CHECKS, run_check
from tests.ops import RECORDS


def cases():
    """Every op through every clause once; a variant that is compiled after its op is a slow test."""
    for record in RECORDS.values():
        compiled = set()
        for subject in record.subjects():
            for check in (name for name in CHECKS if name not in subject.skip):
                marks = [pytest.mark.slow] if check in compiled else []
                if CHECKS[check].slow:
                    compiled.add(check)
                yield pytest.param(subject, check, marks=marks, id=f"{subject.name}-{check}")


@pytest.mark.parametrize("subject, check", list(cases()))
@pytest.mark.filterwarnings("ignore:.* is broadcast with")  # samples that mean to
def test_contract(subject, check):
    run_check(subject, check)
