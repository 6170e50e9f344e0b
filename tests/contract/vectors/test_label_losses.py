"""multilabel_soft_margin_loss and info_nce_loss: parity with torch, the kinds of keys, what is left out."""

import math

import pytest
import torch
import torch.nn.functional as F

import safeops
from safeops.core import matmul as _matmul
from tests.contract.common import DEVICE, each_route, equal, flags, on, t
from tests.contract.vectors.test_row_losses import each_reduction, vectors

NAN, INF = math.nan, math.inf
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


@each_route
@each_reduction
@each_dtype
@pytest.mark.parametrize("weighted", [False, True])
def test_multilabel_soft_margin_loss_is_torchs(route, reduction, dtype, weighted):
    x, y = vectors(9, 6, dtype=dtype)
    y = y.detach().sigmoid().requires_grad_()
    weight = torch.rand(6, dtype=dtype, device=DEVICE).requires_grad_() if weighted else None
    leaves = [x, y, weight] if weighted else [x, y]
    for a, b in ((x, y), (x[0], y[0])):
        ours = on(route, "multilabel_soft_margin_loss")(a, b, weight=weight, reduction=reduction)
        theirs = F.multilabel_soft_margin_loss(a, b, weight=weight, reduction=reduction)
        torch.testing.assert_close(ours, theirs)
        got, want = (torch.autograd.grad(z.sum(), leaves) for z in (ours, theirs))
        torch.testing.assert_close(got, want)


@each_route
def test_a_label_that_is_certain(route):
    """An infinite logit with the right label costs nothing, where torch returns NaN."""
    x, y = t(INF, -INF, 0.0).requires_grad_(), t(1.0, 0.0, 1.0)
    assert F.multilabel_soft_margin_loss(x, y).isnan()
    loss = on(route, "multilabel_soft_margin_loss")(x, y)
    assert equal(loss, math.log(2) / 3)
    assert equal(torch.autograd.grad(loss, x)[0], [0, 0, -1 / 6])
    assert on(route, "multilabel_soft_margin_loss")(x, 1 - y) == INF


@each_route
def test_a_class_of_weight_0_does_not_exist_but_counts(route):
    x, y = vectors(5, 4)
    weight = t(1.0, 0.0, 2.0, 0.5)
    dirty = torch.where(weight == 0, NAN, x.detach()).requires_grad_()
    loss = on(route, "multilabel_soft_margin_loss")(dirty, y.sigmoid(), weight=weight)
    torch.testing.assert_close(loss, F.multilabel_soft_margin_loss(x, y.sigmoid(), weight=weight))
    grad = torch.autograd.grad(loss, dirty)[0]
    assert (grad[:, 1] == 0).all() and (grad[:, 0] != 0).all()
    assert on(route, "multilabel_soft_margin_loss")(x, y.sigmoid(), weight=torch.zeros_like(weight), empty="nan") == 0


# ---- info_nce_loss


def eager(query, key, negatives=None, temperature=0.1, reduction="mean"):
    """Computes the loss in plain torch, as users write it."""
    q, k = F.normalize(query, dim=-1), F.normalize(key, dim=-1)
    if negatives is None:
        logits, target = q @ k.T, torch.arange(len(q), device=q.device)
    else:
        n = F.normalize(negatives, dim=-1)
        far = q @ n.T if n.dim() == 2 else torch.einsum("nd,nmd->nm", q, n)
        logits = torch.cat([(q * k).sum(-1, keepdim=True), far], 1)
        target = torch.zeros(len(q), dtype=torch.int64, device=q.device)
    return F.cross_entropy(logits / temperature, target, reduction=reduction)


def operands(kind, n=7, length=6, dtype=torch.float64):
    """Returns [query, positive_key], with negative_keys as third for the kinds "shared" and "own"."""
    shape = {"in the batch": None, "shared": (5, length), "own": (n, 5, length)}[kind]
    pair = vectors(n, length, dtype=dtype)
    return pair if shape is None else [*pair, torch.randn(shape, dtype=dtype, device=DEVICE).requires_grad_()]


each_kind = pytest.mark.parametrize("kind", ["in the batch", "shared", "own"])


@each_route
@each_reduction
@each_kind
@each_dtype
def test_info_nce_loss_is_that_of_normalized_products(route, kind, reduction, dtype):
    tensors = operands(kind, dtype=dtype)
    for temperature in (0.07, 1.0, 30):
        ours = on(route, "info_nce_loss")(*tensors, temperature=temperature, reduction=reduction)
        theirs = eager(*tensors, temperature=temperature, reduction=reduction)
        # A cosine, of size 1, has a rounding error of eps; divided by the temperature, so is the error.
        allowed = 32 * torch.finfo(dtype).eps / min(temperature, 1)
        torch.testing.assert_close(ours, theirs, rtol=allowed, atol=allowed * tensors[0].shape[0])
        got, want = (torch.autograd.grad(z.sum(), tensors) for z in (ours, theirs))
        for g, w in zip(got, want):
            torch.testing.assert_close(g, w, rtol=allowed, atol=allowed * float(w.abs().max()))


