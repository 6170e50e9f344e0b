"""cosine_embedding_loss per row and its backward agree with the definition in fp64 and its autograd."""

import pytest
import torch
from safeops.kernels.vectors.cosine_embedding_loss import cosine_embedding_loss, cosine_embedding_loss_backward

from safeops.ops.vectors.cosine_embedding_loss import _loss_of_row as record
from safeops.ops.vectors.cosine_embedding_loss import definition
from tests.kernels.interpreted.truth import BF16, F16, F32, F64, close, fill, in_order

NAN, INF = float("nan"), float("inf")
LAYOUTS = {  # (shape, memory order): vectors along the last dim, along memory or across it
    "rows": ((9, 40), (0, 1)),
    "long rows": ((3, 300), (0, 1)),
    "one row": ((301,), (0,)),
    "images": ((2, 6, 20), (0, 2, 1)),
    "no rows": ((0, 5), (0, 1)),
    "no numbers": ((3, 0), (0, 1)),
}


def example(layout, *dtypes):
    x, y = (in_order(*LAYOUTS[layout], dtype, seed) for seed, dtype in enumerate(dtypes or (F32, F32), 1))
    return x, y, torch.arange(x[..., :1].numel() if x.shape[-1] else 3).reshape(x.shape[:-1]) % 3 - 1


def check(x, y, target, keep=None, margin=-0.1):
    wide = F64 if F64 in (x.dtype, y.dtype) else F32
    leaves = [t.double().requires_grad_() for t in (x, y)]
    want = definition(*leaves, target, keep, margin)
    if keep is not None:
        want = torch.where(keep, want, 0)
    loss, *others = cosine_embedding_loss(x, y, target, keep, margin)
    assert loss.dtype == wide and loss.shape == want.shape
    close(loss, want.detach(), torch.tensor(2.0), wide)
    upstream = fill(loss.shape, F32, 3)
    operands = record.operands(x, y, target, keep, margin)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "backward", cosine_embedding_loss_backward)
        grads = record.gradients(upstream, (True, True, False), operands, record.Saved(*others))
    for got, slope, t, norm in zip(grads, torch.autograd.grad(want, leaves, upstream.double()), (x, y), others[1:]):
        assert got.dtype == t.dtype and got.shape == t.shape
        close(got.double(), slope, 6 / torch.where(norm == 0, 1, norm).unsqueeze(-1), t.dtype)
    return loss, grads


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    x, y, target = example(layout)
    check(x, y, target)
    check(x, y, target.to(F32), fill(target.shape, F32, 4) > 0, 0.2)


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (F16, F32), (F64, F64)], ids=str)
def test_dtypes(dtypes):
    check(*example("rows", *dtypes))


@pytest.mark.parametrize("scale", [1e30, 1e-30])
def test_squares_neither_overflow_nor_vanish(scale):
    x, y, target = example("rows")
    loss, _ = check(x * scale, y * scale, target)
    assert loss.isfinite().all()


@pytest.mark.parametrize("layout", ["rows", "long rows", "images"])
def test_what_is_not_kept_is_garbage_and_a_kept_nan_shows(layout):
    x, y, target = example(layout)
    keep = fill(target.shape, F32, 4) > 0
    keep.view(-1)[0] = False
    loss, grads = check(x, y, target, keep)
    for garbage in (NAN, INF):
        dirty = [torch.where(keep.unsqueeze(-1), t, garbage) for t in (x, y)]
        again, *others = cosine_embedding_loss(*dirty, target, keep, -0.1)
        slopes = cosine_embedding_loss_backward(
            torch.where(keep, fill(loss.shape, F32, 3), 0), *dirty, target, *others, -0.1, True, True
        )
        assert torch.equal(again, loss) and all(map(torch.equal, slopes, grads))
    x[..., 0] = NAN
    assert torch.equal(cosine_embedding_loss(x, y, target, None, -0.1)[0].isnan(), target != 0)


def test_targets():
    x, y, _ = example("rows")
    target = torch.tensor([1.0, -1.0, 0.0, NAN, 2.0, 0.5, INF, -1.0, 1.0])
    x[7], y[8] = 0, 0  # a pair with a zero vector has cosine 0, and gradient 0 for both vectors
    loss, (dx, dy) = check(x, y, target)
    assert loss.isnan().tolist() == [t != t for t in target.tolist()] and not loss[[2, 4, 5, 6]].any()
    assert loss[7] == torch.tensor(0.1) and loss[8] == 1 and not dx[7:].any() and not dy[7:].any()
