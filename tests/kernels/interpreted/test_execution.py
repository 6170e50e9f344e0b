"""Results do not depend on the order of blocks or the width of offsets, and counters are reset: faults that a test of
ordinary values would not show."""

import pytest
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as interpreter
from safeops.kernels.engine import buffers, elementwise, indexing, launch, sums, tiling
from safeops.kernels.reductions import masked_sum

from tests.kernels.interpreted.truth import F16, F32, build, close, fill, launchers, total

NAN = float("nan")


def run():
    x, y, mask, weight = build("odd")
    loss = launchers("mse_loss")[0](x, y, mask, weight, None, 1, False, None)
    rows = fill((12, 700), F32, 1)
    by_row = masked_sum.masked_mean(rows, rows > -1, None, [1], False, False, F32)
    by_column = masked_sum.masked_sum(rows.t().contiguous(), None, None, [0], False, False, F32)
    return [*loss, *by_row, *by_column]


def splits():
    return [plan.grid[1] for plan in launch._plans.values()]


def same_bits(a, b):
    return all(torch.equal(s, t) for s, t in zip(a, b))


def test_whoever_finishes_last(monkeypatch):
    """The result has the same bits whichever block finishes last."""
    first = run()
    assert max(splits()) > 2 and same_bits(first, run())
    builder = interpreter.interpreter_builder
    in_order = builder.set_grid_idx

    def backwards(*index):
        in_order(*(n - 1 - i for i, n in zip(index, builder.grid_dim)))

    monkeypatch.setattr(builder, "set_grid_idx", backwards)
    assert same_bits(first, run())


def test_counters_are_left_at_zero(monkeypatch):
    counters = torch.zeros(buffers.COUNTERS, dtype=torch.int32)
    monkeypatch.setattr(tiling, "split_counters", lambda device: counters)
    first = run()
    assert not counters.any() and same_bits(first, run())
    counters += 1  # a planted fault: no block sees that it is the last, so none writes the result
    with pytest.raises(AssertionError):
        assert not any(t.isnan().any() for t in run())


def test_split_depends_on_sizes_alone():
    policy = tiling.Policy()
    assert tiling.split_tiles(1, 1, policy) == (1, 1)
    for tiles, blocks in ((2, 1), (250, 1), (16384, 1), (10**6, 1), (10**8, 1), (77, 300)):
        count, each = tiling.split_tiles(tiles, blocks, policy)
        assert (count - 1) * each < tiles <= count * each and count <= 65535  # limit of the grid's second dimension
        assert each <= 16 or each % 16 == 0 and count > policy.most_splits // 2


@pytest.mark.parametrize("layout", ["odd", "channel mask", "no two fuse", "narrow"])
def test_wide_indices(monkeypatch, layout):
    monkeypatch.setattr(indexing, "INT32_LIMIT", 0)
    x, y, mask, weight = build(layout)
    forward, backward = launchers("mse_loss")
    expected, scale, *_ = total((x.double() - y.double()) ** 2, x.shape, mask, weight)
    close(forward(x, y, mask, weight, None, 2, False, None)[0], expected, scale)
    dx, _ = backward(torch.tensor(1.0), None, x, y, mask, weight, True, False, F32, F32)
    close(dx.abs().sum(), total(2 * (x.double() - y.double()).abs(), x.shape, mask, weight)[1])
    assert all(plan.signature["space"].M == "i64" for plan in launch._plans.values())


def test_offsets_beyond_31_bits(monkeypatch):
    """Three elements that are 2^31 apart are reduced right. The storage between them is never touched, so it takes no
    memory."""
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)  # would copy the storage
    step = 2**31
    storage = torch.UntypedStorage(2 * (2 * step + 1))
    x = torch.empty(0, dtype=F16).set_(storage, 0, (3,), (step,))
    x.copy_(torch.tensor([1.0, 2.0, 4.0]))
    mask = torch.tensor([True, False, True])
    assert masked_sum.masked_sum(x, mask, None, None, False, False, F32)[0] == 5
    y = torch.zeros(3, dtype=F16)
    assert launchers("mse_loss")[0](x, y, mask, None, None, 2, False, None)[0] == 17


