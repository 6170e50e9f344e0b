"""Code that follows the advice has, on half operands, the value and gradient that the written code has in fp64."""

import math

import pytest
import torch
import torch.nn.functional as F

import safeops
from safeops_lint.check import lint_source
from tests.lint.programs import EVERY, program

ON = torch.tensor([[True, True, False], [False, True, True]])
FEW = torch.tensor([[True, False, False], [False, False, False]])  # the second row keeps nothing
LARGE = torch.tensor([[20.0, -20.0, 3.0], [12.0, 100.0, 1.0]])
LOGITS = torch.tensor([[-20.0, -12.0, 3.0], [17.0, 9.0, -0.5]])
NEGATIVE = torch.tensor([[-20.0, -1e-4, -0.7], [-3.0, -9.0, -0.01]])
PROBABILITIES = torch.tensor([[1.0, 0.25, 0.5], [0.75, 0.125, 0.875]])
# (arguments, the code as written, a part of the advice, the code that follows the advice, the first argument's values)
LOGARITHMS = [
    ("x", "-torch.log(torch.sigmoid(x))", "F.logsigmoid", "-F.logsigmoid(x)", LOGITS),
    ("x", "torch.log(1 - torch.sigmoid(x))", "F.logsigmoid(-x)", "F.logsigmoid(-x)", LOGITS),
    ("x", "torch.log1p(-torch.sigmoid(x))", "F.logsigmoid(-x)", "F.logsigmoid(-x)", LOGITS),
    ("x", "torch.log(torch.softmax(x, -1))", "F.log_softmax", "F.log_softmax(x, -1, dtype=torch.float32)", LOGITS),
    (
        "x",
        "torch.log(1 - torch.softmax(x, -1))",
        "safeops.log1mexp(F.log_softmax(x, dim, dtype=torch.float64))",
        "safeops.log1mexp(F.log_softmax(x, -1, dtype=torch.float64))",
        LOGITS,
    ),
    ("x", "torch.log(1 - torch.exp(x))", "safeops.log1mexp", "safeops.log1mexp(x)", NEGATIVE),
    ("x", "torch.log1p(-torch.exp(x))", "safeops.log1mexp", "safeops.log1mexp(x)", NEGATIVE),
]
OTHERS = [
    ("x", "torch.log2(torch.sigmoid(x))", "F.logsigmoid, over math.log(2)", "F.logsigmoid(x) / math.log(2)", LOGITS),
    (
        "p",
        "torch.log(1 - p.clamp(max=1 - 1e-6))",
        "safeops.safe_log(1 - p, eps=1e-6)",
        "safeops.safe_log(1 - p.float(), eps=1e-6)",
        PROBABILITIES,
    ),
    (
        "p",
        "torch.log1p(-p.clamp(max=1 - 1e-6))",
        ".float() before the clamp",
        "torch.log1p(-p.float().clamp(max=1 - 1e-6))",
        PROBABILITIES,
    ),
    ("x", "torch.log(1 + torch.exp(x))", "F.softplus", "F.softplus(x)", LARGE),
    ("x", "torch.log(torch.exp(x).sum(1))", "torch.logsumexp", "torch.logsumexp(x, 1)", LARGE),
    ("x", "torch.log(torch.exp(x).mean(1))", "logsumexp - log(n)", "torch.logsumexp(x, 1) - math.log(3)", LARGE),
    (
        "x",
        "torch.log((torch.exp(x) * m).sum(1))",
        "safeops.masked_logsumexp",
        "safeops.masked_logsumexp(x.masked_fill(~m, -math.inf), dim=1)",
        LARGE,
    ),
    (
        "x",
        "torch.log(1 + (torch.exp(x) * few).sum(1) * (torch.exp(-x) * ~few).sum(1))",
        "F.softplus of its logarithm, safeops.masked_logsumexp",
        "F.softplus(safeops.masked_logsumexp(x.masked_fill(~few, -math.inf), dim=1)"
        " + safeops.masked_logsumexp((-x).masked_fill(few, -math.inf), dim=1))",
        LARGE,
    ),
    ("x", "torch.exp(x) / torch.exp(x).sum(1, keepdim=True)", "torch.softmax", "torch.softmax(x, 1)", LARGE),
    (
        "x",
        "q = torch.exp(x)\nq = q / q.sum()\nfor _ in range(3):\n"
        "    q = q / q.sum(dim=1, keepdim=True) / 2\n    q = q / q.sum(dim=0, keepdim=True) / 3\nreturn q",
        "x - x.amax()",
        "q = torch.exp(x.float() - x.float().amax())\nq = q / q.sum()\nfor _ in range(3):\n"
        "    q = q / q.sum(dim=1, keepdim=True) / 2\n    q = q / q.sum(dim=0, keepdim=True) / 3\nreturn q",
        LARGE,
    ),
    ("x", "torch.log(torch.cosh(x))", "log_cosh_loss", 'safeops.log_cosh_loss(x, x * 0, reduction="none")', LARGE),
    ("x", "torch.acosh(x)", "safeops.safe_acosh", "safeops.safe_acosh(x)", 1 + PROBABILITIES),
    ("x", "((x + 0.5) * m).sum() / m.sum()", "safeops.masked_mean(x, mask)", "safeops.masked_mean(x + 0.5, m)", LARGE),
    (
        "x",
        "safeops.safe_div((x.abs() * m).sum(), m.sum())",
        "safeops.masked_mean(x, mask)",
        "safeops.masked_mean(x.abs(), m)",
        LARGE,
    ),
    (
        "x",
        "x.sum() * m.sum() * (x * m).sum()",
        ".float() first",
        "x.float().sum() * m.sum() * (x * m).float().sum()",
        LARGE,
    ),
]


