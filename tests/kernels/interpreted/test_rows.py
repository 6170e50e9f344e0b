"""softmax, normalize and cosine_similarity, and their backward, agree with the definitions in fp64 and autograd."""

import pytest
import torch
import triton.runtime.interpreter as interpreter
from safeops.kernels.classification import masked_softmax
from safeops.kernels.engine import buffers, indexing, launch
from safeops.kernels.engine import row_plan as row
from safeops.kernels.vectors import cosine_similarity, normalize

from tests.kernels.interpreted.truth import BF16, F16, F32, F64, close, fill, in_order, shifted
from tests.ops import definitions

NAN, INF = float("nan"), float("inf")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns about garbage in rows that are not kept

# name -> (shape, memory order or None, dim, mask's shape): rows along memory and across it, in one tile and in several,
# and groups of neighboring rows (batch).
LAYOUTS = {
    "rows": ((5, 40), None, 1, (5, 40)),
    "odd rows": ((3, 37), None, -1, (37,)),
    "long rows": ((2, 300), None, 1, (2, 300)),
    "odd long row": ((301,), None, 0, (301,)),
    "columns": ((9, 20), None, 0, (9, 1)),
    "long columns": ((70, 20), None, 0, (70, 20)),
    "batch": ((2, 6, 20), None, 1, (6, 1)),
    "odd batch": ((2, 5, 17), None, 1, (2, 5, 1)),
    "transposed": ((12, 7), (1, 0), 1, (12, 7)),
    "no two fuse": ((2, 3, 2, 5), (3, 1, 0, 2), 2, (3, 1, 5)),
    "one element": ((1,), None, 0, (1,)),
    "0-dim": ((), None, -1, ()),
    "no rows": ((0, 5), None, 1, (5,)),
    "no elements": ((5, 0), None, 1, (5, 1)),
}
SPLIT = ["long rows", "odd long row", "long columns"]
OPS = ["softmax", "log_softmax", "normalize", "cosine_similarity"]


def run(op, x, y=None, mask=None, dim=-1, eps=None):
    """Returns (result, what the forward saves for the backward)."""
    if op == "cosine_similarity":
        return (lambda value, *norms: (value, (value, *norms)))(*cosine_similarity.cosine_similarity(x, y, dim, eps))
    if op == "normalize":
        value, norm = normalize.normalize(x, dim, eps)
        return value, (norm,)
    value, maximum, total = masked_softmax.masked_softmax(x, mask, dim, op == "log_softmax")
    return value, (maximum, total)


def backward(op, grad, saved, x, y=None, mask=None, dim=-1, eps=None, needs=(True, True)):
    if op == "cosine_similarity":
        return cosine_similarity.cosine_similarity_backward(grad, x, y, *saved, dim, eps, *needs)
    if op == "normalize":
        return (normalize.normalize_backward(grad, x, *saved, dim, eps),)
    return (masked_softmax.masked_softmax_backward(grad, x, *saved, mask, dim, op == "log_softmax"),)


def define(op, x, y=None, mask=None, dim=-1, eps=None, dtype=F32):
    if op == "cosine_similarity":
        return definitions.cosine_similarity(x, y, dim, eps, out_dtype=dtype)
    if op == "normalize":
        return definitions.normalize(x, 2.0, dim, eps, out_dtype=dtype)
    return getattr(definitions, "masked_" + op)(x, mask, dim)


def check(op, x, y=None, mask=None, dim=-1, eps=None, scale=1.0):
    value, saved = run(op, x, y, mask, dim, eps)
    assert all(number.dtype == F64 for number in saved[-1:])
    wide = F64 if F64 in (x.dtype, op == "cosine_similarity" and y.dtype) else F32
    out = wide if op == "cosine_similarity" else x.dtype
    assert value.dtype == out and (op == "cosine_similarity" or value.stride() == torch.empty_like(x).stride())
    leaves = [t.double().requires_grad_() for t in ((x, y) if op == "cosine_similarity" else (x,))]
    expected = define(op, *leaves, *(() if len(leaves) == 2 else (None,)), mask, dim, eps, wide)
    close(value, expected.detach(), torch.maximum(expected.detach().abs(), torch.full_like(expected, scale)), out)
    grad = fill(expected.shape, F32, 9)
    if mask is not None:  # an upstream NaN at a masked element must not show
        grad = torch.where(mask, grad, NAN)
    gradients = torch.autograd.grad(expected, leaves, grad.double())
    for dx, gradient, t in zip(backward(op, grad, saved, x, y, mask, dim, eps), gradients, (x, y)):
        broadcast = t.shape != expected.shape and op == "cosine_similarity" and t.shape != torch.broadcast_shapes(
            x.shape, y.shape
        )  # fmt: skip
        assert dx.dtype == (wide if broadcast else t.dtype)
        dx = dx.double().sum_to_size(t.shape) if broadcast else dx
        assert mask is None or not dx[~mask.expand(dx.shape)].any()
        close(dx, gradient, gradient.abs().max() * 2 if gradient.numel() else None, t.dtype)


