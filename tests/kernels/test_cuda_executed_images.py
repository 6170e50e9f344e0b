"""SSIM's CUDA kernels for images, executed on CPU tensors, agree with the definition in fp64.

The tests cover tiles and their borders, sums and maps, masks, levels, layouts, both gradients, barriers, and that the
shared memory suffices. scripts/gpu_check.py tests what only a GPU can show.
"""

import pytest
import torch

from safeops.ops.images import _ssim
from tests.contract.refusals import assert_all_refused
from tests.kernels.cuda_sources import FLOATS, ROOT, needs_compilers
from tests.kernels.executed import cuda

SOURCES = sorted((ROOT / "csrc/cuda/images").glob("*.cu"))
NAN = float("nan")
REFUSED = ("ssim", "ssim_loss", "ms_ssim")
pytestmark = [pytest.mark.slow, needs_compilers, pytest.mark.xdist_group("cuda_executed_images")]


@pytest.fixture(scope="module")
def ops():
    return cuda.ops(*SOURCES)


def images(*shape, dtype=torch.float32, seed=0, noise=0.2):
    torch.manual_seed(seed)
    x = torch.rand(shape, dtype=torch.float64)
    return x.to(dtype), (x + noise * torch.randn(shape, dtype=torch.float64)).to(dtype)


def options(size=11, same=False, by_window=False, data_range=1.0, k2=0.03):
    return data_range, size, 1.5, 0.01, k2, same, by_window


NO_SHARE = torch.empty(0, dtype=torch.float64)
NONE, MEAN, SUM = range(3)


def forward(ops, x, y, mask, chosen):
    """Returns the SSIM map (one value per window), or the sums of each plane."""
    *window, by_window = chosen
    return ops._ssim(x, y, mask, NONE if by_window else _ssim.PLANES, False, False, *window)[0]


def backward(ops, upstream, x, y, mask, chosen, *needs):
    *window, by_window = chosen
    return ops._ssim_backward(upstream, NO_SHARE, x, y, mask, NONE if by_window else _ssim.PLANES, *window, *needs)


def definition(x, y, mask, chosen):
    *window, by_window = chosen
    return _ssim.define(x, y, mask, NONE if by_window else _ssim.PLANES, False, False, *window)[0]


def check(ops, x, y, mask, chosen, needs=(True, True), upstream=None, tolerance=None):
    """Assert that values and gradients agree with the definition, relative to the largest. upstream: the gradient of
    the result; None: random."""
    wide = torch.float64 in (x.dtype, y.dtype)
    tolerance = tolerance or (1e-9 if wide else 1e-4)
    *window, by_window = chosen
    got = forward(ops, x, y, mask, chosen)
    leaves = [t.double().requires_grad_() for t in (x, y)]
    truth = definition(*leaves, mask, chosen)
    if by_window:
        assert got.dtype == (torch.float64 if wide else torch.float32) and got.is_contiguous()
    else:
        assert got.dtype == torch.float64
        assert torch.equal(got[2].long(), truth[2].long())
    near(got, truth, tolerance)
    if upstream is None:
        torch.manual_seed(7)
        upstream = torch.randn(got.shape, dtype=got.dtype)
    upstream = upstream.to(got.dtype)
    gradients = backward(ops, upstream, x, y, mask, chosen, *needs)
    check_gradients(gradients, torch.autograd.grad(truth, leaves, upstream.double()), needs, x, y, mask, tolerance)
    if by_window:  # then the map of SSIM alone is tested, too
        mapped = ops._ssim(x, y, mask, NONE, True, False, *window)[0]
        near(mapped, _ssim.define(*leaves, mask, NONE, True, False, *window)[0], tolerance)
        opposite = ops._ssim_backward(-upstream, NO_SHARE, x, y, mask, NONE, *window, *needs, True)
        torch.testing.assert_close(opposite, gradients, rtol=0, atol=0, equal_nan=True)
        return got, gradients
    for reduction, similarity in ((MEAN, True), (SUM, False)):
        actual, share = ops._ssim(x, y, mask, reduction, similarity, True, *window)
        truth, of_window = _ssim.define(*leaves, mask, reduction, similarity, True, *window)
        assert actual.dtype == (torch.float64 if wide else torch.float32) and torch.equal(share, of_window)
        near(actual, truth, tolerance)
        grads = ops._ssim_backward(torch.tensor(-0.75).to(actual), share, x, y, mask, reduction, *window, *needs)
        wanted = torch.autograd.grad(truth, leaves, torch.tensor(-0.75).double())
        check_gradients(grads, wanted, needs, x, y, mask, tolerance)
    return got, gradients


