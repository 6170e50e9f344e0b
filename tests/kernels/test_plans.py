"""Tests how plans (kernel, constants and launch options) divide rows among threads and tiles, which results do not
show."""

import pytest
import torch

pytest.importorskip("triton")

from safeops.kernels.engine.buffers import COUNTERS
from triton.backends.compiler import GPUTarget

from tests.kernels import plans_classification as classes
from tests.kernels import plans_divergence as divergences
from tests.kernels import plans_rows as rows
from tests.kernels import plans_statistics as statistics
from tests.kernels.modelled import reduced
from tests.kernels.plans_statistics import BF16, F32, F64, meta

WARP = 32


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_row_along_memory_is_one_warps(dtype):
    x = meta((65536, 1024), dtype)
    for plan in (
        rows.forward(rows.NORMALIZE, x),
        rows.backward(rows.SOFTMAX, x),
        rows.cosines(x, x),
        classes.forward(x),
        statistics.forward("VAR", x, None, dims=[1]),
        reduced(None, x, None, None, dims=[1]),
    ):
        assert (plan.config.threads, plan.constants["BM"]) == (WARP, 1)


def test_few_rows_are_split_among_blocks():
    plan = statistics.forward("VAR", meta((64, 1 << 20), F32), None, dims=[1])
    assert plan.constants["SPLIT"] and plan.config.threads > WARP


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_row_across_memory_is_one_threads(dtype):
    """Where rows lie across memory, a row belongs to one thread. A thread has at least two neighboring rows, and
    neighboring lanes have neighbors in memory."""
    x = meta((64, 16, 256, 256), dtype)
    for plan in (rows.forward(rows.SOFTMAX, x, dim=1), rows.cosines(x, x, dim=1), classes.forward(x)):
        tile, vec = plan.constants, plan.constants["VEC"]
        assert 2 <= vec <= tile["BN"] // WARP
        assert tile["BN"] == plan.config.threads * vec, "no two threads have a row in common"


@pytest.mark.parametrize("shape", [(2, 4, 4, 3), (2, 6, 4, 3), (2, 2, 3), (6, 5)])
@pytest.mark.parametrize("dtype", [BF16, F64])
def test_no_warp_holds_what_another_does(dtype, shape):
    x = meta(shape, dtype)
    for plan in (
        classes.forward(x),
        classes.backward(x),
        rows.forward(rows.NORMALIZE, x, dim=1),
        rows.cosines(x, x, 1),
    ):
        tile = plan.constants["BM"] * plan.constants["BN"]
        assert plan.config.threads <= max(tile, WARP)


CUT = "WHOLE WIDE PIECES PEEL AXIS BM BN BS LM LN VEC C pieces per_piece tiles".split()


@pytest.mark.parametrize("columns", [5, 128, 1001, 4096, 20000, 32768, 50257, 128256, 1 << 22])
@pytest.mark.parametrize("dtype", [BF16, F32, F64])
def test_how_a_row_is_summed_depends_on_its_length_alone(dtype, columns):
    """The number of rows changes neither tiles, threads, accesses nor the parts that a row is read in, so a row's
    result has the same bits alone and among others."""

    def cut(make, M):
        plan = make(meta((M, columns), dtype))
        kinds = tuple(plan.kinds[name] for name in ("x", "y", "z") if name in plan.kinds)
        return plan.config, kinds, *map(plan.values.get, CUT)

    for make in (
        lambda x: rows.forward(rows.SOFTMAX, x),
        lambda x: rows.backward(rows.SOFTMAX, x),
        lambda x: rows.forward(rows.NORMALIZE, x),
        lambda x: rows.cosines(x, x),
        rows.triplets,
        classes.forward,
        lambda x: classes.forward(x, entropy=True),
        classes.margins,
        lambda x: divergences.forward(divergences.KINDS["js"], x, x),
    ):
        alone = cut(make, 1)
        assert all(cut(make, M) == alone for M in (2, 3, 64, 300, 5000))


def how_summed(plan, *operands):
    return plan.config, *(plan.kinds[name] for name in operands), *map(plan.values.get, CUT)


