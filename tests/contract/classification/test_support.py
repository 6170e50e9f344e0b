"""support=: log-probabilities over the classes that a sampler kept, as bool or CSR; against log_softmax with -inf."""

import math

import pytest
import torch

import safeops
from tests.ops.record import DEVICE

NAME = "token_log_probs"
ROWS, CLASSES = (3, 4), 11
FORMS = ["bool", "list", "csr", "int32", "threshold"]
each_form = pytest.mark.parametrize("form", FORMS)
each_outside = pytest.mark.parametrize("outside", ["-inf", "mask"])


def example(rows=ROWS, classes=CLASSES, dtype=torch.float32, seed=0):
    """Returns (logits, target, support): some targets are outside, some classes hold NaN or inf outside the support."""
    g = torch.Generator().manual_seed(seed)
    support = torch.rand(*rows, classes, generator=g) < 0.5
    target = torch.randint(classes, rows, generator=g)
    support[..., 2] = True
    first = torch.arange(target.numel()).reshape(rows) % 3 != 0  # two thirds of the targets are in their supports
    support |= torch.nn.functional.one_hot(target, classes).bool() & first.unsqueeze(-1)
    logits = 3 * torch.randn(*rows, classes, generator=g, dtype=torch.float64)
    odd = torch.arange(logits.numel()).reshape(logits.shape) % 4
    garbage = torch.where(odd == 0, math.nan, torch.where(odd == 1, math.inf, logits))
    return torch.where(support, logits, garbage).to(DEVICE, dtype), target.to(DEVICE), support.to(DEVICE)


def csr(support, dtype=torch.int64, seed=3):
    """The support as (offsets, classes), the classes of a row in a random order."""
    order = torch.rand(support.shape, generator=torch.Generator().manual_seed(seed)).to(support.device).argsort(-1)
    rows, places = support.gather(-1, order).reshape(-1, support.shape[-1]).nonzero(as_tuple=True)
    offsets = torch.zeros(order[..., 0].numel() + 1, dtype=dtype, device=support.device)
    offsets[1:] = support.sum(-1).flatten().cumsum(0)
    return offsets, order.reshape(-1, support.shape[-1])[rows, places].to(dtype)


def given(form, support, dim=-1):
    """Returns {option: value} of a support with the classes along `dim`."""
    if form in ("csr", "int32"):
        return {"support": csr(support.movedim(dim, -1), torch.int32 if form == "int32" else torch.int64)}
    if form != "threshold":
        return {"support": [support] if form == "list" else support}
    g = torch.Generator().manual_seed(5)
    least = torch.randn(support.select(dim, 0).shape, generator=g).to(DEVICE)
    above = (torch.rand(support.shape, generator=g) * support.shape[dim]).to(DEVICE)  # (0 for a few: the least itself)
    odd = torch.arange(support.numel(), device=DEVICE).reshape(support.shape) % 3
    sampler = least.unsqueeze(dim) + torch.where(support, above.floor(), -1 - above)
    return {"support": torch.where(~support & (odd == 0), math.nan, sampler), "support_threshold": least}


def reference(logits, target, support, keep=None, outside="-inf", temperature=1.0, softcap=None):
    """Log probability, entropy and logsumexp, from log_softmax of logits of -inf in fp64."""
    inside = support.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    keep = (target >= 0) & (torch.ones_like(inside) if keep is None else keep)
    computed = keep & inside if outside == "mask" else keep
    x = torch.where(support, logits, 0)
    x = x if softcap is None else softcap * torch.tanh(x / softcap)
    x = torch.where(support, x / temperature, -math.inf)
    log_p = torch.where(computed.unsqueeze(-1), x, 0).log_softmax(-1)
    p = log_p.exp()
    rows = (
        log_p.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1),
        -(p * torch.where(p == 0, 0, log_p)).sum(-1),
        torch.where(computed.unsqueeze(-1), x, 0).logsumexp(-1),
    )
    return [torch.where(computed, row, 0) for row in rows], int((keep & ~inside).sum())


