"""--fix keeps values and gradients on ordinary input, adds the import, and changes nothing else."""

import itertools
import textwrap
import warnings

import pytest
import torch

import safeops
from safeops_lint.check import fix_source, lint_source
from safeops_lint.rules import RULES
from tests.lint.programs import EVERY

HEADER = "import torch\nimport torch.nn.functional as F\n"
# (rule, arguments, expression before, expression after), inside a function called loss
EXPRESSIONS = [
    ("SO101", "x", "x[x > 0.5].mean()", "safeops.masked_mean(x, x > 0.5, dtype=x.dtype)"),
    ("SO105", "x, y", "(x / y * (y > 0.5)).sum()", "safeops.masked_fill(x / y, ~(y > 0.5), 0).sum()"),
    ("SO105", "x, y", "((x - 1 / y) * ~(y > 0.5)).sum()", "safeops.masked_fill(x - 1 / y, y > 0.5, 0).sum()"),
    ("SO105", "x, y", "(y.isfinite() * x).sum()", "safeops.masked_fill(x, ~y.isfinite(), 0).sum()"),
    ("SO201", "x, y", "((x - y) ** 2).mean()", "safeops.mse_loss(x, y)"),
    ("SO201", "x, y", "torch.mean((x - y).pow(2))", "safeops.mse_loss(x, y)"),
    ("SO201", "x", "(x * x).sum(1, keepdim=True)", "safeops.masked_sum_of_squares(x, dim=1, keepdim=True)"),
    ("SO201", "x", "x.square().sum()", "safeops.masked_sum_of_squares(x)"),
    ("SO202", "x, y", "x / y.sum(dim=-1, keepdim=True)", "safeops.safe_div(x, y.sum(dim=-1, keepdim=True))"),
    ("SO202", "x", "1.0 / x.norm()", "safeops.safe_reciprocal(x.norm())"),
    ("SO202", "x, y", "(x - y) / x.norm()", "safeops.safe_div(x - y, x.norm())"),
    ("SO202", "x", "x / x.norm(dim=-1, keepdim=True)", "safeops.safe_div(x, x.norm(dim=-1, keepdim=True))"),
    (
        "SO202",
        "x",
        "x / torch.linalg.vector_norm(x, 2, 0, True)",
        "safeops.safe_div(x, torch.linalg.vector_norm(x, 2, 0, True))",
    ),
    ("SO202", "x", "x / x.norm(p=1, dim=1, keepdim=True)", "safeops.safe_div(x, x.norm(p=1, dim=1, keepdim=True))"),
    ("SO202", "x", "(x * (x > 0.5)).sum() / (x > 0.5).sum()", "safeops.masked_mean(x, x > 0.5, dtype=x.dtype)"),
    (
        "SO202",
        "x",
        "(x * (x > 0.1)).sum(1) / (x > 0.1).sum(1)",
        "safeops.masked_mean(x, x > 0.1, dim=1, dtype=x.dtype)",
    ),
    ("SO202", "x, y", "torch.div(x, y.norm())", "safeops.safe_div(x, y.norm())"),
    ("SO204", "x", "torch.log(x)", "safeops.safe_log(x)"),
    ("SO204", "x", "x.sqrt()", "safeops.safe_sqrt(x)"),
    ("SO204", "x", "torch.rsqrt(input=x)", "safeops.safe_rsqrt(x)"),
    ("SO204", "x", "torch.acos(x)", "safeops.safe_acos(x)"),
    ("SO204", "x", "torch.acosh(1 + x)", "safeops.safe_acosh(1 + x)"),
    ("SO204", "x", "torch.log(1 - x.clamp(max=1 - 1e-6))", "safeops.safe_log(1 - x, eps=1e-6)"),
    (
        "SO204",
        "x, y",
        "torch.log(1 - torch.clamp(x * y, max=0.99999))",
        "safeops.safe_log(1 - (x * y), eps=1 - 0.99999)",
    ),
    ("SO204", "x", "torch.log(1 - torch.exp(-x))", "safeops.log1mexp(-x)"),
    ("SO204", "x", "torch.log1p(-(-x).exp())", "safeops.log1mexp(-x)"),
    ("SO204", "x", "x ** -1.5", "safeops.safe_pow(x, -1.5)"),
    ("SO205", "x", "torch.sqrt(torch.sum(x**2, dim=1))", "safeops.safe_norm(x, dim=1)"),
    ("SO205", "x", "x.pow(2).sum(-1, keepdim=True) ** 0.5", "safeops.safe_norm(x, dim=-1, keepdim=True)"),
    ("SO206", "x", "x.clamp(min=1e-8).log()", "safeops.safe_log(x, eps=1e-8)"),
    ("SO207", "x, y", "x.masked_fill(y > 0.5, -1e9).sum()", "safeops.masked_fill(x, y > 0.5, -1e9).sum()"),
    (
        "SO207",
        "x",
        'F.softmax(x.masked_fill(x > 2, float("-inf")), dim=-1)',
        "safeops.masked_softmax(x, ~(x > 2), dim=-1)",
    ),
    ("SO208", "x, y", "torch.where(y != 0, x / y, 0)", "safeops.safe_div(x, y)"),
]
STATEMENTS = [
    (
        "SO103",
        "y = 1 / x\ny[y > 2] = 0\nreturn y",
        "y = 1 / x\ny = safeops.masked_fill(y, y > 2, 0)\nreturn y",
    ),
]


