"""Arguments that mean nothing: refused by name, by the kernel's route and by the composite's."""

import inspect

import numpy as np
import pytest
import torch

import safeops
from safeops.core.op import registry
from tests.callers.calls import CALLS, NUMBERS, OTHERS, TENSORS_TOO, call, tensors
from tests.contract.common import case
from tests.ops import RECORDS

WORDS = "reduction", "empty", "padding"
NO_NUMBER = [1j, 0j, "1", [1], object(), torch.tensor(0.0), torch.tensor([1.0, 2.0])]
NONSENSE = {
    "dtype": [5, 0, True, "float32", torch.complex64, torch.float8_e4m3fn, torch.tensor(1)],
    "dim": [torch.tensor(1.9), torch.tensor(1), 1.0, True, "1", (torch.tensor(1),), [1.0]],
    "keepdim": [1, 0, None, torch.tensor(True)],
    **dict.fromkeys(("log_input", "log_target", "full"), [1, 0, None, "True", torch.tensor(True)]),
    **dict.fromkeys(WORDS, [None, True, "", 5, ["mean"], {"zero"}, np.ones(2)]),
    "capacity": [1.0, True, None, "4", torch.tensor(4), -1, 2**60],
    **{key: [x for x in NO_NUMBER if not (key in TENSORS_TOO and isinstance(x, torch.Tensor))] for key in NUMBERS},
}
KEYS = {name: {*CALLS[name], *WORDS} & inspect.signature(getattr(safeops, name)).parameters.keys() for name in CALLS}
REFUSING = [
    name for name in CALLS if KEYS[name] & NONSENSE.keys() and name not in ("apply_where", "magnitude", "safe_atan2")
]


@pytest.fixture(params=["kernel", "composite"])
def route(request, monkeypatch):
    if request.param == "composite":
        for op in registry.values():
            monkeypatch.setattr(op, "cpu", False)


def test_the_table_has_every_function():
    assert set(CALLS) == set(safeops.__all__) - OTHERS


@pytest.mark.parametrize("name", REFUSING)
def test_refused_by_name(route, name):
    for key in KEYS[name] & NONSENSE.keys():
        for value in NONSENSE[key]:
            if key == "margin" and isinstance(value, torch.Tensor) and registry[name].family == "rankings":
                continue  # a margin for each pair
            with case(key, value), pytest.raises((TypeError, ValueError), match=rf"^{name}: {key} must be "):
                call(name, **{key: value})


@pytest.mark.parametrize("value", [1j, "1", [1], object()], ids=lambda v: type(v).__name__)
def test_fill_value_of_apply_where(value):
    with pytest.raises(TypeError, match="^apply_where: fill_value must be "):
        call("apply_where", fill_value=value)


def test_a_complex_fill_value_stands_in_for_complex_numbers():
    got = call("apply_where", f1=lambda x: x.to(torch.complex64), fill_value=2j)
    assert got.dtype == torch.complex64 and (got[~CALLS["apply_where"]["condition"]] == 2j).all()


BOUNDED = [
    (name, key) for name in CALLS for key in NUMBERS if key in CALLS[name] and name not in ("magnitude", "safe_atan2")
]


@pytest.mark.parametrize("size", [2**64, -(2**64), 2**63, 10**400], ids=["2^64", "-2^64", "2^63", "10^400"])
@pytest.mark.parametrize("name, key", BOUNDED)
def test_an_integer_of_more_than_64_bits_is_the_float_or_refused_by_name(route, name, key, size):
    try:
        got = call(name, **{key: size})
    except ValueError as error:
        assert str(error).startswith(f"{name}: {key} must be ")
        return
    huge = float(size) if abs(size) < 1e300 else 1.7e308
    for g, w in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, call(name, **{key: huge})))):
        torch.testing.assert_close(g, w, equal_nan=True)


@pytest.mark.parametrize("name", [name for name in CALLS if "dim" in CALLS[name]])
def test_an_integer_of_numpy_is_a_dim(route, name):
    assert torch.equal(call(name, dim=np.int64(1)), call(name, dim=1))


def of_dimensions(name, ndim):
    operands = tensors(name)

    def longer(x, ndim):
        more = [1] * (ndim - x.dim())
        return x.reshape(*more, *x.shape) if name == "token_log_probs" else x.reshape(*x.shape, *more)

    results = {key: longer(x, ndim) for key, x in operands.items() if x.dim() > 1}
    if "ignore_index" in CALLS[name] and registry[name].family == "classification":  # rows lack the dim of the classes
        rows = operands.keys() & {"target", "mask", "row_weight"}
        results |= {key: longer(operands[key], ndim - 1) for key in rows}
    return results