@pytest.mark.parametrize("columns", [128, 1000, 1004, 4096, 20_000, 50_257])
@pytest.mark.parametrize("dtype", [BF16, F32, F64])
def test_where_a_mask_lies_decides_how_it_is_read_alone(dtype, columns):
    """The mask's address and strides change only how the mask is read, not how the row is summed."""
    for make in (rows.forward, rows.backward):
        x, shape = meta((1, columns), dtype), (3, columns + 1)
        masks = torch.empty(shape, dtype=torch.bool), torch.empty(*shape, 2, dtype=torch.bool)[..., 0]
        views = [mask[i : i + 1, j : columns + j] for mask in masks for i in range(3) for j in (0, 1)]
        cuts = {how_summed(make(rows.LOG_SOFTMAX, x, mask), "x") for mask in (meta(x.shape, torch.bool), *views)}
        assert len(cuts) == 1


@pytest.mark.parametrize("columns", [1000, 4096, 9001, 20_000, 50_257])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_the_weights_of_classes_do_not_decide_how_a_row_is_summed(dtype, columns):
    """The dtype of class weights (unless it is fp64), their address and their stride do not change how a row is
    summed."""
    for probabilities in (False, True):
        cuts = set()
        for of_weights in (BF16, F32):
            for weight in (
                torch.empty(columns + 1, dtype=of_weights)[1:],
                torch.empty(columns, 2, dtype=of_weights)[:, 0],
            ):
                for M in (1, 2, 300):
                    x, target = meta((M, columns), dtype), meta((M,), torch.int64)
                    target = x if probabilities else target
                    _, plan, constants, options = classes.ce.prepare(x, target, weight, None, True)
                    plan = classes.row.plan(*plan, constants, **options)
                    cuts.add(how_summed(plan, "x", "probabilities"))
        assert len(cuts) == 1


def test_words_of_a_row_are_counted_in_as_many_bits_as_they_need():
    """Unaligned rows are read in 32-bit words (unaligned.py). A row of 2^30 + 1 elements needs 64-bit counts of words
    in fp64, whose elements are two words."""
    for dtype, wide in ((BF16, False), (F32, False), (F64, True)):
        for make in (rows.forward, rows.backward):
            plan = make(rows.SOFTMAX, meta((1, (1 << 30) + 1), dtype))
            assert plan.constants["PEEL"] and plan.wide == wide


def test_few_long_rows_are_shared_by_blocks():
    for M, shared in ((1, True), (5000, False)):
        x = meta((M, 128256), BF16)
        for plan in (rows.forward(rows.SOFTMAX, x), classes.forward(x), classes.margins(x), rows.cosines(x, x)):
            assert plan.values["pieces"] > 1 and (plan.values["splits"] > 1) == shared


REDUCED = {
    "cross_entropy": lambda x: classes.forward(x, mean=True),
    "multi_margin_loss": lambda x: classes.margins(x, mean=True),
    "triplet_margin_loss": lambda x: rows.triplets(x, mean=True),
}
COUNTING = REDUCED | {
    "nll_loss": lambda x: classes.picked(x, mean=True),
    "box_iou_loss": lambda x: classes.boxes(x[:, :4], mean=True),
    "softmax": lambda x: rows.forward(rows.SOFTMAX, x),
    "softmax_backward": lambda x: rows.backward(rows.SOFTMAX, x),
    "cosine_similarity": lambda x: rows.cosines(x, x),
    "masked_sum": lambda x: reduced(None, x, dims=[1]),
    "masked_sum of columns": lambda x: reduced(None, x, dims=[0]),
    "masked_var": lambda x: statistics.forward("VAR", x, None, dims=[1]),
}


