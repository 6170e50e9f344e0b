"""Statistics, and the backward they share, against their definitions in fp64 and torch's autograd of them."""

import importlib

import pytest
import torch
import triton.runtime.interpreter as interpreter
from safeops.kernels.engine import indexing, launch, tiling
from safeops.kernels.reductions import masked_count, masked_norm, statistic_backward

from tests.kernels.interpreted.truth import BF16, F16, F32, F64, build, close, fill, kept
from tests.ops import definitions

NAN, INF = float("nan"), float("inf")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what is not kept

# name -> (launcher, the keyword of its parameter, the parameter, kind of the backward); the first four are one of
# each MODE of the skeleton whose state is more than a sum
STATISTICS = {
    "var": ("masked_var", "correction", 1.0, 0),
    "logsumexp": ("masked_logsumexp", None, 0.0, 2),
    "norm": ("masked_norm", "ord", 2.0, 0),
    "amax": ("masked_amax", None, 0.0, 1),
    "std": ("masked_std", "correction", 1.0, 0),
    "amin": ("masked_amin", None, 0.0, 1),
    "norm inf": ("masked_norm", "ord", INF, 4),
    "norm -inf": ("masked_norm", "ord", -INF, 4),
    "norm 1": ("masked_norm", "ord", 1.0, 3),
    "sum of squares": ("masked_sum_of_squares", None, 0.0, 0),
    "rms": ("masked_rms", None, 0.0, 0),
}
FILES = {  # a launcher that lies in another op's file
    "masked_std": "masked_var",
    "masked_amin": "masked_amax",
    "masked_rms": "masked_norm",
    "masked_sum_of_squares": "masked_norm",
}
MODES = list(STATISTICS)[:4]


def define(name, x, mask=None, weight=None, dim=(), keepdim=False, **given):
    launcher, keyword, parameter, _ = STATISTICS[name]
    given = {keyword: parameter} | given if keyword else given
    weight = None if weight is None else weight.double()
    return getattr(definitions, launcher)(x, mask, tuple(dim) or None, keepdim=keepdim, weight=weight, **given)


def run(name, x, mask=None, weight=None, dim=None, keepdim=False, empty_nan=False, dtype=None, parameter=None):
    launcher, _, usual, _ = STATISTICS[name]
    file = FILES.get(launcher, launcher)
    f = getattr(importlib.import_module(f"safeops.kernels.reductions.{file}"), launcher)
    return f(x, mask, weight, dim, keepdim, empty_nan, dtype, usual if parameter is None else parameter)


def backward(name, grad, x, origin, scale, mask=None, weight=None, dim=None, keepdim=False):
    f = statistic_backward.statistic_backward
    return f(grad, x, origin, scale, mask, weight, STATISTICS[name][3], dim, keepdim)


def check(name, x, mask, weight, dim, keepdim=False, scale=1.0):
    out = F64 if x.dtype == F64 else F32
    value, origin, factor = run(name, x, mask, weight, dim, keepdim, dtype=out)
    leaf = x.double().requires_grad_()
    expected = define(name, leaf, mask, weight, dim, keepdim)
    grad = fill(expected.shape, F32, 9)
    (gradient,) = torch.autograd.grad(expected, leaf, grad.double())
    expected = expected.detach()
    assert origin.dtype == factor.dtype == F64 and origin.shape == factor.shape == value.shape
    close(value, expected, torch.maximum(expected.abs(), torch.full_like(expected, scale)), out)
    dx = backward(name, grad, x, origin, factor, mask, weight, dim, keepdim)
    assert dx.dtype == x.dtype and dx.stride() == torch.empty_like(x).stride()
    assert not dx[~kept(x.shape, mask, weight)].any()
    close(dx, gradient, gradient.abs().max() * 2 if gradient.numel() else None, x.dtype)


def example(layout, dtype=F32, w_dtype=F32):
    x, _, mask, weight = build(layout, dtype, w_dtype=w_dtype)
    return x, mask, None if weight is None else weight.abs()