def in_loss(arguments, body):
    return f"{HEADER}\n\ndef loss({arguments}):\n{textwrap.indent(body, '    ')}\n"


CASES = [(c, a, in_loss(a, f"return {b}"), in_loss(a, f"return {new}")) for c, a, b, new in EXPRESSIONS]
CASES += [(c, "x", in_loss("x", b), in_loss("x", new)) for c, b, new in STATEMENTS]


def rewritten(source, code):
    return fix_source(source, rules=[RULES[code]])[0]


def with_import(source):
    return source if "safeops." not in source else source.replace(HEADER, HEADER + "import safeops\n")


@pytest.mark.parametrize("code, arguments, before, after", CASES, ids=lambda x: x.split("return")[-1].strip()[:40])
def test_rewrite(code, arguments, before, after):
    assert rewritten(before, code) == with_import(after)
    assert rewritten(with_import(after), code) == with_import(after), "not idempotent"
    once, _ = fix_source(before, rules=EVERY)  # all rules in one run
    assert fix_source(once, rules=EVERY) == (once, 0)


def run(source, arguments, dtype):
    scope = {}
    exec(compile(source, "<fixed>", "exec"), scope)
    torch.manual_seed(0)
    inputs = [(torch.rand(4, 5) * 0.8 + 0.1).to(dtype).requires_grad_() for _ in arguments.split(",")]
    value = scope["loss"](*inputs)
    value.float().sum().backward()
    return value, [x.grad for x in inputs if x.grad is not None]


# rules whose rewrite returns fp32 where torch's code returns half
HALF_RETURNS_FP32 = {"SO201", "SO205"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("code, arguments, before, after", CASES, ids=lambda x: x.split("return")[-1].strip()[:40])
def test_same_value_and_gradient(code, arguments, before, after, dtype):
    if dtype == torch.float16 and "1e9" in before:
        with pytest.raises(RuntimeError, match="overflow"):
            run(before, arguments, dtype)
        return
    old, new = run(before, arguments, dtype), run(rewritten(before, code), arguments, dtype)
    wide = dtype == torch.float16 and code in HALF_RETURNS_FP32
    assert new[0].dtype == (torch.float32 if wide else dtype)
    rtol = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 1e-2}[dtype]
    torch.testing.assert_close(new[0].to(dtype), old[0], rtol=rtol, atol=rtol)
    for a, b in zip(new[1], old[1]):
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol)


