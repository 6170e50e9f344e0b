"""Every clause of the contract on every function of rows; bad calls on both routes."""

import pytest
import torch

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


@pytest.mark.parametrize("length", [31, 33, 1000, 1024, 1025, 2049, 4097])
@pytest.mark.parametrize("name", ["masked_softmax", "masked_log_softmax", "normalize", "cosine_similarity"])
def test_several_rows_of_any_length(name, length):
    """Where the kernels cut rows into pieces, or take several at once; also beside an operand of stride 0."""
    generator = torch.Generator().manual_seed(length)
    x, y = torch.randn(2, 9, length, generator=generator, dtype=torch.float64)
    mask = torch.rand(9, length, generator=generator) < 0.7
    operands = [(), (mask,), (mask[:, :1],)]
    if name == "normalize":
        operands = [()]
    if name == "cosine_similarity":
        operands = [(y,), (y[:1].expand_as(x),), (y[0, 0].expand_as(x),)]
    for other in operands:
        want = composite(getattr(safeops, name), name)(x, *other)
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
            cast = [t if t.dtype == torch.bool else t.to(dtype) for t in (x, *other)]
            got = getattr(safeops, name)(*(t.to(DEVICE) for t in cast))
            torch.testing.assert_close(got.cpu().double(), want, rtol=tolerance, atol=tolerance)