@pytest.mark.parametrize("name, layout, dims", [
    *((name, "odd", [[]]) for name in MODES),
    *((name, "channel mask", [[0, 2], [1]] if name in MODES else [[1, 2]]) for name in STATISTICS),
    *((name, "column mask", [[0], [1]]) for name in MODES[:2]),
    ("var", "shifted", [[0]]), ("var", "transposed", [[0], [1]]), ("logsumexp", "no two fuse", [[0, 2]]),
    ("norm", "no two fuse", [[1, 3, 4]]), ("amax", "narrow", [[0], [1]]), ("var", "one weight", [[]]),
    ("var", "one element", [[0]]), ("norm", "0-dim", [[]]),
])  # fmt: skip
def test_layouts(name, layout, dims):
    for i, dim in enumerate(dims):
        check(name, *example(layout), dim, keepdim=i == 1)


def test_an_expanded_operand():
    """Stride 0, along what is reduced and along what is not."""
    for dim in ([0], [1]):
        check("var", fill((24, 1), F32, 1).expand(24, 10), None, fill((10,), F32, 2).abs().expand(24, 10), dim)


@pytest.mark.parametrize("dtype, w_dtype", [(F16, F16), (BF16, F32), (F64, F64), (F32, F64)])
@pytest.mark.parametrize("name", ["var", "logsumexp"])
def test_dtypes(name, dtype, w_dtype):
    x, mask, weight = (t if t is None else t[:1] for t in example("channel mask", dtype, w_dtype))
    check(name, x, mask, weight, [-1])
    if dtype != F64:
        assert run(name, x, mask, weight, [2], dtype=F16)[0].dtype == F16


def test_weights_of_both_signs():
    x, _, mask, weight = build("odd")
    weight = torch.where(weight < 0, weight / 8, weight)  # as long as their sums are positive
    check("norm", x, mask, weight, [], scale=20.0)


@pytest.mark.parametrize("name, shape, dims", [
    *((name, (4300,), [0]) for name in MODES), ("var", (2, 1100), [1]), ("var", (270, 16), [0]),
])  # fmt: skip
def test_more_tiles_than_one_accumulator_takes(name, shape, dims, monkeypatch):
    monkeypatch.setattr(tiling, "POLICY", tiling.POLICY._replace(most_splits=2))
    x, mask = fill(shape, F32, 1), fill(shape, F32, 2) > -1
    check(name, x, mask, None, dims)
    constants = [plan.constants for plan in launch._plans.values() if plan.kernel.fn.__name__ == "statistic_kernel"]
    assert all(c["LONG"] and c["SPLIT"] for c in constants) and constants


# ---- range and digits


@pytest.mark.parametrize("name", ["norm", "rms", "std"])
@pytest.mark.parametrize("dtype, size", [(F32, 1e30), (F32, 1e-30), (F32, 1e-40), (F64, 1e200), (F64, 1e-200)])
def test_squares_leave_the_range_where_the_result_does_not(name, dtype, size):
    base = fill((140,), F64, 1)
    base[:70] *= 1e-3
    x = (base * size).to(dtype)
    tiny = dtype == F32 and size == 1e-40  # subnormal: few digits
    value, origin, scale = run(name, x)
    exact = x.double() / size
    leaf = exact.requires_grad_()
    expected = define(name, leaf)
    close(value.double() / size, expected.detach(), dtype=F16 if tiny else dtype)
    # the upstream gradient of a loss scaled by 65536, and by 1e-6
    (gradient,) = torch.autograd.grad(expected, leaf)
    for g in (65536.0, 1e-6):
        dx = backward(name, torch.tensor(g, dtype=dtype), x, origin, scale)
        close(dx.double(), gradient * g, gradient.abs().max() * g, F16 if tiny else dtype)


def test_weights_beyond_fp32():
    x, weight = fill((64,), F32, 1), torch.full((64,), 1e35)
    close(run("rms", x, None, weight)[0], x.double().square().mean().sqrt())
    close(run("norm", x * 1e-20, None, weight)[0], (x.double().square().sum() * weight[0].double()).sqrt() * 1e-20)


