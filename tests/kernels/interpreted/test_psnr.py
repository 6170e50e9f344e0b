"""psnr of each image and its backward agree with the definition in fp64 and its autograd."""

import math

import pytest
import torch
from safeops.kernels.images.psnr import psnr, psnr_backward

import safeops
from safeops.ops.images.psnr import _decibels as record
from tests.kernels.interpreted.truth import BF16, F16, F32, close, fill

NAN, INF = math.nan, math.inf
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns about log(0) and an empty mask


def check(x, y, mask=None, data_range=1.0):
    value, squares = psnr(x, y, mask, data_range)
    leaves = [t.double().requires_grad_() for t in (x, y)]
    want = safeops.psnr(*leaves, mask=mask, data_range=data_range, reduction="none")
    close(value, want.detach(), want.abs().nan_to_num(0, 0, 0).clamp(min=1).detach(), dtype=F32)
    upstream = fill(value.shape, F32, 3)
    operands = record.operands(x, y, mask, data_range)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "backward", psnr_backward)
        grads = record.gradients(upstream, (True, True), operands, record.Saved(squares))
    for got, slope, like in zip(grads, torch.autograd.grad(want, leaves, upstream.double()), (x, y)):
        assert got.dtype == like.dtype and got.stride() == like.stride()
        close(got, slope, slope.abs().amax() * torch.ones_like(slope), like.dtype)
    return value, squares


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("shape", [(2, 3, 16, 24), (3, 1, 7, 9), (1, 2, 600), (5, 1), (4, 3, 4, 5, 6)], ids=str)
def test_shapes_and_dtypes(shape, dtype):
    x, y = fill(shape, dtype, 1), fill(shape, dtype, 2)
    check(x, y)
    mask = fill(shape[-1:], F32, 4) > 0 if shape[-1] > 1 else None
    check(x, y, mask, data_range=2.5)
    check(x.transpose(0, -1).contiguous().transpose(0, -1), y, mask)


def test_what_is_not_kept_is_garbage_and_a_kept_nan_shows():
    x, y = fill((3, 1, 5, 40), F32, 1), fill((3, 1, 5, 40), F32, 2)
    mask = fill(x.shape, F32, 4) > 0
    mask[1] = False
    value, squares = check(torch.where(mask, x, 0), y, mask)
    dirty, of_dirty = psnr(torch.where(mask, x, NAN), y, mask)
    assert torch.equal(dirty, value) and torch.equal(of_dirty, squares) and squares[1] == -1 and value[1] == 0
    assert psnr(torch.where(mask, NAN, x), y)[0].isnan().tolist() == [True, False, True]


@pytest.mark.parametrize("scale", [1e30, 1e-30])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_squares_neither_overflow_nor_vanish(scale, dtype):
    x, y = ((fill((2, 1, 8, 9), F32, i) * scale).to(dtype) for i in (1, 2))
    value, _ = check(x, y)
    assert value.isfinite().all()
    check(x, y, data_range=scale)


def test_equal_images():
    x = fill((2, 1, 8, 9), F32, 1)
    y = torch.stack([x[0], x[1] + 1])
    value, squares = check(x, y)
    assert value[0] == INF and squares[0] == 0 and value[1].isfinite()
