"""Code that looks like a finding, and in which the linter must find nothing. Each line is a case."""

import pytest

from safeops_lint.check import lint_source
from tests.lint.programs import EVERY, HEADER, program

# (arguments, body): no rule finds anything
SILENT = [
    ("x, y", "mask = torch.sigmoid(y)\nreturn x * mask"),  # a weight, although it is called mask
    ("x, y", "mask = torch.softmax(y, 1).unsqueeze(0)\nreturn (x * mask).sum()"),
    ("x, drop_mask", "return (x * drop_mask).sum()"),
    (
        "x, y, z",
        "x_max = x.amax(1)\ns = (x.sub(x_max) if z is None else x - x_max).exp()\nreturn (s / s.sum(1)).mean()",
    ),
    # values that are not tensors, or are arrays of another library
    ("", "a = np.ones(3)\nreturn np.log(a[a > 0]) / a.sum()"),
    ("n: int, rate: float", "return math.log(rate) / n + math.sqrt(n) + n ** -0.5"),
    ("names", "return [n for n in names if n]"),
    ("x, reduction='mean'", "if reduction == 'mean':\n    return x.mean()\nreturn x"),
    ("x", "b, c = x.shape\nreturn x.sum() / (b * c) + x.sum() / x.shape[0] + x.softmax(0).sum() / x.numel()"),
    ("x, weight=None", "if weight is not None:\n    x = x * weight\nreturn x.mean()"),
    ("x", "if x.dim() == 2 and x.size(0) > 1 and x.requires_grad:\n    x = x[0]\nreturn x"),
    ("x, weight", "if weight == 'none' or weight == None or weight in ('a', 'b'):\n    return x * 2\nreturn x.mean()"),
    (
        "x",
        "y = x * 2\nif y == (1, 2) or y == 'a' or y == [] or y == None:\n    return x\nreturn x.mean()",
    ),
    ("x, weight", "if weight == True or not weight != 'size':\n    return x * 2\nreturn x.mean()"),
    ("x", "if isinstance(x, float):\n    if x < 0:\n        raise ValueError\nreturn x"),
    ("x", "if x.isnan().any:\n    pass\nreturn x.mean()"),
    # integer indices, which are no masks
    ("x, index", "return x[index].mean() + x[0] + x[:, 1:] + x[..., None] + x[x.argmax()]"),
    ("x", "order = x.argsort()\nreturn x[order]"),
    ("x", "x = x.clone()\nx[0] = 1\nx[:, 2] = 0\nreturn x"),
    ("x", "out = torch.zeros(3)\nout[out > 1] = 2\nreturn x + out"),
    # products with a mask whose other factor is never NaN
    ("x, y", "return ((x > 0) * (y > 0)).sum()"),
    ("x", "return 2 * (x > 0)"),
    ("x, mask", "return (torch.where(mask, x, 0) * mask).sum()"),
    # divisors and arguments of logarithms or roots that a guard keeps from 0
    ("x, mask", "return x.sum() / mask.sum().clamp(min=1)"),
    ("x, mask", "return x.sum() / (mask.sum() + 1e-3)"),
    ("x, mask", "n = torch.maximum(mask.sum(), torch.tensor(1))\nreturn x.sum() / n"),
    ("x, y", "return x / F.softplus(y) + x / y.exp() + x / (1 + y ** 2)"),
    ("x", "return torch.log(x.clamp(min=1e-3)) + torch.log1p(x) + F.log_softmax(x, -1)"),
    ("x, eps", "return torch.sqrt(x + eps) + torch.rsqrt(x.var() + eps)"),
    ("x", "return torch.acos(x.clamp(-1 + 1e-3, 1 - 1e-3))"),
    ("x", "return x ** 2 + x ** 3 + x.pow(2) + 2 ** x + x.sqrt_scale"),
    ("x", "return torch.sqrt(torch.tensor(2.0)) * x / math.sqrt(x.size(-1)) + x / torch.full((), 3.0)"),
    ("x, y", "y = torch.where(y == 0, 1, y)\nreturn x / y"),
    ("x, y", "return torch.where(y > 0, x, y) + torch.where(x > 0, x + 1, x * 2)"),
    # fp32 already
    ("x, y", "return ((x.float() - y.float()) ** 2).mean()"),
    ("x", "x = x.to(torch.float32)\nreturn x.square().sum() + torch.log(x + 1e-8)"),
    ("x", "return x.square().mean(dtype=torch.float32)"),
    ("x", "with torch.autocast('cuda', enabled=False):\n    return (x ** 2).mean()"),
    ("x, y", "with torch.autocast('cuda'):\n    loss = (x.float() - y).abs().mean()\nreturn loss"),
    # in-place writes that autograd does not notice
    ("x", "with torch.no_grad():\n    x[x < 0] = 0\n    y = x.exp().clamp_(min=1e-3)\nreturn x"),
    ("x", "out = torch.empty(3)\nout.fill_(1).clamp_(max=2)\nreturn x * out"),
    ("x, mask", "return safeops.masked_mean(x, mask) + safeops.safe_log(x, eps=1e-8) / safeops.masked_sum(x).exp()"),
    (
        "x, mask",
        "causal = torch.ones(3, 3).tril()\nx = x.masked_fill(causal == 0, float('-inf'))\nreturn x.softmax(-1)",
    ),
    ("x, mask", "return x.masked_fill(mask, 0.0) + x.masked_fill(mask, -1e4)"),
    # values that half can hold
    ("x, labels", "return ((x.sigmoid() - labels) ** 2).mean() + (2 * (1 - x.softmax(-1)) ** 2).mean()"),
    ("x, y", "d = torch.cdist(x.float(), y.float())\nreturn (F.relu(1 - d) ** 2 * 2).mean()"),
    ("x", "e = torch.exp(x - x.amax(-1, keepdim=True))\nreturn e / e.sum(-1, keepdim=True)"),
    ("x, y", "z = (x * 2).to(y.float().dtype)\nreturn y.float() / (z + 1e-8)"),
    ("x", "return torch.log(1 - x.clamp(1e-3, 1 - 1e-3)).mean() + torch.log1p(-x.clamp(max=0.99)).mean()"),
    ("x, t=1.0", "return (torch.exp(x / t) + torch.exp(-x / 0.07) + torch.exp(2 * x) + torch.exp(-64 * x)).mean()"),
    ("x, logp, old_logp", "return (x * (logp - old_logp).clamp(max=10).exp()).mean()"),
    ("x, y", "return x / torch.where(y == 0, 1e-3, y) + torch.pow(0.99, x) + y * (1 + 1e-2)"),
    # synchronizations that happen once, or on demand
    ("x", "if settings.verbose and x.isnan().any():\n    print(x.mean())\nreturn x.mean()"),
    (
        "x, labels",
        "if not state.checked:\n    if (labels > 1).any().item():\n        raise ValueError\nreturn x.mean()",
    ),
    # a choice between two formulas by size; classes as a cast mask; an in-place write that is allowed
    ("x", "small = (x < 1).float()\nreturn (small * x**2 + (1 - small) * (2 * x - 1)).float().mean()"),
    ("x, labels", "pos_inds = labels >= 1\nreturn (x * pos_inds.float()).sum()"),
    ("x, valid", "d = x - 1\nd[~valid] = 0  # noqa: SO103\nreturn (d.float().pow(2) * valid).sum()"),
    # code that follows the advice
    ("x, m", "x = safeops.masked_fill(x, ~m, 0)\nreturn (x * m).sum() / m.sum().clamp(min=1)"),
    ("x, m", "return (safeops.masked_fill(x, ~m, 0).abs() * m).sum() / m.sum().clamp(min=1)"),
    ("x, m", "return safeops.safe_div((x.masked_fill(~m, 0).abs() * m).sum(), m.sum())"),
    ("x, p", "if p > 0:\n    return x.mean() * p\nreturn x.mean()"),
    # values that are on the CPU, where nothing waits
    ("x, n", "i = torch.randint(4, (1,)).item()\nreturn x[i].mean()"),
    ("x, y", "keep = (y > 0).cpu()  # noqa: SO301\nreturn x.cpu()[keep].sum()  # noqa: SO301"),
    # cross entropy of class indices is not NaN where masked; a caller asks for the in-place write
    ("x, y, mask", "return (F.cross_entropy(x, y, reduction='none') * mask).mean()"),
    ("x, inplace", "if inplace:\n    return x.clamp_(0, 1).mean()\nreturn x.clamp(0, 1).mean()"),
    # factors that are labels or masks of pairs, not of valid elements; operands that are finite
    ("x, labels", "known = torch.stack([labels, labels])\nreturn ((x > 0.5).float() * known).sum()"),
    ("x, labels", "mask = labels.unsqueeze(0) != labels.unsqueeze(1)\nreturn (x * mask.float()).sum()"),
    ("x, mask_positives", "return (x * mask_positives).sum()"),
    ("x, mask", "w = torch.pow(2.0, torch.arange(4) - mask.sum(1, keepdim=True).clamp_min(0))\nreturn w * mask"),
    # a value that an earlier step keeps from 0
    ("x, k", "f = k(x)\nreturn (f.clamp_min(1e-3).sqrt() * f).mean()"),
    ("x", "p = x.clamp(max=1 - torch.finfo(torch.float64).eps)\nreturn torch.log(1 - p).mean()"),
    ("x, y", "e = x.exp().masked_select(y).view(4, -1)  # noqa: SO101\nreturn x / e.sum(-1)"),
    ("x", "return torch.log(torch.diagonal(torch.linalg.cholesky(x), dim1=-2, dim2=-1)).sum()"),
    ("x, drop_prob, rate", "if rate() < drop_prob:\n    return x.mean() * 2\nreturn x.mean()"),
]


