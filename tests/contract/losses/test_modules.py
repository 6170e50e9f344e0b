"""The modules of the losses: options in the constructor, tensors in the call. Their functions' tests cover the rest."""

import copy
import functools
import inspect
import io

import pytest
import torch

import safeops
from safeops.ops.losses._pointwise import PointwiseLoss
from safeops.testing import CHECKS, Sample, Subject, run_check
from tests.contract.common import DEVICE
from tests.ops import RECORDS

MODULES = [n for n, m in vars(safeops.nn).items() if getattr(m, "__module__", 0) == "safeops.nn" and n[0] != "_"]
each_module = pytest.mark.parametrize("name", MODULES)

# Checks of the contract that a module could fail although its function passes. (Compiled modules are tested below.)
OWN = "value gradient dtypes masked_garbage nothing_kept torch_func vmap no_sync autocast".split()


def record(module):
    return RECORDS[module.function.__name__]


def loss_of(result):
    return result if isinstance(result, torch.Tensor) else result.loss


def build(name, **options):
    """Returns (module, its function, the function's options, operands, {mask, weight} if the call takes them)."""
    module = getattr(safeops.nn, name)
    call = {key: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for key, x in record(module).call.items()}
    options_of_call = {key: call[key] for key in inspect.signature(module).parameters if key in call}
    parameters = inspect.signature(module.forward).parameters
    operands = [call[key] for key, x in parameters.items() if x.kind is x.POSITIONAL_OR_KEYWORD and key != "self"]
    tensors = {key: call[key] for key in ("mask", "weight") if key in parameters}
    return module(**{**options_of_call, **options}).to(DEVICE), module.function, options_of_call, operands, tensors


def test_every_loss_has_a_module():
    functions = {name: vars(safeops)[name] for name in RECORDS if name in safeops.__all__}
    arguments = {name: inspect.signature(f).parameters.keys() for name, f in functions.items()}
    losses = {name for name in functions if {"reduction", "denominator"} <= arguments[name]}
    assert {getattr(safeops.nn, name).function.__name__ for name in MODULES} == losses


@pytest.mark.parametrize("check", [c for c in OWN if c in CHECKS])
@pytest.mark.parametrize(
    "name", [name for name in MODULES if isinstance(record(getattr(safeops.nn, name)), PointwiseLoss)]
)
def test_module(name, check):
    module, _, defaults, operands, tensors = build(name)
    definition, fields = record(module).definition, record(module).fields
    if check in fields.get("skip", {}):
        pytest.skip(fields["skip"][check])
    wide = {
        key: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for key, x in defaults.items()
    }

    def reference(*operands, **tensors):
        return definition(*operands, **tensors, **wide)

    floats = tuple(i for i, x in enumerate(operands) if x.is_floating_point())
    sample = Sample(tuple(operands), tensors, differentiable=floats)
    fields = {key: fields[key] for key in ("terms", "row_terms") if key in fields}
    run_check(Subject(module, reference, [sample], data=floats, device=DEVICE, name=name, **fields), check)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("empty", ["zero", "nan"])
@each_module
def test_options_reach_the_function(name, reduction, empty):
    module, function, defaults, operands, tensors = build(name, reduction=reduction, empty=empty)
    for keep in (tensors["mask"], torch.zeros_like(tensors["mask"])):
        keywords = {**tensors, "mask": keep}
        got = loss_of(module(*operands, **keywords))
        want = loss_of(function(*operands, **keywords, reduction=reduction, empty=empty, **defaults))
        assert torch.equal(got.nan_to_num(-1), want.nan_to_num(-1)) and torch.equal(got.isnan(), want.isnan())


@each_module
def test_denominator_reaches_the_function(name):
    module, function, defaults, operands, _ = build(name)
    for denominator in (7.0, torch.tensor(7.0, device=DEVICE)):
        assert torch.equal(
            loss_of(module(*operands, denominator=denominator)),
            loss_of(function(*operands, denominator=denominator, **defaults)),
        )


@each_module
def test_modules_copy_save_and_print(name):
    module, _, defaults, operands, _ = build(name, reduction="sum")
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(module), torch.load(buffer, weights_only=False)):
        assert torch.equal(loss_of(twin(*operands)), loss_of(module(*operands)))
    tensors = {key for key, x in defaults.items() if isinstance(x, torch.Tensor)}
    assert not list(module.parameters()) and module.state_dict().keys() == tensors | set(module.op.buffers)
    for option, value in {"reduction": "sum", **defaults}.items():
        assert option in module.op.buffers or f"{option}={value!r}" in repr(module)


@pytest.mark.slow
@each_module
def test_a_module_made_inside_a_compiled_function(name):
    torch._dynamo.reset()
    _, _, defaults, operands, _ = build(name)
    options = {"reduction": "sum"} | {key: x for key, x in defaults.items() if key == "top_k"}  # (needed)
    make = functools.partial(getattr(safeops.nn, name), **options)
    compiled = torch.compile(lambda *x: make()(*x), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*operands), make()(*operands))


def test_tensors_of_a_constructor_are_checked_and_move_with_the_module():
    for wrong in ("1", torch.ones(2, dtype=torch.int64)):
        with pytest.raises(TypeError, match="^BCEWithLogitsLoss: pos_weight must be "):
            safeops.nn.BCEWithLogitsLoss(pos_weight=wrong)
    module = safeops.nn.BCEWithLogitsLoss(pos_weight=torch.ones(2))
    assert module.to(torch.float64).pos_weight.dtype == torch.float64


TENSOR_OPTIONS = [
    *((name, key) for name in MODULES for key in getattr(safeops.nn, name).op.buffers),
    ("QuantileLoss", "quantile"),
    ("InfoNCELoss", "temperature"),
    ("SupervisedContrastiveLoss", "temperature"),
]


@pytest.mark.parametrize("kind", [torch.nn.Parameter, torch.Tensor.detach])
@pytest.mark.parametrize("name, key", TENSOR_OPTIONS)
def test_a_tensor_option_is_trained_or_kept_and_always_saved(name, key, kind):
    value = kind(torch.tensor(0.5 if key == "temperature" else [0.5, 0.5]))
    module = getattr(safeops.nn, name)(**{key: value})
    trained = {key: value} if kind is torch.nn.Parameter else {}
    assert dict(module.named_parameters()).keys() == trained.keys()
    assert torch.equal(module.state_dict()[key], value) and getattr(module, key) is value


def test_a_learned_temperature_gets_a_gradient():
    temperature = torch.nn.Parameter(torch.tensor(0.5))
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    safeops.nn.InfoNCELoss(temperature=temperature)(x, y).backward()
    assert temperature.grad is not None and temperature.grad != 0


@pytest.mark.parametrize(
    "name, key", [("MSELoss", "reduction"), ("HuberLoss", "delta"), ("BCEWithLogitsLoss", "pos_weight")]
)
def test_an_option_in_the_call_is_refused_by_name(name, key):
    x = torch.zeros(3)
    with pytest.raises(TypeError, match=f"{name}: {key} is an option: give it to the constructor"):
        getattr(safeops.nn, name)()(x, x, **{key: x})


@each_module
def test_what_is_given_in_the_wrong_place_is_told_where_it_goes(name):
    module, _, _, operands, _ = build(name)
    with pytest.raises(TypeError, match=rf"{name} takes .* give the others by name \(.*denominator="):
        module(*operands, operands[0])
    with pytest.raises(TypeError, match=r"keyword argument 'reducton', .*; the arguments are reduction, "):
        getattr(safeops.nn, name)(reducton="sum")