# Functions whose operands may have any number of dims: not those of rows of logits, linear layers or images.
OF_ANY_DIMS = [
    name
    for name in CALLS
    if not RECORDS[name].of_rows
    and getattr(registry.get(name), "family", "") not in ("divergences", "images", "linear", "routers")
    and name not in ("cox_loss", "ordinal_loss", "plackett_luce_loss")  # losses of rows, in records of their own
]


@pytest.mark.parametrize("name", OF_ANY_DIMS)
def test_more_than_64_dimensions(route, name):
    """Operands of more than 64 dims, or 63 for ops that move elements, are refused by name. (These ops see 16-byte
    elements as two halves, a further dim.)"""
    moves = name.startswith(("masked_compact", "masked_s")) and name.endswith(("compact", "select", "scatter"))
    most = 63 if moves or name in ("safe_gather", "safe_index_select") else 64
    first = next(iter(tensors(name)))
    call(name, **of_dimensions(name, most))
    for ndim in (most + 1, 65, 66):
        limit = most if ndim == most + 1 else 64
        with pytest.raises(ValueError, match=rf"^{name}: {first} must have at most {limit} dimensions, got {ndim}$"):
            call(name, **of_dimensions(name, ndim))


@pytest.mark.parametrize("name", ["masked_scatter", "masked_select"])
def test_a_mask_of_64_dimensions(route, name):
    with pytest.raises(ValueError, match=f"^{name}: mask must have at most 63 dimensions, got 64$"):
        call(name, input=torch.ones(6), **{"mask": of_dimensions(name, 64)["mask"].reshape(*[1] * 62, 5, 6)})


CONSTANTS = [("policy_loss", key) for key in ("old_log_prob", "advantage", "reference_log_prob")]
ORDERS = [{"ord": ord} for ord in (0, 1, 2, 3, float("inf"), -float("inf"))]
FLOATING = [
    pytest.param(name, key, options, id="-".join((name, key, *map(str, options.values()))))
    for name in CALLS
    for key, x in tensors(name).items()
    if x.is_floating_point() and name not in ("masked_count", "router_load") and (name, key) not in CONSTANTS
    for options in (ORDERS if "ord" in CALLS[name] else [{}])
]


@pytest.mark.parametrize("name, key, options", FLOATING)
def test_no_operand_is_cut_from_the_graph(route, name, key, options):
    x = tensors(name)[key].clone().requires_grad_()
    result = call(name, **{key: x}, **options)
    (dx,) = torch.autograd.grad((result[0] if isinstance(result, tuple) else result).sum(), x, create_graph=True)
    assert dx.isfinite().all()
    if key == "weight" and (name in ("masked_amax", "masked_amin") or abs(options.get("ord", 0)) == float("inf")):
        assert (dx == 0).all()


@pytest.mark.parametrize("name", ["masked_amax", "masked_amin"])
@pytest.mark.parametrize("empty, nothing", [("zero", 0.0), ("nan", float("nan"))])
def test_a_weight_of_no_influence_hides_nothing(name, empty, nothing):
    weight = torch.tensor([[float("nan"), 1.0], [0.0, 0.0]], requires_grad=True)
    x = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    got = getattr(safeops, name)(x, dim=1, weight=weight, empty=empty)
    torch.testing.assert_close(got, torch.tensor([0.0, nothing]), equal_nan=True)
    assert (torch.autograd.grad(got.sum(), weight)[0] == 0).all()


@pytest.mark.parametrize("name", [op.module for op in registry.values() if op.module])
def test_scripting_says_what_to_use(name):
    module = getattr(safeops.nn, name)()
    for model in (module, torch.nn.Sequential(module)):
        with pytest.raises(TypeError, match=f"^{name}: torch.jit.script does not take it; use torch.compile"):
            torch.jit.script(model)


def test_what_scripting_is_told_to_use_works():
    @torch.jit.script
    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.ops.safeops.mse_loss(x, y)

    x, y = torch.ones(3, requires_grad=True), torch.zeros(3)
    loss(x, y).backward()
    assert torch.equal(x.grad, torch.full((3,), 2 / 3))