def outcome(function, logits, upstream):
    """Returns (the function's results, the gradient of the logits for a sum of the three, each row by `upstream`)."""
    x = logits.detach().requires_grad_()
    rows, count = function(x)
    total = sum(
        w * torch.where(r.isfinite(), u.to(r.dtype) * r, 0).sum() for w, r, u in zip((1, 0.5, -0.25), rows, upstream)
    )
    return [r.detach() for r in rows], torch.autograd.grad(total, x)[0], count


def ours(x, target, support, **options):
    *rows, count = safeops.token_log_probs(x, target, **support, **options)
    assert count.dtype == torch.int64 and count.dim() == 0
    return rows, int(count)


def compare(dtype, form, rows=ROWS, keep=None, **options):
    logits, target, support = example(rows, dtype=dtype)
    target.view(-1)[-1] = -100
    upstream = torch.linspace(1, 2, 3 * target.numel(), device=DEVICE, dtype=torch.float64).reshape(3, *rows)
    got = outcome(lambda x: ours(x, target, given(form, support), mask=keep, **options), logits, upstream)
    want = outcome(lambda x: reference(x, target, support, keep, **options), logits.double(), upstream)
    assert got[2] == want[2] > 0
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 1e-5)
    for g, w in zip(got[0], want[0]):
        assert g.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(g.double(), w, rtol=tolerance, atol=tolerance)
    eps = max(tolerance, torch.finfo(dtype).eps)
    assert got[1].dtype == dtype and not got[1][~support].any()
    torch.testing.assert_close(got[1].double(), want[1], rtol=eps, atol=eps)
    return got


@each_form
@each_outside
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_values_and_gradients(dtype, form, outside):
    got = compare(dtype, form, outside=outside)
    assert got[0][0].isinf().any() == (outside == "-inf")


@each_form
@each_outside
def test_with_a_mask_a_temperature_and_a_softcap(form, outside):
    keep = torch.arange(12, device=DEVICE).reshape(ROWS) % 4 != 1
    rows, gradient, _ = compare(torch.float32, form, keep=keep, outside=outside, temperature=0.5, softcap=4.0)
    assert not any(r[~keep].any() for r in rows) and not gradient[~keep].any()


@each_form
def test_a_row_that_is_outside_and_masked_out_does_not_exist(form):
    logits, target, support = example()
    outside = ~support.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    logits[outside] = math.nan
    upstream = torch.where(outside, math.nan, torch.ones(3, *ROWS, device=DEVICE))
    x = logits.requires_grad_()
    rows = safeops.token_log_probs(x, target, **given(form, support), outside="mask")[:3]
    (gradient,) = torch.autograd.grad(rows, x, upstream.unbind())
    assert outside.any() and not gradient[outside].any() and gradient.isfinite().all()


def test_infinite_logits():
    """+inf at the class of the row alone is certain, as without a support; every other +inf or NaN in it is NaN."""
    inf, nan = math.inf, math.nan
    logits = torch.tensor([[inf, 1, 2], [1, inf, 2], [inf, inf, 2], [nan, 1, inf], [-inf, 1, 2]], device=DEVICE)
    target, support = (
        torch.zeros(5, dtype=torch.int64, device=DEVICE),
        torch.ones(5, 3, dtype=torch.bool, device=DEVICE),
    )
    support[3, 2] = False
    for form in ("bool", "csr", "threshold"):
        x = logits.clone().requires_grad_()
        rows = safeops.token_log_probs(x, target, **given(form, support))[:3]
        want = safeops.token_log_probs(logits.masked_fill(~support, -inf), target)
        torch.testing.assert_close(rows, tuple(want), equal_nan=True)
        gradient = torch.autograd.grad(rows[0][::4].sum() + rows[1][::4].sum(), x)[0]
        assert not gradient[0].any() and gradient[4].isfinite().all() and gradient[4, 0] in (0, 1)