@each_route
@each_kind
def test_the_temperature_has_a_gradient(route, kind):
    tensors = operands(kind)
    for value in (0.07, 1.0):
        temperature = torch.tensor(value, dtype=torch.float64, device=DEVICE, requires_grad=True)
        ours, theirs = (f(*tensors, temperature=temperature) for f in (on(route, "info_nce_loss"), eager))
        torch.testing.assert_close(ours, theirs)
        got, want = (torch.autograd.grad(z, (*tensors, temperature)) for z in (ours, theirs))
        torch.testing.assert_close(got, want)
        as_op = torch.ops.safeops.info_nce_loss(*tensors, temperature=temperature)
        torch.testing.assert_close(torch.autograd.grad(as_op, temperature), want[-1:])


@each_kind
def test_second_order_and_forward_mode(kind):
    tensors = operands(kind, n=3, length=3)
    keep = flags(True, False, True)

    def loss(*tensors):
        return safeops.info_nce_loss(*tensors, temperature=0.5, mask=keep)

    assert torch.autograd.gradcheck(loss, tensors, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(loss, tensors, check_fwd_over_rev=True)


@each_route
@each_kind
def test_a_masked_row_is_nobodys_negative(route, kind):
    keep = flags(True, False, True, True, False, True, False)
    tensors = operands(kind)
    rows = [x if i == 2 and kind == "shared" else x[keep] for i, x in enumerate(tensors)]
    want = eager(*rows)
    dwant = torch.autograd.grad(want, tensors)
    weight = torch.where(keep, 2.0, 0.0)
    for garbage in (NAN, INF, 1e300):
        dirty = [x.detach().clone() for x in tensors]
        for i, x in enumerate(dirty):
            if not (i == 2 and kind == "shared"):
                x[~keep] = garbage
            x.requires_grad_()
        for options in ({"mask": keep}, {"weight": weight}):
            got = on(route, "info_nce_loss")(*dirty, **options)
            torch.testing.assert_close(got, want)
            torch.testing.assert_close(torch.autograd.grad(got, dirty), dwant)


@each_route
@each_kind
def test_zero_vectors_and_halves(route, kind):
    tensors = [x.detach().clone() for x in operands(kind)]
    for x in tensors:
        x[1] = 0
        x.requires_grad_()
    loss = on(route, "info_nce_loss")(*tensors, reduction="none")
    keys = 7 if kind == "in the batch" else 6
    assert torch.allclose(loss[1], torch.tensor(keys, dtype=torch.float64, device=DEVICE).log())
    for d in torch.autograd.grad(loss.sum(), tensors):
        assert (d[1] == 0).all() and d.isfinite().all() and (d[0] != 0).any()
    for dtype in (torch.float16, torch.bfloat16):
        # 300^2 overflows fp16, and a bf16 product is off by 1/256, which the temperature 0.01 makes 0.39.
        large = [(x.detach() * 300).to(dtype) for x in tensors]
        got = on(route, "info_nce_loss")(*large, temperature=0.01, reduction="none")
        want = eager(*(x.double() for x in large), temperature=0.01, reduction="none")
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=64 * 2**-24 / 0.01)


@each_kind
def test_no_autocast_in_the_products(kind):
    """Autocast must not round the products to half, neither in forward nor in backward."""
    tensors = operands(kind, dtype=torch.float32)
    want = safeops.info_nce_loss(*tensors)
    dwant = torch.autograd.grad(want, tensors)
    for function in (safeops.info_nce_loss, torch.compile(safeops.info_nce_loss, backend="aot_eager", fullgraph=True)):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            got = function(*tensors)
            dgot = torch.autograd.grad(got, tensors)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(dgot, dwant, rtol=1e-5, atol=1e-6)


@each_route
def test_one_row_has_no_negative(route):
    tensors = operands("in the batch", n=1)
    loss = on(route, "info_nce_loss")(*tensors)
    assert loss == 0 and all((d == 0).all() for d in torch.autograd.grad(loss, tensors))
    assert on(route, "info_nce_loss")(*tensors, torch.zeros(0, 6, device=DEVICE, dtype=torch.float64)) == 0


