"""The CUDA kernels of the SSIM of volumes, executed on CPU tensors, agree with the definition in fp64.

The tests cover tiles, chunks of slices and their borders, sums and maps, masks, levels, layouts and both gradients.
scripts/gpu_check.py tests what only a GPU can show.
"""

import pytest
import torch

from safeops.ops.images import _ssim
from tests.kernels.cuda_sources import FLOATS, needs_compilers
from tests.kernels.test_cuda_executed_images import (
    NAN,
    backward,
    both,
    check,
    check_bits,
    each_padding,
    forward,
    images,
    kept,
    near,
    ops,
    options,
)

__all__ = ["ops"]
pytestmark = [pytest.mark.slow, needs_compilers, pytest.mark.xdist_group("cuda_executed_images")]


@both
@each_padding
@pytest.mark.parametrize("size, sides", [(11, (12, 11, 33)), (3, (35, 9, 34)), (5, (5, 17, 7))], ids=str)
def test_tiles_and_chunks(ops, sides, size, same, by_window):
    """Results are right where a border between tiles crosses the volume in each dim, for the window size that the
    kernel has as a constant and for others."""
    x, y = images(1, 1, *sides)
    for mask in (None, kept(1, 1, *sides)):
        check(ops, x, y, mask, options(size, same, by_window))


@each_padding
@pytest.mark.parametrize("size", [1, 9, _ssim.LARGEST_ON_CUDA[5]])
def test_windows_of_any_size_in_fp64(ops, size, same):
    sides = (max(size, 3), 12, size + 2)
    x, y = images(1, 1, *sides, dtype=torch.float64)
    for mask in (None, kept(1, 1, *sides)):
        check(ops, x, y, mask, options(size, same, True))


def test_planes(ops):
    """Each volume has its own level (the mean that is subtracted first), mask and sums. 2,000 rows are more than one
    block adds up for the level."""
    x, y = images(2, 2, 6, 7, 8)
    x, y = (t + 100.0 * torch.arange(4.0).reshape(2, 2, 1, 1, 1) for t in (x, y))
    check(ops, x, y, kept(2, 2, 6, 7, 8), options(5), tolerance=1e-3)
    x, y = images(1, 2, 40, 50, 3)
    check(ops, x + 100, y - 100, None, options(3), tolerance=1e-3)


@each_padding
@pytest.mark.parametrize("offset, scale", [(1000.0, 1.0), (-3e4, 255.0), (3e38, 3e35), (0.0, 1e-30)])
def test_an_offset_leaves_the_digits(ops, offset, scale, same):
    x, y = images(1, 1, 6, 9, 34)
    x, y = ((t.double() * scale + offset).float() for t in (x, y))
    for mask in (None, kept(1, 1, 6, 9, 34)):
        check(ops, x, y, mask, options(5, same, True, data_range=scale, k2=0.1), tolerance=2e-3)


@pytest.mark.parametrize("garbage", [NAN, float("inf"), 3e38])
@each_padding
def test_what_is_masked_out_does_not_exist(ops, same, garbage):
    x, y = images(1, 1, 8, 9, 40)
    mask = kept(1, 1, 8, 9, 40)
    mask[..., :2, :] = mask[..., 26:] = mask[:, :, 5:] = False  # some windows have no kept pixel
    chosen = options(3, same, True)
    clean = check(ops, x, y, mask, chosen)
    for t in (x, y):
        t[~mask] = garbage
    for a, b in zip((clean[0], *clean[1]), check_bits(ops, x, y, mask, chosen)):
        assert torch.equal(a, b)


@each_padding
@pytest.mark.parametrize("size", [3, 11])
def test_a_kept_nan_shows_where_it_is_seen_and_nowhere_else(ops, size, same):
    sides, place = (14, 24, 44), (7, 12, 31)
    x, y = images(1, 1, *sides)
    x[(0, 0, *place)] = NAN
    got = forward(ops, x, y, None, options(size, same, True))
    half, shift = size // 2, 0 if same else size // 2
    want, reached = torch.zeros(got.shape, dtype=torch.bool), torch.zeros_like(x, dtype=torch.bool)
    want[(0, 0, *(slice(max(at - shift - half, 0), at - shift + half + 1) for at in place))] = True
    assert torch.equal(got.isnan(), want)
    # A window that would be outside of the map does not exist, so it passes no NaN on.
    back = torch.nn.functional.max_pool3d(torch.nn.functional.pad(want.float(), (shift,) * 6), size, 1, half)
    reached = back.bool()
    for gradient in backward(ops, torch.ones_like(got), x, y, None, options(size, same, True), True, True):
        assert torch.equal(gradient.isnan(), reached)


