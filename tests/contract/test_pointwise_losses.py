"""Every clause of the contract on every pointwise loss."""

import pytest

from safeops.testing import CHECKS, run_check
from tests.contract.subjects import losses

SUBJECTS = {s.name: s for s in losses()}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", SUBJECTS)
def test_contract(name, check):
    run_check(SUBJECTS[name], check)
