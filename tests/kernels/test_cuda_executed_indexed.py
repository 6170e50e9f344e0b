"""The CUDA kernels of safe_gather and safe_index_select, executed on CPU tensors, agree with their definitions.

The tests cover strides, int32 and int64 indices, rows moved in 16-byte packets, gradients whose sums take from one to
more than four launches, CUB's sort between the launches, that each destination is written once, and that nothing is
read or written past an end. scripts/gpu_check.py tests what only a GPU can show.
"""

import pytest
import torch

from safeops.ops.selection import safe_gather, safe_index_select
from safeops.testing.compare import assert_same_bits
from tests.contract.refusals import assert_all_refused
from tests.kernels.cuda_sources import needs_compilers
from tests.kernels.test_cuda_executed_selection import numbers, ops, same

__all__ = ["ops"]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES = [torch.bool, torch.float16, torch.float32, torch.int64, torch.complex64, torch.complex128]
INDICES = [torch.int32, torch.int64]
# Numbers of index entries: 1; a thread's tile, and the first sizes that take two and three launches, each with its
# neighbors; 40,000 takes more than four launches.
ENTRIES = [1, 2, 31, 32, 33, 63, 64, 65, 511, 512, 513, 1023, 1024, 1025, 8192, 8193, 40_000]

REFUSED = ("safe_gather", "safe_index_select")
pytestmark = [pytest.mark.slow, needs_compilers, pytest.mark.xdist_group("cuda_executed_selection")]


def indices(*shape, size, dtype=torch.int64, seed=1):
    """Returns indices: most in [0, size), some just outside (-1 and `size`), and 10 % far outside (the dtype's limits
    and -100)."""
    random = torch.Generator().manual_seed(seed)
    index = torch.randint(-1, size + 1, shape, generator=random)
    info = torch.iinfo(dtype)
    far = torch.tensor([info.min, info.max, -100])[torch.randint(3, shape, generator=random)]
    return torch.where(torch.rand(shape, generator=random) < 0.1, far, index).to(dtype)


# ---- forward


def gathers(dtype, kind):
    """Yields (name, input, dim, index)."""
    x = lambda *shape: numbers(*shape, dtype=dtype)  # noqa: E731
    at = lambda *shape, size: indices(*shape, size=size, dtype=kind)  # noqa: E731
    yield "0-dim", x().reshape(()), 0, at(size=1)
    yield "vector", x(50), 0, at(3100, size=50)
    yield "none in the input", x(0, 3), 0, at(5, 3, size=4)
    yield "no index", x(4, 3), 1, at(4, 0, size=3)
    yield "one a row", x(300, 17), 1, at(300, 1, size=17)
    yield "several a row", x(40, 17), -1, at(40, 5, size=17)
    yield "smaller beside dim", x(40, 9, 8), 1, at(33, 4, 7, size=9)
    yield "transposed", x(9, 40, 5).permute(2, 1, 0), 1, at(9, 20, 5, size=40).permute(2, 1, 0)
    yield "input expanded", x(1, 9).expand(30, 9), 1, at(30, 6, size=9)
    yield "index expanded", x(20, 64), 0, at(30, 1, size=20).expand(30, 64)
    yield "index expanded, a row of packets and a half", x(20, 72), 0, at(30, 1, size=20).expand(30, 72)
    yield "rows between packets", x(20, 130)[:, :128], 0, at(30, 1, size=20).expand(30, 128)
    yield "sliced, index expanded", x(20, 130)[:, 1:129], 0, at(30, 1, size=20).expand(30, 128)


