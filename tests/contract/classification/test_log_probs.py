"""token_log_probs beyond its record; temperature, softcap and row weights of cross_entropy: reports, limits, parity."""

import importlib
import math

import pytest
import torch
import torch.nn.functional as F

import safeops
from safeops.ops.classification._logits import shaped
from tests.contract.common import DEVICE, each_route, grad_of, on, tensor

INF, NAN = float("inf"), float("nan")


def logits(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 4).to(DEVICE, dtype)


def targets(*shape, classes, seed=0):
    return torch.randint(0, classes, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


# ---- reported failures


@each_route
def test_a_probability_near_1_in_half(route):
    """Liger#1329: in bf16 p rounds to 1, and log p and its gradient to 0; both must keep their digits."""
    x = torch.tensor([[8.0, 0.0, 0.0], [16.0, 0.0, -INF]], dtype=torch.bfloat16, device=DEVICE).requires_grad_()
    target = targets(2, classes=1)
    got = on(route, "token_log_probs")(x, target)
    wide = x.detach().double().requires_grad_()
    want = wide.log_softmax(-1)[:, 0]
    torch.testing.assert_close(got.log_prob.double(), want, rtol=1e-3, atol=1e-7)
    grad = grad_of(got.log_prob.sum(), x)
    torch.testing.assert_close(grad.double(), grad_of(want.sum(), wide), rtol=1e-2, atol=1e-7)
    assert (grad[:, :2] != 0).all()


@each_route
@pytest.mark.parametrize("classes", [50257, 1000, 129, 128256])
def test_any_vocabulary(route, classes):
    """verl#2899: any vocabulary size works, not only multiples of 256."""
    x, target = logits(3, classes).requires_grad_(), targets(3, classes=classes)
    got = on(route, "token_log_probs")(x, target)
    log_p = x.log_softmax(-1)
    want = log_p.gather(-1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1), x.logsumexp(-1)
    for one, other in zip(got, want):
        torch.testing.assert_close(one, other, rtol=3e-5, atol=2e-5)
        grads = [torch.autograd.grad(result.sum(), x, retain_graph=True)[0] for result in (one, other)]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=2e-6)


@each_route
def test_strided_logits(route):
    """Results are right for logits without the last position, a strided view, with the batch first or second in
    memory."""
    whole, target = logits(4, 9, 40), targets(4, 8, classes=40)
    for x in (whole[:, :-1], whole.transpose(0, 1).contiguous().transpose(0, 1)[:, :-1]):
        want = on(route, "token_log_probs")(x.contiguous(), target)
        for got, other in zip(on(route, "token_log_probs")(x, target), want):
            torch.testing.assert_close(got, other)


@each_route
def test_no_row_kept(route):
    """verl#2377: with no row kept, results are 0, attached to the graph, with gradient 0, even for NaN logits."""
    x = torch.full((3, 5), NAN, device=DEVICE).requires_grad_()
    got = on(route, "token_log_probs")(x, torch.full((3,), -100, device=DEVICE))
    assert all((result == 0).all() for result in got)
    assert (grad_of(sum(result.sum() for result in got), x) == 0).all()


# ---- masked rows


@each_route
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("shape", [(4, 5), (4, 3, 300)], ids=str)
def test_rows_that_do_not_exist(route, softcap, shape):
    """A masked row brings no NaN from its logits or its upstream gradient."""
    x, rows = logits(*shape), shape[:-1]
    x[1:] = NAN
    target, mask = targets(*rows, classes=5), torch.zeros(rows, dtype=torch.bool, device=DEVICE)
    mask[0] = True
    leaf = x.clone().requires_grad_()
    got = torch.stack(on(route, "token_log_probs")(leaf, target, mask=mask, softcap=softcap))
    upstream = torch.ones_like(got)
    upstream[:, 1:] = NAN
    (grad,) = torch.autograd.grad(got, leaf, upstream)
    assert (got[:, 1:] == 0).all() and (grad[1:] == 0).all() and grad[0].isfinite().all()


