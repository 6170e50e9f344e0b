"""The CUDA kernels of the selection ops, executed on CPU tensors, agree with their definitions bit for bit.

The tests cover ranks (how many kept elements come before an element) over tiles whose warps run in any order, strides,
capacities below and above the count, and that nothing is read or written past an end. scripts/gpu_check.py tests what
only a GPU can show.
"""

import re

import pytest
import torch

from safeops.ops.selection import masked_compact, masked_scatter
from safeops.testing.compare import assert_same_bits
from tests.contract.refusals import assert_all_refused
from tests.kernels.cuda_sources import ROOT, needs_compilers
from tests.kernels.executed import cuda, machine
from tests.ops import RECORDS

SOURCES = sorted((ROOT / "csrc/cuda/selection").glob("*.cu"))
DTYPES = [torch.bool, torch.float16, torch.float32, torch.int64, torch.complex64, torch.complex128]

REFUSED = ("masked_compact", "masked_scatter", "masked_select")
pytestmark = [pytest.mark.slow, needs_compilers, pytest.mark.xdist_group("cuda_executed_selection")]


@pytest.fixture(scope="module")
def ops():
    return cuda.ops(*SOURCES, ROOT / "tests/kernels/executed/look_back.cu")


def numbers(*shape, dtype=torch.float32, seed=0):
    random = torch.Generator().manual_seed(seed)
    x = torch.randint(-100, 100, (*shape, 2), generator=random)
    return torch.complex(*x.double().unbind(-1)).to(dtype) if dtype.is_complex else x[..., 0].to(dtype)


def kept(*shape, share=0.6, seed=1):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


def samples(dtype):
    """Yields (name, input, mask) in many layouts. The mask covers the input's first dims."""
    x = lambda *shape: numbers(*shape, dtype=dtype)  # noqa: E731
    yield "one", x(1), kept(1)
    yield "none", x(0, 3), kept(0, 3)
    yield "0-dim", x().reshape(()), kept().reshape(())
    yield "tail", x(1057), kept(1057)
    yield "many tiles", x(35_000), kept(35_000)
    yield "nothing kept", x(2000), kept(2000, share=0)
    yield "all kept", x(2100), kept(2100, share=1)
    yield "transposed", x(37, 60).t(), kept(60, 37)
    yield "both transposed", x(37, 60).t(), kept(37, 60).t()
    yield "sliced, mask expanded", x(50, 90)[:, ::2], kept(45).expand(50, 45)
    yield "input expanded", x(1, 45).expand(50, 45), kept(50, 1).expand(50, 45)
    yield "rows", x(300, 7), kept(300)
    yield "rows of packets", x(30, 64), kept(30)
    yield "rows of packets and a half", x(30, 72), kept(30)
    yield "rows begin between packets", x(30, 130)[:, 1:129], kept(30)
    yield "all rows but the first do", x(30, 130)[:, :128], kept(30)
    yield "rows of columns", x(7, 300).t(), kept(300)
    yield "rows of four dims", x(5, 3, 6, 4).permute(2, 0, 3, 1), kept(6, 5)


