"""masked_sum, masked_mean, their backward, and the reduced losses agree with fp64 on every path of the reduction."""

import pytest
import torch
from safeops.kernels.reductions import masked_sum

from tests.kernels.interpreted.truth import (
    BF16,
    F16,
    F32,
    F64,
    LAYOUTS,
    LOSSES,
    build,
    close,
    fill,
    kept,
    launchers,
    total,
    weights,
)

DTYPES = [(F16, F16, F32), (BF16, BF16, BF16), (F32, F32, F32), (F64, F64, F64), (BF16, F32, F16), (F32, F64, F32)]


def masked(mean):
    return masked_sum.masked_mean if mean else masked_sum.masked_sum


def subsets(rank):
    """Returns the nonempty subsets of the dims, or a selection for four dims and more."""
    every = [[d for d in range(rank) if bits >> d & 1] for bits in range(1, 2**rank)] or [[]]
    return every if rank < 4 else [[rank - 1], [0], [0, 2], [1, 2, 3], [*range(rank)]]


def check_masked(mean, x, mask, weight, dims=(), keepdim=False):
    out = F64 if x.dtype == F64 else F32
    value, used = masked(mean)(x, mask, weight, list(dims), keepdim, False, out)
    expected, scale, count, weight_sum = total(x.double(), x.shape, mask, weight, tuple(dims), keepdim)
    divisor = count if weight is None else weight_sum
    assert used.dtype == F64
    if weight is None:
        assert torch.equal(used, count)  # a count is exact
    else:
        close(used, divisor, total(torch.ones(()).double(), x.shape, mask, weight.abs(), tuple(dims), keepdim)[0], out)
    if mean:  # the truth divides by `used`: weights of both signs may nearly cancel
        expected, scale = (torch.where(count > 0, t / used, 0) for t in (expected, scale))
    close(value, expected, scale, out)


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_subset_of_dims(layout, mean):
    x, _, mask, weight = build(layout)
    for dims in subsets(x.dim()):
        check_masked(mean, x, mask, weight, dims, keepdim=len(dims) % 2 == 0)


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
@pytest.mark.parametrize("layout", ["flat", "odd", "column mask", "transposed"])
def test_dtypes(layout, dtype):
    x, _, mask, weight = build(layout, dtype, w_dtype=dtype)
    for dims in subsets(x.dim()):
        check_masked(True, x, mask, weight, dims)


def test_negative_dims_and_all():
    x, _, mask, _ = build("channel mask")
    for dims in ([-1], [-3, 1], [], [0, 1, 2]):
        check_masked(False, x, mask, None, [d % 3 for d in dims])
    full_sum = masked_sum.masked_sum(x, mask, None, None, False, False, F32)[0]
    assert torch.equal(full_sum, masked_sum.masked_sum(x, mask, None, [-1, 0, 1], False, False, F32)[0])
    assert masked_sum.masked_sum(fill((), F32, 1), None, None, [-1], True, False, F32)[0].shape == ()


@pytest.mark.parametrize("shape, dims", [((9000,), [0]), ((4, 3000), [1]), ((1200, 20), [0]), ((24, 3, 60), [0, 2])])
def test_more_tiles_than_one_accumulator_takes(shape, dims):
    """Sums are right over more tiles than a block adds in fp32: it then adds its accumulators to fp64 ones and clears
    them."""
    from safeops.kernels.engine import launch

    x, mask = fill(shape, F32, 1), fill(shape, F32, 2) > -1
    check_masked(False, x, mask, None, dims)
    constants = [plan.constants for plan in launch._plans.values()]
    assert any(c["LONG"] for c in constants) or shape == (24, 3, 60)
    assert any(c["SPLIT"] for c in constants)


@pytest.mark.parametrize("empty_nan", [False, True])
@pytest.mark.parametrize("mean", [False, True])
def test_nothing_kept(mean, empty_nan):
    nothing = float("nan") if empty_nan else 0.0
    x = torch.full((40, 30), float("nan"))
    none, zero = torch.zeros(40, 30, dtype=torch.bool), torch.zeros(30)
    for mask, weight in ((none, None), (None, zero), (none, zero)):
        for dims in ([], [0], [1]):
            value, used = masked(mean)(x, mask, weight, dims, False, empty_nan, F32)
            close(value, torch.full_like(value, nothing).double())
            assert not used.any()
    value, used = masked(mean)(torch.ones(0, 5), None, None, [0], False, empty_nan, F32)
    close(value, torch.full((5,), nothing).double())
    rows = torch.ones(40, 1, dtype=torch.bool)
    rows[7] = False  # an empty row changes no other row
    value, _ = masked(mean)(torch.ones(40, 30), rows, None, [1], False, empty_nan, F32)
    close(value, torch.where(rows[:, 0], 1.0 if mean else 30.0, nothing).double())


