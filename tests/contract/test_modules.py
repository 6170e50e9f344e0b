"""The nn modules are their functions: options in the constructor, tensors in the call."""

import copy
import io

import pytest
import torch

import safeops
from safeops.testing import CHECKS, Sample, Subject, run_check
from tests.contract import definitions
from tests.contract.subjects import DEVICE, data, mask, weights

MODULES = {
    "MSELoss": ("mse_loss", {}),
    "L1Loss": ("l1_loss", {}),
    "SmoothL1Loss": ("smooth_l1_loss", {"beta": 0.5}),
    "HuberLoss": ("huber_loss", {"delta": 2.0}),
}
# What a module could break by itself; the rest is its function's.
OWN = [
    "value",
    "gradient",
    "dtypes",
    "masked_garbage",
    "nothing_kept",
    "torch_func",
    "vmap",
    "no_sync",
    "autocast",
    "compile",
]


def build(name, **options):
    function, parameters = MODULES[name]
    return getattr(safeops.nn, name)(**parameters, **options).to(DEVICE), getattr(safeops, function), parameters


@pytest.mark.parametrize("check", [c for c in OWN if c in CHECKS])
@pytest.mark.parametrize("name", MODULES)
def test_contract(name, check):
    module, _, parameters = build(name)
    function = getattr(definitions, MODULES[name][0])
    sample = Sample((data(3, 5), data(3, 5, seed=1)), {"mask": mask(3, 5), "weight": weights(5)}, differentiable=(0, 1))

    def reference(input, target, **tensors):
        return function(input, target, **tensors, **parameters)

    run_check(Subject(module, reference, [sample], data=(0, 1), device=DEVICE, name=name), check)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("empty", ["zero", "nan"])
@pytest.mark.parametrize("name", MODULES)
def test_options_reach_the_function(name, reduction, empty):
    module, function, parameters = build(name, reduction=reduction, empty=empty)
    x, y = data(4, 3).to(DEVICE), data(4, 3, seed=1).to(DEVICE)
    for keep in (mask(4, 3).to(DEVICE), torch.zeros(4, 3, dtype=torch.bool, device=DEVICE)):
        got = module(x, y, mask=keep, weight=weights(3).to(DEVICE))
        want = function(x, y, mask=keep, weight=weights(3).to(DEVICE), reduction=reduction, empty=empty, **parameters)
        assert torch.equal(got.nan_to_num(-1), want.nan_to_num(-1)) and torch.equal(got.isnan(), want.isnan())


@pytest.mark.parametrize("name", MODULES)
def test_denominator_reaches_the_function(name):
    module, function, parameters = build(name)
    x, y = data(4, 3).to(DEVICE), data(4, 3, seed=1).to(DEVICE)
    for denominator in (7.0, torch.tensor(7.0, device=DEVICE)):
        assert torch.equal(module(x, y, denominator=denominator), function(x, y, denominator=denominator, **parameters))


@pytest.mark.parametrize("name", MODULES)
def test_modules_copy_save_and_print(name):
    module, _, parameters = build(name, reduction="sum")
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    x = data(4, 3).to(DEVICE)
    for twin in (copy.deepcopy(module), torch.load(buffer, weights_only=False)):
        assert torch.equal(twin(x, x + 1), module(x, x + 1))
    assert not list(module.parameters()) and not module.state_dict()
    for option, value in {"reduction": "'sum'", **parameters}.items():
        assert f"{option}={value}" in repr(module)