KEEP = [
    # A rewrite would drop a comment, break for a mask of another shape, or miss a write through another name.
    "def loss(x):\n    return torch.log(  # natural\n        x\n    ).mean() + torch.log(x  # kept\n    ).sum()\n",
    "def loss(x, m):\n    return x[m > 0].mean()\n",
    "def loss(x):\n    x[x > 1] = 0\n    return x\n",
    "def loss(x):\n    y = x + 1\n    z = y\n    y[y > 1] = 0\n    return z\n",
    "def loss(x):\n    y = x + 1\n    z = y.view(-1)\n    y[y > 1] = 0\n    return z\n",
    "def loss(x, seen):\n    y = x + 1\n    seen.append(y)\n    y[y > 1] = 0\n    return y\n",
    "def loss(x):\n    y = x + 1\n    for i in range(3):\n        y[y > i] = 0\n    return y\n",
    "def loss(x):\n    return torch.log(x, out=x)\n",
    "def loss(x):\n    return x.mul_(x > 0)\n",
    # Operands are integers, which mse_loss refuses.
    "def loss(x, y):\n    return ((x - F.one_hot(y, 3)) ** 2).mean()\n",
    "def loss(x, y):\n    return ((x - y.long()) ** 2).mean() + ((x - (x > 0)) ** 2).mean()\n",
    "def loss(x, y):\n    return (x + 1e-8) / (y + 1e-8)\n",  # 1 if x = y = 0; safe_div gives 0
    "def loss(x, y):\n    return x / y.clamp(min=1e-8)\n",  # clamp makes negative divisors 1e-8
    "def loss(x, y):\n    return x / (x - y + 1e-12).sqrt()\n",  # dividing by safe_sqrt's stand-in 0 gives inf
    "def loss(x, y):\n    z = x + 1e-8\n    return z / (y + 1e-8)\n",
    "@torch.jit.script\ndef loss(x):\n    return torch.log(x)\n",
    # The result is written in place, is written to another tensor, or is rounded.
    "def loss(x, y):\n    x /= y\n    return x.mean()\n",
    "def loss(x, y):\n    x = x / 1\n    x /= y.sum()\n    x /= y + 1e-8\n    return x.mean()\n",
    "def loss(x, y):\n    return x.div_(y).mean() + x.log_().mean() + x.sqrt_().mean()\n",
    "def loss(x, y):\n    return torch.div(x, y, rounding_mode='floor').mean() + torch.div(x, y.sum(), out=x).mean()\n",
    "def loss(x, y):\n    return torch.sqrt((x - y) * 2, out=y).sum() + torch.mean((x - y) ** 2, out=y)\n",
    "def loss(x, *a):\n    return torch.log(*a) + torch.sum(x**2, **a[0])\n",
]


@pytest.mark.parametrize("body", KEEP)
def test_what_a_rewrite_could_change_is_left_alone(body):
    source = f"{HEADER}\n\n{body}"
    new, count = fix_source(source)
    if "natural" in body:  # a rewrite would drop the comments inside the call
        assert "# natural" in new and "# kept" in new
    else:
        assert (new, count) == (source, 0)


@pytest.mark.parametrize("code, arguments, before, after", CASES, ids=lambda x: x.split("return")[-1].strip()[:40])
def test_a_rewrite_takes_operands_that_broadcast(code, arguments, before, after):
    def values(source):
        torch.manual_seed(1)
        inputs = [torch.rand(shape, dtype=torch.float64) + 0.1 for shape in ((4, 5), (3, 1, 4, 5))]
        return evaluated(source, *inputs[: arguments.count(",") + 1])

    with warnings.catch_warnings(record=True):
        torch.testing.assert_close(values(rewritten(before, code)), values(before))


def test_another_division_leaves_a_count_in_half_as_it_is():
    source = in_loss("x, mask", "return x.sum() / mask.to(x.dtype).sum()")
    assert fix_source(source) == (source, 0) and "SO202" in {f.code for f in lint_source(source)}


@pytest.mark.parametrize("body", ["10 * torch.log10(1 / (x - y).abs().mean())", "torch.log2(x.mean() / y.mean())"])
def test_a_quotient_in_a_logarithm_keeps_its_inf(body):
    assert any(f.code == "SO202" for f in lint_source(in_loss("x, y", f"return {body}"), rules=EVERY))
    assert "safe_div" not in fix_source(in_loss("x, y", f"return {body}"), rules=EVERY)[0]
    assert "safe_reciprocal" not in fix_source(in_loss("x, y", f"return {body}"), rules=EVERY)[0]


IMPORTS = [
    ("import torch\n", "import torch\nimport safeops\n"),
    ('"""Docs."""\n\nimport torch\n', '"""Docs."""\n\nimport torch\nimport safeops\n'),
    ("#!/usr/bin/env python\n# -*- coding: utf-8 -*-\nfrom __future__ import annotations\nimport torch\n", None),
    ("import safeops\nimport torch\n", "import safeops\nimport torch\n"),
    ("import torch  # the library\n\nX = 1\n", "import torch  # the library\nimport safeops\n\nX = 1\n"),
]
LOSS = "\n\ndef loss(x):\n    return torch.log(x)\n"


