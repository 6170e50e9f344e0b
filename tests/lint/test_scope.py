"""The linter checks losses, the functions that they call, metrics and training steps, and no other code."""

import pathlib
import textwrap

import pytest

import safeops
from safeops_lint.check import lint_source
from tests.lint.programs import EVERY, HEADER

LOOP = """
for step, (x, y, mask) in enumerate(loader):
    loss = ((model(x) - y).abs() * mask).sum() / mask.type_as(x).sum()
    loss.backward()
"""


@pytest.mark.parametrize("place", ["def train(model, loader):", "if True:"])
def test_a_loop_over_a_loader_gives_tensors(place):
    """In a training step, also at a script's top level, a loop over a loader must be taken to give tensors."""
    code = f"import numpy as np\nimport torch\n\n{place}{textwrap.indent(LOOP, '    ')}"
    assert [f.code for f in lint_source(code)] == ["SO202"]
    assert not lint_source(code.replace("loss.backward()", "print(loss)"))
    for what in ("self.train_loader", "tqdm(data)", "loader(x)", "get_batches(x)"):
        assert lint_source(code.replace("enumerate(loader)", f"enumerate({what})"))


OUTSIDE = [
    "class TestLoss(TestCase):\n    def test_it(self):\n        loss = net(torch.rand(3))\n        assert loss < 1\n",
    "class ExpLoss(torch.autograd.Function):\n    def forward(ctx, x):\n        return x.exp().clamp_(max=1).log()\n",
    # functions that are no losses: the rules about arithmetic and synchronization do not apply
    "def report(x):\n    return x.mean().item(), torch.log(x), (x ** 2).sum(), x / x.sum()\n",
    "def survival(time, y):\n    return time[time > y], torch.nonzero(time > y)\n",
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
        "class TestTimeLoss(nn.Module):\n    def adapt(self, x):\n",
        "class Helper:\n    def kl_loss(self, x):\n",
        "class Helper:\n    def log_loss(self, x):\n",
    ):
        assert [f.code for f in lint_source(HEADER + head + body)] == ["SO204"], head
    step = "def train(model, x):\n    p = model(x)\n    loss = torch.log(p).mean()\n"
    step += "    loss.backward()\n    print(loss.item())\n"
    assert [f.code for f in lint_source(HEADER + step)] == ["SO204"], "a training step may log"
    step = step.replace("loss.backward()", "self.optimizer.step(loss)") + "    return loss\n"
    assert [f.code for f in lint_source(HEADER + step)] == ["SO204"]


@pytest.mark.parametrize("verb", ["load", "init", "test", "update", "parse", "convert", "reset", "register"])
def test_a_loss_may_be_called_by_a_word_that_begins_with_a_verb(verb):
    """load_balancing_loss(p, mask) and initial_condition_loss(p, mask) must count as losses, despite the verb; a method
    load_loss(self, loss), which only handles a loss, must not."""
    body = "    return (torch.log(p) * mask).sum() / mask.sum()\n"
    for name in (f"{verb}_balancing_loss", f"{verb}ial_condition_loss_func", f"{verb}_loss"):
        assert {f.code for f in lint_source(f"{HEADER}def {name}(p, mask):\n{body}")} >= {"SO202"}, name
    about = f"def {verb}_loss(self, loss):\n    if loss.isnan():\n        print(loss)\n    self.loss = loss.item()\n"
    assert lint_source(HEADER + about) == [] == lint_source(HEADER + about + "    return loss\n")


def test_a_batch_that_is_taken_apart_is_of_tensors():
    step = "def step({}):\n    x, y = {}\n    loss = torch.sqrt(x - y).mean()\n    loss.backward()\n"
    assert [f.code for f in lint_source(HEADER + step.format("batch", "batch"))] == ["SO204"]
    assert (
        lint_source(HEADER + step.format("shape", "shape").replace("torch.sqrt(x - y).mean()", "net(x) / (x - y)"))
        == []
    )


def test_a_metric_is_looked_at_and_its_gradient_is_not():
    body = "        return torch.log(x).mean() + x.sum() / y.std()\n"
    metric = "class DiceMetric:\n    def compute(self, x, y):\n"
    assert [f.code for f in lint_source(HEADER + metric + body)] == ["SO202"]
    counting = metric.replace("DiceMetric", "KLDistance(_Base)").replace("compute", "_update") + body
    counting += "    def compute(self):\n        return self.total.item()\n"
    assert lint_source(HEADER + counting) == []
    counted = metric.replace("DiceMetric", "KLDivergence") + "        n = float(x.max())\n" + body
    assert [f.code for f in lint_source(HEADER + counted)] == ["SO301", "SO204", "SO202"]
    assert [f.code for f in lint_source(HEADER + counted.replace("Divergence", "Divergence(Metric)"))] == []
    update = "    def update(self, x):\n        self.total += x\n"
    assert lint_source(HEADER + counted + update) == []
    for name in ("GeneralizedCrossEntropy", "InfoNCE", "EuclideanDistance"):
        head = f"class {name}(nn.Module):\n    def forward(self, x, y):\n"
        assert [f.code for f in lint_source(HEADER + head + body)] == ["SO204", "SO202"], name