def same(what, got, want):
    for a, b in zip(got, want, strict=True):
        a, b = (torch.view_as_real(t) if t.is_complex() else t for t in (a, b))
        assert_same_bits(what, a, b, "differs from the definition")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masked_compact(ops, dtype):
    for what, x, mask in samples(dtype):
        count = int(mask.sum())
        for capacity in sorted({0, 1, count // 2, count, count + 70}):
            fill = 1.0 if dtype == torch.bool else -7.0
            got = ops._masked_compact(x, mask, capacity, fill)
            same(f"{what}, capacity {capacity}", got, masked_compact.definition(x, mask, capacity, fill))
            assert got[0].is_contiguous()
            values, index, _ = got
            for grad in (values, values.expand(2, *values.shape)[1], numbers(*values.shape, dtype=dtype)):
                want = torch.zeros(x.shape, dtype=dtype).reshape(mask.numel(), *x.shape[mask.dim() :])
                used = min(count, capacity)
                want[index[:used]] = grad[:used]
                same(what, [ops._masked_compact_backward(grad, index, x.shape)], [want.reshape(x.shape)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masked_scatter(ops, dtype):
    for what, x, mask in samples(dtype):
        mask = mask[(..., *(None,) * (x.dim() - mask.dim()))]
        full = mask.expand(x.shape)
        count = int(full.sum())
        for length in sorted({0, 1, count // 2, count, count + 70}):
            source = numbers(length, 2, dtype=dtype, seed=2)[:, 1]
            got = ops._masked_scatter(x, source, mask)
            same(what, [got], [masked_scatter.definition(x, source, mask)])
            assert got.stride() == torch.empty_like(x).stride(), what
            rank = full.reshape(-1).cumsum(0).reshape(x.shape)
            taken = full & (rank <= length)
            d_source = torch.zeros(length, dtype=dtype)
            d_source[: min(length, count)] = x[taken]
            want = torch.where(taken, torch.zeros((), dtype=dtype), x), d_source
            same(what, ops._masked_scatter_backward(x, full, [length]), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masked_select(ops, dtype):
    for what, x, mask in samples(dtype):
        mask = mask[(..., *(None,) * (x.dim() - mask.dim()))]
        same(what, [ops._masked_select(x, mask)], [torch.masked_select(x, mask)])


def test_a_broadcast_input_grows(ops):
    x, mask, source = numbers(45), kept(30, 45), numbers(2000, seed=2)
    same("grown", [ops._masked_select(x, mask)], [torch.masked_select(x, mask)])
    same("grown", [ops._masked_scatter(x, source, mask)], [masked_scatter.definition(x, source, mask)])


def tile(dtype):
    """Elements of a block's tile, as in csrc/cuda/selection/selection.cuh."""
    return 32768 // max(2, min(8, dtype.itemsize))


def check_ranks(x, mask, ops, *capacities):
    count = int(mask.sum())
    for capacity in (*capacities, count):
        got = ops._masked_compact(x, mask, capacity, 0.0)
        same("compact", got, masked_compact.definition(x, mask, capacity))
        used, want = min(count, capacity), torch.zeros_like(x)
        want[got[1][:used]] = got[0][:used]
        same("compact, backward", [ops._masked_compact_backward(got[0], got[1], x.shape)], [want])
        source = numbers(capacity, dtype=x.dtype, seed=2)
        same("scatter", [ops._masked_scatter(x, source, mask)], [masked_scatter.definition(x, source, mask)])
        taken = mask & (mask.cumsum(0) <= capacity)
        d_source = torch.zeros(capacity, dtype=x.dtype)
        d_source[:used] = x[taken]
        want = torch.where(taken, torch.zeros((), dtype=x.dtype), x), d_source
        same("scatter, backward", ops._masked_scatter_backward(x, mask, [capacity]), want)
    same("select", [ops._masked_select(x, mask)], [x[mask]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes_about_a_tile(ops, dtype):
    n = tile(dtype)
    for size, share in ((n - 1, 0.5), (n, 1), (n, 0.5), (n + 1, 0.5), (2 * n, 0.01)):
        check_ranks(numbers(size, dtype=dtype), kept(size, share=share), ops, size + 300)


@pytest.mark.parametrize("share", [0.001, 0.5, 1])
@pytest.mark.parametrize("offset", [0, 1], ids=["packets", "unaligned"])
def test_many_tiles(ops, offset, share):
    n = 70 * tile(torch.int64) + 5
    mask = kept(n + offset, share=share)[offset:]
    check_ranks(numbers(n + offset, dtype=torch.int64)[offset:], mask, ops, n // 3)


def test_masks_and_elements_are_read_once_by_16_bytes(ops):
    n = 5 * tile(torch.float32)
    x, mask = numbers(n + 100), kept(n + 100)
    strided = lambda t: t.repeat_interleave(2)[::2]  # noqa: E731
    shifted = lambda t: torch.cat([t[:1], t])[1:]  # noqa: E731
    for call in (
        lambda x, mask: ops._masked_compact(x, mask, 3000),
        lambda x, mask: ops._masked_scatter(x, x[:9000].clone(), mask),
        lambda x, mask: ops._masked_scatter_backward(x, mask, [3000]),
        lambda x, mask: ops._masked_select(x, mask),
    ):
        wide = []
        for operands in ((x, mask), (x, strided(mask)), (strided(x), mask), (shifted(x), shifted(mask))):
            call(*operands)
            wide.append(ops.wide)
        assert wide[0] - wide[1] == -(-len(mask) // 16)
        assert wide[0] - wide[2] == len(x) * 4 // 16
        assert 0 <= wide[3] - wide[0] <= 2 * 6  # a shifted operand takes at most one more packet per tile


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16, torch.float32, torch.complex128], ids=str)
def test_rows_move_in_packets_of_16_bytes(ops, dtype):
    mask = kept(100)  # 100 bytes: read as seven packets of 16
    for offset, packets in ((0, True), (1, dtype == torch.complex128)):
        x = numbers(100, 64 + offset, dtype=dtype)[:, offset:]
        size = 64 * x.element_size() // 16
        values, index, count = ops._masked_compact(x, mask, 80)
        assert ops.wide == 7 + (int(count) * size if packets else 0)
        got = ops._masked_compact_backward(x[:80], index, x.shape)
        assert ops.wide >= int(count) * size if packets else ops.wide == 0
        assert torch.equal(got[mask], x[: int(count)]) and not got[~mask].any()


@pytest.mark.parametrize("n", [8, 40_000])  # one tile, and three
@pytest.mark.parametrize("name", ["masked_compact", "masked_select", "masked_scatter"])
def test_launches_are_as_many_as_the_record_says(ops, name, n):
    """A call takes as many kernels and memory operations, forward and backward, as
    tests/gpu/test_kernels_are_the_route.py records for it."""
    x, mask = numbers(n, dtype=torch.bfloat16), kept(n)
    source = numbers(n // 2, dtype=torch.bfloat16, seed=2)
    calls = {
        "masked_compact": (lambda: ops._masked_compact(x, mask, n // 2),
                           lambda out: ops._masked_compact_backward(out[0], out[1], [n])),
        "masked_select": (lambda: ops._masked_select(x, mask), None),
        "masked_scatter": (lambda: ops._masked_scatter(x, source, mask),
                           lambda out: ops._masked_scatter_backward(out, mask, [n // 2])),
    }  # fmt: skip

    def launches(call):
        out = call()
        return out, (len(ops.launches), ops.memory_operations)

    forward, backward = calls[name]
    want, want_backward = RECORDS[name].launches
    out, counted = launches(forward)
    assert counted == (want(n) if callable(want) else want)
    if backward:
        assert launches(lambda: backward(out))[1] == want_backward


OF_TILE, UP_TO_TILE = 1, 2
FAR = 2**41 + 12345  # a count of more than 32 bits


def look_back(ops, status, tile, own, late, word, seed):
    """Run tests/kernels/executed/look_back.cu for one tile. Returns how many elements are kept before the tile."""
    before, program = torch.zeros(1, dtype=torch.int64), ops.program("look_back")
    operands = machine.Operands([("status", status), ("before", before)])
    params = program.pack([status.data_ptr(), tile, own, late, word, before.data_ptr()])
    machine.run(program, operands, params, (1, 1, 1), (64, 1, 1), seed=seed)
    return before.item()


@pytest.mark.parametrize("distance", [1, 2, 31, 32, 33, 255, 256, 257, 512, 513, 600])  # a block reads 256 at once
def test_look_back(ops, distance):
    """A tile finds the count before it if only the tile `distance` back has published the count up to its end, and the
    tiles between have published their own counts. Earlier tiles publish nothing. One of the needed words comes late."""
    count, random = 2048, torch.Generator().manual_seed(distance)
    for tile in (distance, 620):
        end = tile - distance
        counts = torch.randint(0, 2049, (tile,), generator=random).tolist()
        counts[tile // 2] = 0
        words = [0] * end + [FAR << 2 | UP_TO_TILE] + [c << 2 | OF_TILE for c in counts[end + 1 :]] + [0]
        before = FAR + sum(counts[end + 1 :])
        for late in sorted({-1, end, tile - 1, (end + tile) // 2}):
            for seed in range(1, 4):  # each seed runs the two warps in another order
                status = torch.tensor(words)
                word = words[late] if late >= 0 else 0
                if late >= 0:
                    status[late] = 0
                assert look_back(ops, status, tile, count, late, word, seed) == before, (tile, late)
                assert status.tolist() == words[:-1] + [(before + count) << 2 | UP_TO_TILE]


def test_look_back_from_the_first_tile(ops):
    status = torch.zeros(1, dtype=torch.int64)
    assert look_back(ops, status, 0, 7, -1, 0, 1) == 0
    assert status.item() == 7 << 2 | UP_TO_TILE


def test_unusable_operands_are_refused(ops):
    x, mask = torch.ones(4, 3), torch.ones(4, 3, dtype=torch.bool)
    for call, words in (
        (lambda: ops._masked_compact(x, mask.int(), 3), "mask must be bool"),
        (lambda: ops._masked_compact(x, mask, -1), "capacity must not be negative"),
        (lambda: ops._masked_compact(x, mask[:3], 3), "leading sizes"),
        (lambda: ops._masked_compact_backward(x, torch.zeros(3, dtype=torch.int64), [9, 3]), "one number a slot"),
        (lambda: ops._masked_compact_backward(x, torch.zeros(4, dtype=torch.int64), [9, 2]), "grad and size differ"),
        (lambda: ops._masked_scatter(x, x.double(), mask), "one dtype"),
        (lambda: ops._masked_scatter(x, x, mask[:3]), "do not broadcast"),
    ):
        with pytest.raises(RuntimeError, match=words):
            call()
    stray = torch.tensor([0, 9, 2**61, -1])  # gradients of rows out of range are dropped
    assert torch.equal(ops._masked_compact_backward(x, stray, [9, 3]).sum(1), torch.tensor([3.0] + [0.0] * 8))
    for stray in ([-1, 9, 2**62, 0], [7, 1, 8, 3]):  # an index that does not ascend writes nothing beyond
        ops._masked_compact_backward(x, torch.tensor(stray), [9, 3])


def test_every_kernel_is_tested():
    """Every kernel of the selection ops has tests here or in test_cuda_executed_indexed.py."""
    defined = {name for path in SOURCES for name in re.findall(r'm\.impl\("(\w+)"', path.read_text())}
    moves = {"_masked_compact", "_masked_scatter", "_masked_select", "_safe_gather", "_safe_index_select"}
    assert defined == moves | {f"{name}_backward" for name in moves - {"_masked_select"}}


def test_bad_calls(ops):
    assert_all_refused(ops, REFUSED)
