"""psnr and total_variation: known images, sizes, masks, equal images."""

import itertools
import math

import pytest
import torch

import safeops
from tests.contract.common import DEVICE, case, each_route, on, t
from tests.contract.images.pixels import images, kept, value_and_gradients
from tests.ops import definitions

NAN, INF = math.nan, math.inf


@each_route
@pytest.mark.parametrize("name", ["ssim", "ssim_loss", "ms_ssim", "psnr", "total_variation"])
def test_nothing_kept(route, name):
    x, y = images(2, 2, 12, 13)
    operands = (x,) if name == "total_variation" else (x, y)
    options = {"win_size": 3, "betas": (0.5, 0.5)} if name == "ms_ssim" else {}
    none = torch.zeros(2, 1, 12, 13, dtype=torch.bool, device=DEVICE)
    second_image = none.clone()
    second_image[1] = True
    function = on(route, name)
    value, grads = value_and_gradients(function, *operands, mask=none, **options)
    assert value == 0 and all((g == 0).all() for g in grads)
    assert function(*operands, mask=none, empty="nan", **options).isnan()
    with pytest.raises(ValueError, match=f'^{name}: empty="raise"'):
        function(*operands, mask=none, empty="raise", **options)
    second = function(*operands, mask=second_image, **options)
    torch.testing.assert_close(second, function(*(x[1:] for x in operands), **options))


@each_route
def test_psnr_and_total_variation_of_known_images(route):
    x = torch.zeros(2, 1, 3, 3, device=DEVICE)
    y = x.clone()
    y[0, 0, 1, 1] = 0.3
    psnr = on(route, "psnr")
    got = psnr(x, y, reduction="none")
    assert got[0].item() == pytest.approx(-20 * math.log10(0.1)) and got[1] == INF  # the rms is 0.3 / 3
    value, grads = value_and_gradients(psnr, x, x.clone())
    assert value == INF and all((g == 0).all() for g in grads)  # the usual formula has NaN gradients
    variation = on(route, "total_variation")
    assert variation(y, reduction="none").tolist() == pytest.approx([1.2, 0])
    assert variation(y, mask=y < 0.2) == 0 and variation(y).item() == pytest.approx(0.6)
    assert variation(torch.full((1, 1, 1, 1), 3.0, device=DEVICE)) == 0


@each_route
@pytest.mark.parametrize(
    "shape", [(2, 3, 5, 1030), (3, 2, 300, 250), (1, 2, 3, 9, 11), (2, 1, 1, 7), (1, 1, 6, 1)], ids=str
)
def test_total_variation_of_sizes(route, shape):
    """Value and gradient are right for sizes around the kernels' pieces, every layout and pixels without a neighbor."""
    x, _ = images(*shape)
    keep = kept(*shape, share=0.6)
    last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    turned = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    upstream = torch.rand(shape[0], generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for image, mask in ((x, None), (x.contiguous(memory_format=last), keep), (turned, None), (x.expand(shape), keep)):
        dirty = image if mask is None else torch.where(mask, image, NAN)
        results = []
        for function, leaf in ((on(route, "total_variation"), dirty), (definitions.total_variation, image.double())):
            leaf = leaf.detach().requires_grad_()
            value = function(leaf, mask=mask, reduction="none")
            results.append((value, *torch.autograd.grad(value, leaf, upstream.to(value.dtype))))
        (value, gradient), (want, slopes) = results
        torch.testing.assert_close(value, want.float())
        torch.testing.assert_close(gradient, slopes.float())


@pytest.mark.parametrize("shape", [*((2, c, 6, 7) for c in range(1, 9)), (1, 2, 3, 4, 5), (1, 4, 3, 2, 5)], ids=str)
def test_total_variation_in_any_order_of_memory(shape):
    """Every order of the dims in memory is right, also channels between spatial dims: a neighbor may be far away."""
    images = torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    keep, upstream = kept(*shape, share=0.8), torch.linspace(-1, 1, shape[0], device=DEVICE)
    for order in itertools.permutations(range(len(shape))):
        x = images.permute(order).contiguous().permute([order.index(d) for d in range(len(shape))])
        for dtype, mask in itertools.product((torch.float32, torch.bfloat16), (None, keep)):
            with case(order, dtype, mask is not None):
                leaf = x.to(dtype).requires_grad_()
                wide = leaf.detach().double().requires_grad_()
                value = safeops.total_variation(leaf, mask=mask, reduction="none")
                want = definitions.total_variation(wide, mask=mask, reduction="none")
                torch.testing.assert_close(value, want.float())
                (dx,), (slopes,) = (torch.autograd.grad(v, u, upstream.to(v)) for v, u in ((value, leaf), (want, wide)))
                torch.testing.assert_close(dx, slopes.to(dtype))


@each_route
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_equal_images_make_no_nan_on_the_way_back(route):
    """Neither derivative makes a NaN, even one that a later step turns into 0: anomaly detection would report it."""
    x, _ = images(2, 1, 3, 4)
    y = x.clone()
    y[0] += 0.25
    x.requires_grad_()
    with torch.autograd.detect_anomaly():
        (dx,) = torch.autograd.grad(on(route, "psnr")(x, y, reduction="none").sum(), x, create_graph=True)
        (second,) = torch.autograd.grad((dx[0].square() + dx[1]).sum(), x)
    assert dx[0].all() and not dx[1].any() and second[0].all() and not second[1].any()


def test_int_pixels_are_refused_by_name():
    x = t(1, 2, 3).reshape(1, 1, 1, 3).to(torch.uint8)
    for name in ("ssim", "ssim_loss", "ms_ssim", "psnr"):
        with pytest.raises(TypeError, match=f"^{name}: input must be a floating point tensor"):
            getattr(safeops, name)(x, x)
