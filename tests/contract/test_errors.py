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
    assert error.value.__suppress_context__, "the kernel's own refusal is in the traceback"


@pytest.mark.parametrize("name", ["masked_sum", "masked_mean", "mse_loss"])
def test_a_mask_never_enlarges_its_input(name):
    x, mask = torch.zeros(1, 5, device=DEVICE), torch.ones(2, 5, dtype=torch.bool, device=DEVICE)
    args, kwargs = ((x, x), {"mask": mask}) if name == "mse_loss" else ((x, mask), {})
    with pytest.raises(ValueError, match=rf"{name}: mask \(2, 5\) does not broadcast to input.* \(1, 5\)"):
        getattr(safeops, name)(*args, **kwargs)


HUGE = 10**400  # no float
NESTED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device=DEVICE)
MASK = torch.ones(2, 5, dtype=torch.bool, device=DEVICE)
INDEX = torch.zeros(2, 5, dtype=torch.int64, device=DEVICE)
REDUCTIONS = ["masked_sum", "masked_mean", "masked_var", "masked_norm", "masked_logsumexp", "masked_amax"]
ROWS = {"normalize": (), "cosine_similarity": (0,), "masked_softmax": (MASK,), "masked_log_softmax": (MASK,)}
WRONG = [  # function, what follows the input (0 stands for it), keywords, error, words
    *((name, (), {"keepdim": k}, TypeError, "keepdim") for name in (*REDUCTIONS, "safe_norm") for k in (2, None, 1)),
    *((name, (), {"dim": d}, TypeError, "dim") for name in (*REDUCTIONS, "safe_norm") for d in (True, (False, 1))),
    ("masked_count", (), {"keepdim": 2}, TypeError, "keepdim"),
    ("masked_count", (), {"dim": True}, TypeError, "dim"),
    *((name, (*rest, True), {}, TypeError, "dim") for name, rest in ROWS.items()),
    ("safe_gather", (True, INDEX), {}, TypeError, "dim"),
    ("safe_index_select", (True, INDEX[0]), {}, TypeError, "dim"),
    *((name, (HUGE,), {}, ValueError, "other") for name in ("safe_div", "xlogy")),
    *((name, (-HUGE,), {}, ValueError, "other") for name in ("safe_div", "xlogy")),
    ("safe_pow", (HUGE,), {}, ValueError, "exponent"),
    ("safe_div", (0,), {"eps": HUGE}, ValueError, "eps"),
    ("safe_div", (0,), {"fill_value": -HUGE}, ValueError, "fill_value"),
    ("safe_reciprocal", (), {"fill_value": HUGE}, ValueError, "fill_value"),
    *((name, (), {"eps": HUGE}, ValueError, "eps") for name in ("safe_log", "safe_sqrt", "safe_rsqrt", "normalize")),
    ("cosine_similarity", (0,), {"eps": HUGE}, ValueError, "eps"),
    *((name, (), {"ord": o}, ValueError, "ord") for name in ("masked_norm", "safe_norm") for o in (HUGE, -HUGE)),
    ("masked_var", (), {"correction": HUGE}, ValueError, "correction"),
    *((name, (0,), {"denominator": HUGE}, ValueError, "denominator") for name in ("mse_loss", "huber_loss")),
    ("smooth_l1_loss", (0,), {"beta": HUGE}, ValueError, "beta"),
    ("safe_gather", (0, INDEX), {"fill_value": HUGE}, ValueError, "fill_value"),
    ("safe_index_select", (0, INDEX[0]), {"fill_value": -HUGE}, ValueError, "fill_value"),
    ("masked_compact", (MASK,), {"capacity": 4, "fill_value": HUGE}, ValueError, "fill_value"),
    *(("masked_compact", (MASK,), {"capacity": c}, ValueError, "capacity") for c in (2**59, 2**62, 2**63, 10**30)),
]


@pytest.mark.parametrize("route", ["kernel", "composite"])
@pytest.mark.parametrize(
    "name, rest, kwargs, error, word", [pytest.param(*w, id=f"{i}-{w[0]}-{w[-1]}") for i, w in enumerate(WRONG)]
)
def test_what_the_dispatcher_would_take_or_misname(route, name, rest, kwargs, error, word):
    op = getattr(safeops, name) if route == "kernel" else composite(getattr(safeops, name), name)
    for grad in (False, True):
        x = torch.ones(2, 5, device=DEVICE, requires_grad=grad)
        same = name not in ("safe_gather", "safe_index_select")
        with pytest.raises(error, match=rf"^{name}: {word} "):
            op(x, *(x if same and r.__class__ is int and r == 0 else r for r in rest), **kwargs)


def test_a_number_too_large_for_any_float_is_filled_in_saturated():
    for name, op in (("kernel", safeops.masked_fill), ("composite", composite(safeops.masked_fill, "masked_fill"))):
        for dtype in (torch.float16, torch.float64, torch.int64):
            info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
            x = torch.zeros(2, 5, dtype=dtype, device=DEVICE)
            assert (op(x, MASK, HUGE) == info.max).all() and (op(x, MASK, -HUGE) == info.min).all(), name


@pytest.mark.parametrize("name", ["masked_sum", "masked_fill", "safe_div", "safe_log", "normalize", "masked_select"])
def test_nested_tensors_are_refused(name):
    rest = {"masked_fill": (MASK, 0.0), "safe_div": (2.0,), "masked_select": (MASK,)}.get(name, ())
    for op in (getattr(safeops, name), composite(getattr(safeops, name), name)):
        with pytest.raises(TypeError, match=f"{name}: input must be a dense tensor"):
            op(NESTED, *rest)


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
