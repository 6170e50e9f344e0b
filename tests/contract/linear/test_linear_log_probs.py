"""linear_token_log_probs, in chunks: parity with token_log_probs of the layer's output; memory, masked rows, routes."""

import pytest
import torch

import safeops
from safeops.ops.linear import _chunks
from safeops.testing.memory import _peak_bytes
from tests.ops import definitions
from tests.ops.record import DEVICE

NAME = "linear_token_log_probs"
INF = float("inf")


def example(rows=(6, 5), classes=50, width=16, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape, by=1.0):
        return (by * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(DEVICE, dtype)

    target = torch.randint(classes, rows, generator=generator).to(DEVICE)
    target.view(-1)[0] = -100
    mask = (torch.rand(rows, generator=generator) < 0.8).to(DEVICE)
    x = numbers(*rows, width)
    x[~mask] = torch.nan
    return (x, numbers(classes, width, by=0.3), numbers(classes)), target, mask


def outcome(function, layer, target, mask, weights=(1.0, 0.5, -0.25), **options):
    """Returns (the three results, the gradients of input, weight and bias for a sum over all three results)."""
    input, linear_weight, linear_bias = leaves = [t.detach().requires_grad_() for t in layer]
    results = function(input, linear_weight, target, linear_bias=linear_bias, mask=mask, **options)
    terms = torch.linspace(1, 2, target.numel(), device=DEVICE).reshape(target.shape)
    total = sum(w * (terms * r).sum() for w, r in zip(weights, results))
    return [r.detach() for r in results], torch.autograd.grad(total, leaves)


def check(layer, target, mask, tolerance=1e-5, **options):
    got = outcome(safeops.linear_token_log_probs, layer, target, mask, **options)
    want = outcome(definitions.linear_token_log_probs, [t.double() for t in layer], target, mask, **options)
    for g, w in zip([*got[0], *got[1]], [*want[0], *want[1]]):
        scale = float(w.abs().max()) + 1
        torch.testing.assert_close(g.double() / scale, w / scale, rtol=tolerance, atol=tolerance)
    return got


@pytest.mark.parametrize("chunk", [2**23, 2**7, 1])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.5, "softcap": 3.0}], ids=["plain", "capped"])
def test_in_chunks_as_a_whole(chunk, options, monkeypatch):
    monkeypatch.setattr(_chunks, "CHUNK", chunk)
    check(*example(), **options)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_dtypes(dtype, tolerance, monkeypatch):
    monkeypatch.setattr(_chunks, "CHUNK", 2**7)
    (_, gradients) = check(*example(dtype=dtype), tolerance)
    assert all(g.dtype == dtype for g in gradients)


@pytest.mark.parametrize("weights", [(1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_each_result_alone(weights):
    check(*example(), weights=weights)


def test_fp16_gradients_of_a_mean_over_many_rows_do_not_vanish():
    layer, target, mask = example((4096,), dtype=torch.float16)
    check(layer, target, mask, 3e-3, weights=[w / 4096 for w in (1.0, 0.5, -0.25)])


def test_a_row_that_does_not_exist_is_nothing():
    layer, target, mask = example()
    (rows, gradients) = outcome(safeops.linear_token_log_probs, layer, target, mask)
    gone = ~mask | (target == -100)
    assert all(not r[gone].any() for r in rows) and not gradients[0][gone].any()
    nothing = outcome(safeops.linear_token_log_probs, layer, target, torch.zeros_like(mask))
    assert not any(t.any() for t in (*nothing[0], *nothing[1]))


def test_a_class_whose_bias_is_minus_infinity_does_not_exist():
    (x, w, b), target, mask = example()
    b[40:] = -INF
    target = target.clamp(max=39)
    few = outcome(safeops.linear_token_log_probs, (x, w[:40], b[:40]), target, mask)
    all_of_them = outcome(safeops.linear_token_log_probs, (x, w, b), target, mask)
    for a, c in zip((*few[0], few[1][0]), (*all_of_them[0], all_of_them[1][0])):
        torch.testing.assert_close(a, c)
    assert not all_of_them[1][1][40:].any() and not all_of_them[1][2][40:].any()


@pytest.mark.parametrize("shape", [(0,), (3, 0), ()], ids=str)
def test_sizes(shape):
    layer, target, mask = example((5,))
    x = layer[0].nan_to_num(0)[: 1 if shape == () else 0].reshape(*shape, 16)
    target = torch.zeros(shape, dtype=torch.int64, device=DEVICE)
    (rows, gradients) = outcome(safeops.linear_token_log_probs, (x, *layer[1:]), target, None)
    assert all(r.shape == shape for r in rows) and [g.shape for g in gradients] == [x.shape, (50, 16), (50,)]


def test_strided_operands_are_not_written():
    (x, w, b), target, mask = example()
    layer = x.movedim(0, 1).contiguous().movedim(0, 1), w.mT.contiguous().mT, b.repeat_interleave(2)[::2]
    before = [t.clone() for t in layer]
    got, want = (outcome(safeops.linear_token_log_probs, each, target, mask) for each in (layer, (x, w, b)))
    for g, v in zip((*got[0], *got[1]), (*want[0], *want[1])):
        torch.testing.assert_close(g, v)
    assert all(torch.equal(t.nan_to_num(0), u.nan_to_num(0)) for t, u in zip(layer, before))


def test_the_logits_never_exist(monkeypatch):
    monkeypatch.setattr(_chunks, "CHUNK", 2**16)
    layer, target, mask = example((512,), classes=8192, dtype=torch.bfloat16)

    def step():
        return outcome(safeops.linear_token_log_probs, layer, target, mask)

    logits = 512 * 8192 * 2
    assert _peak_bytes(DEVICE, step) < logits / 2


def test_under_autocast_the_layer_may_differ_in_dtype():
    (x, w, b), target, mask = example()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        got = outcome(safeops.linear_token_log_probs, (x.bfloat16(), w, b), target, mask)
    want = outcome(safeops.linear_token_log_probs, [t.bfloat16() for t in (x, w, b)], target, mask)
    for g, v in zip((*got[0], *got[1]), (*want[0], *want[1])):
        torch.testing.assert_close(g, v, check_dtype=False)


@pytest.mark.slow
def test_compiled_whole():
    layer, target, mask = example()
    function = torch.compile(safeops.linear_token_log_probs, fullgraph=True)
    got = outcome(function, layer, target, mask, temperature=0.5)
    want = outcome(safeops.linear_token_log_probs, layer, target, mask, temperature=0.5)
    for g, v in zip((*got[0], *got[1]), (*want[0], *want[1])):
        torch.testing.assert_close(g, v)


def test_second_derivatives():
    (x, w, b), target, mask = example((3,), classes=5, width=4, dtype=torch.float64)
    x = x.nan_to_num(0)

    def function(x, w, b):
        return safeops.linear_token_log_probs(x, w, target % 5, linear_bias=b, temperature=0.5)

    leaves = [t.requires_grad_() for t in (x, w, b)]
    assert torch.autograd.gradcheck(function, leaves) and torch.autograd.gradgradcheck(function, leaves)
