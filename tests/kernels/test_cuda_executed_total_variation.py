"""The CUDA kernels of total_variation, executed on CPU tensors, agree with the definition in fp64.

The tests cover packets, rows and their ends, layouts, masks, sums of many blocks, and both directions.
scripts/gpu_check.py tests what only a GPU can show.
"""

import pytest
import torch

from safeops.ops.images import total_variation as op
from tests.contract.refusals import assert_all_refused
from tests.kernels.cuda_sources import FLOATS, ROOT, needs_compilers
from tests.kernels.executed import cuda
from tests.kernels.test_cuda_executed_images import ops

__all__ = ["ops"]
FOLDER = ROOT / "csrc/cuda/images"
SOURCES = [FOLDER / "total_variation.cu", FOLDER / "total_variation_backward.cu"]
NAN, INF = float("nan"), float("inf")
NO_SHARE = torch.empty(0, dtype=torch.float64)
REFUSED = ("total_variation",)
pytestmark = [pytest.mark.slow, needs_compilers, pytest.mark.xdist_group("cuda_executed_images")]


def image(*shape, dtype=torch.float32, seed=0):
    """A random image in steps of 1/4, so that some neighbors are equal."""
    torch.manual_seed(seed)
    return (torch.randn(shape) * 4).round().div(4).to(dtype)


def kept(*shape):
    torch.manual_seed(3)
    return torch.rand(shape) < 0.7


NONE, MEAN, SUM = range(3)


def check(ops, x, mask=None, garbage=True):
    """Assert that each reduction agrees with the definition. The kernels add in fp64 and round once."""
    if mask is not None and garbage:
        x.masked_fill_(~mask, NAN)
    wide = x.dtype == torch.float64
    leaf = (x if mask is None else torch.where(mask, x, 0)).double().clone().requires_grad_()
    for reduction in (SUM, MEAN, NONE):
        got, share = ops._total_variation(x, mask, reduction, reduction != SUM)
        want, of_image = op.define(leaf, mask, reduction, reduction != SUM)
        assert got.dtype == (torch.float64 if wide else torch.float32)
        assert torch.equal(share, of_image) or x.numel() == 0 and share.shape == of_image.shape
        near(got, want, 1e-12 if wide else 1e-6)
        grad = (0.75 - torch.arange(1.0 * want.numel())).reshape(want.shape)  # multiples of 1/4, so that sums are exact
        dx = ops._total_variation_backward(grad.to(got.dtype), share, x, mask)
        (slope,) = torch.autograd.grad(want, leaf, grad.double())
        assert dx.dtype == x.dtype and dx.stride() == torch.empty_like(x).stride()
        assert mask is None or not dx[~mask.expand(x.shape)].any()
        near(dx, slope, torch.finfo(x.dtype).eps)
    return got, dx


def near(got, want, rounding):
    assert torch.equal(got.isnan(), want.isnan())
    assert ((got.double() - want).nan_to_num(0).abs() <= rounding * want.nan_to_num(0).abs()).all(), (got, want)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["all", "mask"])
@pytest.mark.parametrize("shape", [(2, 3, 9, 16), (2, 2, 5, 13), (1, 2, 3, 5, 8), (2, 1, 4, 2, 7)], ids=str)
def test_images_and_volumes(ops, shape, dtype, masked):
    """Results are right for rows of whole packets and rows that end within one, and for more rows than a thread
    takes."""
    check(ops, image(*shape, dtype=dtype), kept(*shape) if masked else None)


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (2, 3, 1, 1), (1, 1, 1, 40), (1, 1, 40, 1), (1, 1, 6, 1, 1), (2, 3, 8, 1)]
)
def test_sizes_of_one(ops, shape):
    """A pixel without any neighbor has gradient 0, even for an upstream NaN."""
    for mask in (None, kept(*shape)):
        check(ops, image(*shape), mask)
    if max(shape[2:]) == 1:
        for nan, share in ((torch.full(shape[:1], NAN), NO_SHARE), (torch.tensor(NAN), NO_SHARE.new_ones(()))):
            assert not ops._total_variation_backward(nan, share, image(*shape), None).any()


def test_a_pixel_whose_neighbours_are_masked_has_gradient_0(ops):
    for width in (7, 8):
        mask = torch.ones(1, 1, 7, width, dtype=torch.bool)
        mask[..., 3, 2] = mask[..., 5, 2] = mask[..., 4, 1] = mask[..., 4, 3] = False
        dx = ops._total_variation_backward(torch.tensor([NAN]), NO_SHARE, image(1, 1, 7, width), mask)
        assert dx[..., 4, 2] == 0 and torch.equal(
            dx.isnan(), mask & (torch.arange(7 * width) != 4 * width + 2).view_as(mask)
        )


def layouts():
    """Yields (name, x, mask, True if the kernel reads packets)."""
    x, mask, last = image(2, 3, 6, 8), kept(2, 3, 6, 8), torch.channels_last
    yield "channels last", x.contiguous(memory_format=last), mask.contiguous(memory_format=last), False
    yield "channels last, a mask of pixels", x.contiguous(memory_format=last), mask[:, :1], False
    yield "a mask of pixels", x, mask[:, :1], True
    yield "a mask of columns", x, mask[0, 0, 0], True
    yield "a mask of rows", x, mask[0, 0, :, :1], True
    yield "a mask of images", x, torch.tensor([True, False]).reshape(2, 1, 1, 1), True
    yield "one of all", x, torch.tensor(True), True
    yield "a mask across", x, mask.mT.contiguous().mT, False
    yield "a mask of odd rows", x, kept(2, 3, 6, 9)[..., :8], False
    yield "transposed", x.mT.contiguous().mT, mask, False
    yield "steps", image(2, 6, 12, 16)[:, ::2, ::2, ::2], mask, False
    yield "rows of a larger image", image(2, 3, 6, 16)[..., :8], mask, True
    yield "shifted", image(2, 3, 6, 9)[..., 1:], mask, False
    yield "expanded", image(2, 1, 6, 8).expand(2, 3, 6, 8), mask[:, :1], True
    yield "an expanded row", image(2, 3, 1, 8).expand(2, 3, 6, 8), None, True
    yield "volumes, channels last", image(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d), None, False
    yield "depth nearest", image(1, 2, 5, 6, 8).permute(0, 1, 4, 3, 2), None, True


