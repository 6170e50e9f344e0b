"""Every clause of the contract on every selection op."""

import pytest

from safeops.testing import CHECKS, run_check
from tests.contract.subjects import by_composite
from tests.contract.subjects_selection import selections

SUBJECTS = {s.name: s for s in selections()}
SUBJECTS |= {c.name: c for c in map(by_composite, list(SUBJECTS.values()))}


@pytest.mark.parametrize("name, check", [(s.name, c) for s in SUBJECTS.values() for c in CHECKS if c not in s.skip])
@pytest.mark.filterwarnings("ignore:.* is broadcast with")  # samples that mean to
def test_contract(name, check):
    run_check(SUBJECTS[name], check)
