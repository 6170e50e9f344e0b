"""What is found and what is not: ways to write the same thing, and things that look like it. One line a case."""

import pathlib
import textwrap

import pytest

import safeops
from safeops.lint.check import lint_source
from safeops.lint.rules import RULES

HEADER = """\
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


"""
EVERY = list(RULES.values())

# (code, arguments of a function called loss, its body)
FOUND = [
    ("SO101", "x, y", "return F.mse_loss(x[y > 0], y[y > 0])"),
    ("SO101", "x, y", "valid = ~torch.isnan(y)\nx = x[valid]\nreturn x.mean()"),
    ("SO101", "x, y", "return x[:, y.isfinite()].sum()"),
    ("SO101", "x, mask", "return x[mask].mean()"),
    ("SO101", "x, mask", "return torch.masked_select(x, mask).mean()"),
    ("SO101", "x, y", "keep = (x > 0) & (y > 0)\nreturn x[keep.bool()].mean()"),
    ("SO102", "x, y", "x[y > 0] = y[y > 0]\nreturn x"),
    ("SO102", "x, y", "out = torch.zeros_like(x)\nout[y == 0] = x.min().abs() + 10\nreturn x + out"),
    ("SO103", "x, y", "x[y == 0] = 0\nreturn x"),
    ("SO103", "x, y", "x[torch.isnan(x)] = 0.0\nreturn x"),
    ("SO103", "x", "x = x.exp()\nx[x > 10] = 10\nreturn x"),
    ("SO204", "x, y", "x[y > 0] = 0\nreturn torch.log(x).sum()"),
    ("SO204", "x, y", "valid = y > 0\nreturn torch.log(x[valid]).sum()"),
    ("SO105", "x, pad", "x = F.relu(x)\nreturn (x * ~pad).sum()"),
    ("SO104", "x, y", "i = torch.nonzero(y)\nreturn x[i]"),
    ("SO104", "x, y", "return x[(y > 0).nonzero(as_tuple=True)]"),
    ("SO104", "x, y", "return x[torch.where(y > 0)]"),
    ("SO104", "x, y", "return x[torch.argwhere(y > 0)]"),
    ("SO105", "x, mask", "return (x * mask).sum()"),
    ("SO105", "x, y", "m = (y > 0).float()\nreturn ((x - y) * m).sum()"),
    ("SO105", "x, y", "x *= (y > 0)\nreturn x"),
    ("SO105", "x, y", "return (x * (1 - (y > 0).float())).sum()"),
    ("SO105", "x, mask", "return torch.mul(x, mask.unsqueeze(-1))"),
    ("SO105", "x, y", "return x * y.ne(0).type_as(x)"),
    ("SO201", "x, y", "return torch.sum((x - y) ** 2)"),
    ("SO201", "x, y", "d = x - y\nreturn (d * d).mean()"),
    ("SO201", "x", "return x.pow(2).sum(dim=1).mean()"),
    ("SO202", "x, mask", "return (x.abs()).sum() / mask.sum()"),
    ("SO202", "x", "return x / x.norm(dim=-1, keepdim=True)"),
    ("SO202", "x", "return (x - x.mean()) / x.std()"),
    ("SO202", "x", "n = torch.linalg.norm(x)\nx = x / n\nreturn x"),
    ("SO203", "x, y", "return (x / y).mean()"),
    ("SO204", "x", "return -x.log().mean()"),
    ("SO204", "x", "return -x.clamp(0, 1).log().mean()"),
    ("SO204", "x", "p = torch.softmax(x, -1)\nreturn -torch.log(p).mean()"),
    ("SO204", "x", "return torch.sigmoid(x).log()"),
    ("SO204", "x, y", "return torch.sqrt(x - y)"),
    ("SO204", "x, y", "return torch.acos((x * y).sum(-1))"),
    ("SO204", "x", "return x ** 0.5"),
    ("SO204", "x", "return torch.pow(x, -1)"),
    ("SO204", "x", "return torch.sqrt(x.var(dim=0)).mean()"),
    ("SO205", "x, y", "return torch.sqrt(((x - y) ** 2).sum(-1)).mean()"),
    ("SO205", "x", "s = x.square().sum()\nreturn s.sqrt()"),
    ("SO205", "x", "return torch.sqrt(torch.sum(torch.pow(x, 2), dim=1))"),
    ("SO206", "x, y", "return (x / (y + 1e-8)).mean()"),
    ("SO206", "x", "eps = 1e-12\nreturn torch.log(x.clamp(min=eps))"),
    ("SO206", "x", "return torch.log(torch.clamp(x, 1e-10, 1.0))"),
    ("SO206", "x, eps=1e-8", "return torch.log(x + eps)"),
    ("SO206", "x", "return F.normalize(x, dim=-1, eps=1e-12)"),
    ("SO207", "x, mask", "return x.masked_fill(mask == 0, -1e9).softmax(-1)"),
    ("SO207", "x, mask", "return torch.masked_fill(x, mask, -1e30)"),
    ("SO207", "x, mask", "s = x.masked_fill(~mask, -float('inf'))\nreturn torch.softmax(s, dim=-1)"),
    ("SO207", "x, mask", "return torch.log_softmax(x.masked_fill(mask, -math.inf), dim=-1)"),
    ("SO207", "x, mask", "x.masked_fill_(mask, -1e9)\nreturn x"),
    ("SO207", "x, mask", "return x + (1.0 - mask) * -1e9"),
    ("SO208", "x, y", "return torch.where(y > 0, x / y, torch.zeros_like(x))"),
    ("SO208", "x", "l = torch.log(x)\nreturn torch.where(x == 0, 0.0, l)"),
    ("SO208", "x", "return torch.where(x.eq(0), x, x.sqrt())"),
    ("SO209", "x", "y = torch.exp(x)\ny /= y.sum()\nreturn y"),
    ("SO209", "x", "return torch.sigmoid(x).clamp_(1e-3, 1 - 1e-3).mean()"),
    ("SO209", "x", "y = F.relu(x)\ny.add_(1)\nreturn y"),
    ("SO301", "x", "return x / x.max().item()"),
    ("SO301", "x", "n = int((x > 0).sum())\nreturn x.sum() / n"),
    ("SO301", "x", "return torch.tensor(x.detach().cpu().numpy().mean())"),
    ("SO301", "x", "return sum(x.mean(0).tolist())"),
    ("SO302", "x", "print('loss is', x.mean())\nreturn x.mean()"),
    ("SO302", "x", "text = f'{x.mean()}'\nreturn x"),
    ("SO303", "x", "if torch.isnan(x).any():\n    return x * 0\nreturn x"),
    ("SO303", "x, weight", "if weight > 0 or weight == None:\n    x = x * 2\nreturn x.mean()"),
    ("SO303", "x, y", "assert (y >= 0).all()\nreturn x"),
    ("SO303", "x", "return x.mean() if x.sum() > 0 else x.sum() * 0"),
    ("SO303", "x", "while not bool((x > 0).all()) and x.mean() > 1:\n    x = x / 2\nreturn x"),
    # what is a tensor
    ("SO202", "x, batch", "return x.sum() / batch.depth.sum()"),
    ("SO202", "x, batch", "return x.sum() / batch['mask'].sum()"),
    ("SO204", "counts, lam", "return torch.log(counts / lam).mean()"),
    ("SO204", "lam, k", "return ((lam - k) * 2).sqrt().mean()"),
    ("SO206", "first, second", "return torch.sqrt(torch.clamp(first + second, min=1e-9)).mean()"),
    ("SO206", "x, y", "z = (x.float() * 2).to(y.dtype)\nreturn y / (z + 1e-8)"),
    ("SO206", "x, y", "z = (x.float() * 2).to(y)\nreturn y / (z + 1e-8)"),
    ("SO206", "x, eps=1e-6", "return torch.sqrt(x * x + eps**2).mean()"),
    ("SO206", "x, eps=1e-6", "floor = eps * eps\nreturn torch.log(x + floor).mean()"),
    # no guards, for they ask about no value
    ("SO202", "x, mask", "if mask is not None:\n    x = x.sum() / mask.sum()\nreturn x"),
    ("SO202", "x, mask", "if isinstance(mask, torch.Tensor):\n    x = x.sum() / mask.sum()\nreturn x"),
    ("SO202", "x, mask", "if mask.dim() == 3 and mask.shape[0] > 1:\n    x = x.sum() / mask.sum()\nreturn x"),
    ("SO202", "x, mask", "if mask.dtype == torch.bool:\n    x = x.sum() / mask.sum()\nreturn x"),
    # formulas that half cannot hold
    ("SO202", "x, y", "return 1 - x.var() / y.var()"),
    ("SO202", "x, y", "scale = x.sum() / 4\nreturn (y / (scale * 2)).mean()"),
    ("SO202", "x", "return x / x[x > 0].mean()"),
    ("SO201", "x", "return (x**4).mean()"),
    ("SO201", "x, y, scale", "return (scale * (x - y) ** 2 + 1).mean()"),
    ("SO201", "x, y", "z = y.exp() * (x - y).square()\nreturn z.sum()"),
    ("SO211", "x", "return torch.exp(x) / torch.exp(x).sum(-1, keepdim=True)"),
    ("SO211", "x", "e = x.exp()\nreturn e / e.sum()"),
    ("SO211", "x, y", "return torch.log(x.exp() + y.exp().sum()).mean()"),
    ("SO211", "x", "return torch.log(torch.cumsum(x.exp(), 0)).mean()"),
    ("SO211", "x, y", "return torch.log(torch.exp(-torch.cdist(x, y)).mean(1)).mean()"),
    ("SO201", "x", "return x.pow(2).reshape(4, -1).sum(1).mean()"),
    ("SO201", "x, w", "return torch.sum(w * x * x)"),
    ("SO202", "x, labels", "n = torch.bincount(labels)\nreturn (x / n).mean()"),
    ("SO202", "x, y", "return (x / torch.sin(y)).mean()"),
    ("SO204", "x", "return torch.log1p(-x.clamp(max=1 - 1e-6)).mean()"),
    ("SO204", "x", "return torch.acos(x.clamp(-1, 1)).mean()"),
    ("SO204", "x, rho=1.5", "return torch.pow(x, 1 - rho).mean()"),
    ("SO206", "x, y, eps=1e-7", "return x / (y - x + (1 + eps))"),
    ("SO206", "x, y", "return (x / torch.where(y == 0, 1e-8, y)).mean()"),
    ("SO206", "x, n, beta=0.9999", "return x / (1 - torch.pow(beta, n))"),
    ("SO213", "x, tau=0.07", "return torch.exp(x / tau).mean()"),
    ("SO213", "x, logp, old_logp", "return (x * (logp - old_logp).exp()).mean()"),
    ("SO213", "x", "return torch.exp(64 * (x - 0.3)).sum()"),
    # in place, on an argument or on what was saved
    ("SO209", "x, y", "x.mul_(2)\nreturn F.l1_loss(x, y)"),
    ("SO209", "x, y", "d = x - y\ns = d * d\nd.mul_(2)\nreturn (s + d).float().mean()"),
    ("SO209", "x, y", "d = x - y\ns = torch.log(d)\nd /= 2\nreturn (s + d).mean()"),
    # a mask by its use
    ("SO105", "err, m", "return (err * m).sum() / m.sum()"),
    ("SO401", "x, y", "return F.mse_loss(x.half(), y)"),
    ("SO401", "x, y", "return F.l1_loss(x.to(torch.float16), y.to(torch.float16))"),
    ("SO401", "m, x, y", "with torch.cuda.amp.autocast():\n    p = m(x)\n    loss = (p - y).abs().mean()\nreturn loss"),
    (
        "SO401",
        "model, x, y, n",
        "with torch.autocast('cuda'):\n    loss = ((model(x) - y) ** 2).sub(1).mean() / n\nloss.backward()",
    ),
    ("SO201", "model, batch, y", "p = model(batch)\n((p - y) ** 2).mean().backward()"),
    ("SO402", "x, y", "with torch.autocast('cuda'):\n    return F.binary_cross_entropy(x, y)"),
    ("SO402", "x, y", "c = nn.BCELoss()\nwith torch.amp.autocast('cuda'):\n    return c(x, y)"),
    ("SO403", "x", "with torch.cuda.amp.autocast():\n    return x"),
    ("SO403", "x", "from torch.cuda import amp\nwith amp.autocast():\n    return x"),
    ("SO404", "m, data, accum", "for x in data:\n    (m(x).loss / accum).backward()"),
    (
        "SO404",
        "m, data, args",
        "for x in data:\n    loss = m(x, padding_mask)\n    loss /= args.grad_accum_steps\n    loss.backward()",
    ),
]
# (arguments, body): nothing at all is found, by any rule but those named
SILENT = [
    ("x, y", "mask = torch.sigmoid(y)\nreturn x * mask"),  # a weight, whatever it is called
    ("x, y", "mask = torch.softmax(y, 1).unsqueeze(0)\nreturn (x * mask).sum()"),
    # no tensors, or other people's
    ("", "a = np.ones(3)\nreturn np.log(a[a > 0]) / a.sum()"),
    ("n: int, rate: float", "return math.log(rate) / n + math.sqrt(n) + n ** -0.5"),
    ("names", "return [n for n in names if n]"),
    ("x, reduction='mean'", "if reduction == 'mean':\n    return x.mean()\nreturn x"),
    ("x", "b, c = x.shape\nreturn x.sum() / (b * c) + x.sum() / x.shape[0] + x.sum() / x.numel()"),
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
    # indices that are no masks
    ("x, index", "return x[index].mean() + x[0] + x[:, 1:] + x[..., None] + x[x.argmax()]"),
    ("x", "order = x.argsort()\nreturn x[order]"),
    ("x", "x = x.clone()\nx[0] = 1\nx[:, 2] = 0\nreturn x"),
    ("x, y, index", "x = x.clone()\nx[0] = y\nx[:, 2] = y + 1\nx[index] = y * 2\nx[y > 0] = 1\nreturn x"),
    ("x", "out = torch.zeros(3)\nout[out > 1] = 2\nreturn x + out"),
    # masks that are no factors of NaN
    ("x, y", "return ((x > 0) * (y > 0)).sum()"),
    ("x", "return 2 * (x > 0)"),
    ("x, mask", "return (torch.where(mask, x, 0) * mask).sum()"),
    # guarded
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
    # wide already
    ("x, y", "return ((x.float() - y.float()) ** 2).mean()"),
    ("x", "x = x.to(torch.float32)\nreturn x.square().sum() + torch.log(x + 1e-8)"),
    ("x", "return x.square().mean(dtype=torch.float32)"),
    ("x", "with torch.autocast('cuda', enabled=False):\n    return (x ** 2).mean()"),
    ("x, y", "with torch.autocast('cuda'):\n    loss = (x.float() - y).abs().mean()\nreturn loss"),
    # nothing saved, nothing to lose
    ("x", "with torch.no_grad():\n    x[x < 0] = 0\n    y = x.exp().clamp_(min=1e-3)\nreturn x"),
    ("x", "y = x.clone()\ny.clamp_(min=0)\ny[y > 1] = 1\nreturn y"),
    ("x", "out = torch.empty(3)\nout.fill_(1).clamp_(max=2)\nreturn x * out"),
    ("x, mask", "return safeops.masked_mean(x, mask) + safeops.safe_log(x, eps=1e-8) / safeops.masked_sum(x).exp()"),
    (
        "x, mask",
        "causal = torch.ones(3, 3).tril()\nx = x.masked_fill(causal == 0, float('-inf'))\nreturn x.softmax(-1)",
    ),
    ("x, mask", "return x.masked_fill(mask, 0.0) + x.masked_fill(mask, -1e4)"),
    # what half holds
    ("x, labels", "return ((x.sigmoid() - labels) ** 2).mean() + (2 * (1 - x.softmax(-1)) ** 2).mean()"),
    ("x, y", "d = torch.cdist(x.float(), y.float())\nreturn (F.relu(1 - d) ** 2 * 2).mean()"),
    ("x", "e = torch.exp(x - x.amax(-1, keepdim=True))\nreturn e / e.sum(-1, keepdim=True)"),
    ("x, y", "z = (x * 2).to(y.float().dtype)\nreturn y.float() / (z + 1e-8)"),
    ("x", "return torch.log(1 - x.clamp(1e-3, 1 - 1e-3)).mean() + torch.log1p(-x.clamp(max=0.99)).mean()"),
    ("x, t=1.0", "return (torch.exp(x / t) + torch.exp(-x / 0.07) + torch.exp(2 * x) + torch.exp(-64 * x)).mean()"),
    ("x, logp, old_logp", "return (x * (logp - old_logp).clamp(max=10).exp()).mean()"),
    ("x, y", "return x / torch.where(y == 0, 1e-3, y) + torch.pow(0.99, x) + y * (1 + 1e-2)"),
    # on the CPU nothing waits
    ("x, n", "i = torch.randint(4, (1,)).item()\nreturn x[i].mean()"),
    ("x, y", "keep = (y > 0).cpu()  # noqa: SO301\nreturn x.cpu()[keep].sum()  # noqa: SO301"),
    # classes are never NaN; the caller asks for it
    ("x, y, mask", "return (F.cross_entropy(x, y, reduction='none') * mask).mean()"),
    ("x, inplace", "if inplace:\n    return x.clamp_(0, 1).mean()\nreturn x.clamp(0, 1).mean()"),
    # labels, also by way of another name; pairs of samples are no valid places; finite numbers
    ("x, labels", "known = torch.stack([labels, labels])\nreturn ((x > 0.5).float() * known).sum()"),
    ("x, labels", "mask = labels.unsqueeze(0) != labels.unsqueeze(1)\nreturn (x * mask.float()).sum()"),
    ("x, mask_positives", "return (x * mask_positives).sum()"),
    ("x, mask", "w = torch.pow(2.0, torch.arange(4) - mask.sum(1, keepdim=True).clamp_min(0))\nreturn w * mask"),
    # kept from 0 two steps before
    ("x", "return torch.log(-torch.expm1(torch.clamp(x, max=-1e-4))).mean()"),
    ("x, k", "f = k(x)\nreturn (f.clamp_min(1e-3).sqrt() * f).mean()"),
    ("x", "p = x.clamp(max=1 - torch.finfo(torch.float64).eps)\nreturn torch.log(1 - p).mean()"),
    ("x, y", "e = x.exp().masked_select(y).view(4, -1)  # noqa: SO101\nreturn x / e.sum(-1)"),
    (
        "x, y",
        "x = F.normalize(x, eps=1e-3)\nc = F.cosine_similarity(x, y, eps=1e-3)\n"
        "return ((x @ x.T) ** 2).sum() + c.square().sum()",
    ),
    ("x, y", "x = x.to(y.kind.double_dtype)\nreturn torch.log10(x.square().mean() + 1e-10)"),
    ("x", "return torch.log(torch.diagonal(torch.linalg.cholesky(x), dim1=-2, dim2=-1)).sum()"),
    ("x, drop_prob, rate", "if rate() < drop_prob:\n    return x.mean() * 2\nreturn x.mean()"),
    # read for what runs on the host: a size, another library
    ("x, y", "end = y.amax().item()\nreturn x[:, :end].mean()"),
    ("x, y", "from scipy.optimize import linear_sum_assignment as assign\nreturn x[assign(y.cpu())[0]].mean()"),
    # micro-batches of one size
    ("m, data, accum", "for x in data:\n    loss = m(x) / accum\n    loss.backward()"),
    ("x, label, kind", "if kind.value == label:\n    print(f'{label} {kind}')\nreturn x.mean()"),
    ("x, y", "known = torch.tensor([1, 2])\ni = torch.where(known == 1)[0]\nreturn x[i].mean()"),
    (
        "x, y",
        "m, _ = torch.max(x, 1)\ntop = m.unsqueeze(1).expand_as(x)\n"
        "return (m + torch.log(torch.exp(x - top).sum(1))).mean()",
    ),
    ("x, y", "mask_idx = torch.randint(0, 4, (3,), device=x.device)\nreturn x[mask_idx].mean()"),
    ("x, mask_index", "return x[mask_index].mean()"),
    ("x, z_loss", "if 0 <= z_loss <= 1:\n    return x.mean()\nreturn x.mean() * 2"),
    # another branch
    ("x, kind", "if kind == 'raw':\n    x = x.softmax(-1)\nelse:\n    x = x.exp()\nreturn F.kl_div(x.log(), x)"),
    # errors are raised once
    ("x, n", "if n < 0:\n    raise ValueError(f'bad {x} {x.mean().item()}')\nreturn x"),
    ("x, y", "return F.binary_cross_entropy_with_logits(x, y)"),
    ("x", "with torch.amp.autocast('cuda'):\n    return x.mean()"),
]