def example(op, layout, dtype=F32):
    """Returns (x, y or None, mask or None, dim), with garbage where masked."""
    shape, order, dim, mask_shape = LAYOUTS[layout]
    order = order or tuple(range(len(shape)))
    x = in_order(shape, order, dtype, 1)
    if op == "cosine_similarity":
        return x, fill(shape, dtype, 2), None, dim
    if op == "normalize" or layout == "no rows":
        return x, None, None, dim
    mask = torch.rand(mask_shape, generator=torch.Generator().manual_seed(3)) < 0.6
    x[~mask.expand(shape)] = NAN
    x[(~mask).expand(shape) & (fill(shape, F32, 4) > 0)] = INF
    return x, None, mask, dim


@pytest.mark.parametrize("op, layout", [
    (op, layout) for op in OPS for layout in LAYOUTS if op != "log_softmax" or layout in ("rows", *SPLIT[:2])
])  # fmt: skip
def test_layouts(op, layout):
    check(op, *example(op, layout))
    plans = [plan.values for plan in launch._plans.values() if "WHOLE" in plan.constants]
    assert any(v["splits"] > 1 for v in plans) == (layout in SPLIT)
    assert all(v["WHOLE"] for v in plans) == (layout not in SPLIT)


@pytest.mark.parametrize("layout, dtype", [("long rows", F16), ("rows", BF16), ("columns", F64)])
@pytest.mark.parametrize("op", OPS)
def test_dtypes(op, layout, dtype):
    check(op, *example(op, layout, dtype))


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("op", OPS[:3])
def test_wide_rows(op, dtype, monkeypatch):
    """Rows are right if a block holds them, but reads a part of them again instead of keeping it in registers."""
    monkeypatch.setattr(row, "WIDE_BYTES", 6)  # bytes per element, with a gradient in fp32
    x, mask = fill((3, 504), dtype, 1), None
    if op != "normalize":
        mask = torch.rand(x.shape, generator=torch.Generator().manual_seed(3)) < 0.6
        mask[1] = False
        x[~mask] = NAN
    check(op, x, None, mask)
    assert {plan.constants["WIDE"] for plan in launch._plans.values()} == {True}


@pytest.mark.parametrize("op", OPS)
def test_without_a_mask_and_shifted(op):
    check(op, shifted(fill((3, 40), F32, 1)), fill((3, 40), F32, 2))


@pytest.mark.parametrize("op", OPS[1:])
def test_long_rows_of_which_there_are_enough(op, monkeypatch):
    """Where the rows outnumber the counters, one block reads all pieces of a row and adds them up itself."""
    monkeypatch.setattr(row, "COUNTERS", 0)
    check(op, fill((2300,), F32, 1), fill((2300,), F32, 2))
    plans = [plan.values for plan in launch._plans.values() if "WHOLE" in plan.constants]
    assert all(v["pieces"] > 1 and v["splits"] == 1 and not v["WHOLE"] for v in plans) and plans


def test_an_expanded_operand():
    x = fill((6, 1), F32, 1).expand(6, 20)
    mask = (fill((20,), F32, 2) > 0).expand(6, 20)
    check("softmax", x, None, mask, 0)
    check("cosine_similarity", x, fill((20,), F32, 3).expand(6, 20), None, 0)


@pytest.mark.parametrize("shapes", [((5, 1, 40), (3, 40)), ((40,), (5, 40)), ((2, 300), (300,))])
@pytest.mark.parametrize("dtypes", [(F16, F32), (BF16, BF16), (F32, F64)])
def test_a_broadcast_operands_gradient_stays_wide(shapes, dtypes):
    if dtypes == (BF16, BF16) or shapes[0] == (40,):
        check("cosine_similarity", *(fill(s, d, i) for i, (s, d) in enumerate(zip(shapes, dtypes))))


def test_one_gradient_of_two():
    x, y = fill((3, 40), F32, 1), fill((3, 40), F32, 2)
    value, saved = run("cosine_similarity", x, y)
    both = backward("cosine_similarity", torch.ones(3), saved, x, y)
    for i in range(2):
        one = backward("cosine_similarity", torch.ones(3), saved, x, y, needs=(i == 0, i == 1))
        assert torch.equal(one[i], both[i]) and one[1 - i].shape == (0,)
        assert one[i].isfinite().all()