@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64])
def test_a_negative_frequency_shows(dtype):
    x, weight = fill((3, 40), dtype, 1), torch.ones((3, 40), dtype=dtype)
    weight[0, 5], weight[1, 5] = -0.0, -1.0
    for name in ("var", "std"):
        value = run(name, x, None, weight, [1])[0]
        assert value.isnan().tolist() == [False, True, False]
        assert run(name, x, weight == 1, weight, [1])[0].isfinite().all()


def test_variance_does_not_lose_its_digits_to_the_mean():
    x = 1000 + fill((1500,), F64, 1).float()
    truth = x.double().var()
    ours, origin, scale = run("var", x)
    textbook = (x.square().mean() - x.mean().square()) * 1500 / 1499
    assert (ours - truth).abs() < 1e-6 * truth
    assert (textbook - truth).abs() > 1e3 * (ours - truth).abs()
    # nor its gradient: fp32 holds the mean to 3e-5
    dx = backward("var", torch.tensor(1e3), x, origin, scale)
    close(dx, 2e3 * (x.double() - x.double().mean()) / 1499)


def test_variance_with_an_outlier_first():
    for dtype in (F32, F64):
        x = torch.cat([torch.tensor([1e6], dtype=F64), fill((700,), F64, 1)]).to(dtype)
        # in the outlier's lane, of some forty, all deviations are 1e6, and cancel
        close(run("var", x)[0], x.double().var(), 40 * x.double().var(), dtype=dtype)


@pytest.mark.parametrize("dtype, far, light", [(F32, 1e4, 1e-10), (F64, 1e8, 1e-20)])
@pytest.mark.parametrize("shape, dim, lights", [
    ((3, 1), 0, [0]), ((32,), 0, [0]), ((7, 33), 1, [1]), ((300, 5), 0, [0, -1]), ((5, 300), 1, range(100)),
    ((2, 2200), 1, range(1024)),  # more tiles than one accumulator takes, and whole splits that are far away
])  # fmt: skip
def test_an_element_far_away_of_little_weight(dtype, far, light, shape, dim, lights):
    """It is no pivot, though it come first and be the largest: all others would cancel."""
    x, weight = fill(shape, dtype, 1), torch.ones(shape, dtype=dtype)
    for place in lights:
        x.select(dim, place).fill_(far), weight.select(dim, place).fill_(light)
    leaf = x.double().requires_grad_()
    expected = define("var", leaf, None, weight, [dim], correction=0)
    value, origin, scale = run("var", x, None, weight, [dim], parameter=0.0)
    close(value, expected.detach())  # of fp64 too: 1e8 leaves no more digits
    (gradient,) = torch.autograd.grad(expected.sum(), leaf)
    dx = backward("var", torch.ones_like(value), x, origin, scale, None, weight, [dim])
    close(dx, gradient, gradient.abs().max() * 2)


def test_weights_that_grow_and_shrink():
    """Each element is a heavier one's predecessor, or a lighter one's: the pivot moves, and nothing is lost."""
    steps = torch.arange(400, dtype=F64)
    for exponent in (steps / 4 - 50, 50 - steps / 4, (steps * 0.7).sin() * 30):
        weight, x = torch.exp2(exponent).float(), fill((400,), F32, 1)
        x = torch.where(weight < 1e-6, x * 1e3, x) + 100
        for dim, shape in (([0], (400,)), ([0], (80, 5))):
            check("var", x.view(shape), None, weight.view(shape), dim)


@pytest.mark.parametrize("dtype, number", [(F32, 0.1), (F32, 1e30), (F64, 0.1), (F64, -3.0)])
def test_equal_elements_have_deviation_and_gradient_zero(dtype, number):
    x = torch.full((5, 100), number, dtype=dtype)
    mask = fill((5, 100), F32, 1) > 0
    value, origin, scale = run("std", x, mask, None, [1])
    assert not value.any() and not scale.any()
    assert not backward("std", torch.ones(5), x, origin, scale, mask, None, [1]).any()
    zero = torch.zeros(40)
    value, origin, scale = run("norm", zero)  # pytorch#2421
    assert value == 0 and not backward("norm", torch.tensor(1.0), zero, origin, scale).any()