def program(arguments, body):
    return f"{HEADER}def loss({arguments}):\n{textwrap.indent(body, '    ')}\n"


@pytest.mark.parametrize("code, arguments, body", FOUND, ids=lambda x: x[:60])
def test_found(code, arguments, body):
    assert code in {f.code for f in lint_source(program(arguments, body), rules=EVERY)}


@pytest.mark.parametrize("arguments, body", SILENT, ids=lambda x: x[:60])
def test_silent(arguments, body):
    found = lint_source(
        program(arguments, body).replace("import torch\n", "import safeops\nimport torch\n", 1), rules=EVERY
    )
    assert [(f.code, f.message) for f in found] == []


LOOP = """
for step, (x, y, mask) in enumerate(loader):
    loss = ((model(x) - y).abs() * mask).sum() / mask.sum()
    loss.backward()
"""


@pytest.mark.parametrize("place", ["def train(model, loader):", "if True:"])
def test_a_loop_over_a_loader_gives_tensors(place):
    """In a training step, which may be a script's own code."""
    code = f"import torch\n\n{place}{textwrap.indent(LOOP, '    ')}"
    assert [f.code for f in lint_source(code)] == ["SO202", "SO105"]
    assert not lint_source(code.replace("loss.backward()", "print(loss)"))
    assert not lint_source(code.replace("in enumerate(loader)", "in enumerate(settings)"))