@pytest.mark.parametrize("name, x, mask, packets", list(layouts()), ids=lambda p: p if isinstance(p, str) else "")
def test_layouts(ops, name, x, mask, packets):
    check(ops, x, mask, garbage=x.is_contiguous())
    assert (ops.wide > 0) == packets


def test_a_kept_nan_shows_and_inf(ops):
    for value in (NAN, INF):
        for width in (8, 9):
            x = image(2, 1, 6, width)
            x[0, 0, 3, 4] = value
            x[1, 0, 0, 7] = x[1, 0, 1, 7] = INF  # their difference is inf - inf
            check(ops, x)


@pytest.mark.parametrize("images", [1, 2, 3, 9, 33, 300])
def test_blocks_are_added_up_the_same_whatever_their_order(ops, images):
    """The sums have the same bits in each run, whatever the order of the blocks, for one image and for many."""
    size = (200, 80) if images < 4 else (20, 61) if images < 100 else (3, 61)
    x = image(images, 1, *size, dtype=torch.float64)
    for mask in (None, kept(*x.shape)):
        got = check(ops, x, mask)[0]
        assert all(torch.equal(got, ops._total_variation(x, mask, NONE, False)[0]) for _ in range(2))


def test_an_image_of_which_nothing_is_kept_is_none(ops):
    x, mask = image(3, 2, 40, 61), kept(3, 2, 40, 61)
    mask[1] = False
    got = check(ops, x, mask)[0]
    assert got[1].isnan() and torch.equal(ops._total_variation(x, mask, MEAN, True)[1], torch.tensor(0.5).double())
    for reduction in (MEAN, SUM):
        assert ops._total_variation(x, mask & False, reduction, True)[0].isnan()
        assert ops._total_variation(x, mask & False, reduction, False)[0] == 0


def test_one_launch(ops):
    for images in (1, 3):
        _, share = ops._total_variation(image(images, 1, 100, 41), None, MEAN, False)
        assert len(ops.launches) == 1
        ops._total_variation_backward(torch.tensor(1.0), share, image(images, 1, 100, 41), None)
        assert len(ops.launches) == 1


def test_units_beyond_a_blocks_threads(ops, tmp_path):
    """If an image has more units of work than kMostBlocks blocks have threads, a block takes several units, with the
    same gradients."""
    header = (FOLDER / "neighbours.cuh").read_text()
    assert "kMostBlocks = 2048" in header
    (tmp_path / "neighbours.cuh").write_text(header.replace("kMostBlocks = 2048", "kMostBlocks = 3"))
    sources = [tmp_path / path.name for path in SOURCES]
    for source, path in zip(sources, SOURCES):
        source.write_text(path.read_text().replace('"parts.cuh"', '"cuda/images/parts.cuh"'))
    x, few = image(2, 1, 150, 88), cuda.ops(*sources)
    operands = x, None, NONE, False
    assert torch.allclose(few._total_variation(*operands)[0], ops._total_variation(*operands)[0], rtol=1e-6)
    operands = torch.ones(2), NO_SHARE, x, None
    dx = few._total_variation_backward(*operands)
    assert torch.equal(dx, ops._total_variation_backward(*operands))


def test_a_gradient_of_half_overflows_to_infinity(ops):
    x = image(1, 1, 4, 8, dtype=torch.float16)
    dx = ops._total_variation_backward(torch.tensor([1e6]), NO_SHARE, x, None)
    assert dx.isinf().any() and not dx.isnan().any()


def test_nothing(ops):
    for shape in ((0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0), (2, 1, 0, 3, 4)):
        check(ops, torch.empty(shape))


def test_unusable_operands_are_refused(ops):
    x, grad, share = torch.rand(1, 1, 4, 4), torch.zeros(1), NO_SHARE
    for call, text in (
        (lambda: ops._total_variation(x[0], None), "needs .N, C, H, W."),
        (lambda: ops._total_variation(x.long(), None), "input must be float16"),
        (lambda: ops._total_variation(x, torch.ones(4)), "mask must be bool"),
        (lambda: ops._total_variation(x, torch.ones(3, dtype=torch.bool)), "does not broadcast"),
        (lambda: ops._total_variation_backward(grad.double(), share, x, None), "grad and result_slope must be"),
        (lambda: ops._total_variation_backward(grad.expand(2), share, x, None), "grad and result_slope must be"),
        (lambda: ops._total_variation_backward(grad[0], share, x, None), "grad and result_slope must be"),
        (lambda: ops._total_variation_backward(grad, share.new_ones(()), x, None), "grad and result_slope must be"),
        (lambda: ops._total_variation_backward(grad, share.float(), x, None), "grad and result_slope must be"),
    ):
        with pytest.raises(RuntimeError, match=text):
            call()


def test_bad_calls(ops):
    assert_all_refused(ops, REFUSED)