@pytest.mark.parametrize("arguments, body", SILENT, ids=lambda x: x[:60])
def test_silent(arguments, body):
    results = lint_source(
        program(arguments, body).replace("import torch\n", "import safeops\nimport torch\n", 1), rules=EVERY
    )
    assert [(f.code, f.message) for f in results] == []


@pytest.mark.parametrize("code, total, use", [
    ("SO202", "mask.sum()", "x.sum() / total"),
    ("SO204", "x.var()", "torch.log(total)"),
    ("SO204", "(x * y).sum()", "torch.acos(total)"),
    ("SO205", "x.square().sum()", "total.sqrt()"),
])  # fmt: skip
@pytest.mark.parametrize("guard", ["if total > 0:\n    x = x + {use}", "x = {use} if total != 0 else x",
                                   "if not total > 0:\n    return x\nx = x + {use}"])  # fmt: skip
def test_what_a_condition_asked_about_is_guarded(code, total, use, guard):
    def codes(body):
        source = program("x, y, mask", f"total = {total}\n{body}\nreturn x.mean()")
        return {f.code for f in lint_source(source, rules=EVERY)}

    assert code in codes(f"x = x + {use}") and code not in codes(guard.format(use=use))
    assert code in codes(f"if y > 0:\n    x = x + {use}")


def test_a_function_that_returns_numbers_waits_on_purpose():
    source = program("x, y", "e = (x - y).abs()\ne = e[e > 0].mean()\nn = e.item()\nreturn e * n")
    told = {f.code for f in lint_source(source, rules=EVERY)}
    assert {"SO101", "SO301"} <= told
    assert lint_source(source.replace("(x, y):", "(x, y) -> dict[str, float]:"), rules=EVERY) == []


def test_an_eps_out_of_a_dictionary_is_one():
    source = """class SomeLoss(nn.Module):
    def __init__(self, **options):
        self.{0} = options.get("{0}", 1e-5)

    def forward(self, x, y):
        return (x / (y.var() + self.{0})).mean()
"""
    assert lint_source(HEADER + source.format("epsilon")) == []
    assert [f.code for f in lint_source(HEADER + source.format("offset"))] == ["SO202"]