@pytest.mark.parametrize("head, expected", IMPORTS)
def test_import_goes_behind_the_others_once(head, expected):
    new, count = fix_source(head + LOSS)
    expected = head + "import safeops\n" if expected is None else expected
    assert new == expected + LOSS.replace("torch.log", "safeops.safe_log") and count == 1
    compile(new, "<new>", "exec")


def test_import_under_another_name_is_used():
    new, _ = fix_source("import torch\nimport safeops as so\n" + LOSS)
    assert "so.safe_log(x)" in new and new.count("import safeops") == 1


def test_docstring_and_future_come_first():
    source = (
        '"""Docs."""\nfrom __future__ import annotations\n\ndef loss(x):\n    import torch\n    return torch.log(x)\n'
    )
    new, _ = fix_source(source)
    assert new.startswith('"""Docs."""\nfrom __future__ import annotations\nimport safeops\n')
    compile(new, "<new>", "exec")


def test_a_name_that_is_taken_is_not_overwritten():
    source = HEADER + "safeops = None\n" + LOSS
    assert fix_source(source) == (source, 0)
    assert [f.code for f in lint_source(source)] == ["SO204"]


def test_bce_of_a_sigmoid():
    source = (
        HEADER
        + "def f(x, y):\n    with torch.autocast('cuda'):\n        return F.binary_cross_entropy(torch.sigmoid(x), y)\n"
    )
    new = rewritten(source, "SO402")
    assert "F.binary_cross_entropy_with_logits(x, y)" in new and "safeops" not in new
    x, y = torch.randn(8), torch.rand(8).round()
    torch.testing.assert_close(F_with(new)(x, y), torch.nn.functional.binary_cross_entropy(x.sigmoid(), y))


def F_with(source):
    scope = {}
    exec(source.replace("torch.autocast('cuda')", "torch.no_grad()"), scope)
    return scope["f"]


def test_a_product_with_a_mask_is_not_hidden_by_the_division():
    """With safe_div NaN times the mask would still be NaN, while SO202 would be silent; so --fix must not write it."""
    quotient = "(err.abs() * m).sum() / m.sum()"
    for head in ("", "m = (y > 0).float()\n", "m = y > 0\n"):
        source = in_loss("err, m, y", f"{head}return {quotient}")
        new, count = fix_source(source)
        assert (new, count) == (source, 0) and {f.code for f in lint_source(new)} == {"SO202"}
    divided = in_loss("err, m", "total = (err.abs() * m).sum()\nreturn safeops.safe_div(total, m.sum())")
    assert ["masked_mean" in f.message for f in lint_source(with_import(divided))] == [True]
    bounded = in_loss("p, m", f"return {quotient.replace('err.abs()', 'p.sigmoid()')}")  # this numerator is never NaN
    assert "safeops.safe_div((p.sigmoid() * m).sum(), m.sum())" in fix_source(bounded)[0]
    rules = [RULES["SO105"], RULES["SO202"]]
    new, _ = fix_source(in_loss("err, y", "m = y > 0\nreturn (err / y * m).sum() / m.sum()"), rules=rules)
    assert "safeops.safe_div(safeops.masked_fill(err / y, ~m, 0).sum(), m.sum())" in new
    assert lint_source(new, rules=rules) == []


@pytest.mark.parametrize("p", ["torch.sigmoid(x)", "x.softmax(-1)", "x * y", "x.clamp(1e-6, 1 - 1e-6)"])
@pytest.mark.parametrize("log", ["torch.log(1 - {})", "torch.log1p(-{})"])
def test_what_half_rounds_to_0_gets_no_floor(p, log):
    """1 - p may be 0 in half but not in fp32. A floor would then change the fp32 value, which is finite."""
    source = in_loss("x, y", f"return {log.format(p)}.mean()")
    assert fix_source(source, rules=EVERY) == (source, 0)


