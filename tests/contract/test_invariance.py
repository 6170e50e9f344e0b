"""A row's results have the same bits in any batch, at any place in it, with any padding and any alignment of a mask."""

import pytest
import torch

import safeops
from safeops.core.domain import box
from safeops.core.op import registry
from safeops.core.reduction import Reduction
from safeops.core.sums import MaskedCount
from safeops.testing import DTYPES
from tests.contract.common import REPEATS, case, names
from tests.ops import RECORDS
from tests.ops.record import DEVICE

pytestmark = pytest.mark.skipif(
    not registry["masked_softmax"].runs_on(DEVICE), reason="of the kernels: torch's own sums are cut by size"
)
# Loops differ by dtype in their conversions alone, and bf16's are the most.
DTYPES_OF_ROWS = [
    pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16, pytest.param(torch.float64, marks=REPEATS)
]  # fmt: skip
BATCHES = (2, 3, 40)
ENOUGH = 1500  # rows of a batch on CUDA: so many that one block has a whole row
# Lengths for which CUDA has a row in one tile or in pieces of several blocks. Rows of odd length begin unaligned.
LENGTHS = (5, 16, 33, 257, 1001, 4097, 20000, 32768, 140001)


def first(x, dim=-1):
    """Returns the target that is class 0 for each row."""
    return torch.ones_like(x.select(dim, 0), dtype=torch.int64)


def of_rows(function, **options):
    return lambda x, y, keep: function(x, first(x), mask=keep, reduction="none", **options)


def of_pairs(function, **options):
    return lambda x, y, keep: function(x, y, mask=keep, reduction="none", **options)


def of_elements(function):
    return lambda x, y, keep: function(x, None if keep is None else keep.unsqueeze(-1).expand(x.shape), -1)


# name: function of (x, y, which rows are kept) that returns one or several results per row
OPS = {
    "masked_softmax": of_elements(safeops.masked_softmax),
    "masked_log_softmax": of_elements(safeops.masked_log_softmax),
    "normalize": lambda x, y, keep: safeops.normalize(x, dim=-1),
    "cosine_similarity": lambda x, y, keep: safeops.cosine_similarity(x, y, dim=-1),
    "cross_entropy": of_rows(safeops.cross_entropy),
    "cross_entropy, smoothing": of_rows(safeops.cross_entropy, label_smoothing=0.1, z_loss=0.01),
    "cross_entropy, probabilities": lambda x, y, keep: safeops.cross_entropy(x, y.abs(), mask=keep, reduction="none"),
    "nll_loss": of_rows(safeops.nll_loss),
    "multi_margin_loss": of_rows(safeops.multi_margin_loss),
    "token_log_probs": lambda x, y, keep: torch.stack(safeops.token_log_probs(x, first(x), mask=keep), -1),
    "kl_div_with_logits": of_pairs(safeops.kl_div_with_logits),
    "js_div_with_logits": of_pairs(safeops.js_div_with_logits),
    "tv_with_logits": of_pairs(safeops.tv_with_logits),
    "box_iou_loss": lambda x, y, keep: safeops.box_iou_loss(
        box(x[..., :4]), box(y[..., :4]), kind="ciou", mask=keep, reduction="none"
    ),
    "cosine_embedding_loss": lambda x, y, keep: safeops.cosine_embedding_loss(
        x, y, first(x), mask=keep, reduction="none"
    ),
    "triplet_margin_loss": lambda x, y, keep: safeops.triplet_margin_loss(
        x, y, y.flip(-1), mask=keep, reduction="none"
    ),
}