def selections(dtype, kind):
    """Yields (name, input, dim, index)."""
    x = lambda *shape: numbers(*shape, dtype=dtype)  # noqa: E731
    at = lambda *shape, size: indices(*shape, size=size, dtype=kind)  # noqa: E731
    yield "0-dim", x().reshape(()), 0, at(size=1)
    yield "0-dim input, vector of one", x().reshape(()), -1, at(1, size=1)
    yield "one index", x(7, 5), 0, at(size=7)
    yield "vector", x(50), 0, at(3100, size=50)
    yield "none in the input", x(0, 3), 0, at(5, size=4)
    yield "no index", x(4, 3), 0, at(0, size=4)
    yield "no columns", x(4, 0), 0, at(3, size=4)
    yield "rows", x(30, 64), 0, at(70, size=30)
    yield "odd rows", x(30, 33), 0, at(70, size=30)
    yield "rows of packets and a half", x(30, 72), 0, at(70, size=30)
    yield "last dim", x(13, 40), 1, at(90, size=40)
    yield "middle dim", x(3, 20, 16), 1, at(45, size=20)
    yield "one index of a middle dim", x(4, 7, 6), 1, torch.tensor([3], dtype=kind)  # a packet would cross lines
    yield "transposed", x(64, 30).t(), 0, at(70, size=30)
    yield "sliced", x(30, 130)[:, 1:129], 0, at(70, size=30)
    yield "rows between packets", x(30, 130)[:, :128], 0, at(70, size=30)
    yield "some lines between packets", x(3, 2561)[:, :2560].unflatten(1, (20, 128)), 1, at(45, size=20)
    yield "lines between packets", x(3, 20, 130)[:, :, :128], 1, at(45, size=20)
    yield "strided rows", x(60, 64)[::2], 0, at(140, size=30)[::2]
    yield "rows expanded", x(30, 1).expand(30, 64), 0, at(70, size=30)
    yield "four dims", x(4, 3, 5, 6).permute(2, 0, 3, 1), 2, at(8, size=6)