@pytest.mark.parametrize("bad", [1.0, 1 - 2**-12])
def test_a_rewritten_logarithm_of_1_minus_p_keeps_its_fp32_value_in_half(bad):
    source = in_loss("p", "return torch.log(1 - p.clamp(max=1 - 1e-6))")
    p = torch.tensor([bad, 0.25]).half()
    torch.testing.assert_close(
        evaluated(fix_source(source)[0], p).float(), evaluated(source, p.float()), rtol=1e-3, atol=0
    )
    source = in_loss("x", "return torch.log(1 - torch.exp(x))")
    x = torch.tensor([-1e-3, -2e-3, -0.7]).bfloat16()
    torch.testing.assert_close(
        evaluated(fix_source(source)[0], x).float(), evaluated(source, x.double()).float(), rtol=8e-3, atol=0
    )


def evaluated(source, *arguments):
    scope = {}
    exec(source, scope)
    return scope["loss"](*arguments)


ADDED = [
    "x.clamp_min(1e-12).sqrt()",  # safe_sqrt gives the true root below its floor
    "torch.log(x + 1e-8)",
    "(x + 1e-12).sqrt()",
    "x / (y + 1e-8)",
    "1 / (x + 1e-8)",
    "x / (x.norm(dim=1, keepdim=True) + 1e-8)",
]


@pytest.mark.parametrize("expression", ADDED)
def test_an_eps_that_is_added_is_left_alone(expression):
    """A floor in place of an added eps would change values where x is about eps, in fp32 and fp64 too."""
    source = in_loss("x, y", f"return {expression}")
    assert fix_source(source, rules=EVERY) == (source, 0)
    assert "SO206" in {finding.code for finding in lint_source(source, rules=EVERY)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("code, arguments, before, after", CASES, ids=lambda x: x.split("return")[-1].strip()[:40])
def test_no_finite_value_is_changed_at_an_edge(code, arguments, before, after, dtype):
    """At values of 0, near eps, 1 and beyond, one at a time, a rewrite must be at least as near to fp64's result as the
    code before. It may be nearer where the dtype rounds (1 - 1e-6, 1 - exp(x))."""
    edges = [0.0, 1e-30, 1e-12, 1e-9, 1e-8, 1e-6, 0.5, 1 - 1e-6, 1.0, 1 + 1e-6, 2.0, -0.5, -2.0, 70.0]
    new_text = rewritten(before, code)
    for values in itertools.product(edges, repeat=len(arguments.split(", "))):
        row = [torch.tensor([[value]], dtype=torch.float64) for value in values]
        old, new, true = (
            evaluated(text, *(x.to(to) for x in row))
            for text, to in ((before, dtype), (new_text, dtype), (before, torch.float64))
        )
        if old.isfinite().all() and not ("log1mexp" in new_text and dtype == torch.float64 and abs(values[0]) < 1e-3):
            room = 1e-9 if dtype == torch.float64 else 1e-5
            off, was = ((x.double() - true).abs().max() for x in (new, old))
            assert off <= was + room * max(1, true.abs().max()), (values, old, new)


ROOTS = [
    ("cov, var_x, var_y", "return (cov / (var_x * var_y).sqrt()).mean()"),
    ("cov, var_x, var_y", "n = torch.sqrt(var_x * var_y)\nreturn (cov / n).mean()"),
]


@pytest.mark.parametrize("arguments, body", ROOTS)
def test_a_root_that_something_is_divided_by_stays_reported(arguments, body):
    source = in_loss(arguments, body)
    new, _ = fix_source(source, rules=EVERY)
    assert "SO204" in {f.code for f in lint_source(new, rules=EVERY)}


def test_a_root_below_a_division_that_heeds_0_is_rewritten():
    new, _ = fix_source(in_loss("x, y", "return ((x - y) / (x.var() * y.var()).sqrt()).mean()"))
    assert "safeops.safe_div(x - y, safeops.safe_sqrt(x.var() * y.var()))" in new


def test_the_advice_for_an_entropy_has_no_nan():
    body = "l = x.masked_fill(m, float('-inf')).log_softmax(1)\nreturn (l.exp() * l).sum()"
    (finding,) = [f for f in lint_source(in_loss("x, m", body)) if "0 * -inf" in f.message]
    assert "safeops.xlogy(p, p)" in finding.message
    x, m = torch.randn(2, 3, requires_grad=True), torch.tensor([[True, False, False], [False] * 3])
    p = x.masked_fill(m, -torch.inf).softmax(1)
    (gradient,) = torch.autograd.grad(safeops.xlogy(p, p).sum(), x)
    assert gradient.isfinite().all()