@pytest.mark.parametrize("name", COUNTING)
def test_no_launch_counts_in_more_counters_than_there_are(name):
    """No plan needs more counters than the buffer has. (interpreted/test_workspaces.py: no launch uses more than its
    plan says.)"""
    for M in (1, 255, 256, 257, 510, 511, 512, 767, 1018, 1019, 1020, 1021, 1022, 1023, 1024, 1100, 70_000):
        for columns in (1000, 24_576, 32_000, 50_257, 1 << 20):
            plan = COUNTING[name](meta((M, columns), BF16))
            assert plan.counters <= COUNTERS, (M, columns)
            if name in REDUCED and plan.values["splits"] == 1:  # 1 counts the bundles; each bundle counts its blocks
                assert plan.counters == 1 + -(-plan.values["groups"] // max(256, -(-plan.values["groups"] // 512)))


@pytest.mark.parametrize("name", REDUCED)
def test_as_many_rows_are_split_as_counters_allow(name):
    plans = [REDUCED[name](meta((M, 50_000), F32)) for M in (1019, 1020)]
    assert [plan.values["splits"] > 1 for plan in plans] == [True, False] and plans[0].counters == COUNTERS


def registers_of_a_block(plan, arch):
    options = plan.options(GPUTarget("cuda", arch, WARP))
    return -(-options.get("maxnreg", 0) // 8) * 8 * WARP * options["num_warps"]


CHOICES = {  # for the plans that set their own register limit
    "softmax": lambda x, dim: rows.forward(rows.SOFTMAX, x, dim=dim),
    "softmax_backward": lambda x, dim: rows.backward(rows.SOFTMAX, x, dim=dim),
    "normalize_backward": lambda x, dim: rows.backward(rows.NORMALIZE, x, dim=dim),
    "cosine_similarity": lambda x, dim: rows.cosines(x, x, dim),
    "lpips_distance": lambda x, dim: rows.distances(x.movedim(dim, 1)[..., None]),
    "triplet_margin_loss": lambda x, dim: rows.triplets(x.movedim(dim, -1), True),
    "cross_entropy": lambda x, dim: classes.forward(x.movedim(dim, 1)),
    "smoothing": lambda x, dim: classes.forward(x.movedim(dim, 1), weight=True, smooth=True),
    "shares": lambda x, dim: classes.forward(x.movedim(dim, 1), True, True, True),
    "token_log_probs": lambda x, dim: classes.forward(x.movedim(dim, 1), entropy=True, temperature=0.5),
    "cross_entropy_backward": lambda x, dim: classes.backward(x.movedim(dim, 1), weight=True, smooth=True),
    "multi_margin_loss": lambda x, dim: classes.margins(x.movedim(dim, -1)),
    "multi_margin_loss_backward": lambda x, dim: classes.margins(x.movedim(dim, -1), gradient=True),
    **{
        f"{kind}_div": lambda x, dim, op=op: divergences.forward(op, x.movedim(dim, -1), x.movedim(dim, -1))
        for kind, op in divergences.KINDS.items()
    },
    "js_div_backward": lambda x, dim: divergences.backward(
        divergences.KINDS["js"], x.movedim(dim, -1), x.movedim(dim, -1)
    ),
}


@pytest.mark.parametrize("dtype", [BF16, F32, F64])
@pytest.mark.parametrize("name", CHOICES)
def test_a_block_has_the_registers_that_it_asks_for(name, dtype):
    """No plan asks for more registers per block than a multiprocessor has (65536): the driver would refuse the launch.
    (test_triton_build.py tests each compiled plan.)"""
    for columns in (1, 16, 100, 513, 1001, 1024, 2048, 2049, 3000, 4096, 8192, 9001, 16384, 20_000, 32_768, 50_257):
        for x, dim in ((meta((3, columns), dtype), 1), (meta((3, columns, 256), dtype), 1)):
            plan = CHOICES[name](x, dim)
            assert all(registers_of_a_block(plan, arch) <= 65536 for arch in (80, 100)), x.shape


@pytest.mark.parametrize("dtype", [BF16, F32, F64])
@pytest.mark.parametrize("name", CHOICES)
def test_how_a_row_across_memory_is_summed(name, dtype):
    """Rows across memory are summed in an order that their length alone decides, if at least 512 rows lie side by side,
    in a multiple of 16 bytes (docs/limits.md)."""
    for channels in (3, 16, 21, 100, 1000, 5000):
        shapes = ((batch, channels, N) for batch in (1, 3) for N in (512, 520, 1024, 12_544, 1 << 20))
        assert len({how_summed(CHOICES[name](meta(shape, dtype), 1)) for shape in shapes}) == 1, channels


@pytest.mark.parametrize("dtype", [BF16, F32, F64])
def test_a_plan_depends_on_no_more_of_an_address_than_its_key_has(dtype):
    """A plan depends on addresses only modulo 16: the key that finds a launch again contains no more of them."""
    storage, step = torch.empty(4096, dtype=dtype), 16 // dtype.itemsize
    dense = [classes.boxes(storage[i * step :][:1200].view(300, 4)).constants["DENSE"] for i in range(8)]
    assert dense == [True] * 8
    assert not classes.boxes(storage[1:1201].view(300, 4)).constants["DENSE"]
