"""The CUDA kernels of ms_ssim, executed on CPU tensors, agree with the definition in fp64, in the images of half
the size, the sums of each scale, and the gradients added up over the scales.
"""

import pytest
import torch

from safeops.ops.images.ms_ssim import _scales, definition, halve, halve_mask
from tests.kernels.cuda_sources import needs_compilers
from tests.kernels.test_cuda_executed_images import NAN, each_padding, images, kept, near, ops

__all__ = ["ops"]
pytestmark = [pytest.mark.slow, needs_compilers, pytest.mark.xdist_group("cuda_executed_images")]
HALF, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
# (shape, scales, window size): tile borders in each dim and scale, odd sides, and a single scale.
SHAPES = [((1, 2, 95, 50), 3, 11), ((2, 1, 13, 88), 2, 5), ((1, 1, 12, 12), 1, 3)]


def window(size, same, data_range=1.0):
    return data_range, size, 1.5, 0.01, 0.03, same


def check(ops, x, y, mask, scales, chosen, needs=(True, True), tolerance=1e-4):
    leaves = [t.double().requires_grad_() for t in (x, y)]
    want = definition(*leaves, mask, scales, *chosen)
    sums, *coarse = ops._ms_ssim(x, y, mask, scales, *chosen)
    assert sums.dtype == F64 and torch.equal(sums[:, 2].long(), want[:, 2].long())
    near(sums[:, :2], want[:, :2], tolerance)
    torch.manual_seed(7)
    upstream = torch.randn(sums.shape, dtype=F64)
    upstream[:, 2] = 0
    gradients = ops._ms_ssim_backward(upstream, x, y, mask, *coarse, scales, *chosen, *needs)
    wanted = torch.autograd.grad(want, leaves, upstream)
    for gradient, slope, needed, leaf in zip(gradients, wanted, needs, (x, y)):
        assert gradient.dtype == leaf.dtype and gradient.shape == (leaf.shape if needed else (0,))
        if needed:
            assert mask is None or not gradient.masked_fill(mask, 0).any()
            near(gradient, slope, max(tolerance, torch.finfo(leaf.dtype).eps))
    return sums, *coarse, *gradients


@each_padding
@pytest.mark.parametrize("shape, scales, size", SHAPES, ids=str)
def test_scales(ops, shape, scales, size, same):
    x, y = images(*shape)
    for mask in (None, kept(*shape), kept(*shape[-2:])):
        check(ops, x, y, mask, scales, window(size, same))


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (HALF, F32), (F64, F64)], ids=str)
def test_dtypes(ops, dtypes):
    shape = 1, 2, 45, 50
    x, y = (t.to(dtype) for t, dtype in zip(images(*shape, dtype=F64), dtypes))
    tolerance = 1e-9 if F64 in dtypes else 1e-4
    check(ops, x, y, None, 2, window(3, False), tolerance=tolerance)
    check(ops, x.mT.contiguous().mT, y, kept(*shape), 2, window(3, True), tolerance=tolerance)
    check(ops, x, y, None, 2, window(3, False), (True, False), tolerance)
    check(ops, x, y, None, 2, window(3, False), (False, True), tolerance)


def test_images_of_half_the_size(ops):
    shape = 1, 2, 45, 51
    x, y = images(*shape, dtype=BF16)
    for mask in (None, kept(*shape, share=0.4)):
        _, pixels, masks = ops._ms_ssim(x, y, mask, 2, *window(3, False))
        halves = halve(x.double(), mask), halve(y.double(), mask)
        near(pixels, torch.cat([half.flatten() for half in halves]), 1e-6)
        if mask is None:
            assert not masks.numel()
        else:
            assert torch.equal(masks, halve_mask(mask).flatten())


@pytest.mark.parametrize("scale", [1e30, 1e-30, 1e38])
def test_huge_and_tiny(ops, scale):
    x, y = images(1, 1, 30, 31)
    check(ops, x * scale, y * scale, None, 2, window(3, False, scale), tolerance=2e-4)


@pytest.mark.parametrize("garbage", [NAN, float("inf"), 3e38])
def test_what_is_masked_out_does_not_exist(ops, garbage):
    shape = 1, 1, 30, 51
    x, y = images(*shape)
    mask = kept(*shape)
    mask[..., :5] = False  # some half-size pixels then average no kept pixel
    clean = check(ops, x, y, mask, 2, window(3, True))
    dirty = [torch.where(mask, t, garbage) for t in (x, y)]
    sums, *coarse = ops._ms_ssim(*dirty, mask, 2, *window(3, True))
    torch.manual_seed(7)
    upstream = torch.randn(sums.shape, dtype=F64)
    upstream[:, 2] = 0
    gradients = ops._ms_ssim_backward(upstream, *dirty, mask, *coarse, 2, *window(3, True), True, True)
    assert all(map(torch.equal, clean, (sums, *coarse, *gradients)))


def test_a_kept_nan_shows(ops):
    x, y = images(1, 2, 30, 31)
    x[0, 1, 4, 5] = NAN
    sums = ops._ms_ssim(x, y, None, 2, *window(3, False))[0]
    assert sums[:, :2].isnan().any(0).any(0).tolist() == [[False, True]] and sums[:, :2, :, 1].isnan().all()


def test_one_launch_a_scale(ops):
    x, y = images(2, 1, 40, 60)
    sums, *coarse = ops._ms_ssim(x, y, None, 3, *window(3, False))
    assert len(ops.launches) == 3
    ops._ms_ssim_backward(sums, x, y, None, *coarse, 3, *window(3, False), True, True)
    assert len(ops.launches) == 3


@pytest.mark.parametrize("shape", [(0, 2, 20, 20), (2, 2, 0, 20)], ids=str)
def test_no_pixels(ops, shape):
    x = torch.zeros(shape)
    sums, *coarse = ops._ms_ssim(x, x, None, 2, *window(3, True))
    assert sums.shape == (2, 3, *shape[:2]) and not sums.any()
    gradients = ops._ms_ssim_backward(sums, x, x, None, *coarse, 2, *window(3, True), True, True)
    assert [g.shape for g in gradients] == [x.shape] * 2


def test_what_backward_is_given_must_be_of_the_forward(ops):
    x, y = images(1, 1, 20, 20)
    sums, pixels, masks = ops._ms_ssim(x, y, None, 2, *window(3, False))
    for wrong in ((sums[:1], pixels, masks), (sums, pixels[1:], masks), (sums, pixels, torch.zeros(1, dtype=bool))):
        with pytest.raises(RuntimeError, match="must be of the results of _ms_ssim"):
            ops._ms_ssim_backward(wrong[0], x, y, None, *wrong[1:], 2, *window(3, False), True, True)


def test_volumes_take_the_definition(ops):
    x, _ = images(1, 1, 6, 7, 20)
    with pytest.raises(RuntimeError, match="needs a scale at least, and images"):
        ops._ms_ssim(x, x, None, 2, *window(3, False))
    assert _scales.prepare(x, x, None, 2, window(3, False))[0] is False
    assert _scales.prepare(x[0], x[0], None, 2, window(3, False))[0] is True