def test_without_torch_nothing_is_found():
    for code, arguments, body in FOUND:
        lines = program(arguments, body).splitlines(keepends=True)
        source = "".join(line for line in lines if "import torch" not in line and "from torch" not in line)
        assert lint_source(source, rules=EVERY) == [], code


OUTSIDE = [
    "class ExpLoss(torch.autograd.Function):\n    def forward(ctx, x):\n        return x.exp().clamp_(max=1).log()\n",
    # only a loss is looked at by the rules about its arithmetic and its waiting
    "def report(x):\n    return x.mean().item(), torch.log(x), (x ** 2).sum(), x / x.sum()\n",
    "def evaluate(model, x):\n    print(model(x).mean())\n    if (x > 0).all():\n        return float(x.sum())\n",
    "class Net(nn.Module):\n    def forward(self, x):\n        return x / x.norm() + torch.log(x)\n",
]


@pytest.mark.parametrize("text", OUTSIDE)
def test_code_that_is_no_loss_is_left_alone(text):
    assert lint_source(HEADER + text) == []


def test_a_loss_is_told_by_what_it_is():
    body = "        return torch.log(x).mean()\n"
    for head in (
        "class DiceLoss(nn.Module):\n    def forward(self, x):\n",
        "class Helper:\n    def kl_loss(self, x):\n",
        "class Helper:\n    def log_loss(self, x):\n",
    ):
        assert [f.code for f in lint_source(HEADER + head + body)] == ["SO204"], head
    step = "def train(model, x):\n    p = model(x)\n    loss = torch.log(p).mean()\n"
    step += "    loss.backward()\n    print(loss.item())\n"
    assert [f.code for f in lint_source(HEADER + step)] == ["SO204"], "a training step may log"
    step = step.replace("loss.backward()", "self.optimizer.step(loss)") + "    return loss\n"
    assert [f.code for f in lint_source(HEADER + step)] == ["SO204"]


