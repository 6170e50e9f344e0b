"""Every clause of the contract on every masked reduction."""

import pytest

from safeops.testing import CHECKS, run_check
from tests.contract.subjects import reductions

SUBJECTS = {s.name: s for s in reductions()}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", SUBJECTS)
def test_contract(name, check):
    run_check(SUBJECTS[name], check)