def test_what_a_loss_class_tells_of_itself_is_no_part_of_the_loss():
    head = "class ContrastiveLoss(nn.Module):\n    def forward(self, x):\n        return x.mean()\n\n"
    head += "    def {}(self):\n        return torch.ones(3) * self.scale.exp().item()\n"
    assert lint_source(HEADER + head.format("get_config_dict")) == []
    assert lint_source(HEADER + head.format("extra_state")) != []
    transform = "class Distance(BaseTransform):\n    def forward(self, pos):\n        return pos / float(pos.max())\n"
    assert lint_source(HEADER + transform) == []
    assert lint_source(HEADER + transform.replace("BaseTransform", "nn.Module")) != []


def test_a_helper_may_wait_and_may_not_lose_values():
    """A loss's helper may select or report, so a synchronization in it is no finding; a NaN or overflow is one."""
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
    ("class Smoothed(nn.Module):\n    def forward(self, x, target):\n        logits = x\n", ["SO202", "SO204"]),
    ("class Smoothed(nn.Module):\n    def smooth(self, tokens, target):\n        logits = tokens\n", []),
    ("class Helper:\n    def compare(self, logits, target):\n", ["SO202"]),
    ("class Helper:\n    def plot_pair(self, logits, target):\n", []),
    ("class Helper:\n    def batch_psnr(self, logits, other):\n", ["SO202"]),
])  # fmt: skip
def test_what_compares_a_prediction_with_a_target_is_looked_at(head, codes):
    """A method that compares a prediction with a target is checked: no method for synchronizations, and only `forward`
    for its gradient."""
    body = "        n = float(logits.max())\n        return torch.log(1 - logits).mean() * n / logits.std()\n"
    assert [f.code for f in lint_source(HEADER + head + body)] == codes


DEMO = {
    "boolean_write": {"SO103", "SO202"},
    "multiply_by_mask": {"SO105", "SO202"},
    "half_eps": {"SO202", "SO206"},
    "where_after_log": {"SO202", "SO208"},
    "half_mask": {"SO202"},
    "repaired_by_hand": {"SO101"},
    "with_safeops": set(),
}


def test_the_seven_losses_of_the_demo():
    source = (pathlib.Path(safeops.__file__).parent / "demo" / "losses.py").read_text()
    starts = {line.split("(")[0][4:]: i for i, line in enumerate(source.splitlines(), 1) if line.startswith("def ")}
    results = {name: set() for name in starts}
    for f in lint_source(source):
        name = max((n for n in starts if starts[n] <= f.line), key=starts.get)
        results[name].add(f.code)
    assert results == DEMO


SQUARES = "def square_loss(x, y):\n    return (x - y).square().sum() / torch.log(x + 1e-8).mean().clamp(min=1)\n"


@pytest.mark.parametrize(
    "decorator",
    ["@f64_math", "@force_fp32()", "@force_fp32(apply_to=('x',))", "@custom_fwd(cast_inputs=torch.float32)"],
)
def test_a_decorator_that_casts_makes_it_wide(decorator):
    code = HEADER + "from mmcv.runner import f64_math, force_fp32\nfrom torch.amp import custom_fwd\n"
    for left in (SQUARES, f"@custom_fwd(cast_inputs=torch.float16)\n{SQUARES}"):
        assert {f.code for f in lint_source(code + left, rules=EVERY)} == {"SO201", "SO206"}
    assert lint_source(f"{code}{decorator}\n{SQUARES}", rules=EVERY) == []


def test_a_guard_in_a_loss_is_named_once():
    (finding,) = lint_source(HEADER + "def loss(x: torch.Tensor):\n    return torch.log10(x.abs() + 1e-8).mean()\n")
    assert finding.code == "SO206" and "eps=" in finding.message


def test_a_logarithm_of_exponentials_is_asked_about_in_losses():
    """Outside of losses log(sum(exp(x))) is no finding, since the caller may have subtracted the maximum."""
    body = "def {}(x):\n    return x.abs().exp().sum(1).log().mean()\n"
    assert [f.code for f in lint_source(HEADER + body.format("some_loss"))] == ["SO211"]
    assert lint_source(HEADER + body.format("evaluate_norm")) == []