def test_a_target_outside_has_the_gradient_of_the_logsumexp():
    """log_prob is -inf; its gradient is that of -logsumexp, as log_softmax has it."""
    x = torch.tensor([[1.0, 2.0, 0.5, 9.0]], dtype=torch.float64, device=DEVICE, requires_grad=True)
    target, support = torch.tensor([3], device=DEVICE), torch.tensor([[True, True, True, False]], device=DEVICE)
    for form in ("bool", "csr", "threshold"):
        got = safeops.token_log_probs(x, target, **given(form, support))
        want = x.masked_fill(~support, -math.inf).log_softmax(-1)[0, 3]
        assert got.log_prob == want == -math.inf and got.outside == 1
        for g, w in zip(*(torch.autograd.grad(y.sum(), x) for y in (got.log_prob, want))):
            torch.testing.assert_close(g, w)
    assert safeops.token_log_probs(x, target, support=support, outside="mask").log_prob == 0


@pytest.mark.parametrize("rows", [(), (0,), (3, 0), (1,)], ids=str)
def test_sizes(rows):
    """One row without dims, and no rows."""
    logits, target, support = (
        t[0] if rows == () else t.reshape(*rows, *t.shape[1:]) for t in example((math.prod(rows),))
    )
    for form in ("bool", "csr", "threshold"):
        results = safeops.token_log_probs(logits, target, **given(form, support), outside="mask")
        assert all(r.shape == rows for r in results[:3]) and results.outside.shape == ()
        want = reference(logits.double(), target, support, outside="mask")
        for g, w in zip(results[:3], want[0]):
            torch.testing.assert_close(g.double(), w, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(DEVICE != "cpu", reason="other devices mask such rows out")
def test_a_row_without_a_support_raises():
    logits, target, support = example()
    offsets, classes = csr(support)
    nothing, twice, beyond = support.clone(), classes.clone(), classes.clone()
    nothing[1, 2] = False
    first = int(offsets[6])
    twice[first + 1], beyond[first] = twice[first], CLASSES
    short = offsets.clone()
    short[7] = short[6]
    for wrong, what in (
        (nothing, "row 6 has no class"),
        ((offsets, twice), rf"row 6 has classes \[{twice[first]}, {twice[first]}"),
        ((offsets, beyond), rf"row 6 has classes \[{CLASSES}"),
        ((short, classes), r"row 6 has classes \[\]"),
    ):
        with pytest.raises(ValueError, match=f"^{NAME}: support of {what}.*needs classes in .0, {CLASSES}"):
            safeops.token_log_probs(logits, target, support=wrong)
        keep = torch.arange(12).reshape(ROWS) < 6
        keep[2, 0] = isinstance(wrong, torch.Tensor)
        results = safeops.token_log_probs(logits, target, support=wrong, mask=keep)
        assert all(not r[~keep].any() and r[0].all() for r in results[:3])


@pytest.mark.skipif(DEVICE != "cpu", reason="other devices do not look")
@pytest.mark.parametrize("place, value", [(0, 1), (-1, 999), (-1, 1)])
def test_offsets_that_do_not_span_the_classes_raise(place, value):
    logits, target, support = example()
    offsets, classes = csr(support)
    offsets[place] = value
    with pytest.raises(ValueError, match=f"^{NAME}: support's offsets must begin at 0 and end at the number of its cl"):
        safeops.token_log_probs(logits, target, support=(offsets, classes))


def test_where_the_host_may_not_look_such_a_row_is_masked_out():
    """Under vmap, as on CUDA, a row without a support is masked out."""
    logits, target, support = example((4,))
    support[1] = False
    offsets, classes = csr(support)
    classes[-1] = classes[-2]  # the last row has a class twice
    got = torch.vmap(lambda x: safeops.token_log_probs(x, target, support=support)[:3])(logits.unsqueeze(0))
    other = torch.vmap(lambda x: safeops.token_log_probs(x, target, support=(offsets, classes))[:3])(
        logits.unsqueeze(0)
    )
    for g, o in zip(got, other):
        assert g[0, 1] == 0 and o[0, 1] == 0 and o[0, 3] == 0 and g[0, 3] != 0
        torch.testing.assert_close(g[0, :3], o[0, :3])


def test_derivatives():
    logits, target, support = example((2,), 4, torch.float64)
    target = torch.where(support.gather(-1, target.unsqueeze(-1)).squeeze(-1), target, 2)  # (finite: all are inside)
    x = torch.where(support, logits, 0).requires_grad_()
    for form in (support, csr(support)):

        def function(x, form=form):
            return safeops.token_log_probs(x, target, support=form, temperature=0.5)[:3]

        assert torch.autograd.gradcheck(function, x) and torch.autograd.gradgradcheck(function, x)
        (tangent, *_) = torch.func.jvp(function, (x.detach(),), (torch.ones_like(x),))[1]
        assert tangent.abs().max() < 1e-12  # (a constant added to the logits changes nothing)


def test_the_op_itself():
    logits, target, support = example()
    op = torch.ops.safeops.token_log_probs.support
    for form in ([support], list(csr(support))):
        want = safeops.token_log_probs(logits, target, support=support, outside="mask")
        for g, w in zip(op(logits, target, support=form, outside="mask"), want):
            torch.testing.assert_close(g, w)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["bool", "csr", "threshold"])