def test_a_metric_is_looked_at_and_its_gradient_is_not():
    body = "        return torch.log(x).mean() + x.sum() / y.sum()\n"
    metric = "class DiceMetric:\n    def compute(self, x, y):\n"
    assert [f.code for f in lint_source(HEADER + metric + body)] == ["SO202"]
    counting = metric.replace("DiceMetric", "KLDistance(_Base)").replace("compute", "_update") + body
    counting += "    def compute(self):\n        return self.total.item()\n"
    assert [f.code for f in lint_source(HEADER + counting)] == ["SO202"]
    counted = metric.replace("DiceMetric", "KLDivergence") + "        n = float(x.max())\n" + body
    assert [f.code for f in lint_source(HEADER + counted)] == ["SO301", "SO204", "SO202"]
    assert [f.code for f in lint_source(HEADER + counted.replace("Divergence", "Divergence(Metric)"))] == ["SO202"]
    update = "    def update(self, x):\n        self.total += x\n"
    assert [f.code for f in lint_source(HEADER + counted + update)] == ["SO202"]
    for name in ("GeneralizedCrossEntropy", "InfoNCE", "EuclideanDistance"):
        head = f"class {name}(nn.Module):\n    def forward(self, x, y):\n"
        assert [f.code for f in lint_source(HEADER + head + body)] == ["SO204", "SO202"], name


