"""Every clause of the contract on every unary and binary function and on apply_where; bad calls on both routes."""

import pytest
import torch

import safeops
from safeops.testing import CHECKS, Subject, run_check
from safeops.testing.execution import check_errors
from safeops.testing.sample import Sample
from tests.contract.bad_calls_unary_binary import APPLY_WHERE, BAD_CALLS
from tests.contract.subjects import DEVICE, by_composite, composite
from tests.contract.subjects_unary_binary import binary, functions, unary

SUBJECTS = {s.name: s for s in (*unary(), *binary())}
SUBJECTS |= {c.name: c for c in map(by_composite, list(SUBJECTS.values()))}
SUBJECTS |= {s.name: s for s in functions()}
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


@pytest.mark.parametrize("bad", [pytest.param(b, id=f"{i}-{b.words[1]}") for i, b in enumerate(APPLY_WHERE)])
def test_named_error_of_apply_where(bad):
    check_errors(Subject(safeops.apply_where, None, (), errors=[bad], device=DEVICE), Sample())


@pytest.mark.parametrize("name", BAD_CALLS)
def test_sparse_operands_are_refused(name):
    x = torch.ones(2, 5, device=DEVICE)
    rest = (x,) if name in ("safe_pow", "safe_atan2", "xlogy") else ()
    for op in (getattr(safeops, name), composite(getattr(safeops, name), name)):
        with pytest.raises(TypeError, match=f"{name}: input must be a dense tensor, got layout torch.sparse_coo"):
            op(x.to_sparse(), *rest)
