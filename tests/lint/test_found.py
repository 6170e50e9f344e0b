"""Code in which a rule must find something, as real projects write it. Each line is a case."""

import pytest

from safeops_lint.check import lint_source
from tests.lint.programs import EVERY, HEADER, program

# (rule, arguments of the function loss, body of the function)
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
    ("SO105", "x, pad", "x = F.relu(x).log()\nreturn (x * ~pad).sum()"),
    ("SO104", "x, y", "i = torch.nonzero(y)\nreturn x[i]"),
    ("SO104", "x, y", "return x[(y > 0).nonzero(as_tuple=True)]"),
    ("SO104", "x, y", "return x[torch.where(y > 0)]"),
    ("SO104", "x, y", "return x[torch.argwhere(y > 0)]"),
    ("SO105", "x, mask", "return (x.log() * mask).sum()"),
    ("SO105", "x, y", "m = (y > 0).float()\nreturn ((x / y - 1).abs() * m).sum()"),
    ("SO105", "x, y", "x = x.sqrt()\nx *= (y > 0)\nreturn x"),
    ("SO105", "x, y", "return (x.acos() * (1 - (y > 0).float())).sum()"),
    ("SO105", "x, mask", "return torch.mul(x**-0.5, mask.unsqueeze(-1))"),
    ("SO105", "x, y", "return torch.log(x + 1e-8) * y.ne(0).type_as(x)"),
    ("SO105", "x, y, mask", "return (x.masked_fill(y > 0, -math.inf).log_softmax(1) * mask).sum()"),
    ("SO105", "x, y", "return (x - y) * y.isfinite()"),
    ("SO105", "x, valid_mask", "return (x.abs() * valid_mask).sum()"),
    ("SO105", "x, y", "m = 1 - torch.isnan(y).float()\nreturn ((x - y) * m).sum()"),
    ("SO201", "x, y", "return torch.sum((x - y) ** 2)"),
    ("SO201", "x, y", "d = x - y\nreturn (d * d).mean()"),
    ("SO201", "x", "return x.pow(2).sum(dim=1).mean()"),
    ("SO202", "x, mask", "return (x.abs()).sum() / mask.sum()"),
    ("SO202", "x", "return x / x.norm(dim=-1, keepdim=True)"),
    ("SO202", "x", "return (x - x.mean()) / x.std()"),
    ("SO202", "x", "n = torch.linalg.norm(x)\nx = x / n\nreturn x"),
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
    ("SO208", "x, y", "return torch.where(y > 0, x / y, torch.zeros_like(x))"),
    ("SO208", "x", "l = torch.log(x)\nreturn torch.where(x == 0, 0.0, l)"),
    ("SO208", "x", "return torch.where(x.eq(0), x, x.sqrt())"),
    ("SO301", "x", "return x / x.max().item()"),
    ("SO301", "x", "n = int((x > 0).sum())\nreturn x.sum() / n"),
    ("SO301", "x", "return torch.tensor(x.detach().cpu().numpy().mean())"),
    ("SO301", "x", "return x * sum(x.mean(0).tolist())"),
    ("SO301", "x, y", "n = x.max().item()\nreturn x.mean() / n, {'n': n}"),
    ("SO301", "x", "return x.mean(), x.max().item()"),
    ("SO302", "x", "print('loss is', x.mean())\nreturn x.mean()"),
    ("SO302", "x", "text = f'{x.mean()}'\nreturn x"),
    ("SO303", "x", "if torch.isnan(x).any():\n    return x * 0\nreturn x"),
    ("SO303", "x, y", "assert (y >= 0).all()\nreturn x"),
    ("SO303", "x", "return x.mean() if x.sum() > 0 else x.sum() * 0"),
    ("SO303", "x", "while not bool((x > 0).all()) and x.mean() > 1:\n    x = x / 2\nreturn x"),
    # values that the linter must take for tensors
    ("SO202", "x, batch", "return x.sum() / batch['mask'].sum()"),
    ("SO204", "counts, lam", "return torch.log(counts / lam).mean()"),
    ("SO204", "lam, k", "return ((lam - k) * 2).sqrt().mean()"),
    ("SO206", "x", "s = torch.linalg.svdvals(x.float()).type_as(x)\nreturn s / (s.sum() + 1e-12)"),
    ("SO206", "x, y", "p = x / ((y > 0).sum() + 1e-3)\nreturn p / (p + 1e-7)"),
    ("SO206", "x, y", "p = x.softmax(-1)\nreturn (y * torch.log(p + 1e-6)).sum()"),
    ("SO206", "x", "p = x.softmax(-1)\nreturn (p * torch.log(p + 1e-8)).sum()"),
    ("SO206", "x, mask", "return x.sum() / ((x * mask).sum() + 1e-8)"),
    ("SO204", "x, v", "return (x * v.detach() ** -0.5).mean()"),
    ("SO204", "x, v", "return (x * v.detach().log()).mean()"),
    ("SO206", "first, second", "return torch.sqrt(torch.clamp(first + second, min=1e-9)).mean()"),
    ("SO206", "x, y", "z = (x.float() * 2).to(y.dtype)\nreturn y / (z + 1e-8)"),
    ("SO206", "x, y", "z = (x.float() * 2).to(y)\nreturn y / (z + 1e-8)"),
    ("SO206", "x, eps=1e-6", "return torch.sqrt(x * x + eps**2).mean()"),
    ("SO206", "x, eps=1e-6", "floor = eps * eps\nreturn torch.log(x + floor).mean()"),
    # conditions that do not depend on values, and so do not guard the division
    ("SO202", "x, mask", "if mask is not None:\n    x = x.sum() / mask.sum()\nreturn x"),
    ("SO202", "x, mask", "if isinstance(mask, torch.Tensor):\n    x = x.sum() / mask.sum()\nreturn x"),
    ("SO202", "x, mask", "if mask.dim() == 3 and mask.shape[0] > 1:\n    x = x.sum() / mask.sum()\nreturn x"),
    ("SO202", "x, mask", "if mask.dtype == torch.bool:\n    x = x.sum() / mask.sum()\nreturn x"),
    ("SO202", "x, out_weights", "return (x * out_weights).sum(-1) / out_weights.sum(-1)"),
    ("SO202", "x, labels", "weight = labels.ne(0).to(x.dtype)\nreturn (x * weight).sum() / weight.sum()"),
    ("SO202", "x, labels", "return x.sum() / (labels != -100).sum()"),
    ("SO202", "x, weight", "return x.sum() / weight.std()"),
    ("SO204", "x, var", "return (x + torch.log(var)).mean()"),
    ("SO204", "x, target", "return (x * target.log()).mean()"),
    ("SO204", "x, y, target", "return torch.sqrt(x * target).mean()"),
    ("SO204", "x, std", "return (x - std).log().mean()"),
    ("SO204", "x", "p = model(x)\nreturn p.log().mean()"),
    ("SO206", "x, y", "e = torch.exp(x - y)\nreturn (e / (e.sum(1) + 1e-8)).mean()"),
    ("SO206", "x, y", "return x / torch.clamp(y.sum() + 1e-9, min=1e-9)"),
    ("SO206", "x, weights", "return (x * weights).sum(1) / (weights.sum(1) + 1e-8)"),
    ("SO206", "x, std", "return (x / (std.amin() - std + 1e-8)).mean() + (x / (x * std + 1e-8)).mean()"),
    # formulas that overflow in half
    ("SO202", "x, y", "return 1 - x.var() / y.var()"),
    ("SO202", "x, y", "scale = x.sum() / 4\nreturn (y / (scale * 2)).mean()"),
    ("SO202", "x", "return x / x[x > 0].mean()"),
    ("SO201", "x", "return (x**4).mean()"),
    ("SO201", "x, y, flow", "z = flow.inverse(x)\nreturn (x - y).square().sum() + z.mean()"),  # not a matrix inverse
    ("SO201", "x, y, cov", "d = (x - y).square().sum(-1)\nreturn (d + cov.float().det()).mean()"),
    ("SO205", "x, m", "x = torch.where(m, x, 0.0)\nreturn x.square().sum(-1).sqrt().mean()"),
    ("SO301", "x, y", "n = (y > 0).sum().item()\nreturn x.sum() / n, n"),
    ("SO201", "x, y, scale", "return (scale * (x - y) ** 2 + 1).mean()"),
    ("SO201", "x, y", "z = y.exp() * (x - y).square()\nreturn z.sum()"),
    ("SO211", "x", "return torch.exp(x) / torch.exp(x).sum(-1, keepdim=True)"),
    ("SO211", "x", "e = x.exp()\nreturn e / e.sum()"),
    ("SO211", "x, y", "return torch.log(x.exp() + y.exp().sum()).mean()"),
    ("SO211", "x", "return torch.log(torch.cumsum(x.exp(), 0)).mean()"),
    ("SO201", "x", "return x.pow(2).reshape(4, -1).sum(1).mean()"),
    ("SO204", "x", "return torch.log1p(-x.clamp(max=1 - 1e-6)).mean()"),
    ("SO204", "x", "return torch.acos(x.clamp(-1, 1)).mean()"),
    ("SO204", "x, rho=1.5", "return torch.pow(x, 1 - rho).mean()"),
    ("SO206", "x, y, eps=1e-7", "return x / (y - x + (1 + eps))"),
    ("SO206", "x, y", "return (x / torch.where(y == 0, 1e-8, y)).mean()"),
    ("SO206", "x, n, beta=0.9999", "return x / (1 - torch.pow(beta, n))"),
    ("SO201", "x, valid", "d = x - 1\nd[~valid] = 0\nreturn (d * d).sum()"),
    # an eps that half can hold, but whose reciprocal overflows
    ("SO206", "x", "return torch.log(x + 1e-6).mean()"),
    ("SO206", "x, y", "return (x / (y.abs() + 1e-6)).mean()"),
    ("SO206", "x", "return x.clamp(min=1e-6).reciprocal().mean()"),
    ("SO206", "x", "return torch.log(torch.max(x, torch.full_like(x, 1e-9))).mean()"),
    # values that come from layers, loops and lambdas, or go into @
    ("SO204", "x", "p = nn.Sequential(nn.Linear(3, 3), nn.Softmax(-1))\nreturn p(x).log().mean()"),
    ("SO204", "x", "return x.abs().pow(0.5).mean()"),
    (
        "SO202",
        "outs, refs",
        "s = 0\nfor i, (o, r) in enumerate(zip(outs, refs)):\n    s += o.sum() / r.sum()\nreturn s",
    ),
    ("SO204", "k1, k2", "return torch.sqrt(torch.trace(k1 @ k2))"),
    ("SO204", "h", "return torch.log(1 - h).mean()"),
    # other functions with an edge
    ("SO204", "x, y", "return torch.xlogy(y, x).sum()"),
    ("SO204", "x", "return torch.logit(x).mean()"),
    ("SO202", "x, y", "return torch.addcdiv(x, y, y.std()).mean()"),
    # .float() passes the gradient on, unlike float(x)
    ("SO208", "x, y", "return torch.where(y != 0, x / y, 0).float().mean()"),
    ("SO204", "x, y", "return torch.sqrt((x - y).abs()).float().mean()"),
    ("SO205", "x, y", "ret = x - y\nreturn torch.sqrt(torch.sum(ret**2, dim=-1)).mean()"),
    (
        "SO204",
        "x, y",
        "c = F.cosine_similarity(x.float(), y.float()).clamp(-1, 1)\nreturn torch.sqrt(1 - c * c).mean()",
    ),
    ("SO204", "x, q", "return torch.log((x + 1e-3).clamp(max=q.sigmoid())).mean()"),
    ("SO206", "x, p", "p = p.detach()\nreturn (x * (1 / (p + 1e-6))).mean()"),
]