@pytest.mark.parametrize("op, shape", [*((op, (2, 24)) for op in OPS), ("softmax", (2, 300)), ("normalize", (2, 300))])
def test_upstream_gradients_that_are_expanded(op, shape):
    x, y = fill(shape, F32, 1), fill(shape, F32, 2)
    value, saved = run(op, x, y)
    narrow = torch.tensor(1.5).expand(value.shape)
    for a, b in zip(backward(op, narrow, saved, x, y), backward(op, narrow.contiguous(), saved, x, y)):
        close(a, b.double())


# ---- range


@pytest.mark.parametrize("op", OPS[2:])
@pytest.mark.parametrize("dtype, size, n", [
    (F32, 1e30, 30), (F32, 1e-30, 300), (F64, 1e200, 300), (F64, 1e-200, 30), (F16, 1e4, 30),
])  # fmt: skip
def test_squares_leave_the_range_where_the_result_does_not(op, dtype, size, n):
    x = (fill((2, n), F64, 1) * size).to(dtype)
    y = fill((2, n), F64, 2).to(dtype)
    truth = [t.requires_grad_() for t in (x.double() / size, y.double())]
    value, saved = run(op, x, y)
    expected = define(op, *truth)
    close(value, expected.detach(), torch.ones_like(expected).detach(), F32 if op == "cosine_similarity" and
          dtype == F16 else dtype)  # fmt: skip
    # The upstream gradient is scaled by `size`, so that the gradient is in range.
    grad = fill(expected.shape, F64, 3)
    up = grad * size
    dx = backward(op, up.to(dtype if dtype == F64 else F32), saved, x, y)[0].double()
    (gradient,) = torch.autograd.grad(expected, truth[:1], grad)
    close(dx, gradient, gradient.abs().max() * 2, dtype)


@pytest.mark.parametrize("op", OPS[2:])
@pytest.mark.parametrize("n", [4, 300])
def test_norms_beyond_the_largest_double(op, n):
    most = torch.finfo(F64).max
    unit, y = (fill((2, n), F64, 1) / 3).requires_grad_(), fill((2, n), F64, 2)
    with torch.no_grad():
        unit[:, :2] = 1
    x = unit.detach() * most
    value, saved = run(op, x, y)
    expected = define(op, unit, y)
    close(value, expected.detach(), torch.ones_like(expected).detach(), F64)
    grad = fill(expected.shape, F64, 3)
    dx = backward(op, grad * 2.0**1000, saved, x, y)[0]
    (gradient,) = torch.autograd.grad(expected, unit, grad)
    close(dx, gradient * (2.0**1000 / most), gradient.abs().max() * (2.0**1000 / most), F64)


@pytest.mark.parametrize("n", [3, 300])
def test_logits_of_any_size(n):
    x = torch.zeros(3, n)
    x[0], x[1], x[2] = 1e4, -3e38, 1.0
    x[0, 0], x[1, 1], x[2, 2] = 1e4 - 1, -1e38, 3e38
    for op in OPS[:2]:
        check(op, x, scale=1e4)


# ---- kept values show, and no others


@pytest.mark.parametrize("n", [20, 300])
@pytest.mark.parametrize("op", OPS[:2])
def test_a_row_of_which_nothing_is_kept(op, n):
    x, mask = fill((3, n), F32, 1), torch.ones(3, n, dtype=torch.bool)
    mask[1], x[1] = False, NAN
    value, saved = run(op, x, None, mask)
    close(value, define(op, x.double(), None, mask))
    assert (value[1] == (0 if op == "softmax" else -INF)).all()
    grad = torch.ones(3, n)
    grad[1] = NAN
    (dx,) = backward(op, grad, saved, x, None, mask)
    assert (dx[1] == 0).all() and dx.isfinite().all()


@pytest.mark.parametrize("n", [20, 300])
@pytest.mark.parametrize("op", OPS)
def test_what_is_kept_shows(op, n):
    """NaN, inf and a row of -inf each show in their own row alone."""
    x, y = fill((5, n), F32, 1), fill((5, n), F32, 2)
    x[0, n - 1], x[1, 3], x[2], x[3, 0] = NAN, INF, -INF, -INF
    value, saved = run(op, x, y)
    if op == "normalize":
        expected = x / x.abs().square().sum(1, keepdim=True).sqrt()
    elif op == "cosine_similarity":
        expected = define(op, x.double(), y.double())
        expected[:4] = NAN
    else:
        expected = getattr(torch, op)(x.double(), 1)
    close(value, expected.double(), torch.ones_like(expected).double())
    grads = backward(op, torch.ones_like(value), saved, x, y)
    for dx in grads:
        assert dx[4].isfinite().all() and dx[0].isnan().any() and dx[2].isnan().any()