def check_gradients(gradients, wanted, needs, x, y, mask, tolerance):
    for gradient, want, needed, leaf in zip(gradients, wanted, needs, (x, y)):
        assert gradient.dtype == leaf.dtype
        if not needed:
            assert gradient.shape == (0,)
            continue
        if mask is not None:
            assert (gradient[~mask.expand(x.shape)] == 0).all()
        assert gradient.stride() == torch.empty_like(leaf).stride()
        # eps of an fp16 or bf16 gradient: it is rounded once, at the end.
        near(gradient, want, max(tolerance, torch.finfo(leaf.dtype).eps))


def near(got, want, tolerance):
    assert got.shape == want.shape
    assert torch.equal(got.isnan(), want.isnan())
    want = want.detach()
    error = (got.double() - want).nan_to_num(0).abs().max()
    assert error <= tolerance * want.nan_to_num(0).abs().max(), (error, want.nan_to_num(0).abs().max())


def kept(*shape, share=0.7):
    torch.manual_seed(3)
    return torch.rand(shape) < share


both = pytest.mark.parametrize("by_window", [False, True], ids=["sums", "map"])
each_padding = pytest.mark.parametrize("same", [False, True], ids=["valid", "same"])


@both
@each_padding
@pytest.mark.parametrize("size", [11, 5], ids=["known size", "any size"])
@pytest.mark.parametrize("sides", [(53, 52), pytest.param((12, 96), marks=pytest.mark.exhaustive)], ids=str)
def test_tiles(ops, sides, size, same, by_window):
    """Results are right where a tile's border crosses the image, close to the image's end or further inside, in each
    dim."""
    x, y = images(1, 1, *sides)
    for mask in (None, kept(1, 1, *sides)):
        check(ops, x, y, mask, options(size, same, by_window))


@each_padding
@pytest.mark.parametrize("wide", [False, True], ids=["fp32", "fp64"])
@pytest.mark.parametrize("size", [1, 3, _ssim.LARGEST_ON_CUDA[4]])
def test_windows_of_any_size(ops, size, wide, same):
    sides = (max(size, 12), size + 29)
    x, y = images(1, 1, *sides, dtype=torch.float64 if wide else torch.float32)
    check(ops, x, y, kept(1, 1, *sides), options(size, same, True))


def test_more_tiles_than_threads_are_added_up(ops):
    x, y = images(1, 1, 1, 42 * 130 - 5)
    check(ops, x, y, None, options(1))


def test_one_launch(ops):
    x, y = images(2, 1, 12, 60)
    for reduction in (NONE, MEAN, SUM, _ssim.PLANES):
        value, share = ops._ssim(x, y, None, reduction)
        assert len(ops.launches) == 1
        ops._ssim_backward(torch.ones_like(value), share, x, y, None, reduction)
        assert len(ops.launches) == 1


def test_no_window_counts(ops):
    x, y = images(2, 1, 12, 60)
    for mask in (torch.zeros_like(x, dtype=torch.bool), torch.arange(60) < 5):  # no pixel; no window's center
        for reduction in (MEAN, SUM):
            assert ops._ssim(x, y, mask, reduction, True, False)[0] == 0
            value, share = ops._ssim(x, y, mask, reduction, True, True)
            assert value.isnan()
            assert not any(g.any() for g in ops._ssim_backward(value, share, x, y, mask, reduction, need_target=True))


def test_planes(ops):
    """Each plane has its own level (a mean that is subtracted first), mask and sums."""
    x, y = images(2, 3, 13, 14)
    x, y = (t + 100.0 * torch.arange(6.0).reshape(2, 3, 1, 1) for t in (x, y))
    check(ops, x, y, kept(2, 3, 13, 14), options(5), tolerance=1e-3)


