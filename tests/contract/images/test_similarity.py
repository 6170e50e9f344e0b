"""The SSIM family: reported failures that it answers, masks, sizes, memory, parity."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import safeops
from safeops.core.op import registry
from safeops.testing import no_synchronisation
from safeops.testing.memory import _peak_bytes
from tests.contract.common import DEVICE, each_route, on
from tests.contract.images.pixels import images, kept, truth, value_and_gradients
from tests.ops import definitions
from tests.test_routes import dispatched

NAN = math.nan
KERNELS = registry["ssim"].runs_on(DEVICE)
SIMILARITIES = ("ssim", "ssim_loss")
each_similarity = pytest.mark.parametrize("name", SIMILARITIES)
each_padding = pytest.mark.parametrize("padding", ["valid", "same"])
kernels_only = pytest.mark.skipif(not KERNELS, reason="no kernels here")


# ---- reported failures


@each_route
@each_padding
def test_fused_ssim_37_similarity_of_nearly_equal_images_is_at_most_1(route, padding):
    x = torch.full((1, 1, 11, 11), 0.6, device=DEVICE)
    for y in (x + 1e-7, x - 1e-7, x):
        for reduction in ("mean", "none"):
            got = on(route, "ssim")(x, y, padding=padding, reduction=reduction)
            assert (got <= 1).all() and (got > 0.999999).all()
            assert (on(route, "ssim_loss")(x, y, padding=padding, reduction=reduction) >= 0).all()


@each_route
@each_padding
def test_similarity_is_at_most_1_for_any_images(route, padding):
    for size in (1e-3, 1.0, 300.0):
        x, _ = images(2, 1, 40, 40, noise=0)
        x = x * size
        for y in (x.clone(), x * (1 + 1e-6), x.half().float()):
            assert (on(route, "ssim")(x, y, padding=padding, reduction="none") <= 1).all()


@each_route
def test_fused_ssim_a_nan_pixel_shows_where_it_is_kept_and_nowhere_else(route):
    x, y = images(1, 1, 24, 24)
    x[..., 4, 5] = NAN
    ssim = on(route, "ssim")
    assert ssim(x, y).isnan()
    near = ssim(x, y, padding="same", reduction="none").isnan()
    assert near[..., :10, :11].all() and near.sum() == 10 * 11
    keep = ~x.isnan()
    value, (dx, dy) = value_and_gradients(ssim, x, y, mask=keep)
    assert value.isfinite() and dx.isfinite().all() and dy.isfinite().all() and dx[..., 4, 5] == 0 == dy[..., 4, 5]


@each_route
@each_similarity
def test_torchmetrics_1290_constants_are_not_those_of_half(route, name):
    """The constants are not rounded to half: C1 C2 = 9e-8 would become 1.19e-7, which dark images show."""
    x, y = images(1, 1, 16, 16)
    x, y = (x * 1e-2).half(), (y * 1e-2).half()
    assert on(route, name)(x, y).item() == pytest.approx(truth(name, x, y).item(), rel=1e-5)


@each_route
@each_padding
@pytest.mark.parametrize("mask", [None, kept(1, 1, 64, 64)], ids=["whole", "masked"])
def test_an_offset_of_1000_leaves_the_digits(route, padding, mask):
    x, y = images(2, 1, 64, 64)
    x, y = x + 1000, y + 1000
    options = {"mask": mask, "padding": padding}
    got = on(route, "ssim")(x, y, reduction="none", **options)
    want = truth("ssim", x, y, reduction="none", **options)
    assert (got <= 1).all() and (got.double() - want).abs().max() < 1e-3
    # The plain formula E[x^2] - E[x]^2 of a variance is off by more than 0.01 in fp32.
    mean, squares = F.avg_pool2d(x, 11, 1), F.avg_pool2d(x * x, 11, 1)
    assert (
        squares - mean * mean - F.avg_pool2d((x - 1000).square(), 11, 1) + (mean - 1000).square()
    ).abs().max() > 0.01
    ours = value_and_gradients(on(route, "ssim"), x, y, **options)[1]
    wide = value_and_gradients(definitions.ssim, x.double(), y.double(), **options)[1]
    for a, b in zip(ours, wide):
        assert (a - b).abs().max() < 1e-3 * b.abs().max()


@each_route
@each_padding
def test_an_offset_of_which_twice_is_too_much_leaves_the_digits(route, padding):
    x, y = (3e38 + 3e35 * t for t in images(1, 1, 20, 21, dtype=torch.float64))
    x, y, options = x.float(), y.float(), {"padding": padding, "data_range": 3e35, "k2": 0.1, "reduction": "none"}
    value, gradients = value_and_gradients(on(route, "ssim"), x, y, **options)
    wide, wanted = value_and_gradients(definitions.ssim, x.double(), y.double(), **options)
    assert (value - wide).abs().max() < 1e-3
    for a, b in zip(gradients, wanted):
        assert (a - b).abs().max() < 1e-3 * b.abs().max()


@each_route
@each_padding
def test_rounding_makes_no_variance_negative(route, padding):
    """The loss must stay >= 0 for flat images at a level of 1000, where a variance could round below 0."""
    x = torch.full((1, 1, 40, 40), 1000.0, device=DEVICE)
    y = x + torch.where(torch.arange(40, device=DEVICE) < 20, 0.37, -0.41)
    assert (on(route, "ssim_loss")(x, y, padding=padding, reduction="none") >= 0).all()


@pytest.mark.parametrize("name", [*SIMILARITIES, "ms_ssim"])
def test_what_the_cuda_kernel_takes(name):
    """On CUDA, windows too large for a tile in shared memory or in registers take the composite."""
    with FakeTensorMode():
        image, volume = (torch.empty(1, 1, *[48] * dims, device="cuda") for dims in (2, 3))

    def takes(x, size):
        return registry[name].prepare(x, x, None, (1.0, size, 1.5, 0.01, 0.03, "valid"), 1, True, "zero")[0]

    assert takes(image, 3) and takes(image, 11) and takes(image, 21)
    assert takes(volume, 3) and takes(volume, 11)
    assert not takes(image, 23) and not takes(volume, 13)
    assert takes(torch.zeros(1, 1, 48, 48), 23) and takes(torch.zeros(1, 1, 13, 13, 13), 13)  # no such limit


# ---- masks


@each_route
def test_a_kept_nan_that_no_counted_window_sees_has_gradient_0(route):
    x, y = images(1, 1, 16, 16)
    keep = torch.ones(1, 1, 16, 16, dtype=torch.bool, device=DEVICE)
    keep[..., 5, 5] = False  # the centre of the one window that sees the corner
    x[..., 0, 0] = NAN
    value, (dx, dy) = value_and_gradients(on(route, "ssim"), x, y, mask=keep)
    assert value.isfinite() and dx.isfinite().all() and dx[..., 0, 0] == 0 == dy[..., 0, 0]
    assert on(route, "ssim")(x, y).isnan()


@each_route
@each_similarity
def test_masked_windows_are_made_of_what_is_kept(route, name):
    """A strip that is masked out gives the SSIM of images that end there, with windows cut at the border."""
    x, y = images(2, 3, 20, 30)
    keep = torch.arange(30, device=DEVICE) < 21
    masked = on(route, name)(x, y, mask=keep, padding="same", reduction="none")
    part = on(route, name)(x[..., :21], y[..., :21], padding="same", reduction="none")
    torch.testing.assert_close(masked[..., :21], part)
    assert (masked[..., 21:] == 0).all()


# ---- sizes


@pytest.mark.slow
@each_route
@each_padding
@pytest.mark.parametrize("size", [(11, 11), (12, 31), (150, 21), (130, 515), (11, 1100)], ids=str)
def test_sizes_beyond_tiles_and_chunks(route, padding, size):
    x, y = images(1, 1, *size)
    mask = kept(1, 1, *size)
    for options in ({}, {"mask": mask}):
        for reduction in ("mean", "none"):
            how = {**options, "padding": padding, "reduction": reduction}
            got = value_and_gradients(on(route, "ssim"), x, y, **how)
            want = value_and_gradients(definitions.ssim, x.double(), y.double(), **how)
            torch.testing.assert_close(got[0].double(), want[0], rtol=1e-4, atol=1e-5)
            for a, b in zip(got[1], want[1]):
                assert (a - b).abs().max() <= 1e-4 * b.abs().max()


@each_route
@pytest.mark.parametrize(
    "options", [{"win_size": 1}, {"win_size": 25, "win_sigma": 30.0}, {"win_sigma": 1e-3}], ids=str
)
def test_other_windows(route, options):
    x, y = images(1, 2, 40, 33)
    for padding in ("valid", "same"):
        got = value_and_gradients(on(route, "ssim"), x, y, padding=padding, **options)
        want = value_and_gradients(definitions.ssim, x.double(), y.double(), padding=padding, **options)
        assert got[0].item() == pytest.approx(want[0].item(), rel=1e-5)
        for a, b in zip(got[1], want[1]):
            assert (a - b).abs().max() <= 1e-4 * b.abs().max()


@each_route
@each_similarity
@each_padding
@pytest.mark.parametrize(
    "shape", [(0, 3, 12, 12), (2, 0, 12, 12), (2, 3, 0, 12), (2, 3, 12, 0), (0, 1, 12, 12, 12)], ids=str
)
def test_no_pixels(route, name, padding, shape):
    x, y = torch.zeros(shape, device=DEVICE), torch.zeros(shape, device=DEVICE)
    value, (dx, dy) = value_and_gradients(on(route, name), x, y, padding=padding)
    assert value == 0 and dx.shape == dy.shape == shape
    smaller = [n - 10 if n and padding == "valid" else n for n in shape[2:]]
    assert on(route, name)(x, y, padding=padding, reduction="none").shape == (*shape[:2], *smaller)


def test_same_takes_images_smaller_than_a_window():
    x, y = images(1, 1, 3, 2)
    assert safeops.ssim(x, y, padding="same").item() == pytest.approx(truth("ssim", x, y, padding="same").item())


# ---- parity


def plain_ssim(x, y, data_range=1.0):
    """Computes SSIM by the usual formula, with five convolutions, as pytorch-msssim does."""
    g = torch.exp(-((torch.arange(11.0) - 5) ** 2) / 4.5).to(x)
    g = g / g.sum()
    w = (g[:, None] * g).expand(x.shape[1], 1, 11, 11)
    mx, my, xx, yy, xy = (F.conv2d(z, w, groups=x.shape[1]) for z in (x, y, x * x, y * y, x * y))
    c1, c2 = (0.01 * data_range) ** 2, (0.03 * data_range) ** 2
    contrast = (2 * (xy - mx * my) + c2) / (xx - mx * mx + yy - my * my + c2)
    return contrast * (2 * mx * my + c1) / (mx * mx + my * my + c1), contrast


@each_route
@pytest.mark.parametrize("data_range", [1.0, 255.0])
def test_ssim_and_ms_ssim_are_the_usual_ones(route, data_range):
    x, y = (z * data_range for z in images(2, 3, 176, 192, dtype=torch.float64))
    torch.testing.assert_close(on(route, "ssim")(x, y, data_range=data_range), plain_ssim(x, y, data_range)[0].mean())
    value, a, b = 1, x, y
    for beta in (0.0448, 0.2856, 0.3001, 0.2363):
        value = value * plain_ssim(a, b, data_range)[1].mean((2, 3)) ** beta
        a, b = F.avg_pool2d(a, 2), F.avg_pool2d(b, 2)
    value = value * plain_ssim(a, b, data_range)[0].mean((2, 3)) ** 0.1333
    got = on(route, "ms_ssim")(x, y, data_range=data_range, reduction="none")
    torch.testing.assert_close(got, value)


@each_route
def test_negative_contrast_is_no_nan(route):
    x, _ = images(1, 1, 48, 48)
    plain = plain_ssim(x, 1 - x)[1].mean() ** 0.5
    assert plain.isnan()
    value, (dx, dy) = value_and_gradients(on(route, "ms_ssim"), x, 1 - x, betas=(0.5, 0.5))
    assert value == 0 and (dx == 0).all() and (dy == 0).all()


@each_route
def test_nearly_equal_images_keep_the_digits_of_their_loss(route):
    x, y = images(1, 1, 32, 32, dtype=torch.float64, noise=0)
    y = x + 1e-4 * torch.sin(torch.arange(32.0, device=DEVICE))
    x, y = x.float(), y.float()
    want = truth("ssim_loss", x, y).item()
    assert 0 < want < 1e-6 and on(route, "ssim_loss")(x, y).item() == pytest.approx(want, rel=1e-3)


# ---- kernels


@kernels_only
def test_which_kernels_run():
    x, y = images(1, 3, 32, 32)
    x.requires_grad_()
    for name in (*SIMILARITIES, "ms_ssim"):
        options = {"betas": (0.5, 0.5)} if name == "ms_ssim" else {}
        value, ops = dispatched(lambda name=name, options=options: getattr(safeops, name)(x, y, **options))
        assert ops.count("safeops::_ssim") == (2 if options else 1)
        _, ops = dispatched(lambda value=value: torch.autograd.grad(value, x))
        assert ops.count("safeops::_ssim_backward") == (2 if options else 1)


@kernels_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_that_of_the_gradients(dtype):
    x, y = images(2, 3, 256, 256, dtype=dtype)
    x.requires_grad_(), y.requires_grad_()

    def step():
        return torch.autograd.grad(safeops.ssim_loss(x, y, mask=None), (x, y))

    assert _peak_bytes(DEVICE, step) <= 2 * x.nbytes + 65536


@kernels_only
@each_similarity
@each_padding
def test_memory_of_a_map_is_the_map(name, padding):
    """The kernel writes the map itself, and the backward reads the map's gradient: no buffer of that size is added."""
    x, y = images(2, 3, 256, 256)
    mask = kept(2, 1, 256, 256)
    x.requires_grad_(), y.requires_grad_()
    for keep in (None, mask):
        value = getattr(safeops, name)(x, y, mask=keep, padding=padding, reduction="none")
        upstream = torch.ones((), device=DEVICE).expand_as(value)

        def forward(keep=keep):
            return getattr(safeops, name)(x, y, mask=keep, padding=padding, reduction="none")

        def backward(value=value, upstream=upstream):
            return torch.autograd.grad(value, (x, y), upstream, retain_graph=True)

        assert _peak_bytes(DEVICE, forward) <= value.nbytes + 65536
        assert _peak_bytes(DEVICE, backward) <= 2 * x.nbytes + 65536


