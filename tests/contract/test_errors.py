"""Bad input: named errors before any work, on the public function, the dispatcher's op and the module alike."""

import pytest
import torch

import safeops
from safeops.testing import Subject
from safeops.testing.execution import check_errors
from safeops.testing.sample import Sample
from tests.contract.bad_calls import BAD_CALLS
from tests.contract.subjects import DEVICE, composite

CALLS = [
    pytest.param(n, bad, id=f"{n}-{i}-{bad.words[1]}") for n, calls in BAD_CALLS.items() for i, bad in enumerate(calls)
]


@pytest.mark.parametrize("name, bad", CALLS)
def test_named_error(name, bad):
    check_errors(Subject(getattr(safeops, name), None, (), errors=[bad], device=DEVICE), Sample())


@pytest.mark.parametrize("name, bad", CALLS)
def test_the_composite_refuses_the_same(name, bad):
    check_errors(Subject(composite(getattr(safeops, name), name), None, (), errors=[bad], device=DEVICE), Sample())


def test_the_message_is_the_one_users_can_act_on():
    with pytest.raises(ValueError) as error:
        safeops.masked_mean(torch.zeros(2, 5, device=DEVICE), torch.ones(3, 4, dtype=torch.bool, device=DEVICE))
    assert str(error.value) == "masked_mean: mask (3, 4) does not broadcast to input (2, 5)"


@pytest.mark.parametrize("name", ["masked_sum", "masked_mean", "mse_loss"])
def test_a_mask_never_enlarges_its_input(name):
    x, mask = torch.zeros(1, 5, device=DEVICE), torch.ones(2, 5, dtype=torch.bool, device=DEVICE)
    args, kwargs = ((x, x), {"mask": mask}) if name == "mse_loss" else ((x, mask), {})
    with pytest.raises(ValueError, match=rf"{name}: mask \(2, 5\) does not broadcast to input.* \(1, 5\)"):
        getattr(safeops, name)(*args, **kwargs)


@pytest.mark.parametrize("name", ["MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss"])
def test_modules_refuse_as_their_functions_do(name):
    loss, x = getattr(safeops.nn, name)(), torch.zeros(2, 5, device=DEVICE)
    with pytest.raises(TypeError, match="mask must be a bool tensor"):
        loss(x, x, mask=torch.ones(2, 5, device=DEVICE))
    with pytest.raises(ValueError, match="reduction must be one of"):
        getattr(safeops.nn, name)(reduction="average")(x, x)


def test_an_error_leaves_autograd_and_the_rng_alone():
    x = torch.ones(2, 5, device=DEVICE, requires_grad=True)
    state = torch.get_rng_state()
    with pytest.raises(ValueError):
        safeops.mse_loss(x, torch.ones(2, 3, device=DEVICE))
    assert x.grad is None and x._version == 0
    assert torch.equal(torch.get_rng_state(), state)
    safeops.mse_loss(x, torch.zeros(2, 5, device=DEVICE)).backward()
    assert torch.equal(x.grad, torch.full_like(x, 0.2))
