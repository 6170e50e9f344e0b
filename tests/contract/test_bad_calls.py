"""Bad input: named errors before any work, on the public function, its composite and the module alike."""

import inspect

import pytest
import torch

import safeops
from tests.contract.common import DEVICE, case, each_route, on
from tests.contract.losses.test_modules import MODULES
from tests.contract.refusals import BAD_CALLS, assert_refused
from tests.ops import RECORDS
from tests.ops.operands import HUGE

NAMES = [name for name, record in RECORDS.items() if not isinstance(record.call, str) and name != "apply_where"]
MASK = torch.ones(2, 5, dtype=torch.bool, device=DEVICE)


# apply_where has a single route.
ROUTES = [(route, name) for route in ("kernel", "composite") for name in BAD_CALLS]
ROUTES.remove(("composite", "apply_where"))


@pytest.mark.parametrize("route, name", ROUTES)
def test_named_error(route, name):
    for i, bad in enumerate(BAD_CALLS[name]):
        with case(i, *bad.words):
            assert_refused(on(route, name), bad)


@each_route
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["sparse", "nested"])
def test_only_dense_tensors(route, name, kind):
    record = RECORDS[name]
    key, first = next(iter(record.tensors().items()))
    strange = first.to_sparse() if kind == "sparse" else torch.nested.nested_tensor([first, first[:1]])
    others = {k: x.to(DEVICE) for k, x in record.tensors().items()} | {key: strange.to(DEVICE)}
    with pytest.raises(TypeError, match=f"^{name}: {key} must be a dense tensor"):
        on(route, name)(**{**record.call, **others})


def test_the_message_is_the_one_users_can_act_on():
    with pytest.raises(ValueError) as error:
        safeops.masked_mean(torch.zeros(2, 5, device=DEVICE), torch.ones(3, 4, dtype=torch.bool, device=DEVICE))
    assert str(error.value) == "masked_mean: mask (3, 4) does not broadcast to input (2, 5)"
    assert error.value.__suppress_context__, "the kernel's own refusal is in the traceback"


# Reductions and pointwise losses, whose mask broadcasts to the input. (A mask of rows has fewer dims.)
WEIGHTED = [RECORDS[n] for n in NAMES if {"mask", "weight"} <= RECORDS[n].call.keys()]
OF_ROWS = "classification", "divergences", "linear", "vectors", "rankings", "row_loss"
MASKED = [r.name for r in WEIGHTED if not r.kind.startswith(OF_ROWS)]


@pytest.mark.parametrize("name", MASKED)
def test_a_mask_never_enlarges_its_input(name):
    mask = torch.ones(2, 5, dtype=torch.bool, device=DEVICE)
    parameters = inspect.signature(getattr(safeops, name)).parameters.values()
    operands = [torch.zeros(1, 5, device=DEVICE) for x in parameters if x.default is x.empty]
    with pytest.raises(ValueError, match=rf"{name}: mask \(2, 5\) does not broadcast to .* \(1, 5\)"):
        getattr(safeops, name)(*operands, mask=mask)


@each_route
def test_a_number_too_large_for_any_float_is_filled_in_saturated(route):
    for dtype in (torch.float16, torch.float64, torch.int64):
        info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        x, fill = torch.zeros(2, 5, dtype=dtype, device=DEVICE), on(route, "masked_fill")
        assert (fill(x, MASK, HUGE) == info.max).all() and (fill(x, MASK, -HUGE) == info.min).all()


# Operands without which a call may be refused, though they have a default: another argument may replace them.
NEEDED = "target", "target_weight", "reference_chosen", "reference_rejected"


@pytest.mark.parametrize("name", MODULES)
def test_modules_refuse_as_their_functions_do(name):
    module = getattr(safeops.nn, name)
    parameters = inspect.signature(module.forward).parameters.values()
    call = RECORDS[module.op.name].call
    operands = [
        call[x.name].to(DEVICE) for x in parameters if x.name != "self" and (x.default is x.empty or x.name in NEEDED)
    ]
    options = {"top_k": call["top_k"]} if "top_k" in call else {}
    with pytest.raises(TypeError, match="mask must be a bool tensor"):
        module(**options)(*operands, mask=torch.ones(2, 5, device=DEVICE))
    with pytest.raises(ValueError, match="reduction must be one of"):
        module(reduction="average", **options)(*operands)


def test_an_error_leaves_autograd_and_the_rng_alone():
    x = torch.ones(2, 5, device=DEVICE, requires_grad=True)
    state = torch.get_rng_state()
    with pytest.raises(ValueError):
        safeops.mse_loss(x, torch.ones(2, 3, device=DEVICE))
    assert x.grad is None and x._version == 0
    assert torch.equal(torch.get_rng_state(), state)
    safeops.mse_loss(x, torch.zeros(2, 5, device=DEVICE)).backward()
    assert torch.equal(x.grad, torch.full_like(x, 0.2))


def test_shapes_are_named_inside_a_trace_too():
    torch._dynamo.reset()
    x, y = torch.ones(3, device=DEVICE), torch.ones(4, device=DEVICE)
    for f in (safeops.safe_div, safeops.mse_loss):
        with pytest.raises(Exception, match=r"input \(3,\) and (other|target) \(4,\) do not broadcast"):
            torch.compile(f, backend="eager", fullgraph=True)(x, y)


@pytest.mark.skipif(DEVICE != "cpu", reason="needs a real and a meta tensor")
def test_raw_ops_refuse_a_meta_operand():
    x, meta = torch.ones(2, 3), torch.ones(2, 3, device="meta")
    raw = torch.ops.safeops
    for call in (
        lambda: raw._mse_loss(x, meta),
        lambda: raw._masked_sum(x, meta.bool()),
        lambda: raw._masked_fill(x, meta.bool(), None, 1.0),
        lambda: raw._safe_div(x, meta),
        lambda: raw._safe_div_backward(x, meta, x),
    ):
        with pytest.raises(ValueError, match="meta"):
            call()
