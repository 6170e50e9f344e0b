"""The CUDA sources of images, run on the CPU thread by thread, against the definition in fp64.

What this shows: tiles and their borders, sums and maps, masks, levels, layouts, both gradients, barriers, that shared
memory suffices. What it cannot show: anything about a GPU. That is scripts/gpu_check.py.
"""

import pytest
import torch

from safeops._torch import schema
from safeops.ops.images import _ssim
from tests.kernels.emulated import FLOATS, ROOT, compiled, needs_compiler

SOURCES = [ROOT / f"csrc/cuda/images/{name}.cu" for name in ("ssim", "ssim_backward")]
NAN = float("nan")
pytestmark = [needs_compiler, pytest.mark.xdist_group("cuda_emulated_images")]


@pytest.fixture(scope="module")
def ops(tmp_path_factory):
    target = compiled(SOURCES, tmp_path_factory.mktemp("emulated") / "cuda_emulated_images.so")
    library = torch.library.Library("safeops_emulated", "FRAGMENT")
    for op in (_ssim._forward, _ssim._backward):
        library.define(str(schema(op)).removeprefix("safeops::"))
    torch.ops.load_library(str(target))
    yield torch.ops.safeops_emulated
    library._destroy()


def images(*shape, dtype=torch.float32, seed=0, noise=0.2):
    torch.manual_seed(seed)
    x = torch.rand(shape, dtype=torch.float64)
    return x.to(dtype), (x + noise * torch.randn(shape, dtype=torch.float64)).to(dtype)


def options(size=11, same=False, by_window=False, data_range=1.0, k2=0.03):
    return data_range, size, 1.5, 0.01, k2, same, by_window


def check(ops, x, y, mask, chosen, needs=(True, True), upstream=None, tolerance=None):
    """Values and gradients, judged by the largest. The upstream gradient is of the result's shape, or made here."""
    wide = torch.float64 in (x.dtype, y.dtype)
    tolerance = tolerance or (1e-9 if wide else 1e-4)
    same, by_window = chosen[-2:]
    got = ops._ssim(x, y, mask, *chosen)
    leaves = [t.double().requires_grad_() for t in (x, y)]
    truth = _ssim.define(*leaves, mask, *chosen)
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
    gradients = ops._ssim_backward(upstream, x, y, mask, *chosen, *needs)
    wanted = torch.autograd.grad(truth, leaves, upstream.double())
    for gradient, want, needed, leaf in zip(gradients, wanted, needs, (x, y)):
        assert gradient.dtype == leaf.dtype
        if not needed:
            assert gradient.shape == (0,)
            continue
        if mask is not None:
            assert (gradient[~mask.expand(x.shape)] == 0).all()
        assert gradient.stride() == torch.empty_like(leaf).stride()
        # a half's gradient is rounded once, at the end
        near(gradient, want, max(tolerance, torch.finfo(leaf.dtype).eps))
    return got, gradients


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
@pytest.mark.parametrize("sides", [(53, 52), (43, 96), (12, 11)], ids=str)
def test_tiles(ops, sides, size, same, by_window):
    """Two tiles down, a window beside one, three across; in the backward a pixel beside one, three, a whole image."""
    x, y = images(1, 2, *sides)
    for mask in (None, kept(1, 1, *sides)):
        check(ops, x, y, mask, options(size, same, by_window))