@pytest.mark.parametrize("special", [float("nan"), float("inf")])
def test_what_is_kept_shows(special):
    x = torch.ones(700)
    x[650] = special
    for weight in (None, torch.ones(700)):
        close(masked(True)(x, torch.ones(700, dtype=torch.bool), weight, [], False, False, F32)[0], x[650].double())
    weight = torch.ones(700)
    weight[3] = float("nan")
    assert masked(False)(torch.ones(700), None, weight, [], False, False, F32)[0].isnan()


def test_sum_of_weights_zero_is_not_empty():
    value, used = masked(True)(torch.tensor([1.0, 2.0]), None, torch.tensor([1.0, -1.0]), [], False, False, F32)
    assert value == float("-inf") and used == 0


def test_half_is_never_summed_in_half():
    x = torch.full((2000,), 60000.0, dtype=F16)  # pytorch#44350
    assert masked(True)(x, None, None, [], False, False, F16)[0] == 60000
    assert masked(False)(x, None, None, [], False, False, F16)[0] == float("inf")  # the sum 1.2e8 does not fit fp16


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "empty"])
def test_masked_backward(layout, mean):
    x, _, mask, weight = build(layout)
    for dims in subsets(x.dim()):
        keepdim = len(dims) % 2 == 1
        _, used = masked(mean)(x, mask, weight, dims, keepdim, False, F32)
        grad = fill(used.shape, F32, 5)
        dx = masked_sum.masked_sum_backward(
            grad, list(x.shape), F32, used if mean else None, mask, weight, dims, keepdim
        )
        g = grad.double() / used if mean else grad.double()
        if not keepdim:
            for d in dims:
                g = g.unsqueeze(d)
        expected = torch.where(kept(x.shape, mask, weight), g * weights(x.shape, weight), 0)
        close(dx, expected)
        assert dx.is_contiguous() and not dx[~kept(x.shape, mask, weight)].any()


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name, dtypes):
    loss = LOSSES[name]
    out = F64 if F64 in dtypes[:2] else F32
    for layout in ("odd", "channel mask", "transposed", "0-dim") if name == "mse_loss" else ("odd", "channel mask"):
        x, y, mask, weight = build(layout, *dtypes)
        operands = loss.operands(x, y)
        expected, _, count, weight_sum = total(loss.truth(*operands)[0], x.shape, mask, weight)
        scale = total(loss.sizes(*operands)[0], x.shape, mask, weight)[1] + expected.abs()
        for reduction in (1, 2):
            value, used = loss.forward(*operands, mask, weight, None, reduction, *loss.parameters, False, None)
            by = used if reduction == 1 and count else 1
            close(value, expected / by, scale / by, out)
            close(used, count if weight is None else weight_sum, total(1, x.shape, mask, weight)[1], out)


def test_denominators():
    x, y, mask, weight = build("odd")
    forward, _ = launchers("mse_loss")
    expected, scale, *_ = total((x.double() - y.double()) ** 2, x.shape, mask, weight)
    for denominator, divisor, by in ((torch.tensor(37.5), None, 37.5), (None, 1e6 / 3, 1e6 / 3)):
        value, used = forward(x, y, mask, weight, denominator, 1, False, divisor)
        assert used.dtype == F64 and used.item() == by
        close(value, expected / by, scale / by)
        nothing = torch.zeros((), dtype=torch.bool)
        value, _ = forward(x, y, nothing, weight, denominator, 1, True, divisor)
        assert value == 0  # not NaN: a given denominator counts elements that other ranks keep
    for options in ((torch.tensor(0.0), 1, False, None), (None, 1, False, 0.0)):
        for keep in (mask, nothing):
            value, used = forward(x, y, keep, weight, *options)
            assert value == 0 and used == float("inf")  # the backward divides by it
            value, _ = forward(x, y, keep, weight, *options[:2], True, options[3])
            assert value.isnan()
