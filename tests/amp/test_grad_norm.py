"""grad_norm: torch's value if torch is right, the true one if not."""

import math

import pytest
import torch

import safeops
from tests.amp.gradients import each_dtype, mixed, parameters, sets, true_norm

INF, NAN = math.inf, math.nan


@each_dtype
@pytest.mark.parametrize("ord", [2.0, 1, INF, "inf", 3.5], ids=str)
def test_norm_is_not_worse_than_torchs(dtype, ord):
    for gradients in sets(dtype):
        want = true_norm(gradients, float(ord))
        got = safeops.grad_norm(parameters(gradients), ord)
        rival = torch.nn.utils.get_total_norm(gradients, float(ord))
        assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) and got.shape == ()
        room = want * torch.finfo(got.dtype).eps * (64 if dtype == torch.float64 else 1)  # the truth is fp64
        assert (got.double() - want).abs() <= (rival.double() - want).abs() + room


def test_norm_of_half_gradients_beyond_65504():
    gradients = [torch.full((1000,), 60000.0, dtype=torch.float16), torch.full((500,), -60000.0, dtype=torch.float16)]
    assert torch.nn.utils.get_total_norm(gradients) == INF
    got = safeops.grad_norm(parameters(gradients))
    assert abs(got.item() / (60000 * 1500**0.5) - 1) < 1e-6


@pytest.mark.parametrize("size", [1e30, 1e-30, 1e-42])
def test_norm_of_fp32_gradients_whose_squares_do_not_fit(size):
    gradients = [torch.full((1000,), size)]
    rival = torch.nn.utils.get_total_norm(gradients)
    got = safeops.grad_norm(parameters(gradients)).double()
    want = gradients[0][0].double() * 1000**0.5
    assert rival == INF or rival == 0 or size == 1e-30
    assert abs(got / want - 1) < (1e-6 if size > 1e-38 else 1e-4)


def test_norm_of_mixed_dtypes():
    gradients = mixed()
    got = safeops.grad_norm(parameters(gradients))
    assert got.dtype == torch.float64 and abs(got / true_norm(gradients) - 1) < 1e-7  # halves: fp32 sums


def test_norm_shows_what_is_not_finite():
    for bad, want in ((NAN, NAN), (INF, INF), (-INF, INF)):
        gradients = [torch.ones(70_000), torch.tensor([1.0, bad]).half()]
        for ord in (1, 2, INF, 3):
            assert str(safeops.grad_norm(parameters(gradients), ord).item()) == str(want)


def test_modules_tensors_and_generators():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    model[1].bias.requires_grad_(False)
    model(torch.ones(5, 4)).square().sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(gradients) == 3
    want = true_norm(gradients).float()
    for argument in (model, model.parameters(), list(model.parameters()), iter(tuple(model.parameters()))):
        assert torch.allclose(safeops.grad_norm(argument), want, rtol=1e-6)
    assert torch.allclose(safeops.grad_norm(model[0].weight), true_norm([model[0].weight.grad]).float(), rtol=1e-6)


def test_without_gradients():
    for nothing in ([], iter(()), torch.nn.Linear(2, 2), [torch.nn.Parameter(torch.ones(2), requires_grad=False)]):
        for got in (safeops.grad_norm(nothing), safeops.clip_grad_norm_(nothing, 1.0, nonfinite="raise")):
            assert got == 0 and got.dtype == torch.float32 and not got.requires_grad
    empty = parameters([torch.zeros(0), torch.zeros(0, 3)])
    assert safeops.grad_norm(empty) == 0 and safeops.clip_grad_norm_(empty, 1.0) == 0