@kernels_only
def test_nothing_of_the_size_of_an_image_is_saved():
    x, y = images(2, 3, 64, 64)
    x.requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda z: kept.append(z) or z, lambda z: z):
        safeops.ssim_loss(x, y, mask=y > 0.1)
    inputs = {z.data_ptr() for z in (x, y)}
    assert all(z.numel() <= 18 or z.dtype == torch.bool or z.data_ptr() in inputs for z in kept)


@each_similarity
def test_no_synchronisation(name):
    x, y = images(1, 1, 16, 16)
    x.requires_grad_()
    with no_synchronisation(DEVICE):
        torch.autograd.grad(getattr(safeops, name)(x, y, mask=y > 0.1), x)


def test_the_mean_over_micro_batches_by_denominator():
    x, y = images(4, 1, 20, 20)
    mask = kept(4, 1, 20, 20)
    count = mask[..., 5:-5, 5:-5].sum().float()
    parts = [slice(0, 1), slice(1, 4)]
    expected = value_and_gradients(safeops.ssim_loss, x, y, mask=mask)
    ours = value_and_gradients(
        lambda x, y: sum(safeops.ssim_loss(x[p], y[p], mask=mask[p], denominator=count) for p in parts), x, y
    )
    torch.testing.assert_close(ours, expected)


def test_module():
    x, y = images(1, 3, 16, 16)
    module = copy.deepcopy(safeops.nn.SSIMLoss(win_size=7, data_range=2.0))
    assert torch.equal(module(x, y), safeops.ssim_loss(x, y, win_size=7, data_range=2.0))
    with pytest.raises(ValueError, match="^SSIMLoss: win_size must be odd"):
        safeops.nn.SSIMLoss(win_size=4)


@each_route
@pytest.mark.parametrize("name", SIMILARITIES)
def test_equal_images_with_the_least_constants(name, route):
    z = torch.zeros(1, 1, 12, 12, device=DEVICE)
    assert on(route, name)(z, z, k1=1e-15, k2=1e-15) == (1 if name == "ssim" else 0)
    with pytest.raises(ValueError, match=f"^{name}: k1 must be at least 1e-15, got 1e-25"):
        on(route, name)(z, z, k1=1e-25)
