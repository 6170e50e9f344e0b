"""Findings of a default run, which the code shows to be likely. A rule that is asked for reports the rest."""

import pytest

from safeops_lint.check import lint_source
from safeops_lint.rules import RULES
from tests.lint.programs import EVERY, HEADER, program

# code, arguments, what may well be kept away, the same where the code shows that it is not
PAIRS = [
    # autocast computes pow in fp32, and a caller keeps what is squared small
    ("SO201", "x, y", "return ((x - y) ** 2).mean()", "return ((x - y.half()) ** 2).mean()"),
    # a norm of matrices is 0 where all of them are; what is filled afterwards has a gradient of 0
    ("SO202", "x, y", "return (x / torch.norm(x, dim=(1, 2), keepdim=True) - y).abs().mean()",
     "return (x / torch.norm(x, dim=1, keepdim=True) - y).abs().mean()"),
    ("SO202", "x, y", "s = x.T @ x\nreturn (s / s.norm() - y).abs().mean()", "return (x / x.norm() - y).abs().mean()"),
    ("SO207", "x, y, mask",
     "a = x.masked_fill(mask, -torch.inf).softmax(1)\na = a.masked_fill(mask, 0)\nreturn (a @ y).mean()",
     "a = x.masked_fill(mask, -torch.inf).softmax(1)\nreturn (a.masked_fill(mask, 0) @ y).mean() + a.mean()"),
    ("SO207", "x, mask",
     "s = torch.softmax(x.masked_fill(mask, -torch.inf), 1)\nloss = torch.where(mask.all(1), 0, s)\nreturn loss",
     "s = torch.softmax(x.masked_fill(mask, -torch.inf), 1)\nreturn s.mean()"),
    # log(1 - exp(x)), which is NaN at x = 0 alone; what has no gradient
    # weights and lengths are not all 0
    ("SO202", "x, w", "return (x * w).sum() / w.sum()", "w = (w > 0).to(x.dtype)\nreturn (x * w).sum() / w.sum()"),
    ("SO202", "x, fro", "return (x / x.norm(p='fro')).mean()", "return (x / fro.norm()).mean()"),
    ("SO202", "x, y", "return (x / (1 - x.norm(dim=1))).mean()", "return (x / (x.norm(dim=1) * y.norm())).mean()"),
    ("SO202", "x, weight", "return (x / weight.norm(dim=1)).mean()", "return (x / x.norm(dim=1)).mean()"),
    ("SO202", "x, y", "return y[x / x.std() > 3].mean()", "return (x / x.std()).mean()"),
    # which of two is larger, and the largest of all
    ("SO202", "x, y", "return (x / (torch.max(x, y) - torch.min(x, y))).mean()",
     "return (x / (x.max(1)[0] - x.min(1)[0])).mean()"),
    ("SO202", "x, y", "return (x / x.max()).mean()", "return (x / (x.amax(1) - x.amin(1))[:, None]).mean()"),
    ("SO202", "x, y", "return ((x - y).abs() / y.abs().mean()).mean()", "return (x / x.norm(dim=1)).mean()"),
    ("SO202", "x, y", "n = (x - y).square().sum()\nreturn x.sum() / n", "n = y.square().sum()\nreturn x.sum() / n"),
    # only the caller knows what an argument holds, unless its name says a probability
    ("SO204", "depth", "return torch.log(depth).mean()", "return torch.log(1 - depth).mean()"),
    ("SO204", "input_labels, p", "return torch.log(input_labels).mean()", "return torch.log(p).mean()"),
    ("SO204", "pi, prob", "return torch.log(pi).mean()", "return torch.log(prob[pi > 0]).mean()"),
    ("SO204", "rate, p", "return torch.log(rate / 2).mean()", "return torch.log(p / rate).mean()"),
    ("SO204", "re, im", "return torch.sqrt(re**2 + im**2).mean()", "return torch.sqrt((re - im).abs() / 8).mean()"),
    ("SO204", "x, y", "return torch.sqrt(F.mse_loss(x, y))", "return torch.sqrt(x.var(1)).mean()"),
    ("SO204", "x, conf", "return (x - torch.log(conf)).mean()", "return (x - torch.log(1 - conf)).mean()"),
    # a noise schedule ends at 1 and has no gradient
    ("SO204", "x, level", "return (x * (1 - level).sqrt()).mean()", "return (level * (1 - x).sqrt()).mean()"),
    ("SO204", "x, level", "level = level.view(-1, 1)\nreturn (x * (1 - level).sqrt()).mean()",
     "level = level * x\nreturn (x * (1 - level).sqrt()).mean()"),
    ("SO204", "x, level, t", "t = t.long()\nreturn (x * (1 - level[t]).sqrt()).mean()",
     "return (level * (1 - x[:, 0].view(-1)).sqrt()).mean()"),
    ("SO204", "x, level", "return (x * torch.rsqrt(1 - level)).mean()", "return (x - (1 - level).log()).mean()"),
    ("SO204", "x, level", "return (x * (1 - level).sqrt()).mean()", "return (1 - (x * level)).sqrt().mean()"),
    ("SO204", "x, y", "return torch.log(1 - torch.exp(-2 * y)).mean()", "return torch.log(1 - torch.tanh(y)).mean()"),
    # a batch has fewer rows than an image has pixels
    # what is fetched has no gradient; inf is what the PSNR of equal images is, and is stored through an index
    ("SO204", "x, y", "print(torch.acos((x * y).sum(1).clamp(-1, 1)).cpu().numpy())\nreturn x.mean()",
     "print(torch.acos((x * y).sum(1)).cpu().numpy())\nreturn x.mean()"),
    ("SO204", "x, y", "c = x.max(1)[0].clamp(-1, 1)\nw = torch.acos(c).detach()\nreturn (w * x).mean()",
     "c = x.max(1)[0].clamp(-1, 1)\nw = torch.acos(c).float()\nreturn (w * x).mean()"),
    ("SO204", "x, y", "def psnr(x):\n    return torch.log10(1 - x.sigmoid())\nreturn psnr(x).mean()",
     "def psnr(x):\n    return torch.sqrt(1 - x.sigmoid())\nreturn psnr(x).mean()"),
    # bf16 holds 1e-12, and autocast normalizes in fp32
    ("SO206", "x, y", "return F.normalize(x.bfloat16()).mean()", "return F.normalize(x.half()).mean()"),
    ("SO206", "x, y", "with torch.autocast('cuda', dtype=torch.float16):\n    return F.normalize(x).mean()",
     "return F.normalize(x.to(torch.float16)).mean()"),
    # to clamp a target twice is to clamp it once
    # most similarities and distances are small
    ("SO211", "near, far, score", "return torch.log1p(torch.exp(near - far)).mean()",
     "return torch.log1p(torch.exp(near - score)).mean()"),
    ("SO211", "sim, target", "e = torch.exp(sim @ target)\nreturn (e / e.sum(1)).log().mean()",
     "logits = sim @ target\ne = torch.exp(logits)\nreturn (e / e.sum(1)).log().mean()"),
    ("SO211", "sim, y", "return torch.log(torch.exp(sim).sum(1)).mean()",
     "return torch.log(torch.exp(sim / 0.05).sum(1)).mean()"),
    ("SO211", "sim", "return -torch.log(torch.exp(sim) / torch.exp(sim).sum(1)).mean()",
     "return -torch.log(torch.exp(sim / 0.07) / torch.exp(sim / 0.07).sum(1)).mean()"),
    ("SO211", "near, sim", "return (torch.exp(near) / torch.exp(sim).sum(1)).mean()",
     "return (torch.exp(near) / torch.exp(sim / 0.07).sum(1)).mean()"),
    ("SO211", "near, sim", "return torch.log(torch.exp(near) / (torch.exp(near) + torch.exp(sim)).sum(1)).mean()",
     "r = torch.exp(near) / (torch.exp(near) + torch.exp(sim / 0.07)).sum(1)\nreturn torch.log(r).mean()"),
    ("SO211", "sim, y", "e = torch.exp(sim)\nreturn torch.log(e.sum(1)).mean()",
     "e = torch.exp(sim / 0.05)\nreturn torch.log(e.sum(1)).mean()"),
    ("SO211", "sim, target", "e = torch.exp(sim @ target)\nreturn torch.log(e.sum(1)).mean()",
     "outputs = sim @ target\ne = torch.exp(outputs)\nreturn torch.log(e.sum(1)).mean()"),
    ("SO211", "near, outputs", "d = near * 2\nreturn torch.log1p(torch.exp(d)).mean()",
     "d = outputs * 2\nreturn torch.log1p(torch.exp(d)).mean()"),
    ("SO211", "near, sim", "return torch.log(torch.exp(sim).sum(1) + torch.exp(near)).mean()",
     "return torch.log(torch.exp(sim).sum(1) - torch.exp(near)).mean()"),
    ("SO211", "logp, old_logp", "return torch.log(1 + torch.exp(logp - old_logp)).mean()",
     "return torch.log(1 + torch.exp(logp - old_logp / 0.05)).mean() + torch.log(1 + torch.exp(logp / 0.05)).mean()"),
    # fp32 holds exp up to 88
    ("SO211", "x, y", "m = (y > 0).float()\nreturn torch.log(1 + torch.exp(x * m)).mean()",
     "m = (y > 0).type_as(x)\nreturn torch.log(1 + torch.exp(x * m)).mean()"),
    ("SO211", "near, far", "e = torch.exp(near - far)\nreturn (e / e.sum(1)).mean()",
     "return torch.log(torch.cosh(near - far)).mean()"),
    # no batch is met in all its elements
    ("SO205", "x, y", "return torch.sqrt(((x - y) ** 2).sum())", "return torch.sqrt(((x - y) ** 2).sum(1)).mean()"),
    ("SO205", "x, y", "d = x - y\nreturn (d * d).sum().sqrt()", "d = x - x.mean()\nreturn (d * d).sum().sqrt()"),
    # half a chord is 1 between opposite points alone
    ("SO204", "x, y", "return torch.asin((x - y).norm(dim=1) / 2).mean()", "return torch.acos((x * y).sum(1)).mean()"),
    # v / (|v| + 1e-6) is 1 at most
    ("SO206", "v", "return (v / (v.norm() + 1e-6)).mean()", "return (1 / (v.std() + 1e-6)).mean()"),
    # what is not valid is a number most of the time
    ("SO105", "x, valid", "return (x * valid).mean()", "return (x * x.isfinite()).mean()"),
    ("SO105", "x, mask", "return ((x - 1).abs().sqrt() * mask).mean()", "return (torch.log(x) * mask).mean()"),
    # a matcher's indices are on the CPU; what numpy computes cannot stay a tensor
    ("SO301", "x, idx: torch.Tensor", "return x * idx[0].item()", "return x * (idx > 0).sum().item()"),
    ("SO301", "x, y", "w = solve(y.detach().cpu().numpy())\nreturn (x * w).mean()",
     "return (x * y.tolist()).mean()"),
    ("SO301", "x, indices: torch.Tensor", "return x * len(indices.cpu())", "return x * len(x.cpu())"),
    # squared norms are small, and anchors make most boxes fp32
    ("SO210", "x, y", "return torch.sqrt((x**2).sum(1) * (y * y).sum(1)).mean()",
     "return torch.sqrt((x * y).sum(1) * (x + y).sum(1)).mean()"),
    ("SO210", "x, y", "return ((x**2).sum(1) * (y * y).sum(1)).mean()",
     "return ((x**2).sum(1) * (y.half() * y).sum(1)).mean()"),
    # data are fp32
    ("SO206", "x, target", "return torch.log(target[:, 2:] / target[:, :2] + 1e-16).mean()",
     "return torch.log(x[:, 2:] / target[:, :2] + 1e-16).mean()"),
    # what of an argument may be 0 its name says, or what was written into it; sums and products are 0 in half
    ("SO206", "depth, attn", "return torch.log(depth + 1e-8).mean()", "return torch.log(attn + 1e-8).mean()"),
    # whether a divisor is ever 0 only the data tell; one over it is inf there, and a tensor over its own spread NaN
    ("SO206", "x, y", "return (x / (x.norm() + 1e-8)).mean()", "return (x / (x.std(1) + 1e-8)).mean()"),
    ("SO206", "x, y", "return torch.cosh(x - y + 1e-8).mean()",
     "return torch.log(2 * (x - y + 1e-8) / (y + 1)).mean()"),
    ("SO206", "x, gamma", "return ((1 - x + 1e-8) ** 2).mean()", "return ((1 - x + 1e-8) ** gamma).mean()"),
    ("SO206", "p, y", "p = p.clamp(1e-8, 1)\nreturn F.binary_cross_entropy(p, y)",
     "p = p.clamp(1e-8, 1)\nreturn (y * p.log()).mean()"),
    # autocast normalizes in fp32
    ("SO206", "x, y", "return F.normalize(x).mean()", "return F.normalize(x.half()).mean()"),
    ("SO206", "x, y", "return F.cosine_similarity(x, y, 1, 1e-9).mean()",
     "return F.cosine_similarity(x.half(), y, 1, 1e-9).mean()"),
    ("SO206", "depth, y", "return torch.log((depth @ y) + 1e-8).mean()", "return torch.log((depth * y) + 1e-8).mean()"),
    ("SO206", "depth, p", "return torch.log(depth + 1e-6).mean()", "return torch.log(p + 1e-6).mean()"),
    # autocast computes powers, sums and softmax in fp32
    ("SO206", "x, y", "return torch.log(x.softmax(1) + 1e-8).mean()", "return torch.log(x.sigmoid() + 1e-8).mean()"),
    ("SO206", "x, y", "return torch.log((x - y) ** 2 + 1e-8).mean()", "return torch.log((x - y).abs() + 1e-8).mean()"),
    ("SO206", "x, y", "return torch.log((x - y) ** 2 + 1e-6).mean()", "return torch.log((x - y).abs() + 1e-6).mean()"),
    ("SO206", "x, y", "return torch.log((x - y).exp() / 2 + 1e-8).mean()",
     "return torch.log((x - y).exp().half() / 2 + 1e-8).mean()"),
    ("SO206", "x, y", "return torch.log(F.conv1d(x, y).exp() - y + 1e-8).mean()",
     "return torch.log(F.conv1d(x.exp(), y) - y + 1e-8).mean()"),
    ("SO206", "p, q", "return torch.log(p @ q + 1e-8).mean()", "return torch.log(p * q + 1e-8).mean()"),
    # the loss itself pulls a log-variance to 0
    # a policy has moved little since it was sampled, while it is clipped
]  # fmt: skip