def test_logits_of_any_size():
    x = torch.tensor([[1e4, 1e4 - 1, -1e4], [-1e38, -1e38, -3e38], [3e38, 1.0, 2.0]])
    value, origin, scale = run("logsumexp", x, None, None, [1])
    close(value, x.double().logsumexp(1))
    dx = backward("logsumexp", torch.ones(3), x, origin, scale, None, None, [1])
    near = [0, 2]  # at -1e38 the origin, even in fp64, does not hold the log 2: torch's own gradient is 1 there as well
    close(dx[near], x.double().softmax(1)[near], torch.ones(()))


# ---- what is kept shows, and nothing else


@pytest.mark.parametrize("name", STATISTICS)
def test_nothing_kept(name):
    x = torch.full((3, 40), NAN)
    none, zero = torch.zeros(3, 40, dtype=torch.bool), torch.zeros(40)
    cases = [(none, None, [], False), (None, zero, [1], True)]
    cases += [(none, zero, [0], False), (None, zero, [], True)] if name in MODES else []
    for mask, weight, dim, empty_nan in cases:
        value, origin, scale = run(name, x, mask, weight, dim, False, empty_nan)
        assert (value.isnan() if empty_nan else value == 0).all() and not scale.any()
        dx = backward(name, torch.full_like(value, NAN), x, origin, scale, mask, weight, dim)
        assert (dx == 0).all()
    for empty_nan in (False, True):
        value, *_ = run(name, torch.ones(0, 5), None, None, [0], False, empty_nan)
        assert value.shape == (5,) and (value.isnan() if empty_nan else value == 0).all()


def test_too_little_for_the_correction():
    x = torch.tensor([[3.0, 1.0], [5.0, 9.0]])
    mask = torch.tensor([[True, False], [True, True]])
    for name, truth in (("var", 8.0), ("std", 8.0**0.5)):  # pytorch#4320
        value, origin, scale = run(name, x, mask, None, [1])
        close(value, torch.tensor([0.0, truth], dtype=F64))
        dx = backward(name, torch.tensor([NAN, 1.0]), x, origin, scale, mask, None, [1])
        assert (dx[0] == 0).all() and (dx[1] != 0).all()  # where there is none, whatever the gradient
        assert run(name, x, mask, None, [1], empty_nan=True)[0].isnan().tolist() == [True, False]
        assert run(name, x, mask, None, [1], parameter=0.0)[0].tolist() == [0.0, 4.0 if name == "var" else 2.0]


@pytest.mark.parametrize("name", STATISTICS)
def test_what_is_kept_shows(name):
    rows = torch.ones(4, 70)
    rows[0, 60], rows[1, 60], rows[2, 60] = NAN, INF, -INF
    mask = torch.ones(4, 70, dtype=torch.bool)
    value, origin, scale = run(name, rows, mask, None, [1])
    expected = {
        "var": [NAN] * 3,
        "std": [NAN] * 3,
        "amax": [NAN, INF, 1],
        "amin": [NAN, 1, -INF],
        "logsumexp": [NAN, INF, 1 + torch.tensor(69.0).log()],
        "norm -inf": [NAN, 1, 1],
    }.get(name, [NAN, INF, INF])
    close(value[:3], torch.tensor(expected, dtype=F64))
    assert value[3].isfinite()
    dx = backward(name, torch.ones(4), rows, origin, scale, mask, None, [1])
    assert dx[0, 60].isnan() or name in ("amax", "amin") and dx[0, 60] == 1  # to the NaN itself
    assert dx[3].isfinite().all()
    if name in ("var", "std"):
        assert dx[:3].isnan().all()
    mask[:3, 60] = False
    value, origin, scale = run(name, rows, mask, None, [1])
    dx = backward(name, torch.ones(4), rows, origin, scale, mask, None, [1])
    assert value.isfinite().all() and dx.isfinite().all() and not dx[~mask].any()


