"""Every clause of the contract on every op, on its composite, and on what its kernels do not compute."""

import pytest

from safeops.testing import CHECKS, run_check
from tests.ops import RECORDS

SUBJECTS = {subject.name: subject for record in RECORDS.values() for subject in record.subjects()}


@pytest.mark.parametrize("name, check", [(s.name, c) for s in SUBJECTS.values() for c in CHECKS if c not in s.skip])
@pytest.mark.filterwarnings("ignore:.* is broadcast with")  # samples that mean to
def test_contract(name, check):
    run_check(SUBJECTS[name], check)
