"""A default run reports only findings that the code shows to be likely. A rule that the command names reports all."""

import pytest

from safeops_lint.check import lint_source
from safeops_lint.rules import RULES
from tests.lint.programs import EVERY, HEADER, program

# (rule, arguments, code that may never meet the problem, like code that is likely to meet it)
PAIRS = [
    # autocast computes pow in fp32, and the caller may keep the squared values small
    ("SO201", "x, y", "return ((x - y) ** 2).mean()", "return ((x - y.half()) ** 2).mean()"),
    # a sum of weights, or 1 - a norm, is hardly ever 0; a mask may be empty, and a row's norm 0
    ("SO202", "x, w", "return (x * w).sum() / w.sum()", "w = (w > 0).to(x.dtype)\nreturn (x * w).sum() / w.sum()"),
    ("SO202", "x, y", "return (x / (1 - x.norm(dim=1))).mean()", "return (x / (x.norm(dim=1) * y.norm())).mean()"),
    # differences of two tensors, and sizes over a batch, are hardly ever 0; those of a row or of one tensor may be
    ("SO202", "x, y", "return (x / (torch.max(x, y) - torch.min(x, y))).mean()",
     "return (x / (x.max(1)[0] - x.min(1)[0])).mean()"),
    ("SO202", "x, y", "return (x / x.max()).mean()", "return (x / (x.amax(1) - x.amin(1))[:, None]).mean()"),
    ("SO202", "x, y", "return ((x - y).abs() / y.abs().mean()).mean()", "return (x / x.norm(dim=1)).mean()"),
    ("SO202", "x, y", "n = (x - y).square().sum()\nreturn x.sum() / n", "n = y.square().sum()\nreturn x.sum() / n"),
    # only the caller knows an argument's values, unless its name says that it is a probability
    ("SO204", "depth", "return torch.log(depth).mean()", "return torch.log(1 - depth).mean()"),
    ("SO204", "input_labels, p", "return torch.log(input_labels).mean()", "return torch.log(p).mean()"),
    ("SO204", "pi, prob", "return torch.log(pi).mean()", "return torch.log(prob[pi > 0]).mean()"),
    ("SO204", "rate, p", "return torch.log(rate / 2).mean()", "return torch.log(p / rate).mean()"),
    ("SO204", "x, y", "return torch.sqrt(F.mse_loss(x, y))", "return torch.sqrt(x.var(1)).mean()"),
    ("SO204", "x, conf", "return (x - torch.log(conf)).mean()", "return (x - torch.log(1 - conf)).mean()"),
    # a noise level may end at 1, but needs no gradient
    ("SO204", "x, level", "return (x * (1 - level).sqrt()).mean()", "return (level * (1 - x).sqrt()).mean()"),
    ("SO204", "x, level", "level = level.view(-1, 1)\nreturn (x * (1 - level).sqrt()).mean()",
     "level = level * x\nreturn (x * (1 - level).sqrt()).mean()"),
    ("SO204", "x, level, t", "t = t.long()\nreturn (x * (1 - level[t]).sqrt()).mean()",
     "return (level * (1 - x[:, 0].view(-1)).sqrt()).mean()"),
    ("SO204", "x, level", "return (x * torch.rsqrt(1 - level)).mean()", "return (x - (1 - level).log()).mean()"),
    ("SO204", "x, level", "return (x * (1 - level).sqrt()).mean()", "return (1 - (x * level)).sqrt().mean()"),
    # under autocast exp is fp32, and overflows only above 88
    ("SO211", "x, y", "m = (y > 0).float()\nreturn torch.log(1 + torch.exp(x * m)).mean()",
     "m = (y > 0).type_as(x)\nreturn torch.log(1 + torch.exp(x * m)).mean()"),
    # a sum over a whole batch of differences is hardly ever 0
    ("SO205", "x, y", "return torch.sqrt(((x - y) ** 2).sum())", "return torch.sqrt(((x - y) ** 2).sum(1)).mean()"),
    ("SO205", "x, y", "d = x - y\nreturn (d * d).sum().sqrt()", "d = x - x.mean()\nreturn (d * d).sum().sqrt()"),
    # v / (|v| + 1e-6) is 1 at most
    ("SO206", "v", "return (v / (v.norm() + 1e-6)).mean()", "return (1 / (v.std() + 1e-6)).mean()"),
    # a masked-out element is a finite number most of the time
    ("SO105", "x, valid", "return (x * valid).mean()", "return (x * x.isfinite()).mean()"),
    ("SO105", "x, mask", "return ((x - 1).abs().sqrt() * mask).mean()", "return (torch.log(x) * mask).mean()"),
    # a value for numpy must leave the device
    ("SO301", "x, y", "w = solve(y.detach().cpu().numpy())\nreturn (x * w).mean()",
     "return (x * y.tolist()).mean()"),
    # squared norms are small; most boxes are fp32, since their anchors are
    ("SO210", "x, y", "return torch.sqrt((x**2).sum(1) * (y * y).sum(1)).mean()",
     "return torch.sqrt((x * y).sum(1) * (x + y).sum(1)).mean()"),
    ("SO210", "x, y", "return ((x**2).sum(1) * (y * y).sum(1)).mean()",
     "return ((x**2).sum(1) * (y.half() * y).sum(1)).mean()"),
    # a target comes from the data, which are fp32
    ("SO206", "x, target", "return torch.log(target[:, 2:] / target[:, :2] + 1e-16).mean()",
     "return torch.log(x[:, 2:] / target[:, :2] + 1e-16).mean()"),
    # an argument may be 0 if its name says so, if 0 is written into it, or if it is a sum or product in half. A divisor
    # is 0 only for certain data, which make a reciprocal inf, and NaN of a tensor over its own spread
    ("SO206", "x, y", "return (x / (x.norm() + 1e-8)).mean()", "return (x / (x.std(1) + 1e-8)).mean()"),
    ("SO206", "x, y", "return torch.cosh(x - y + 1e-8).mean()",
     "return torch.log(2 * (x - y + 1e-8) / (y + 1)).mean()"),
    ("SO206", "x, gamma", "return ((1 - x + 1e-8) ** 2).mean()", "return ((1 - x + 1e-8) ** gamma).mean()"),
    ("SO206", "p, y", "p = p.clamp(1e-8, 1)\nreturn F.binary_cross_entropy(p, y)",
     "p = p.clamp(1e-8, 1)\nreturn (y * p.log()).mean()"),
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
    formula = HEADER + helper.replace("x + 1e-8", "1 + torch.exp(x)")  # likely for any caller
    assert [f.code for f in lint_source(formula.format("_log_of", ""))] == ["SO211"]


BY_DEFAULT = [
    ("SO202", "error, mask", "return (error * mask).sum() / mask.sum()"),
    ("SO206", "a, b", "return (a / (b + 1e-8)).mean()"),
    ("SO202", "x, attention_mask", "return (x * attention_mask).sum(1) / attention_mask.sum(1)"),
    ("SO202", "x, padding_mask", "return x.sum(1) / padding_mask.sum(1, keepdim=True)"),
    ("SO202", "x, x_mask", "return x.sum() / x_mask.sum()"),
    ("SO202", "x, labels", "return x.sum() / (labels != -100).sum()"),
    ("SO206", "x, mask", "m = mask.type_as(x)\nreturn (x * m).sum() / (m.sum() + 1e-8)"),
    ("SO206", "x, y", "m = (y > 0).to(x.dtype)\nreturn (x * m).sum(1) / (m.sum(1) + 1e-8)"),
    ("SO206", "x, mask", "n = mask.to(x).sum() + 1e-8\nreturn x.sum() / n"),
    ("SO206", "x, mask", "n = mask.type_as(x).sum().clamp(min=1e-8)\nreturn x.sum() / n"),
]


@pytest.mark.parametrize("code, arguments, body", BY_DEFAULT)
def test_a_run_without_options_names_it(code, arguments, body):
    assert code in {f.code for f in lint_source(program(arguments, body))}


@pytest.mark.parametrize("body", [body for code, _, body in BY_DEFAULT if code == "SO206" and "mask" in body])
def test_a_count_in_half_is_not_mended_by_another_division(body):
    (finding,) = lint_source(program("x, mask", body))
    assert "safeops.masked_mean" in finding.message and "safe_div" not in finding.message and not finding.fixable


BCE = [
    "return F.binary_cross_entropy(torch.sigmoid(x), y)",
    "return F.binary_cross_entropy(x, y)",
    "bce = nn.BCELoss()\nreturn bce(x.sigmoid(), y)",
]


@pytest.mark.parametrize("body", BCE)
def test_whether_a_loss_runs_under_autocast_its_caller_may_decide(body):
    """torch's binary_cross_entropy raises under CUDA autocast. If no code shows autocast, the finding is only possible,
    and --fix must leave the call: its clamp of the logarithm at -100 would be lost."""
    indented = body.replace("\n", "\n    ")
    source = program("x, y", f"with torch.autocast(DEVICE):\n    {indented}")
    (finding,) = lint_source(source.replace("DEVICE", "'cuda'"), rules=[RULES["SO402"]])
    assert finding.likely and finding.fixable == ("sigmoid(x)" in body)
    for possible in (
        program("x, y", body),
        source.replace("DEVICE", "'cpu'"),
        source.replace("DEVICE", "device_type='cpu'"),
    ):
        assert "SO402" not in {f.code for f in lint_source(possible)}
        (finding,) = lint_source(possible, rules=[RULES["SO402"]])
        assert not finding.likely and not finding.fixable
    off = source.replace("DEVICE", "'cuda', enabled=False")
    for silent in (off, program("x, y", body.replace("x", "x.float()"))):
        assert lint_source(silent, rules=[RULES["SO402"]]) == []


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
