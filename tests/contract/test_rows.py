"""Every clause of the contract on every function of rows; bad calls on both routes."""

import pytest

import safeops
from safeops.testing import CHECKS, Subject, run_check
from safeops.testing.execution import check_errors
from safeops.testing.sample import Sample
from tests.contract.bad_calls_rows import BAD_CALLS
from tests.contract.subjects import DEVICE, by_composite, composite
from tests.contract.subjects_rows import rows

SUBJECTS = {s.name: s for s in rows()}
SUBJECTS |= {c.name: c for c in map(by_composite, list(SUBJECTS.values()))}
CALLS = [
    pytest.param(n, bad, id=f"{n}-{i}-{bad.words[1]}") for n, calls in BAD_CALLS.items() for i, bad in enumerate(calls)
]


@pytest.mark.parametrize("name, check", [(s.name, c) for s in SUBJECTS.values() for c in CHECKS if c not in s.skip])
@pytest.mark.filterwarnings("ignore:.* is broadcast with")  # samples that mean to
def test_contract(name, check):
    run_check(SUBJECTS[name], check)


@pytest.mark.parametrize("name, bad", CALLS)
def test_named_error(name, bad):
    check_errors(Subject(getattr(safeops, name), None, (), errors=[bad], device=DEVICE), Sample())


@pytest.mark.parametrize("name, bad", CALLS)
def test_the_composite_refuses_the_same(name, bad):
    check_errors(Subject(composite(getattr(safeops, name), name), None, (), errors=[bad], device=DEVICE), Sample())
