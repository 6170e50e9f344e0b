"""The losses of routers: the papers' sums, balance, cuts of a step, choices that probabilities hide, transformers'."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import safeops
from safeops.core.op import registry
from tests.contract.common import DEVICE, case, flags, grad_of, t
from tests.ops.operands import data, mask
from tests.ops.record import on
from tests.test_routes import dispatched

INF, NAN = math.inf, math.nan
NAMES = "load_balancing_loss", "router_entropy", "router_load", "router_z_loss"


def logits(*shape, seed=0, dtype=torch.float64):
    return data(*shape, seed=seed).to(DEVICE, dtype).requires_grad_()


# ---- the papers' formulas, token by token


def of_tokens(rows, top_k, scores, keep):
    """Returns (f, P) of Switch's equations 5 and 6, with DeepSeek's K T choices: lists of E numbers."""
    experts, tokens = len(rows[0]), sum(keep)
    f, p = [0.0] * experts, [0.0] * experts
    for row in (row for row, kept in zip(rows, keep) if kept):
        s = [1 / (1 + math.exp(-x)) if scores == "sigmoid" else math.exp(x) for x in row]
        for i in sorted(range(experts), key=lambda i: -row[i])[:top_k]:
            f[i] += 1 / (top_k * tokens)
        for i in range(experts):
            p[i] += s[i] / sum(s) / tokens
    return f, p


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_the_papers_sums(scores, top_k):
    """Switch's loss for top_k=1, DeepSeek's for each sequence; counts and shares to log must be those of the loss."""
    x, keep = logits(3, 5, 4), mask(3, 5).to(DEVICE)
    sequences = [of_tokens(rows, top_k, scores, kept) for rows, kept in zip(x.tolist(), keep.tolist())]
    want = [4 * sum(f * p for f, p in zip(*sequence)) for sequence in sequences]
    options = {"top_k": top_k, "scores": scores}
    got = safeops.load_balancing_loss(x, **options, level="sequence", mask=keep, reduction="none")
    torch.testing.assert_close(got.tolist(), want)
    f, p = of_tokens(x.flatten(0, 1).tolist(), top_k, scores, keep.flatten().tolist())
    got = safeops.load_balancing_loss(x, **options, mask=keep)
    torch.testing.assert_close(got.item(), 4 * sum(a * b for a, b in zip(f, p)))
    result, tokens = safeops.router_load(x, **options, mask=keep), keep.sum().item()
    assert result.load.tolist() == [round(a * top_k * tokens) for a in f] and result.load.dtype == torch.int64
    torch.testing.assert_close((result.importance / tokens).tolist(), p)
    torch.testing.assert_close(result.max_violation.item(), 4 * max(f) - 1)
    assert not any(value.requires_grad for value in result)


def test_z_loss_and_entropy():
    rows = logits(2, 3).tolist()
    z = [math.log(sum(map(math.exp, row))) for row in rows]
    torch.testing.assert_close(safeops.router_z_loss(t(*rows, dtype=torch.float64)).item(), sum(a * a for a in z) / 2)
    entropy = [-sum(math.exp(x - a) * (x - a) for x in row) for row, a in zip(rows, z)]
    torch.testing.assert_close(safeops.router_entropy(t(*rows, dtype=torch.float64)).item(), sum(entropy) / 2)
    assert safeops.router_entropy(t([0.0, -INF, -INF], [0.0, 0.0, -INF], grad=True)).item() == pytest.approx(
        math.log(2) / 2
    )


@pytest.mark.parametrize("value", [INF, NAN])
def test_a_kept_inf_shows_in_the_z_loss(value):
    x = t([1.0, value], [0.0, 0.0], grad=True)
    loss = safeops.router_z_loss(x)
    assert not loss.isfinite() and not grad_of(loss, x)[0].isfinite().any() and grad_of(
        safeops.router_z_loss(x, mask=flags(False, True)), x
    ).isfinite().all()  # fmt: skip


# ---- choices


def test_at_balance_the_loss_is_1_and_its_gradient_0():
    x = (4.0 * torch.eye(4, device=DEVICE)).repeat(2, 1).requires_grad_()
    for level in ("batch", "sequence", "global"):
        for scores in ("softmax", "sigmoid"):
            loss = safeops.load_balancing_loss(x, top_k=1, level=level, scores=scores)
            assert loss.item() == pytest.approx(1, rel=1e-6) and grad_of(loss, x).abs().max() < 1e-6
    assert safeops.router_load(x, top_k=1).max_violation == 0


def test_experts_are_chosen_by_logits_where_probabilities_are_equal():
    x = t([60.0, 0.0, 61.0], [59.0, 0.0, 58.0])  # all of their sigmoids but one are 1
    for scores in ("sigmoid", "softmax"):
        assert safeops.router_load(x, top_k=1, scores=scores).load.tolist() == [1, 0, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sigmoid_scores_that_all_underflow(dtype):
    x = t([-200.0, -201.0], [-200.0, -200.0], dtype=dtype, grad=True)
    loss = safeops.load_balancing_loss(x, top_k=1, scores="sigmoid", load=t(1, 0, dtype=torch.int64), reduction="none")
    p = 1 / (1 + math.exp(-1))
    torch.testing.assert_close(loss, t(2 * p, 1.0), rtol=1e-5, atol=0)
    slope = 2 * p * (1 - p)
    torch.testing.assert_close(grad_of(loss[0], x)[0].float(), t(slope, -slope), rtol=1e-2, atol=0)


def test_indices_out_of_range_count_for_no_expert():
    x, index = logits(4, 3), t([0, 1], [-1, 1], [0, 3], [2, -(2**31)], dtype=torch.int64)
    assert safeops.router_load(x, index).load.tolist() == [2, 2, 1]
    loss, none = (safeops.load_balancing_loss(x, i) for i in (index, index.clamp(max=-1)))
    shares = x.softmax(-1).mean(0)
    torch.testing.assert_close(loss, 3 * (shares * t(0.4, 0.4, 0.2, dtype=torch.float64)).sum())
    assert none == 0 and not grad_of(none, x).any()


# ---- cuts of a step


def test_micro_batches():
    """Gradients add up to those of the whole: of sequences with a denominator, of a batch with the step's load too. A
    call's own load is another's."""
    x, keep = logits(4, 5, 6), mask(4, 5).to(DEVICE)
    cuts = [slice(0, 1), slice(1, 2), slice(2, 4)]

    def of_cuts(denominator, **options):
        losses = [
            safeops.load_balancing_loss(x[c], top_k=2, mask=keep[c], denominator=denominator, **options) for c in cuts
        ]
        return sum(grad_of(loss, x) for loss in losses)

    def of_all(**options):
        return grad_of(safeops.load_balancing_loss(x, top_k=2, mask=keep, **options), x)

    load = sum(safeops.router_load(x[c], top_k=2, mask=keep[c]).load for c in cuts)
    torch.testing.assert_close(of_cuts(keep.any(-1).sum(), level="sequence"), of_all(level="sequence"))
    torch.testing.assert_close(of_cuts(keep.sum(), load=load), of_all())
    assert not torch.allclose(of_cuts(keep.sum()), of_all(), rtol=0.1)
    torch.testing.assert_close(of_all(load=load), of_all(level="global"))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_of_several_micro_batches(reentrant):
    """A repeated call counts no token twice: the gradient is the one without checkpointing."""
    torch.manual_seed(0)
    experts = torch.nn.Linear(8, 4).to(DEVICE)
    batches = [torch.randn(6, 8, device=DEVICE, requires_grad=True) for _ in range(3)]
    with torch.no_grad():
        load = sum(safeops.router_load(experts(x), top_k=2).load for x in batches)

    def loss(x, load):
        hidden = experts(x)
        balance = safeops.load_balancing_loss(hidden, top_k=2, load=load, denominator=18)
        return balance + 0.001 * safeops.router_z_loss(hidden, denominator=18)

    for x in batches:
        checkpoint(loss, x, load, use_reentrant=reentrant).backward()
    got = experts.weight.grad.clone()
    experts.zero_grad()
    (loss(torch.cat(batches), None)).backward()
    torch.testing.assert_close(got, experts.weight.grad)


# ---- routes, modules, other libraries


@pytest.mark.skipif(not all(registry[name].runs_on(DEVICE) for name in NAMES), reason="no kernels here")
@pytest.mark.parametrize("name", NAMES)
def test_the_kernels_of_the_parts_run(name):
    x = logits(5, 6, dtype=torch.float32)
    options = {} if name in ("router_entropy", "router_z_loss") else {"top_k": 2}
    _, forward = dispatched(lambda: getattr(safeops, name)(x, **options))
    assert ("safeops::_masked_logsumexp" if name == "router_z_loss" else "safeops::_masked_softmax") in forward


@pytest.mark.parametrize("name, options", [
    ("LoadBalancingLoss", {"top_k": 2, "scores": "sigmoid"}), ("RouterZLoss", {}), ("RouterEntropy", {}),
])  # fmt: skip
def test_modules(name, options):
    module = getattr(safeops.nn, name)(reduction="sum", **options)
    x, keep = logits(5, 6), flags(True, False, True, True, True)
    assert torch.equal(module(x, mask=keep), module.function(x, mask=keep, reduction="sum", **options))
    if options:
        index = x.topk(2).indices
        assert torch.equal(safeops.nn.LoadBalancingLoss()(x, index), safeops.load_balancing_loss(x, index))
        with pytest.raises(TypeError, match=r"^LoadBalancingLoss: top_k must be an integer, got 2\.0$"):
            safeops.nn.LoadBalancingLoss(top_k=2.0)
        with pytest.raises(ValueError, match="^LoadBalancingLoss: level must be one of 'batch', .*'tokens'$"):
            safeops.nn.LoadBalancingLoss(top_k=2, level="tokens")


@pytest.mark.parametrize("name", NAMES)
def test_half_is_computed_in_fp32(name):
    """Half logits must give what the same numbers give in fp32, on both routes; gradients are rounded once."""
    options = {} if name in ("router_entropy", "router_z_loss") else {"top_k": 2}
    for dtype in (torch.float16, torch.bfloat16):
        for route in ("kernel", "composite"):
            with case(dtype, route):
                half = logits(7, 5, dtype=dtype)
                wide = half.detach().float().requires_grad_()
                got, want = (on(route, name)(x, **options) for x in (half, wide))
                if name == "router_load":
                    assert all(map(torch.equal, got, want))
                else:
                    assert torch.equal(got, want) and got.dtype == torch.float32
                    assert torch.equal(grad_of(got, half), grad_of(want, wide).to(dtype))


@pytest.mark.slow
def test_as_transformers():
    """transformers pools the tokens of all layers and divides counts by tokens, not by choices: top_k times ours."""
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    layers = tuple(logits(2 * 6, 8, seed=seed, dtype=torch.float32) for seed in range(3))
    keep = mask(2, 6).to(DEVICE)
    for top_k in (1, 2):
        for attention_mask in (None, keep.long()):
            theirs = mixtral.load_balancing_loss_func(layers, 8, top_k, attention_mask)
            of_tokens = None if attention_mask is None else keep.flatten()
            ours = top_k * safeops.load_balancing_loss(torch.stack(layers), top_k=top_k, mask=of_tokens)
            torch.testing.assert_close(ours, theirs)
            got, want = (torch.autograd.grad(loss, layers) for loss in (ours, theirs))
            torch.testing.assert_close(got, want)
    probabilities = [x.softmax(-1) for x in layers]  # a router that returns them has softmax(softmax(x)) there
    twice = mixtral.load_balancing_loss_func(tuple(probabilities), 8, 1)
    once = safeops.load_balancing_loss(torch.stack(probabilities), top_k=1, scores="probabilities")
    torch.testing.assert_close(once, mixtral.load_balancing_loss_func(layers, 8, 1))
    assert (twice - 1).abs() < 0.25 * (once - 1).abs()


def test_layers_in_one_call():
    """The tokens of a layer are a sequence of the stacked layers: the mean of the layers' losses, in one call."""
    layers = [logits(6, 8, seed=seed) for seed in range(3)]
    keep = mask(6).to(DEVICE)
    one = safeops.load_balancing_loss(torch.stack(layers), top_k=2, level="sequence", mask=keep)
    want = sum(safeops.load_balancing_loss(x, top_k=2, mask=keep) for x in layers) / 3
    torch.testing.assert_close(one, want)
    torch.testing.assert_close(torch.autograd.grad(one, layers), torch.autograd.grad(want, layers))