@pytest.mark.parametrize("n", [20, 300])
def test_zero_vectors(n):
    x, y = fill((3, n), F32, 1), fill((3, n), F32, 2)
    x[1] = 0
    for op in OPS[2:]:
        value, saved = run(op, x, y)
        assert (value[1] == 0).all() and value.isfinite().all()
        for dx in backward(op, torch.ones_like(value), saved, x, y):
            assert (dx[1] == 0).all() and dx.isfinite().all()
    y[1, 0] = NAN
    assert run("cosine_similarity", x, y)[0].isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("n", [20, 300])
def test_below_eps(n):
    x, y = fill((2, n), F32, 1) * 1e-3, fill((2, n), F32, 2)
    for op in OPS[2:]:
        check(op, x[:1], y[:1], eps=1e-1)
        check(op, x[1:], y[1:], eps=0)


# ---- execution


@pytest.mark.parametrize("partials", [32, 8])  # partial results that a block loads at once: all of a row's, and fewer
@pytest.mark.parametrize("op", [op for op in OPS if op != "log_softmax"])
def test_whichever_block_is_first(op, partials, monkeypatch):
    """The results have the same bits in any order of the blocks and with 64-bit offsets, and the counters end at 0."""
    monkeypatch.setattr(row.tiling, "POLICY", row.tiling.POLICY._replace(partials=partials))
    counters = {}
    monkeypatch.setattr(buffers, "split_counters", lambda device: counters.setdefault(0, torch.zeros(64).int()))
    monkeypatch.setattr(row.tiling, "split_counters", buffers.split_counters)
    x, y = fill((2, 300), F32, 1), fill((2, 300), F32, 2)

    def every():
        value, saved = run(op, x, y)
        return value, *saved, *backward(op, torch.ones_like(value), saved, x, y)

    def same(a, b):
        return all(torch.equal(s, t) for s, t in zip(a, b)) and not counters[0].any()

    first = every()
    check(op, x, y)
    builder = interpreter.interpreter_builder
    in_order = builder.set_grid_idx
    monkeypatch.setattr(builder, "set_grid_idx", lambda *index: in_order(*(n - 1 - i for i, n in zip(index, builder.grid_dim))))  # fmt: skip  # noqa: E501
    assert same(first, every())
    monkeypatch.setattr(indexing, "INT32_LIMIT", 0)
    launch._plans.clear()
    assert same(first, every())
    assert all(plan.signature["space"].M == "i64" for plan in launch._plans.values())


@pytest.mark.parametrize("op", OPS)
def test_the_callers_tensors_are_not_written(op):
    x, y, mask, dim = example(op, "rows")
    operands = [t for t in (x, y, mask) if t is not None]
    before = [t.clone() for t in operands]
    value, saved = run(op, x, y, mask, dim)
    kept = [t.clone() for t in saved]
    backward(op, torch.ones_like(value), saved, x, y, mask, dim)
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(before + kept, [*operands, *saved]))


@pytest.mark.parametrize("size", [1e200, 1e-200, 1e-310])
def test_norms_whose_inverse_a_double_may_not_hold(size):
    """Without eps, which would bound the divisor, normalize is right for norms whose inverse overflows fp64. The
    gradient is that of vectors of size 1, times upstream / size."""
    plain = torch.tensor([[3.0, 4.0] * 20, [1.0, 2.0] * 20], dtype=F64, requires_grad=True)
    x, w = plain.detach() * size, torch.linspace(-1, 1, 80, dtype=F64).view(2, 40)
    x[1], close_to = 0, {"rtol": 1e-9, "atol": 1e-12}  # subnormal 1e-310 has only 13 digits
    unit, norm = normalize.normalize(x, 1, 0.0)
    truth = plain / plain.norm(dim=1, keepdim=True)
    torch.testing.assert_close(unit, torch.stack([truth[0].detach(), x[1]]), **close_to)
    got = normalize.normalize_backward(w * size, x, norm, 1, 0.0)
    torch.testing.assert_close(got[0], torch.autograd.grad(truth, plain, w)[0][0], **close_to)
    assert not got[1].any()
    value, *norms = cosine_similarity.cosine_similarity(x, x.flip(1), 1, 0.0)
    torch.testing.assert_close(value, torch.tensor([0.96, 0.0], dtype=F64), **close_to)
    up, other = torch.tensor([0.7, 0.3], dtype=F64), plain.detach().flip(1)
    got, _ = cosine_similarity.cosine_similarity_backward(up * size, x, x.flip(1), value, *norms, 1, 0.0)
    truth = torch.nn.functional.cosine_similarity(plain, other, 1)
    torch.testing.assert_close(got[0], torch.autograd.grad(truth, plain, up)[0][0], **close_to)
    assert not got[1].any()