def test_weights_that_are_nan():
    weight = torch.ones(300)
    weight[200] = NAN
    for name in ("var", "logsumexp", "norm", "rms", "norm 1"):
        assert run(name, fill((300,), F32, 1), None, weight)[0].isnan()


@pytest.mark.parametrize("name, x", [
    ("amax", [2.0, 5.0, 5.0, NAN, 5.0]), ("amin", [5.0, 2.0, NAN, 2.0, 2.0]), ("norm inf", [5.0, -5.0, NAN, 5.0, 0.0]),
])  # fmt: skip
def test_ties_share_the_gradient(name, x):
    x = torch.tensor(x * 40)
    mask = ~x.isnan()
    value, origin, scale = run(name, x, mask)
    dx = backward(name, torch.tensor(3.0), x, origin, scale, mask, torch.full((200,), 7.0))  # a weight only masks
    ties = (x.abs() == value) if name == "norm inf" else (x == value)
    close(dx, torch.where(ties, x.sign() * 3 / 120, 0).double())
    value, origin, scale = run(name, x)  # the 40 NaN
    assert value.isnan() and scale == 1 / 40
    dx = backward(name, torch.tensor(3.0), x, origin, scale)
    assert (dx[x.isnan()].isnan() if name == "norm inf" else dx[x.isnan()] == 3 / 40).all() and not dx[~x.isnan()].any()


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("name", [name for name, (*_, kind) in STATISTICS.items() if kind in (1, 4)])
def test_a_gradient_that_is_not_finite_stays_with_the_extreme(name, dtype):
    x = fill((3, 70), dtype, 5) + 0.01
    value, origin, scale = run(name, x, dim=[1])
    grad = torch.tensor([NAN, INF, 1.0], dtype=dtype)
    dx = backward(name, grad, x, origin, scale, dim=[1])
    extreme = (x if name in ("amax", "amin") else x.abs()) == value[:, None]
    assert torch.equal(dx != 0, extreme) and torch.equal(~dx.isfinite(), extreme & ~grad.isfinite()[:, None])


@pytest.mark.parametrize("name", ["norm", "rms", "std"])
@pytest.mark.parametrize("size", [1e-309, 1e-318, 1e-200, 4e307])
def test_norms_at_the_ends_of_fp64(name, size):
    """1 / norm fits no double, or the norm itself does not; the gradient is of size 1."""
    x = torch.tensor([3.0, 4.0], dtype=F64) * size
    unit = (x / size).requires_grad_()
    _, origin, scale = run(name, x)
    (gradient,) = torch.autograd.grad(define(name, unit), unit)
    for upstream in (1.0, 1e300, 1e-300):
        dx = backward(name, torch.tensor(upstream, dtype=F64), x, origin, scale)
        close(dx, gradient * upstream, dtype=F64)


@pytest.mark.parametrize("weight", [[-1.0, -1.0], [1.0, -3.0]])
def test_a_root_of_a_mean_with_weights_whose_sum_is_negative(weight):
    x, w = torch.tensor([1.0, 2.0], dtype=F64), torch.tensor(weight, dtype=F64)
    value, origin, scale = run("rms", x, None, w)
    root = ((w * x * x).sum() / w.sum()).sqrt()
    close(value, root, dtype=F64)
    close(backward("rms", torch.ones((), dtype=F64), x, origin, scale, None, w), w * x / (root * w.sum()), dtype=F64)


def test_every_kept_element_is_minus_infinite():
    x = torch.full((70,), -INF)
    value, origin, scale = run("logsumexp", x)
    assert value == -INF and not backward("logsumexp", torch.tensor(1.0), x, origin, scale).any()
    value, _, scale = run("amax", x)
    assert value == -INF and scale == 1 / 70