def told(arguments, body, **options):
    return {f.code for f in lint_source(program(arguments, body), **options)}


@pytest.mark.parametrize("code, arguments, possible, likely", PAIRS, ids=lambda x: x[:60])
def test_a_default_run_tells_what_is_likely(code, arguments, possible, likely):
    assert code not in told(arguments, possible)
    assert code in told(arguments, possible, rules=EVERY)
    assert code in told(arguments, likely)


def test_a_condition_on_an_option_asks_about_no_tensor():
    method = """class SomeLoss(nn.Module):
    def forward(self, x):
        if self.{}:
            x = x * 2
        return torch.sqrt(torch.sum((x - self.center) ** 2, dim=-1)).mean()
"""
    assert [f.code for f in lint_source(HEADER + method.format("reduce"))] == ["SO205"]


def test_a_test_trains_nothing():
    source = program("x, y", "return torch.log(x + 1e-8)[y > 0].mean()")
    assert {f.code for f in lint_source(source, "losses.py")} == {"SO101", "SO206"}
    for path in ("tests/test_losses.py", "losses_test.py", "conftest.py"):
        assert lint_source(source, path) == []
        assert {f.likely for f in lint_source(source, path, rules=EVERY)} == {False}
    assert lint_source(source, "latest.py") and lint_source(source, "testing.py")