def test_the_same_from_run_to_run():
    tensors = operands("in the batch", n=300, dtype=torch.float32)
    outcomes = []
    for _ in range(3):
        loss = safeops.info_nce_loss(*tensors)
        outcomes.append([loss, *torch.autograd.grad(loss, tensors)])
    assert all(torch.equal(a, b) for other in outcomes[1:] for a, b in zip(outcomes[0], other))


# ---- products of halves summed in fp32, as on CUDA; on a CPU the tests use fp32 products of the halves in their place


@pytest.fixture
def of_halves(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(_matmul, "sums_wide", lambda device: True)
        monkeypatch.setattr(_matmul, "wide_mm", lambda a, b: a.float() @ b.float())


each_half = pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])


@each_half
@pytest.mark.parametrize("kind", ["in the batch", "shared"])
@pytest.mark.parametrize("near", [0.0, 1.0], ids=["apart", "near their keys"])
def test_products_of_halves(of_halves, half, kind, near):
    """The loss is as exact as with fp32 products. A gradient's error is less than 1/2 eps of half, relative to its
    norm; rounding the gradient to half is more than a third of that."""
    query, *keys = (x.detach() for x in operands(kind, n=256, length=128))
    rounded = [x.to(half).requires_grad_() for x in (query, keys[0] + near * query, *keys[1:])]
    exact = [x.detach().double().requires_grad_() for x in rounded]
    got, want = (safeops.info_nce_loss(*x, temperature=0.07, reduction="none") for x in (rounded, exact))
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=2e-5)
    up = torch.full_like(want, 2.0**10)  # fp16 gradients are then not subnormal
    for g, w in zip(torch.autograd.grad(got, rounded, up.float()), torch.autograd.grad(want, exact, up)):
        assert g.dtype == half and (g.double() - w).norm() < 0.5 * torch.finfo(half).eps * w.norm()


@each_half
@pytest.mark.parametrize("scale", [2.0**-30, 1.0, 2.0**30])
def test_slopes_of_halves_neither_vanish_nor_overflow(of_halves, half, scale):
    """Extreme upstream gradients and temperatures leave the products' gradients in range."""
    query, key = (x.detach() for x in operands("in the batch", n=64, length=32))
    rounded = [x.to(half).requires_grad_() for x in (query, key)]
    exact = [x.detach().double().requires_grad_() for x in rounded]
    for temperature in (1e-7, 0.07, 1e5):
        losses = [safeops.info_nce_loss(*x, temperature=temperature, reduction="sum") for x in (rounded, exact)]
        torch.testing.assert_close(losses[0].double(), losses[1], rtol=1e-5, atol=0)
    grads = []
    for x in (rounded, exact):  # leaves in fp32, for half gradients would overflow fp16
        wide = [leaf.detach().to(torch.promote_types(torch.float32, leaf.dtype)).requires_grad_() for leaf in x]
        logits = _matmul.matmul(*wide, half if x is rounded else None)
        grads.append(torch.autograd.grad(logits, wide, scale * torch.sin(exact[0] @ exact[1].mT).to(logits.dtype)))
    for g, w in zip(*grads):
        assert (g.double() - w).norm() < 0.5 * torch.finfo(half).eps * w.norm()


@each_half
def test_derivatives_of_halves_by_every_route(of_halves, half):
    """Derivatives are as exact as half allows: compiled, second, to the temperature, and under a mask."""
    torch._dynamo.reset()
    keep = torch.arange(64, device=DEVICE) % 3 != 0
    tensors = [x.detach().to(half).requires_grad_() for x in operands("in the batch", n=64, length=32)]
    temperature = torch.tensor(0.5, device=DEVICE, dtype=half, requires_grad=True)
    compiled = torch.compile(safeops.info_nce_loss, backend="aot_eager", fullgraph=True)
    exact = [x.detach().double().requires_grad_() for x in (*tensors, temperature)]
    want = torch.autograd.grad(safeops.info_nce_loss(*exact[:2], temperature=exact[2], mask=keep), exact)
    for function in (safeops.info_nce_loss, compiled):
        loss = function(*tensors, temperature=temperature, mask=keep)
        for g, w in zip(torch.autograd.grad(loss, (*tensors, temperature)), want):
            assert (g.double() - w).norm() < torch.finfo(half).eps * w.norm()
            assert g.dim() == 0 or not g[~keep].any()

    def second(x, *others, temperature):
        (first,) = torch.autograd.grad(safeops.info_nce_loss(x, *others, temperature=temperature), x, create_graph=True)
        return torch.autograd.grad(first.double().square().sum(), x)[0].double()

    got, want = (second(*x[:2], temperature=t) for x, t in ((tensors, temperature), (exact, exact[2])))
    assert (got - want).norm() < 8 * torch.finfo(half).eps * want.norm()