@pytest.mark.parametrize("dtype, out", [(F32, F32), (F64, F64), (F32, F16)])
@pytest.mark.parametrize("order", [1.0, 2.0, INF])
def test_safe_norm_saturates(order, dtype, out):
    """Where finite elements overflow; an infinite one shows."""
    if order == INF and out != F16:
        return  # a magnitude fits
    f = masked_norm.safe_norm
    x = torch.ones(4, 90, dtype=dtype)
    x[:3] = torch.finfo(dtype).max / 2 if out != F16 else 1e5
    x[1, 7], x[2, 7] = INF, NAN
    value, origin, scale = f(x, None, None, [1], dtype=out, parameter=order)
    norm = 90 ** (0 if order == INF else 1 / order)
    close(value, torch.tensor([torch.finfo(out).max, INF, NAN, norm], dtype=F64), dtype=out)
    dx = statistic_backward.statistic_backward(
        torch.ones(4, dtype=out), x, origin, scale, None, None, {1.0: 3, 2.0: 0, INF: 4}[order], [1]
    )
    assert not dx[0].any() and dx[3].all() and dx[3].isfinite().all()


def test_a_variance_of_one_element_that_is_not_finite():
    for number in (NAN, INF):
        value, _, scale = run("var", torch.tensor([[number], [1.0]]), None, None, [1])
        assert value[0].isnan() and scale[0].isnan() and value[1] == scale[1] == 0


def test_unknown_order():
    with pytest.raises(ValueError, match="masked_norm"):
        run("norm", torch.ones(3), parameter=3.0)


# ---- counts


@pytest.mark.parametrize("layout", ["odd", "column mask", "channel mask", "transposed", "no mask", "0-dim", "empty"])
def test_count(layout):
    x, _, mask, weight = build(layout)
    count = masked_count.masked_count
    keep = kept(x.shape, mask, weight)
    for dim in ([], [0], [-1]):
        dims = tuple(d % max(x.dim(), 1) for d in dim) or tuple(range(x.dim()))
        for keepdim in (False, True):
            expected = keep.sum(dims, keepdim=keepdim) if x.dim() else keep.long()
            got = count(x, mask, weight, dim, keepdim)
            assert got.dtype == torch.int64 and torch.equal(got, expected)
    assert torch.equal(count(x, mask), kept(x.shape, mask, None).sum())


# ---- execution


def test_whoever_finishes_last(monkeypatch):
    """Blocks may finish in any order, and offsets may need 64 bits; the bits of the result are the same."""
    x, mask = fill((280,), F32, 1), fill((280,), F32, 2) > 0
    y = fill((20, 10), F32, 1)

    def every():
        return [t for name in MODES for t in (*run(name, x, mask), *run(name, y, None, None, [0]))]

    def same(a, b):
        return all(torch.equal(s, t) for s, t in zip(a, b))

    first = every()
    assert max(plan.grid[1] for plan in launch._plans.values()) > 2
    builder = interpreter.interpreter_builder
    in_order = builder.set_grid_idx
    monkeypatch.setattr(builder, "set_grid_idx", lambda *index: in_order(*(n - 1 - i for i, n in zip(index, builder.grid_dim))))  # fmt: skip  # noqa: E501
    assert same(first, every())
    monkeypatch.setattr(indexing, "INT32_LIMIT", 0)
    launch._plans.clear()
    assert same(first, every())
    assert all(plan.signature["M"] == "i64" for plan in launch._plans.values())


def test_the_callers_tensors_are_not_written():
    x, _, mask, weight = build("channel mask")
    before = [t.clone() for t in (x, mask, weight)]
    value, origin, scale = run("var", x, mask, weight, [1])
    backward("var", torch.ones_like(value), x, origin, scale, mask, weight, [1])
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(before, (x, mask, weight)))


def test_expanded_upstream_gradient():
    x = fill((8, 48), F32, 1)
    value, origin, scale = run("norm", x, None, None, [1])
    dx = backward("norm", torch.tensor(2.0).expand(8), x, origin, scale, None, None, [1])
    close(dx, 2 * x.double() / x.double().norm(dim=1, keepdim=True))