def test_what_a_loss_class_tells_of_itself_is_no_part_of_the_loss():
    head = "class ContrastiveLoss(nn.Module):\n    def forward(self, x):\n        return x.mean()\n\n"
    head += "    def {}(self):\n        return self.scale.exp().item()\n"
    assert lint_source(HEADER + head.format("get_config_dict")) == []
    assert lint_source(HEADER + head.format("extra_state")) != []
    transform = "class Distance(BaseTransform):\n    def forward(self, pos):\n        return float(pos.max())\n"
    assert lint_source(HEADER + transform) == []
    assert lint_source(HEADER + transform.replace("BaseTransform", "nn.Module")) != []


def test_a_helper_may_wait_and_may_not_lose_values():
    """What a loss calls also cuts, decodes and reports."""
    loss = "def chunked_loss(x, lengths):\n    return part(x, lengths).mean()\n\n\n"
    helper = "def part(x, lengths):\n    end = lengths.max().item()\n    return x.log() / end\n"
    assert [f.code for f in lint_source(HEADER + loss + helper)] == ["SO204"]
    assert [f.code for f in lint_source(HEADER + helper.replace("part", "part_loss"))] == ["SO301", "SO204"]


def test_an_optimizer_is_no_loss():
    body = (
        "    def step(self, closure):\n        loss = closure()\n        if torch.max(self.p) > 1:\n            pass\n"
    )
    source = HEADER + "class Lamb({}):\n" + body + "        return loss\n"
    assert lint_source(source.format("torch.optim.Optimizer")) == []
    assert [f.code for f in lint_source(source.format("nn.Module"))] == ["SO303"]


