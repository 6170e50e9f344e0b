"""The statistics and their common backward agree with their definitions in fp64 and autograd."""

from math import prod

import pytest
import torch
import triton.runtime.interpreter as interpreter
from safeops.kernels.engine import indexing, launch, tiling
from safeops.kernels.reductions import masked_count

from tests.kernels.interpreted.statistic import MODES, STATISTICS, backward, check, example, run
from tests.kernels.interpreted.truth import BF16, F16, F32, F64, build, close, fill, kept

NAN, INF = float("nan"), float("inf")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns about garbage in rows that are not kept


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
    """Statistics of an expanded operand are right, with stride 0 along reduced dims and along others."""
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
    weight = torch.where(weight < 0, weight / 8, weight)  # the weights' sums stay positive
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


# ---- kept values show, and no others


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
        assert (dx[0] == 0).all() and (dx[1] != 0).all()  # no variance: gradient 0, even for NaN
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
        "silog": [NAN] * 3,
        "amax": [NAN, INF, 1],
        "amin": [NAN, 1, -INF],
        "logsumexp": [NAN, INF, 1 + torch.tensor(69.0).log()],
        "norm -inf": [NAN, 1, 1],
    }.get(name, [NAN, INF, INF])
    close(value[:3], torch.tensor(expected, dtype=F64))
    assert value[3].isfinite()
    dx = backward(name, torch.ones(4), rows, origin, scale, mask, None, [1])
    # In amax and amin the NaN gets the whole gradient, which is 1.
    assert dx[0, 60].isnan() or name in ("amax", "amin") and dx[0, 60] == 1
    assert dx[3].isfinite().all()
    if name in ("var", "std", "silog"):
        assert dx[:3].isnan().all()
    if name == "logsumexp":
        assert dx[1, 60] == 1 and dx[1].sum() == 1
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
    dx = backward(name, torch.tensor(3.0), x, origin, scale, mask, torch.full((200,), 7.0))  # weights only mask
    ties = (x.abs() == value) if name == "norm inf" else (x == value)
    close(dx, torch.where(ties, x.sign() * 3 / 120, 0).double())
    value, origin, scale = run(name, x)  # without the mask, the 40 NaN are the extremes
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


@pytest.mark.parametrize("shape, dim", [((1040,), None), ((3, 80), [1]), ((3, 80), [0])])
def test_count_of_any_byte(shape, dim):
    """Counts are right for a mask viewed from uint8, whose bytes may be other than 0 and 1, also where a kernel reads
    four bytes at a time."""
    numbers = torch.arange(prod(shape)).reshape(shape) * 37 % 256
    mask = numbers.where(numbers % 3 != 0, 0).to(torch.uint8).view(torch.bool)
    expected = (mask.view(torch.uint8) != 0).sum(dim)
    assert torch.equal(masked_count.masked_count(torch.empty(shape), mask, None, dim), expected)


# ---- execution


def test_whoever_finishes_last(monkeypatch):
    """The results have the same bits whichever block finishes last, and with 64-bit offsets."""
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
    assert all(plan.signature["space"].M == "i64" for plan in launch._plans.values())


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
