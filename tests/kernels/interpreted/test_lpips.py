"""lpips_distance's distances in one layer and their backward agree with the definition in fp64 and its autograd."""

import pytest
import torch
from safeops.kernels.engine import launch
from safeops.kernels.images.lpips_distance import lpips_distance, lpips_distance_backward

from safeops.ops.images.lpips_distance import _apart as record
from safeops.ops.images.lpips_distance import definition
from tests.kernels.interpreted.truth import BF16, F16, F32, F64, close, fill, in_order

NAN, INF = float("nan"), float("inf")
LAYOUTS = {  # name -> ((N, C, H, W), memory order or None)
    "images": ((2, 20, 6, 8), (0, 1, 2, 3)),
    "odd images": ((3, 5, 7, 3), (0, 1, 2, 3)),
    "channels last": ((2, 40, 2, 3), (0, 2, 3, 1)),
    "many channels": ((1, 300, 4, 4), (0, 1, 2, 3)),
    "many channels last": ((2, 301, 1, 1), (0, 2, 3, 1)),
    "no two fuse": ((2, 3, 2, 5), (3, 1, 0, 2)),
    "no images": ((0, 5, 2, 2), (0, 1, 2, 3)),
    "no channels": ((2, 0, 2, 2), (0, 1, 2, 3)),
}


def example(layout, *dtypes):
    return [in_order(*LAYOUTS[layout], dtype, seed) for seed, dtype in enumerate(dtypes or (F32, F32), 1)]


def check(x, y, weight=None, keep=None):
    wide = F64 if F64 in (x.dtype, y.dtype) else F32
    leaves = [t.double().requires_grad_() for t in (x, y)]
    want = definition(*leaves, None if weight is None else weight.double(), keep)
    value, *others = lpips_distance(x, y, weight, keep)
    assert value.dtype == wide and value.shape == want.shape
    largest = torch.tensor(4.0 if weight is None or not weight.numel() else 4 * weight.abs().amax().item())
    close(value, want.detach(), largest, wide)
    upstream = fill(value.shape, F32, 3)
    if keep is not None:
        upstream = torch.where(keep, upstream, 0)
    grads = lpips_distance_backward(upstream, x, y, weight, value, *others, True, True)
    for got, slope, t, norm in zip(grads, torch.autograd.grad(want, leaves, upstream.double()), (x, y), others[1:]):
        assert got.dtype == t.dtype and got.shape == t.shape
        scale = 8 * largest / torch.where(norm == 0, 1, norm)
        close(got.double(), slope, scale, t.dtype)
        assert keep is None or not got.masked_fill(keep, 0).any()
    return value, grads


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    x, y = example(layout)
    check(x, y)
    weight = fill((x.shape[1], 1, 1), F32, 5)
    weight[:1] = 0
    keep = fill((x.shape[0], 1, *x.shape[2:]), F32, 4) > 0
    check(x, y, weight, keep)
    plans = [plan.constants["WHOLE"] for plan in launch._plans.values() if plan.kernel.fn.__name__ == "lpips_kernel"]
    assert not plans or all(plans) == (not layout.startswith("many channels"))


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (F16, F32), (F64, F64)], ids=str)
@pytest.mark.parametrize("layout", ["images", "many channels"])
def test_dtypes(layout, dtypes):
    x, y = example(layout, *dtypes)
    check(x, y, fill((x.shape[1], 1, 1), BF16, 5))


@pytest.mark.parametrize("scale", [1e30, 1e-30])
@pytest.mark.parametrize("layout", ["images", "many channels"])
def test_squares_neither_overflow_nor_vanish(layout, scale):
    x, y = example(layout)
    value, _ = check(x * scale, y * scale)
    assert value.isfinite().all() and (value > 0).all()


@pytest.mark.parametrize("layout", ["images", "many channels"])
def test_what_is_not_kept_is_garbage_and_a_kept_nan_shows(layout):
    x, y = example(layout)
    keep = fill((x.shape[0], 1, *x.shape[2:]), F32, 4) > 0
    value, grads = check(x, y, None, keep)
    for garbage in (NAN, INF):
        dirty = torch.where(keep, x, garbage), torch.where(keep, y, -garbage)
        again, *others = lpips_distance(*dirty, None, keep)
        upstream = torch.where(keep, fill(value.shape, F32, 3), 0)
        slopes = lpips_distance_backward(upstream, *dirty, None, again, *others, True, True)
        assert torch.equal(again, value) and all(map(torch.equal, slopes, grads))
    x[0, 1, 0, 0] = NAN
    assert lpips_distance(x, y)[0].isnan().sum() == 1


@pytest.mark.parametrize("layout", ["images", "many channels"])
def test_zero_vectors_and_equal_ones(layout):
    x, y = example(layout)
    x[0, :, 0], y[0, :, 0, 1] = 0, 0
    y[0, :, 1] = x[0, :, 1]
    value, (dx, dy) = check(x, y)
    assert not dx[0, :, 0].any() and not dy[0, :, 0, 1].any() and value[0, 0, 0, 1] == 0
    assert not value[0, :, 1].any() and not dx[0, :, 1].any() and not dy[0, :, 1].any()


def test_close_vectors_keep_their_digits():
    x, _ = example("images", F64, F64)
    y = x * 3 + 1e-9
    want = definition(x, y)
    value = lpips_distance(x, y)[0]
    assert ((value - want).abs() <= 1e-6 * want).all() and (want > 0).all()


def test_gradients_that_are_not_wanted():
    x, y = example("images")
    value, *others = lpips_distance(x, y)
    for needs in ((True, False), (False, True), (False, False)):
        grads = lpips_distance_backward(fill(value.shape, F32, 3), x, y, None, value, *others, *needs)
        assert [g.numel() > 0 for g in grads] == list(needs)


def test_the_record_takes_what_the_kernels_take():
    x, y = example("images")
    operands = record.operands(x, y)
    assert operands.weight is None and operands.keep is None
    value, *others = lpips_distance(x, y)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "backward", lpips_distance_backward)
        grads = record.gradients(value, (True, False), operands, record.Saved(value, *others))
    assert grads[0].shape == x.shape and not grads[1].numel()