def test_what_is_possible_says_so():
    possible, likely = (
        lint_source(program("x, y", body), rules=EVERY) for body in ("return ((x - y) ** 2).mean()", PAIRS[0][3])
    )
    assert [f.likely for f in possible] == [False] and [f.likely for f in likely] == [True]


def test_an_exponent_over_a_temperature_is_large_whichever_rule_is_asked():
    source = program("sim", "return torch.log(torch.exp(sim / 0.07).sum(1)).mean()")
    assert [f.likely for f in lint_source(source, rules=[RULES["SO211"]])] == [True]


def test_a_difference_of_squares_in_fp32_is_possible_alone():
    body = "return (x{0}**2).mean() - x{0}.mean() ** 2"
    assert "SO212" in told("x", body.format("")) and "SO212" not in told("x", body.format(".float()"))
    assert "SO212" in told("x", body.format(".float()"), rules=EVERY)


def test_a_private_function_is_given_what_its_callers_made_for_it():
    helper = (
        "def {0}(x):\n    return torch.log(x + 1e-8){1}\n\n\ndef some_loss(x, y):\n    return ({0}(x) - y).mean()\n"
    )
    assert [f.code for f in lint_source(HEADER + helper.format("log_of", ""))] == ["SO206"]
    assert lint_source(HEADER + helper.format("_log_of", "")) == []
    assert [f.likely for f in lint_source(HEADER + helper.format("_log_of", ""), rules=EVERY)] == [False]
    formula = HEADER + helper.replace("x + 1e-8", "1 + torch.exp(x)")  # which is the same whoever calls it
    assert [f.code for f in lint_source(formula.format("_log_of", ""))] == ["SO211"]