@each_route
@pytest.mark.parametrize("options", [{}, {"temperature": 0.5}, {"softcap": 3.0, "temperature": 2.0}], ids=str)
@pytest.mark.parametrize("length", [6, 40, 3000])
def test_a_class_of_minus_infinity_does_not_exist(route, options, length):
    x = logits(3, length, dtype=torch.float64)
    x[:, length // 2 :: 2] = -INF
    others = [c for c in range(length) if x[0, c] > -INF]
    leaf, short = x.requires_grad_(), x.detach()[:, others].requires_grad_()
    target = targets(3, classes=2)
    got = torch.stack(on(route, "token_log_probs")(leaf, target, **options))
    want = torch.stack(on(route, "token_log_probs")(short, target, **options))
    torch.testing.assert_close(got, want)
    upstream = torch.randn(got.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    grad = torch.autograd.grad(got, leaf, upstream)[0]
    torch.testing.assert_close(grad[:, others], torch.autograd.grad(want, short, upstream)[0])
    assert (grad[leaf == -INF] == 0).all()


@each_route
def test_infinite_logits(route):
    x = tensor([[INF, 0.0, -1.0], [INF, 0.0, -1.0], [INF, INF, 0.0], [-INF, -INF, -INF], [0.0, -INF, 0.0]])
    x.requires_grad_()
    target = torch.tensor([0, 1, 0, 0, 1], device=DEVICE)
    got = on(route, "token_log_probs")(x, target)
    assert [row[0].item() for row in got] == [0.0, 0.0, INF]
    assert torch.stack(got)[:, 1:4].isnan().all()
    assert got.log_prob[4] == -INF and abs(got.entropy[4].item() - math.log(2)) < 1e-6
    assert (grad_of(got.log_prob[0] + got.entropy[0] + got.logsumexp[0], x)[0] == 0).all()


# ---- parity


@each_route
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_what_cross_entropy_and_its_friends_say(route, dtype):
    x, target = logits(2, 7, 50, dtype=dtype), targets(2, 7, classes=50)
    got = on(route, "token_log_probs")(x, target, temperature=0.7, softcap=5.0)
    options = {"reduction": "none", "temperature": 0.7, "softcap": 5.0}
    loss = on(route, "cross_entropy")(x.movedim(-1, 1), target, **options)
    torch.testing.assert_close(got.log_prob, -loss)
    z = (5 * torch.tanh(x.double() / 5)) / 0.7
    torch.testing.assert_close(got.logsumexp.double(), z.logsumexp(-1), rtol=1e-6, atol=1e-5)
    entropy = torch.distributions.Categorical(logits=z).entropy()
    torch.testing.assert_close(got.entropy.double(), entropy, rtol=1e-5, atol=1e-5)


@each_route
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("of_classes", [False, True])
def test_row_weights_of_cross_entropy(route, reduction, of_classes):
    """Row weights multiply the losses and enter the divisor of a mean; weight 0 drops the row."""
    x, target, w = logits(6, 5), targets(6, classes=5), tensor([0.5, 2.0, 0.0, 1.0, 3.0, -1.0])
    x[2] = NAN
    weight = tensor([1.0, 0.5, 2.0, 1.0, 0.25]) if of_classes else None
    got = on(route, "cross_entropy")(x, target, weight=weight, row_weight=w, reduction=reduction)
    kept = w != 0
    loss = F.cross_entropy(x[kept], target[kept], weight=weight, reduction="none") * w[kept]
    divisor = (w[kept] * (1 if weight is None else weight[target[kept]])).sum()
    if reduction == "none":
        assert got[2] == 0
        return torch.testing.assert_close(got[kept], loss)
    torch.testing.assert_close(got, loss.sum() / (divisor if reduction == "mean" else 1))


def test_row_weights_are_refused():
    x, target = logits(2, 5), targets(2, classes=5)
    for wrong, error, words in (
        (torch.ones(3, device=DEVICE), ValueError, r"row_weight .*\(3,\).*\(2,\)"),
        (torch.ones(2, device=DEVICE).long(), TypeError, "row_weight .*floating"),
        (2.0, TypeError, "row_weight .*tensor"),
    ):
        with pytest.raises(error, match=f"cross_entropy: {words}"):
            safeops.cross_entropy(x, target, row_weight=wrong)


def test_a_named_tuple():
    x = logits(4, 5)
    got = safeops.token_log_probs(x, targets(4, classes=5))
    assert got._fields == ("log_prob", "entropy", "logsumexp")
    compiled = torch.compile(safeops.token_log_probs, fullgraph=True, backend="aot_eager")
    for one, other in zip(compiled(x, targets(4, classes=5)), got):
        assert torch.equal(one, other)


@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_a_softcap_that_is_known_when_it_runs(softcap):
    """torch 2.14 traces softcap's default 0.0 as a tensor: 0 means no softcap, and must not become a divisor."""
    x = logits(4, 5)
    assert torch.equal(shaped(x, 1.0, torch.tensor(softcap).double()), shaped(x, 1.0, softcap))


RAW = {  # name: (options of the raw op, leading dims of the upstream gradient, last arguments of the raw backward)
    "token_log_probs": ((None, -100, 1.0, 0.0), (3,), (False,)),
    "cross_entropy": ((None, None, -100, 0.0, 0.0, 1.0, 0.0), (), (True, False, False)),
}


@pytest.mark.parametrize("name", RAW)
def test_the_gradient_in_torch_is_the_kernels(name):
    """Composites agree with the kernels: a +inf logit makes a row's gradient NaN unless it is the target's alone."""
    x = torch.tensor([[INF, 0.0, 1.0], [INF, INF, 0.0], [0.0, INF, -INF], [0.5, -INF, 1.0], [2.0, NAN, 0.0]])
    target, (options, upstream, last) = torch.tensor([0, 0, 0, 2, 1]), RAW[name]
    module = importlib.import_module(f"safeops.ops.classification.{name}")
    kernels = [getattr(torch.ops.safeops, f"_{name}{suffix}") for suffix in ("", "_backward")]
    results = []
    for forward, backward in (kernels, (module._composite, module._composite_backward)):
        numbers = next(t for t in forward(x, target, *options)[1:] if t.shape[0] in (2, 3))
        d = backward(torch.ones(*upstream, 5), x, target, numbers, *options, *last)
        results.append(d[0] if isinstance(d, tuple) else d)
    torch.testing.assert_close(*results, equal_nan=True)
    assert results[0].isnan().any(1).tolist() == [False, True, True, False, True]


@each_route
def test_results_are_written_in_place(route):
    """The results may be changed in place before backward, as those of torch's log_softmax().gather() may."""
    x, target = logits(4, 5).requires_grad_(), targets(4, classes=5)
    pad = torch.tensor([False, True, False, False], device=DEVICE)
    layer = torch.eye(5, device=DEVICE)
    for call in (
        lambda: on(route, "token_log_probs")(x, target),
        lambda: on(route, "linear_token_log_probs")(x, layer, target),
    ):
        for at in range(3):
            want = grad_of(torch.where(pad, 0, call()[at]).sum(), x)
            torch.testing.assert_close(grad_of(call()[at].masked_fill_(pad, 0).sum(), x), want)