def test_compiled_whole(form):
    logits, target, support = example()
    function = torch.compile(lambda x, s: safeops.token_log_probs(x, target, **s), fullgraph=True)
    leaves = [logits.detach().requires_grad_() for _ in range(2)]
    got, want = (f(x, given(form, support)) for f, x in zip((function, ours_whole(target)), leaves))
    torch.testing.assert_close(tuple(got), tuple(want))
    gradients = [torch.autograd.grad(r.entropy.sum() + r.logsumexp.sum(), x) for r, x in zip((got, want), leaves)]
    torch.testing.assert_close(*gradients)


def ours_whole(target):
    return lambda x, s: safeops.token_log_probs(x, target, **s)


X, T = torch.zeros(2, 5), torch.tensor([0, 4])
S, OFFSETS = torch.ones(2, 5, dtype=torch.bool), torch.tensor([0, 1, 2])


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"support": S.float()}, TypeError, "support must be bool.*torch.float32"),
        ({"support": S[0]}, ValueError, r"support \(5,\).*logits \(2, 5\)"),
        ({"support": X, "support_threshold": X}, ValueError, r"support_threshold \(2, 5\).*each of the rows \(2,\)"),
        ({"support_threshold": X[:, 0]}, TypeError, "support_threshold needs support, the sampler's logits"),
        ({"support": [1.0]}, TypeError, "support must be a tensor.*float"),
        ({"support": (OFFSETS, T, T)}, TypeError, "support must be.*pair .offsets, classes., got 3 parts"),
        ({"support": (OFFSETS.float(), T)}, TypeError, "support's offsets must be 1-dim, int64 or.*torch.float32"),
        ({"support": (OFFSETS, T.unsqueeze(0))}, TypeError, r"support's classes must be 1-dim.*\(1, 2\)"),
        ({"support": (OFFSETS[:2], T)}, ValueError, r"support's offsets \(2,\).*one more element.*\(2,\)"),
        ({"support": S.to("meta")}, ValueError, "support.*meta"),
        ({"support": (OFFSETS, T.to("meta"))}, ValueError, "support's classes.*meta"),
        ({"support": S, "outside": "drop"}, ValueError, "outside.*'-inf'.*'mask'.*drop"),
        ({"outside": "mask"}, TypeError, "outside='mask' needs support"),
        ({"support": S, "with_argmax": True}, TypeError, "with_argmax does not go with support"),
        ({"support": S, "temperature": 0.0}, ValueError, "temperature.*0.0"),
    ],
    ids=lambda x: None,
)  # fmt: skip
def test_bad_calls(options, error, words):
    with pytest.raises(error, match=f"^{NAME}: {words}"):
        safeops.token_log_probs(X, T, **options)
    with pytest.raises(IndexError, match=f"^{NAME}: target 5 is out of range"):
        safeops.token_log_probs(X, T + 1, support=S)