BY_DEFAULT = [
    ("SO202", "error, mask", "return (error * mask).sum() / mask.sum()"),
    ("SO206", "a, b", "return (a / (b + 1e-8)).mean()"),
    ("SO202", "x, attention_mask", "return (x * attention_mask).sum(1) / attention_mask.sum(1)"),
    ("SO202", "x, padding_mask", "return x.sum(1) / padding_mask.sum(1, keepdim=True)"),
    ("SO202", "x, x_mask", "return x.sum() / x_mask.sum()"),
    ("SO202", "x, labels", "return x.sum() / (labels != -100).sum()"),
]


@pytest.mark.parametrize("code, arguments, body", BY_DEFAULT)
def test_a_run_without_options_names_it(code, arguments, body):
    assert code in {f.code for f in lint_source(program(arguments, body))}


WRITES = [
    "error = (x - y).abs()\nerror[mask] = 0\nreturn error.mean()",
    "error = (x - y).clone()\nerror[y > 0] = 0\nreturn error.mean()",
    "loss = ((x - y) * 2).mean(1)\nloss[mask] = 0.0\nloss.mean().backward()",
]


@pytest.mark.parametrize("body", WRITES)
def test_a_boolean_write_is_named_if_only_as_possible(body):
    assert "SO103" in {f.code for f in lint_source(program("x, y, mask", body), rules=EVERY)}
    step = HEADER + "def train(x, y, mask):\n    " + body.replace("\n", "\n    ").replace("return ", "loss = ")
    assert "SO103" in {f.code for f in lint_source(step + "\n    loss.backward()\n", rules=EVERY)}