def test_what_a_class_holds_is_no_tensor_for_being_given_to_torch():
    body = "class TailLoss:\n    def loss(self, z):\n        q = self.q\n        return (torch.log(q) * z).mean()\n"
    assert lint_source(HEADER + body) == []
    assert lint_source(HEADER + body.replace("torch.log(q)", "torch.log(1 - q)")) == []
    assert [f.code for f in lint_source(HEADER + body.replace("torch.log(q)", "torch.log(1 - z)"))] == ["SO204"]


@pytest.mark.parametrize("head, codes", [
    ("class Smoothed(nn.Module):\n    def forward(self, logits, target):\n", ["SO202", "SO204"]),
    ("class Smoothed(nn.Module):\n    def forward(self, tokens, target):\n        logits = tokens\n", []),
    ("class Helper:\n    def compare(self, logits, target):\n", ["SO202"]),
    ("class Helper:\n    def plot_pair(self, logits, target):\n", []),
    ("class Helper:\n    def batch_psnr(self, logits, other):\n", ["SO202"]),
])  # fmt: skip
def test_what_compares_a_prediction_with_a_target_is_looked_at(head, codes):
    """A method that does it, `forward` for its gradient too; of what it fetches nothing is said."""
    body = "        n = float(logits.max())\n        return torch.log(logits).mean() * n / logits.sum()\n"
    assert [f.code for f in lint_source(HEADER + head + body)] == codes


