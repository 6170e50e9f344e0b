"""A denominator counts what all micro-batches and ranks keep: it, not the call's mask, decides if nothing is kept."""

import pytest
import torch

import safeops
from tests.callers.calls import CALLS
from tests.contract.common import DEVICE, each_route, on

LOSSES = [name for name, arguments in CALLS.items() if "denominator" in arguments]
ZEROS = [0, 0.0, torch.tensor(0), torch.tensor(0.0), torch.tensor(0.0, dtype=torch.float64)]
COUNTS = [4, torch.tensor(4), torch.tensor(0.5)]


def value_and_gradients(name, route, **changes):
    """Returns (loss of the record's call, gradient to the first floating-point operand with the most dims)."""
    arguments = {
        key: x.clone().to(x.device if x.is_meta else DEVICE) if isinstance(x, torch.Tensor) else x
        for key, x in {**CALLS[name], **changes}.items()
    }
    floating = (x for x in arguments.values() if isinstance(x, torch.Tensor) and x.is_floating_point())
    x = max(floating, key=torch.Tensor.dim)
    result = on(route, name)(**{key: v.requires_grad_() if v is x else v for key, v in arguments.items()})
    value = result[0] if isinstance(result, tuple) else result
    return value.detach(), torch.autograd.grad(value, x)[0]


def nothing_kept(name):
    return {"mask": torch.zeros_like(CALLS[name]["mask"])}


@each_route
@pytest.mark.parametrize("name", LOSSES)
def test_no_element_here_and_some_elsewhere(name, route):
    for denominator in COUNTS:
        for empty in ("zero", "nan", "raise"):
            value, grad = value_and_gradients(name, route, denominator=denominator, empty=empty, **nothing_kept(name))
            assert value == 0 and not grad.any(), (denominator, empty, value)


@each_route
@pytest.mark.parametrize("name", LOSSES)
def test_no_element_anywhere(name, route):
    for denominator in ZEROS:
        for mask in (nothing_kept(name), {}):  # {}: the call keeps rows, yet the denominator is 0
            value, grad = value_and_gradients(name, route, denominator=denominator, **mask)
            assert value == 0 and not grad.any(), (denominator, mask)
            value, grad = value_and_gradients(name, route, denominator=denominator, empty="nan", **mask)
            assert value.isnan() and not grad.any(), (denominator, mask)


@pytest.mark.parametrize("name", LOSSES)
def test_raise_asks_the_denominator(name):
    for denominator in ZEROS:
        with pytest.raises(ValueError, match=f'{name}: empty="raise": nothing is kept'):
            value_and_gradients(name, "kernel", denominator=denominator, empty="raise")


@pytest.mark.parametrize("name", LOSSES)
def test_on_another_device_it_is_refused(name):
    with pytest.raises(ValueError, match=f"{name}: denominator is on meta"):
        value_and_gradients(name, "composite", denominator=torch.tensor(3.0, device="meta"))


@each_route
def test_a_kept_nan_is_not_hidden(route):
    target = CALLS["mse_loss"]["target"].clone().fill_(torch.nan)
    value, _ = value_and_gradients("mse_loss", route, target=target, denominator=torch.tensor(0.0))
    assert value.isnan()


def test_second_order():
    x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    for denominator, want in ((torch.tensor(0.0), 0.0), (torch.tensor(4.0), 0.5)):
        loss = safeops.mse_loss(x, torch.zeros_like(x), denominator=denominator)
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        assert torch.autograd.grad(first.sum(), x)[0].tolist() == [want, want]