@each_padding
@pytest.mark.parametrize("offset, scale", [(1000.0, 1.0), (-3e4, 255.0), (3e38, 3e35), (0.0, 1e-30)])
def test_an_offset_leaves_the_digits(ops, offset, scale, same):
    """A large offset costs no digits. The definition takes the operands rounded to fp32. The sum 3e38 + 3e38 overflows
    fp32, but must not do harm."""
    x, y = images(1, 1, 20, 21)
    x, y = ((t.double() * scale + offset).float() for t in (x, y))
    for mask in (None, kept(1, 1, 20, 21)):
        check(ops, x, y, mask, options(11, same, True, data_range=scale, k2=0.1), tolerance=2e-3)


@pytest.mark.parametrize("garbage", [NAN, float("inf"), 3e38])
@each_padding
def test_what_is_masked_out_does_not_exist(ops, same, garbage):
    x, y = images(1, 1, 20, 50)
    mask = kept(1, 1, 20, 50)
    mask[..., :2, :] = mask[..., 30:] = False  # some windows have no kept pixel
    chosen = options(5, same, True)
    clean = check(ops, x, y, mask, chosen)
    for t in (x, y):
        t[~mask] = garbage
    got = check_bits(ops, x, y, mask, chosen)
    for a, b in zip((clean[0], *clean[1]), got):
        assert torch.equal(a, b)


def check_bits(ops, x, y, mask, chosen):
    got = forward(ops, x, y, mask, chosen)
    torch.manual_seed(7)
    upstream = torch.randn(got.shape, dtype=got.dtype)
    if mask is not None and chosen[-2]:
        upstream[~mask.expand(x.shape)] = NAN  # a window that does not count must not use its upstream gradient
    return got, *backward(ops, upstream, x, y, mask, chosen, True, True)


@each_padding
@pytest.mark.parametrize("value", [NAN, float("inf")])
def test_a_kept_one_shows_where_it_is_seen_and_nowhere_else(ops, value, same):
    for size in (5, 11):
        x, y = images(1, 1, 25, 60)
        x[..., 12, 31] = value
        got = forward(ops, x, y, None, options(size, same, True))
        half, shift = size // 2, 0 if same else size // 2
        want = torch.zeros(got.shape, dtype=torch.bool)
        rows, columns = (slice(max(at - shift - half, 0), at - shift + half + 1) for at in (12, 31))
        want[..., rows, columns] = True
        assert torch.equal(got.isnan(), want)
        dx, dy = backward(ops, torch.ones_like(got), x, y, None, options(size, same, True), True, True)
        reached = torch.zeros_like(x, dtype=torch.bool)
        reached[..., 12 - 2 * half : 13 + 2 * half, 31 - 2 * half : 32 + 2 * half] = True
        assert torch.equal(dx.isnan(), reached) and torch.equal(dy.isnan(), reached)


def test_the_level_is_that_of_the_finite_pixels(ops):
    """Where most of a tile is NaN, the windows with finite pixels alone keep their digits: NaN is left out of the
    level."""
    x, y = images(1, 1, 40, 16)
    x, y = x + 1000, y + 1000
    x[..., 12:, :], y[..., 16:, :] = NAN, float("inf")
    chosen = options(5, False, True)
    near(forward(ops, x, y, None, chosen), definition(x.double(), y.double(), None, chosen), 1e-4)


def test_a_kept_nan_that_no_counted_window_sees_has_gradient_0(ops):
    x, y = images(1, 1, 16, 16)
    mask = torch.ones(1, 1, 16, 16, dtype=torch.bool)
    mask[..., 5, 5] = False  # center of the only window that contains pixel (0, 0)
    x[..., 0, 0] = NAN
    sums, (dx, dy) = check(ops, x, y, mask, options(11))
    assert sums.isfinite().all() and dx.isfinite().all() and dx[..., 0, 0] == 0 == dy[..., 0, 0]


def test_nearly_equal_images_have_no_negative_loss(ops):
    x = torch.full((1, 1, 14, 14), 1000.0)
    for y in (x, x * (1 + 1e-6), x + torch.where(torch.arange(14) < 7, 0.37, -0.41)):
        for same in (False, True):
            assert (forward(ops, x, y, None, options(11, same, True)) >= 0).all()
    assert (forward(ops, x, x, None, options()) == torch.tensor([0.0, 0.0, 16.0]).reshape(3, 1, 1)).all()