def outcome(op, x, y, keep=None):
    x = x.detach().requires_grad_()
    result = op(x, y, keep)
    (dx,) = torch.autograd.grad(result, x, torch.full_like(result, 1.5))
    return result.detach(), dx


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", DTYPES_OF_ROWS, ids=str)
def test_a_row_does_not_see_its_neighbours(name, dtype):
    generator = torch.Generator(DEVICE).manual_seed(0)

    def numbers(*shape):
        return 3 * torch.randn(shape, generator=generator, device=DEVICE).to(dtype)

    for length in LENGTHS:
        row, other = numbers(length), numbers(length)
        # A mask that keeps all rows changes no result, but is computed by other loops.
        every = torch.ones(1, dtype=torch.bool, device=DEVICE)
        alone = [outcome(OPS[name], row[None], other[None], keep) for keep in (None, every)]
        batches = BATCHES if length < 140000 else (2, 20)
        for batch in (*batches, ENOUGH) if DEVICE != "cpu" and length in (1001, 20000) else batches:
            for place in {0, batch // 2, batch - 1} if batch < ENOUGH else {ENOUGH // 2}:
                x, y = numbers(batch, length), numbers(batch, length)
                x[place], y[place] = row, other
                keep = torch.arange(batch, device=DEVICE) % 3 == place % 3
                for padded, wanted in zip((None, keep), alone):
                    got = outcome(OPS[name], x, y, padded)
                    for g, a in zip(got, wanted):
                        assert torch.equal(g[place], a[0]), (length, batch, place, padded is None)


IMAGES = {
    "masked_softmax": lambda x: safeops.masked_softmax(x, None, 1),
    "normalize": lambda x: safeops.normalize(x, dim=1),
    "cosine_similarity": lambda x: safeops.cosine_similarity(x, x.detach().flip(1), 1),
    "cross_entropy": lambda x: safeops.cross_entropy(x, first(x, 1), reduction="none"),
    "token_log_probs": lambda x: safeops.token_log_probs(x.movedim(1, -1), first(x, 1)).entropy,
    "kl_div_with_logits": lambda x: safeops.kl_div_with_logits(
        x.movedim(1, -1), x.detach().flip(1).movedim(1, -1), reduction="none"
    ),
}


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nor_does_an_image(name, dtype):
    """An image, whose rows (the channels of a pixel) are strided, has the same bits alone and in a batch."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    for channels, pixels in ((3, 5), (21, 300), (100, 49), (1000, 5), (5000, 2), (5000, 49)):
        if DEVICE != "cpu" and pixels < 16:  # on CUDA a tile then holds pixels of several images
            continue
        image = 3 * torch.randn(1, channels, pixels, generator=generator, device=DEVICE).to(dtype)
        alone = outcome(lambda x, y, keep: IMAGES[name](x), image, None)
        for batch in BATCHES[:2]:
            x = torch.randn(batch, channels, pixels, generator=generator, device=DEVICE).to(dtype)
            x[-1] = image
            for g, a in zip(outcome(lambda x, y, keep: IMAGES[name](x), x, None), alone):
                assert torch.equal(g[-1], a[0]), (channels, pixels, batch)


# ---- reductions of one dim

# Lengths around those where a row's order of summation changes: a register, a chunk of 1024, a slice.
FEW = (5, 33, 257)
MANY = (*range(1, 71), 127, 255, 256, 257, 511, 512, 513, 1000, 1024, 1025, 2049, 32769, 70001)


def reduced(name, x, mask, weight, dim):
    """Returns [the reduction of x over dim, the gradient to x], without the gradient if there is none."""
    kwargs = {"mask": mask, "weight": weight}
    kwargs = {key: value for key, value in kwargs.items() if value is not None and key in RECORDS[name].call}
    x = x.detach().requires_grad_(x.is_floating_point())
    result = getattr(safeops, name)(x, dim=dim, **kwargs)
    if not result.requires_grad:
        return [result]
    return [result.detach(), torch.autograd.grad(result, x, torch.full_like(result, 1.5))[0]]


def assert_bits(got, want):
    for g, w in zip(got, want, strict=True):
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[w.element_size()]
        same = (g.contiguous().view(bits) == w.contiguous().view(bits)) | (g.isnan() & w.isnan())
        assert same.all(), f"{int((~same).sum())} of {same.numel()} differ"


def part(tensors, dim, index):
    return [None if t is None else t.movedim(dim, 0)[index].movedim(0, dim).clone() for t in tensors]


def inside(t, margin):
    """A copy of t inside a larger tensor, where rows have gaps and begin at any byte."""
    if t is None:
        return None
    larger = torch.ones(t.shape[0], t.shape[1] + 3, dtype=t.dtype)[:, margin : margin + t.shape[1]]
    return larger.copy_(t)


@pytest.mark.skipif(DEVICE != "cpu", reason="on CUDA the layout decides, too (docs/limits.md)")
@pytest.mark.parametrize(
    "dtype, lengths",
    [
        *(pytest.param(dtype, FEW, id=f"{dtype}-few") for dtype in DTYPES),
        *(pytest.param(dtype, MANY, id=f"{dtype}-many", marks=REPEATS) for dtype in DTYPES if dtype != torch.float32),
        pytest.param(torch.float32, MANY, id="torch.float32-many", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", names(Reduction, MaskedCount))
def test_a_reduced_row_does_not_see_its_neighbours(name, dtype, lengths):
    generator = torch.Generator().manual_seed(0)
    rows = 70
    for length in lengths:
        x = 3 * torch.randn(rows, length, generator=generator, dtype=torch.float64)
        # Neighbors of 0, with squares that vanish, with subnormal numbers, or so large that squares overflow.
        x[1], x[2], x[35] = 0, 1e-25, 1e-170 if dtype == torch.float64 else 1e-40
        x[3, 0], x[4] = 1e30, x[4] * 1e17
        x = x.to(dtype)
        mask = torch.rand(rows, length, generator=generator) < 0.8
        weight = torch.rand(rows, length, generator=generator).to(dtype)
        weight[5] = 0
        for masked, weighted in ((0, 0), (1, 1)) if lengths is FEW else ((0, 0), (1, 0), (0, 1), (1, 1)):
            operands = [x, mask if masked else None, weight if weighted else None]
            want = reduced(name, *operands, -1)
            with case(dtype, length, masked, weighted):
                for index in (slice(3, 40), slice(5, 6), slice(7, 9), torch.arange(rows - 1, -1, -1)):
                    assert_rows(name, operands, 0, index, want)
                padded = [inside(t, margin) for t, margin in zip(operands, (1, 2, 0))]
                assert_bits(reduced(name, *padded, -1), want)
                # Strided rows: first 64 or more side by side, then fewer.
                across = [None if t is None else t.t().contiguous() for t in operands]
                want = reduced(name, *across, 0)
                for index in (slice(3, 70), slice(2, 66)):
                    assert_rows(name, across, 1, index, want)
                few = part(across, 1, slice(2, 65))
                want = reduced(name, *few, 0)
                for index in (slice(1, 3), slice(3, 20)):
                    assert_rows(name, few, 1, index, want)
                images = [None if t is None else t.expand(3, *t.shape).contiguous() for t in few]
                assert_bits([t[1] for t in reduced(name, *images, 1)], want)


def assert_rows(name, operands, dim, index, want):
    """Asserts that rows computed alone have the same bits as among all rows."""
    got = reduced(name, *part(operands, dim, index), 1 - dim)
    assert_bits(got, part(want[:1], 0, index) + part(want[1:], dim, index))