FORWARD = [("gather", gathers, safe_gather.definition), ("index_select", selections, safe_index_select.definition)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", INDICES, ids=str)
@pytest.mark.parametrize("name, samples, definition", FORWARD, ids=[name for name, *_ in FORWARD])
def test_forward(ops, name, samples, definition, kind, dtype):
    raw = getattr(ops, f"_safe_{name}")
    for what, x, dim, index in samples(dtype, kind):
        for fill in (0.0, 1.0 if dtype == torch.bool else -7.0):
            got = raw(x, index, dim, fill)
            same(what, [got], [definition(x, index, dim, fill)])
            assert got.is_contiguous(), what


@pytest.mark.parametrize(
    "dtype, columns, offset, packets",
    [
        (torch.float16, 64, 0, True),
        (torch.float32, 64, 0, True),
        (torch.int8, 64, 0, True),
        (torch.float16, 64, 1, False),  # rows do not start at multiples of 16 bytes
        (torch.float16, 63, 0, False),
    ],
    ids=str,
)
def test_rows_move_in_packets_of_16_bytes(ops, dtype, columns, offset, packets):
    table = torch.arange(20 * (columns + offset)).reshape(20, -1).to(dtype)[:, offset:]
    index = torch.tensor([3, -1, 19, 3])
    for call in (
        lambda: ops._safe_index_select(table, index, 0),
        lambda: ops._safe_gather(table, index[:, None].expand(4, columns), 0),
    ):
        got = call()
        # An index out of range reads nothing.
        assert ops.wide == (3 * columns * table.element_size() // 16 if packets else 0)
        assert torch.equal(got, torch.where(index[:, None] < 0, 0, table[index]))


# ---- backward


def spread(kind, entries, length):
    """Returns an index of `entries` numbers in [0, length) or out of range. kind: which numbers occur more than
    once."""
    if kind == "random":
        return indices(entries, size=length, dtype=torch.int32).long()
    if kind == "one for all":
        return torch.full((entries,), length - 1)
    if kind == "all different":
        return torch.randperm(entries, generator=torch.Generator().manual_seed(3))
    if kind == "padding":  # all but one entry name one destination or none
        index = torch.full((entries,), 3 % length)
        index[::3] = -100
        index[entries // 2] = length - 1
        return index
    return torch.arange(entries) // 40 % length  # runs longer than a thread's tile


def summed(index, grad, length):
    """Returns the sums, by index, of grad (entries, columns) and of its magnitudes: both (length, columns) in fp64."""
    inside = (index >= 0) & (index < length)
    total = torch.zeros(length, grad.shape[1], dtype=torch.float64)
    place = index[inside].long()
    return (
        total.index_add(0, place, grad[inside].double()),
        total.index_add(0, place, grad[inside].double().abs()),
    )


def check_sums(what, got, index, grad, length):
    """Assert that sums agree within the rounding of a summation tree in fp32 (fp64 for an fp64 grad) and that of the
    result, and that a destination that no entry names is 0."""
    truth, magnitude = summed(index, grad, length)
    wide = torch.finfo(torch.float64 if grad.dtype == torch.float64 else torch.float32).eps
    room = 64 * wide * magnitude + torch.finfo(got.dtype).eps * truth.abs()
    off = (got.double() - truth).abs() > room
    assert got.shape == truth.shape and not off.any(), f"{what}: {off.sum()} of {off.numel()} off"
    assert not got[magnitude[:, 0] == 0].any(), f"{what}: a place nobody named is not 0"


SPREADS = ("random", "one for all", "all different", "padding", "runs")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", SPREADS)
def test_sums(ops, kind, dtype):
    """Gradients are right for every number of launches, for safe_gather of a vector and safe_index_select of rows."""
    for entries in ENTRIES:
        length = entries if kind == "all different" else max(1, entries // 7)
        index = spread(kind, entries, length)
        random = torch.Generator().manual_seed(entries)
        grad = torch.randn(entries, 1, generator=random, dtype=torch.float64).to(dtype)
        grad[(index < 0) | (index >= length)] = torch.nan  # entries out of range: their gradient must not be used
        what = f"{kind}, {entries} entries"
        got = ops._safe_gather_backward(grad[:, 0], index, 0, [length])
        check_sums(what, got[:, None], index, grad, length)
        same(what, [ops._safe_gather_backward(grad[:, 0], index.int(), 0, [length])], [got])
        # An index that is smaller than dx in a dim other than `dim` takes the path with the sort.
        wider = ops._safe_gather_backward(grad, index[:, None], 0, [length, 2])
        check_sums(what, wider[:, :1], index, grad, length)
        assert not wider[:, 1].any()
        columns = 3 if entries < 3000 else 1
        lines = torch.cat([grad, torch.randn(entries, columns, generator=random).to(dtype)], dim=1)[:, :columns]
        rows = ops._safe_index_select_backward(lines, index, 0, [length, columns])
        same(what, [rows[:, 0]], [got])  # a column's sum does not depend on the other columns
        if columns > 1:
            check_sums(what, rows, index, lines, length)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", INDICES, ids=str)
@pytest.mark.parametrize("name, samples", [("gather", gathers), ("index_select", selections)])
def test_backward_layouts(ops, name, samples, kind, dtype):
    """The gradients agree with autograd of the definition in fp64, for every layout of index and upstream gradient."""
    raw = getattr(ops, f"_safe_{name}_backward")
    definition = {"gather": safe_gather, "index_select": safe_index_select}[name].definition
    for what, x, dim, index in samples(dtype, kind):
        leaf = x.double().detach().requires_grad_()
        value = definition(leaf, index, dim, 0.0)
        order = tuple(range(x.dim()))[::-1]
        for grad in (
            numbers(*value.shape, dtype=dtype, seed=5).reshape(value.shape),
            numbers(*value.shape[::-1], dtype=dtype, seed=6).reshape(value.shape[::-1]).permute(order),
            numbers(1, dtype=dtype, seed=7).reshape(()).expand(value.shape),  # as .sum() passes it
        ):
            (want,) = torch.autograd.grad(value, leaf, grad.double(), retain_graph=True)
            assert want.abs().max() <= 60_000 if want.numel() else True  # whole numbers: each sum is exact
            got = raw(grad, index, dim, x.shape)
            assert got.is_contiguous() and got.dtype == dtype
            error = (got.double() - want).abs() > want.abs() * torch.finfo(dtype).eps
            assert not error.any(), f"{what}: {error.sum()} of {error.numel()} off"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_columns_are_summed_in_packets(ops, dtype):
    """Where a column's sums exceed shared memory, grad is read in 16-byte packets along rows if these are aligned and
    contiguous, else element by element, with the same bits."""
    for entries, shape, dim in ((3000, (18_000, 16), 0), (1100, (2, 18_000, 16), 1)):
        index = indices(entries, size=shape[dim])
        sizes = [entries if d == dim else n for d, n in enumerate(shape)]
        grad = torch.randn(sizes, generator=torch.Generator().manual_seed(0)).to(dtype)
        got = ops._safe_index_select_backward(grad, index, dim, shape)
        # An index out of range reads nothing.
        taken = int(((index >= 0) & (index < shape[dim])).sum()) * grad.numel() // entries
        assert ops.wide == taken * grad.element_size() // 16
        shifted = torch.zeros(grad.numel() + 1, dtype=dtype)[1:].view(sizes).copy_(grad)
        for other in (shifted, grad.transpose(0, -1).contiguous().transpose(0, -1)):
            same(str(shape), [ops._safe_index_select_backward(other, index, dim, shape)], [got])
            assert ops.wide == 0


def test_gradients_in_another_dtype(ops):
    """Sums are added in fp64 if grad or the result is fp64."""
    index = torch.zeros(3000, dtype=torch.int64)
    grad = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    for source in FLOATS:
        for target in FLOATS:
            got = ops._safe_gather_backward(grad.to(source), index, 0, [2], target)
            want = grad.to(source).double().sum()
            assert got.dtype == target and got[1] == 0
            room = torch.finfo(target).eps if torch.float64 in (source, target) else max(torch.finfo(target).eps, 1e-5)
            assert (got[0].double() - want).abs() <= want.abs() * room
    x = torch.tensor([1.0, 2.0**-40]).repeat(2000)  # an fp32 sum would lose the 2^-40
    got = ops._safe_gather_backward(x, torch.zeros(4000, dtype=torch.int64), 0, [1], torch.float64)
    assert got.item() == x.double().sum().item()


def test_a_place_named_once_gets_the_gradient_itself(ops):
    """A destination that one entry names gets the gradient's bits, also subnormals and infinities; a NaN reaches no
    other destination."""
    grad = torch.tensor([0.0, 0.0, 1e-45, -1e-40, torch.inf, -torch.inf, torch.nan, 3.0]).repeat(200)
    index = torch.randperm(1600, generator=torch.Generator().manual_seed(0))
    want = torch.zeros(1600)
    want[index] = grad
    for got in (
        ops._safe_gather_backward(grad, index, 0, [1600]),
        ops._safe_index_select_backward(grad[:, None], index, 0, [1600, 1])[:, 0],
    ):
        assert_same_bits("named once", got, want, "differs from the gradient")


MAGNITUDES = [1e-45, -3e-39, 1e-30, -1e-20, 2e-10, -1.0, 3e5, -1e20, 1e30, -2e38]


@pytest.mark.parametrize("dtype", FLOATS[1:3], ids=str)
def test_magnitudes_far_apart(ops, dtype):
    """A small sum is right though the sum beside it is 1e80 times as large, and so is a sum of both, in every order."""
    random = torch.Generator().manual_seed(0)
    grad = torch.randn(40, 40, generator=random).mul(torch.tensor(MAGNITUDES).repeat(4))
    for named in (torch.arange(40) % 10, torch.arange(40) // 4, torch.zeros(40, dtype=torch.int64)):
        order = torch.stack([torch.randperm(40, generator=random) for _ in range(40)])
        x, index = grad.to(dtype).gather(1, order), named[order]
        first = ops._safe_gather_backward(x, index, 1, [40, 10])
        for row in range(0, 40, 10):
            check_sums("far apart", first[row, :, None], index[row], x[row, :, None], 10)
        shuffled = torch.randperm(40, generator=random)
        again = ops._safe_gather_backward(x[:, shuffled].contiguous(), index[:, shuffled], 1, [40, 10])
        same("in another order", [again], [first])


@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
def test_sums_are_exact_where_a_block_has_what_it_adds_in_reach(ops, dtype):
    """Where one block adds all summands of a destination, the result is their fp64 sum rounded once."""
    grad = torch.randn(30, 500, generator=torch.Generator().manual_seed(0)).to(dtype)
    index = indices(30, 500, size=70)
    got = ops._safe_gather_backward(grad, index, 1, [30, 70])
    inside = (index >= 0) & (index < 70)
    want = torch.zeros(30, 70, dtype=torch.float64)
    want.scatter_add_(1, index.clamp(0, 69), torch.where(inside, grad.double(), 0))
    same("exact", [got], [want.float().to(dtype)])


def test_nonfinite_sums(ops):
    """inf - inf gives NaN at its own destination alone; an entry out of range is not added anywhere."""
    inf, nan = torch.inf, torch.nan
    grad = torch.tensor([[inf, 1.0, inf, -inf, inf, -inf, nan, 2.0, 1e-30, -2.0, nan, 3.0]])
    index = torch.tensor([[0, 0, 1, 1, 2, 3, 4, 4, 5, 6, -1, 5]])
    for dtype in FLOATS[:3]:
        got = ops._safe_gather_backward(grad.to(dtype), index, 1, [1, 8])
        want = torch.tensor([[inf, nan, inf, -inf, nan, 3.0, -2.0, 0.0]], dtype=dtype)
        assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0)) and torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.isinf(), want.isinf())
    tall = torch.full((1, 3), torch.finfo(torch.float32).max)  # finite summands, whose sum overflows
    got = ops._safe_gather_backward(tall * torch.tensor([1.0, 1.0, -1.0]), torch.tensor([[0, 0, 1]]), 1, [1, 2])
    assert got.tolist() == [[inf, -tall[0, 0].item()]]


LINES = [  # (shape of dx, dim, entries of the index)  # what one block sums
    ((520, 5), 1, 5),  # several lines
    ((515, 2, 2), 1, 3),  # several slabs
    ((3, 1000), 1, 1000),  # a line
    ((2, 3000), 1, 7000),  # a line, reading its entries again from the cache
    ((1, 20_000), 1, 900),  # a segment of a line
    ((40, 100), 0, 30),  # several columns
    ((2, 700, 50), 1, 60),  # a strip of columns; the last strip is narrower
    ((2, 3000, 20), 1, 40),  # a segment of a strip
]


@pytest.mark.parametrize("number", range(len(LINES)))
def test_lines_are_summed_in_one_launch(ops, number):
    """Short lines take one launch, without a memset or a sort, and give the same bits in any layout and for any order
    of the threads."""
    (shape, dim, entries), dtype = LINES[number], FLOATS[number % 3]
    sizes = [entries if d == dim else n for d, n in enumerate(shape)]
    grad = torch.randn(sizes, generator=torch.Generator().manual_seed(0)).to(dtype)
    index = indices(*sizes, size=shape[dim], dtype=torch.int32).long()
    first = ops._safe_gather_backward(grad, index, dim, shape)
    assert (len(ops.launches), ops.memory_operations) == (1, 0)
    inside = (index >= 0) & (index < shape[dim])
    want = torch.zeros(shape, dtype=torch.float64)
    want.scatter_add_(dim, index.clamp(0, shape[dim] - 1), torch.where(inside, grad.double(), 0))
    same("value", [first], [want.float().to(dtype)])
    turned = tuple(range(len(shape)))[::-1]
    laid = grad.permute(turned).contiguous().permute(turned)
    for g, i in ((grad, index), (laid, index), (grad, index.int())):
        same("again", [ops._safe_gather_backward(g, i, dim, shape)], [first])


def test_an_index_alone_in_its_line_is_not_added(ops):
    """An index that is alone in its line takes one memset for the zeros and one launch for the named elements."""
    grad, index = torch.randn(300, 1), indices(300, 1, size=17)
    got = ops._safe_gather_backward(grad, index, 1, [300, 17])
    assert (len(ops.launches), ops.memory_operations) == (1, 1)
    inside = (index >= 0) & (index < 17)
    assert torch.equal(got, torch.zeros(300, 17).scatter_add_(1, index.clamp(0, 16), grad * inside))


def test_half_sums_are_fp32_and_overflow_to_inf(ops):
    ones = torch.full((5000,), 1.0, dtype=torch.float16)
    index = torch.zeros(5000, dtype=torch.int64)
    assert ops._safe_gather_backward(ones, index, 0, [1]).item() == 5000  # an fp16 sum would stop at 2048
    assert ops._safe_gather_backward(ones * 20, index, 0, [1]).item() == torch.inf


def test_bitwise_repeatable(ops):
    index = indices(5000, size=40)
    grad = torch.randn(5000, 3, generator=torch.Generator().manual_seed(0))
    first = ops._safe_index_select_backward(grad, index, 0, [40, 3])
    for _ in range(3):
        same("again", [ops._safe_index_select_backward(grad, index, 0, [40, 3])], [first])
    # The sums do not depend on the strides or the number of columns.
    same("one column", [ops._safe_index_select_backward(grad[:, :1], index, 0, [40, 1])], [first[:, :1]])
    same("transposed", [ops._safe_index_select_backward(grad.t(), index, 1, [3, 40])], [first.t().contiguous()])
    every = index[:, None].expand(5000, 3)
    moved = ops._safe_gather_backward(grad[:, 1:2], every[:, 1:2], 0, [40, 3])
    assert not moved[:, 1:].any() and torch.allclose(moved[:, 0], first[:, 1], rtol=1e-5, atol=1e-4)


def test_unusable_operands_are_refused(ops):
    x, index = torch.ones(4, 3), torch.zeros(4, 3, dtype=torch.int64)
    for call, words in (
        (lambda: ops._safe_gather(x, index.short(), 0), "int32 or int64"),
        (lambda: ops._safe_gather(x, index, 2), "out of range"),
        (lambda: ops._safe_gather(x, index[0], 0), "as many dims"),
        (lambda: ops._safe_gather(x[:, :2], index, 0), "larger than input"),
        (lambda: ops._safe_gather_backward(x, index[:3], 0, [4, 3]), "differ in shape"),
        (lambda: ops._safe_gather_backward(x, index, 0, [4, 2]), "larger than input"),
        (lambda: ops._safe_gather_backward(x, index, 0, [4]), "as many dims"),
        (lambda: ops._safe_gather_backward(x.int(), index, 0, [4, 3]), "grad must be float"),
        (lambda: ops._safe_index_select(x, index, 0), "one dimension"),
        (lambda: ops._safe_index_select(x[0, 0], index[0], 0), "one index"),
        (lambda: ops._safe_index_select_backward(x, index[0], 0, [4, 3]), "grad and size differ"),
        (lambda: ops._safe_index_select_backward(x, index[:, 0], 0, [4, 2]), "grad and size differ"),
        (lambda: ops._safe_index_select_backward(x, index[:, 0], 0, [12]), "grad and size differ"),
    ):
        with pytest.raises(RuntimeError, match=words):
            call()


def test_bad_calls(ops):
    assert_all_refused(ops, REFUSED)