def function(body):
    text = body if "return" in body else f"return {body}"
    scope = {"torch": torch, "F": F, "safeops": safeops, "math": math, "m": ON, "few": FEW}
    exec("def f(x):\n    p = x\n" + "".join(f"    {line}\n" for line in text.splitlines()), scope)
    return scope["f"]


def value_and_gradient(body, x):
    x = x.clone().requires_grad_()
    value = function(body)(x)
    weights = torch.linspace(1, 2, value.numel(), dtype=value.dtype).reshape(value.shape)
    (value * weights).sum().backward()
    return value.detach().double(), x.grad.double()


@pytest.mark.parametrize("case", [*LOGARITHMS, *OTHERS], ids=lambda case: case[1][:40])
def test_the_advice_is_right(case):
    arguments, written, words, advised, x = case
    body = written if "return" in written else f"return {written}"
    source = program(f"{arguments}, m, few", body).replace("import torch\n", "import safeops\nimport torch\n", 1)
    messages = [finding.message for finding in lint_source(source, rules=EVERY)]
    assert any(words in message for message in messages), messages
    x = x.half()
    want, got = value_and_gradient(written, x.double()), value_and_gradient(advised, x)
    assert all(part.isfinite().all() for part in got)
    for a, b in zip(got, want):  # at an edge the fp64 value or gradient is not finite, and is not compared
        torch.testing.assert_close(
            torch.where(b.isfinite(), a, 0), torch.where(b.isfinite(), b, 0), rtol=4e-3, atol=1e-6
        )


@pytest.mark.parametrize("case", LOGARITHMS, ids=lambda case: case[1][:40])
def test_trace_and_audit_advise_the_same(case):
    _, written, words, advised, x = case
    x = x.half().requires_grad_()
    with safeops.debug.audit() as audit, safeops.debug.trace(action="record") as tracer:
        function(written)(x).sum().backward()
    told = [tracer.report.instead, *(finding.instead for finding in audit.findings if finding.code == "domain")]
    form = words if words.startswith("F.log_") or "log1mexp(F" in words else words.partition("(")[0]
    assert len(told) > 1 and all(form in instead for instead in told), told


def messages(code, arguments, body):
    return [f.message for f in lint_source(program(arguments, body)) if f.code == code]


@pytest.mark.parametrize("cast", ["", "mask = mask.type_as(e)\n"])
def test_a_masked_mean_counts_the_elements_of_what_it_averages(cast):
    e, mask = torch.rand(2, 3, 4, 4), torch.rand(2, 1, 4, 4) > 0.5
    torch.testing.assert_close((e * mask).sum() / mask.sum(), 3 * safeops.masked_mean(e, mask))
    torch.testing.assert_close((e * mask).sum() / mask.expand_as(e).sum(), safeops.masked_mean(e, mask))
    (message,) = messages("SO202", "e, mask", f"{cast}return (e * mask).sum() / mask.sum()")
    assert "counts the elements of x, mask.sum() those of mask" in message


def test_an_index_aligns_a_mask_at_the_left_and_a_loss_at_the_right():
    x, y, mask = torch.rand(3, 3), torch.rand(3, 3), torch.tensor([True, False, True])
    torch.testing.assert_close(F.mse_loss(x[mask], y[mask]), safeops.mse_loss(x, y, mask=mask.unsqueeze(-1)))
    told = messages("SO101", "x, y, mask", "return F.mse_loss(x[mask], y[mask])")
    assert len(told) == 2 and all("mask.unsqueeze(-1)" in message for message in told)