SHAPES = [(), (1,), (7,), (1, 1), (4, 30), (1, 5, 1, 8), (96, 32)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_line_is_cut_as_in_the_general_way(monkeypatch, shape):
    x, one = fill(shape, F32, 1), torch.ones(()).expand(shape)
    kinds = [(x, x), (x, None), (x, one), (x, torch.ones((1,) * len(shape)))]

    def plans():
        for a, b in kinds:
            tensors, gone = (a, b, None, None, None), [True] * len(shape)
            yield sums.plan(None, tensors, shape, gone, F32, F32, True, (0, None), False, 0)
            tensors = (a, b, None, None, None, b, None, x, None, None)
            constants = {"F": None, "SLOPES": 0, "parameters": 0}
            yield elementwise.plan(elementwise.ELEMENTWISE, tensors, elementwise.OUTPUTS, shape, F32, constants)

    def facts(plan):
        return plan.grid, plan.values, plan.kinds, plan.vec, plan.wide, plan.dtypes

    assert indexing.line((x, x), torch.Size(shape)) is not None
    quick = list(map(facts, plans()))
    for module in (tiling, elementwise):
        monkeypatch.setattr(module, "line", lambda tensors, shape: None)
    assert quick == list(map(facts, plans()))


def test_what_is_no_line():
    x = fill((6, 8), F32, 1)
    for other in (x[:, :7], x.t(), x[:, :1], x[0], x[:1].expand(6, 8)):
        assert indexing.line((x, other), x.shape) is None
    assert indexing.line((x[:0],), torch.Size((0, 8))) is None


def test_the_callers_tensors_are_not_written():
    x, y, mask, weight = build("channel mask")
    before = [t.clone() for t in (x, y, mask, weight)]
    forward, backward = launchers("huber_loss")
    forward(x, y, mask, weight, None, 1, 0.7, False, None)
    backward(torch.tensor(1.0), None, x, y, mask, weight, 0.7, True, True, F32, F32)
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(before, (x, y, mask, weight)))


def test_unsafe_operands_are_refused():
    x = torch.ones(4, 5)
    with pytest.raises(ValueError, match="does not broadcast"):
        masked_sum.masked_sum(x, torch.ones(4, dtype=torch.bool), None, None, False, False, F32)
    with pytest.raises(TypeError, match="torch.complex64"):
        masked_sum.masked_sum(x.to(torch.complex64), None, None, None, False, False, F32)
    with pytest.raises(ValueError, match="meta"):
        masked_sum.masked_sum(x, torch.ones(5, dtype=torch.bool, device="meta"), None, None, False, False, F32)


def test_an_integer_that_overflows_is_noticed():
    """The fixture `integers_fit` reports an integer overflow in a kernel."""

    @triton.jit
    def area(out, rows, columns):
        tl.store(out, rows * columns)

    out = torch.zeros((), dtype=torch.int64)
    area[(1,)](out, 1 << 15, 1 << 15)
    assert out == 1 << 30
    with pytest.raises(Exception, match="mul overflows int32"):
        area[(1,)](out, 1 << 16, 1 << 16)


@triton.jit
def halves(x, out):
    at = tl.arange(0, 4)
    tl.store(out + at, tl.load(x + at, mask=at < 2))


@pytest.mark.parametrize("dtype, garbage", [
    (torch.float16, NAN), (torch.bfloat16, NAN), (torch.float32, NAN), (torch.float64, NAN), (torch.bool, True),
    (torch.int32, 2**31 - 1),
])  # fmt: skip
def test_masked_lanes_without_other_are_garbage_here(dtype, garbage):
    x, out = torch.zeros(4, dtype=dtype), torch.zeros(4, dtype=dtype)
    halves[(1,)](x, out)
    torch.testing.assert_close(out, torch.tensor([0, 0, garbage, garbage], dtype=dtype), equal_nan=True)