def layouts():
    x, y = images(2, 2, 13, 15)
    mask = kept(2, 2, 13, 15)
    last = torch.channels_last
    yield "channels last", x.contiguous(memory_format=last), y, mask.contiguous(memory_format=last)
    yield "transposed", x.mT.contiguous().mT, y, mask.mT.contiguous().mT
    yield "steps", images(2, 4, 26, 30, seed=1)[0][:, ::2, ::2, 1::2], y, mask
    yield "expanded input", x, y[:1, :1].expand(2, 2, 13, 15), mask[:1].expand(2, 2, 13, 15)
    yield "one row", x[:, :, :1].expand(2, 2, 13, 15), y, mask[0, 0, 0]
    yield "a mask of columns", x, y, mask[0, 0, :, :1]
    yield "a mask of images", x, y, torch.tensor([True, False]).reshape(2, 1, 1, 1)
    yield "no mask", x[..., 1:], y[..., 1:], None


@both
def test_layouts(ops, by_window):
    for _, x, y, mask in layouts():
        check(ops, x, y, mask, options(5, True, by_window))


def test_upstream_gradients_of_any_strides(ops):
    x, y = images(2, 2, 13, 15)
    for shape, by_window in (((2, 2, 9, 11), True), ((3, 2, 2), False)):
        for upstream in (torch.tensor(0.7).expand(shape), torch.randn(shape[::-1]).permute(*range(len(shape))[::-1])):
            check(ops, x, y, None, options(5, False, by_window), upstream=upstream.double())


@pytest.mark.parametrize("second", FLOATS, ids=str)
@pytest.mark.parametrize("first", FLOATS, ids=str)
def test_dtypes(ops, first, second):
    (x, _), (_, y) = images(1, 1, 13, 14, dtype=first), images(1, 1, 13, 14, dtype=second)
    for needs in ((True, True), (True, False), (False, True), (False, False)):
        check(ops, x, y, kept(13, 14), options(11, True, True), needs)


def test_a_gradient_of_half_overflows_to_infinity(ops):
    x, y = images(1, 1, 12, 13, dtype=torch.float16)
    large = torch.full((3, 1, 1), 1e8, dtype=torch.float64)
    assert backward(ops, large, x, y, None, options(), True, False)[0].isinf().any()


def test_nothing(ops):
    for shape in ((0, 2, 13, 13), (2, 0, 13, 13), (2, 2, 0, 13), (2, 2, 13, 0), (2, 2, 4, 13)):
        x = torch.rand(shape)
        for by_window in (False, True):
            chosen = options(5, False, by_window)
            got = forward(ops, x, x, None, chosen)
            sides = [max(n - 4, 0) for n in shape[2:]]
            assert got.shape == ((*shape[:2], *sides) if by_window else (3, *shape[:2]))
            assert (got == 0).all()
            for gradient in backward(ops, torch.ones_like(got), x, x, None, chosen, True, True):
                assert gradient.shape == x.shape and (gradient == 0).all()


def test_unusable_operands_are_refused(ops):
    x, most = torch.rand(1, 1, 24, 24), _ssim.LARGEST_ON_CUDA[4]
    for call, text in (
        (lambda: forward(ops, x[0], x[0], None, options()), "two images"),
        (lambda: forward(ops, x, x[..., 1:], None, options()), "of one shape"),
        (lambda: forward(ops, x, x, None, options(most + 2)), f"at most {most}"),
        (lambda: forward(ops, x, x, None, options(4)), "win_size must be odd"),
        (lambda: forward(ops, x.long(), x, None, options()), "input must be float16"),
        (lambda: forward(ops, x, x, torch.ones(24), options()), "mask must be bool"),
        (lambda: forward(ops, x, x, torch.ones(23, dtype=torch.bool), options()), "does not broadcast"),
        (lambda: backward(ops, x, x, x, None, options(), True, True), "grad and result_slope must be"),
        (lambda: backward(ops, x.double(), x, x, None, options(same=True, by_window=True), True, True), "grad"),
        (lambda: ops._ssim_backward(torch.tensor(1.0), NO_SHARE, x, x, None, MEAN), "grad and result_slope must be"),
        (lambda: ops._ssim_backward(torch.ones(1), NO_SHARE.new_ones(()), x, x, None, MEAN), "grad and result_slope"),
    ):
        with pytest.raises(RuntimeError, match=text):
            call()


def test_bad_calls(ops):
    assert_all_refused(ops, REFUSED)
