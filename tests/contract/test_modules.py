"""The nn modules are their functions: options in the constructor, tensors in the call."""

import copy
import inspect
import io

import pytest
import torch

import safeops
from safeops.testing import CHECKS, Sample, Subject, run_check
from tests.contract.common import DEVICE
from tests.ops import RECORDS
from tests.ops.operands import data, mask, weights

MODULES = [n for n, m in vars(safeops.nn).items() if getattr(m, "__module__", 0) == "safeops.nn" and n[0] != "_"]
# What a module could break by itself; the rest is its function's.
OWN = "value gradient dtypes masked_garbage nothing_kept torch_func vmap no_sync autocast compile".split()


def build(name, **options):
    """(module, its function, the function's own options)"""
    module = getattr(safeops.nn, name)
    call = RECORDS[module.function.__name__].call
    parameters = {key: call[key] for key in inspect.signature(module).parameters if key in call}
    return module(**parameters, **options).to(DEVICE), module.function, parameters


def test_every_loss_has_a_module():
    losses = {name for name, record in RECORDS.items() if record.family == "losses"}
    assert {getattr(safeops.nn, name).function.__name__ for name in MODULES} == losses


@pytest.mark.parametrize("check", [c for c in OWN if c in CHECKS])
@pytest.mark.parametrize("name", MODULES)
def test_contract(name, check):
    module, function, parameters = build(name)
    sample = Sample((data(3, 5), data(3, 5, seed=1)), {"mask": mask(3, 5), "weight": weights(5)}, differentiable=(0, 1))

    def reference(input, target, **tensors):
        return RECORDS[function.__name__].definition(input, target, **tensors, **parameters)

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


@pytest.mark.parametrize("name", MODULES)
def test_a_module_made_inside_a_compiled_function(name):
    torch._dynamo.reset()
    make = getattr(safeops.nn, name)
    compiled = torch.compile(lambda x, y: make(reduction="sum")(x, y), backend="aot_eager", fullgraph=True)
    x, y = data(4, 3).to(DEVICE), data(4, 3, seed=1).to(DEVICE)
    torch.testing.assert_close(compiled(x, y), make(reduction="sum")(x, y))