ADAM = """def train(model, x):
    model.half()
    other = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW({}.parameters(), lr=1e-3{})
"""


def test_an_optimizer_beside_half_weights():
    for of, rest, found in (("model", "", 1), ("model", ", eps=1e-9", 1), ("other", "", 0), ("model", ", eps=1e-6", 0)):
        assert [f.code for f in lint_source(HEADER + ADAM.format(of, rest))] == ["SO405"] * found
    assert not lint_source(HEADER + ADAM.replace("model.half()", "x.half()").format("model", ""))
    assert not lint_source(HEADER + ADAM.replace("AdamW", "SGD").format("model", ""))


CLIP = """
for x in loader:
    scaler.scale(model(x).mean()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
"""


def test_clipping_of_what_is_still_scaled():
    assert [f.code for f in lint_source(HEADER + CLIP)] == ["SO406"]
    assert not lint_source(HEADER + CLIP.replace("    nn", "    scaler.unscale_(optimizer)\n    nn"))
    assert not lint_source(HEADER + CLIP.replace("scaler.scale(model(x).mean())", "model(x).mean()"))


DEMO = {
    "boolean_write": {"SO103", "SO206"},
    "multiply_by_mask": {"SO105", "SO206", "SO202"},
    "boolean_index": {"SO101", "SO206"},
    "where_after_division": {"SO101", "SO208"},
    "half_mask": {"SO105", "SO202"},
    "repaired_by_hand": {"SO101"},
    "with_safeops": set(),
}