def test_a_kept_nan_that_no_counted_window_sees_has_gradient_0(ops):
    x, y = images(1, 1, 5, 8, 8)
    mask = torch.ones(1, 1, 5, 8, 8, dtype=torch.bool)
    mask[..., 2, 2, 2] = False  # center of the only window that contains pixel (0, 0, 0)
    x[..., 0, 0, 0] = NAN
    sums, (dx, dy) = check(ops, x, y, mask, options(5))
    assert sums.isfinite().all() and dx.isfinite().all() and dx[..., 0, 0, 0] == 0 == dy[..., 0, 0, 0]


def test_equal_volumes_have_no_loss(ops):
    x = torch.full((1, 1, 12, 12, 12), 1000.0)
    for y in (x, x * (1 + 1e-6)):
        for same in (False, True):
            assert (forward(ops, x, y, None, options(11, same, True)) >= 0).all()
    assert (forward(ops, x, x, None, options()) == torch.tensor([0.0, 0.0, 8.0]).reshape(3, 1, 1)).all()


def layouts():
    x, y = images(2, 2, 4, 5, 6)
    mask, last = kept(2, 2, 4, 5, 6), torch.channels_last_3d
    yield x.contiguous(memory_format=last), y, mask.contiguous(memory_format=last)
    yield x.transpose(2, 4).contiguous().transpose(2, 4), y, mask.mT.contiguous().mT
    yield images(2, 4, 8, 10, 12, seed=1)[0][:, ::2, ::2, ::2, 1::2], y, mask
    yield x, y[:1, :1].expand(x.shape), mask[:1].expand(x.shape)
    yield x[:, :, :1].expand(x.shape), y, mask[0, 0, :, :1, :1]
    yield x, y, torch.tensor([True, False]).reshape(2, 1, 1, 1, 1)


@both
def test_layouts(ops, by_window):
    for x, y, mask in layouts():
        check(ops, x, y, mask, options(3, True, by_window))


def test_upstream_gradients_of_any_strides(ops):
    x, y = images(2, 2, 4, 5, 6)
    for shape, by_window in (((2, 2, 2, 3, 4), True), ((3, 2, 2), False)):
        for upstream in (torch.tensor(0.7).expand(shape), torch.randn(shape[::-1]).permute(*range(len(shape))[::-1])):
            check(ops, x, y, None, options(3, False, by_window), upstream=upstream.double())


@pytest.mark.parametrize("second", FLOATS, ids=str)
@pytest.mark.parametrize("first", FLOATS, ids=str)
def test_dtypes(ops, first, second):
    (x, _), (_, y) = images(1, 1, 4, 5, 6, dtype=first), images(1, 1, 4, 5, 6, dtype=second)
    for needs in ((True, True), (True, False), (False, True), (False, False)):
        check(ops, x, y, kept(4, 5, 6), options(5, True, True), needs)


def test_nothing(ops):
    for shape in ((0, 2, 5, 5, 5), (2, 0, 5, 5, 5), (2, 2, 0, 5, 5), (2, 2, 5, 5, 0), (2, 2, 5, 4, 5)):
        x = torch.rand(shape)
        for by_window in (False, True):
            chosen = options(5, False, by_window)
            got = forward(ops, x, x, None, chosen)
            sides = [max(n - 4, 0) for n in shape[2:]]
            assert got.shape == ((*shape[:2], *sides) if by_window else (3, *shape[:2])) and (got == 0).all()
            for gradient in backward(ops, torch.ones_like(got), x, x, None, chosen, True, True):
                assert gradient.shape == x.shape and (gradient == 0).all()


def test_larger_windows_are_refused(ops):
    x, most = torch.rand(1, 1, 16, 16, 16), _ssim.LARGEST_ON_CUDA[5]
    near(forward(ops, x, x, None, options(most)), torch.tensor([0.0, 0.0, 216.0]).reshape(3, 1, 1).double(), 1e-9)
    with pytest.raises(RuntimeError, match=f"at most {most}"):
        forward(ops, x, x, None, options(most + 2))
