"""Every clause of the contract on every statistic; bad calls on both routes; accuracy where plain formulas lose it."""

import pytest

from safeops.testing import CHECKS, run_check
from tests.contract.subjects import by_composite
from tests.contract.subjects_statistics import counts, gradients_of_weights, other_orders, statistics

SUBJECTS = {s.name: s for s in (*statistics(), *counts())}
SUBJECTS |= {c.name: c for c in map(by_composite, list(SUBJECTS.values()))}
SUBJECTS |= {s.name: s for s in (*gradients_of_weights(), *other_orders())}


@pytest.mark.parametrize("name, check", [(s.name, c) for s in SUBJECTS.values() for c in CHECKS if c not in s.skip])
def test_contract(name, check):
    run_check(SUBJECTS[name], check)