@pytest.mark.parametrize("code, arguments, body", FOUND, ids=lambda x: x[:60])
def test_found(code, arguments, body):
    assert code in {f.code for f in lint_source(program(arguments, body), rules=EVERY)}


def test_without_torch_nothing_is_found():
    for code, arguments, body in FOUND:
        lines = program(arguments, body).splitlines(keepends=True)
        source = "".join(line for line in lines if "import torch" not in line and "from torch" not in line)
        assert lint_source(source, rules=EVERY) == [], code


CLIP = """
for x in loader:
    scaler.scale(model(x).mean()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
"""


def test_a_step_by_what_is_still_scaled():
    step = CLIP.replace("nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "optimizer.step()")
    assert [f.code for f in lint_source(HEADER + step)] == ["SO406"]
    assert not lint_source(HEADER + step.replace("optimizer.step()", "scaler.step(optimizer)\n    scheduler.step()"))
    assert not lint_source(HEADER + step.replace("optimizer", "scheduler"))


def test_clipping_of_what_is_still_scaled():
    assert [f.code for f in lint_source(HEADER + CLIP)] == ["SO406"]
    assert not lint_source(HEADER + CLIP.replace("    nn", "    scaler.unscale_(optimizer)\n    nn"))
    assert not lint_source(HEADER + CLIP.replace("scaler.scale(model(x).mean())", "model(x).mean()"))


def test_a_clamp_below_one_is_not_called_none():
    source = program("x", "p = x.clamp(1e-6, 1 - 1e-6)\nreturn (torch.log(p) + torch.log(1 - p)).sum()")
    (finding,) = [f for f in lint_source(source) if f.code == "SO204"]
    assert finding.message.startswith("a clamp that is 1 in half keeps the argument of log")


def test_a_variance_in_a_window_is_that_of_ssim():
    for average, use in (("F.conv2d({}, y)", "ssim"), ("F.avg_pool2d({}, 3)", "ssim"), ("({}).mean()", "masked_var")):
        body = f"return ({average.format('x**2')} - {average.format('x')} ** 2).mean()"
        (finding,) = [f for f in lint_source(program("x, y", body)) if f.code == "SO212"]
        assert use in finding.message


@pytest.mark.parametrize("bound", ["1", "1 - 1e-6", "0.9999"])
def test_a_clamp_at_one(bound):
    (finding,) = lint_source(program("x, y", f"return torch.acos((x * y).sum(1).clamp(-1, {bound})).mean()"))
    assert finding.message.startswith("a clamp that is 1 in half keeps the argument of acos")


def test_a_root_is_not_told_of_one():
    (finding,) = lint_source(program("x", "return x.clamp(0, 1).sqrt().mean()"))
    assert finding.message.startswith("nothing keeps the argument of sqrt inside its domain")


@pytest.mark.parametrize(
    "body", ["valid = x > 0\nreturn torch.log(x[valid]).sum()", "return torch.log(x[0 < x]).sum()"]
)
def test_a_mask_that_asks_for_the_domain_is_a_guard(body):
    assert {f.code for f in lint_source(program("x", body), rules=EVERY)} == {"SO101"}