def test_the_seven_losses_of_the_demo():
    source = (pathlib.Path(safeops.__file__).parent / "demo" / "losses.py").read_text()
    starts = {line.split("(")[0][4:]: i for i, line in enumerate(source.splitlines(), 1) if line.startswith("def ")}
    found = {name: set() for name in starts}
    for f in lint_source(source):
        name = max((n for n in starts if starts[n] <= f.line), key=starts.get)
        found[name].add(f.code)
    assert found == DEMO


@pytest.mark.parametrize("code, total, use", [
    ("SO202", "mask.sum()", "x.sum() / total"),
    ("SO203", "y", "(x / total).mean()"),
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
    assert code in codes(f"if y > 0:\n    x = x + {use}" if total != "y" else f"if x > 0:\n    x = x + {use}")


def test_a_clamp_below_one_is_not_called_none():
    source = program("x", "p = x.clamp(1e-6, 1 - 1e-6)\nreturn (torch.log(p) + torch.log(1 - p)).sum()")
    (finding,) = [f for f in lint_source(source) if f.code == "SO204"]
    assert finding.message.startswith("the clamp keeps the argument of log from 0 in fp32 alone")


@pytest.mark.parametrize(
    "body", ["valid = x > 0\nreturn torch.log(x[valid]).sum()", "return torch.log(x[0 < x]).sum()"]
)
def test_a_mask_that_asks_for_the_domain_is_a_guard(body):
    assert {f.code for f in lint_source(program("x", body), rules=EVERY)} == {"SO101"}
