"""What is wrong in half wherever it stands, and what functions return to their callers."""

import textwrap

import pytest

from safeops.lint.check import lint_source
from tests.lint.programs import DEFAULT, HEADER


def codes(source):
    source = HEADER + "from dataclasses import dataclass\n" + textwrap.dedent(source)
    return [f.code for f in lint_source(source, rules=DEFAULT)]


def method(body, arguments="x: torch.Tensor, y: torch.Tensor", name="mix", base="nn.Module", inside=""):
    return (
        f"class Layer({base}):\n{textwrap.indent(inside, '    ')}\n    def {name}(self, {arguments}):\n"
        + textwrap.indent(body, "        ")
    )


# (what is found, what is not), of a layer's method that is no loss
BODIES = [
    ("SO206", "return x / (y.exp() + 1e-16)", "return x / (y.exp() + 1e-4)"),
    ("SO206", "return x + (y + 1e-45).log()", "return x + (y.float() + 1e-45).log()"),
    ("SO206", "return x * torch.rsqrt(y.clamp(min=1e-12))", "return x * y.clamp(min=1e-12)"),
    ("SO206", "d = y.sqrt().add_(1e-8)\nreturn x.addcdiv_(y, d)", "return x.addcdiv_(y, y.sqrt().add_(1e-4))"),
    ("SO206", "return (x / y.log_softmax(1).clamp_min(1e-9))", "return x / ((y > 0).sum() + 1e-9)"),
    ("SO206", "log_std = y.clamp(-20, 2)\nreturn log_std.exp()", "log_std = y.clamp(-10, 2)\nreturn log_std.exp()"),
    ("SO206", "log_std = x.tanh()\nreturn torch.exp(log_std.clamp(min=-18))",
     "return torch.exp(x.tanh().clamp(min=-18))"),
    ("SO206", "return x / (y.abs() + 1e-16)", "return x / (y.real.abs() + 1e-16)"),
    ("SO206", "return x / (y.abs() + 1e-16)", "y_re, y_im = y\nreturn x / (y_re.abs() + 1e-16)"),
    ("SO206", "return x / (y.abs() + 1e-16)", "return x / (y.to(self.compute_dtype) + 1e-16)"),
    ("SO206", "u = torch.rand_like(x)\nreturn x - (u + 1e-20).log()",
     "u = torch.rand(3)\nreturn x - (u + 1e-20).log()"),
    ("SO211", "s = torch.exp(x)\nreturn s / s.sum(-1)", "s = torch.exp(x - x.max())\nreturn s / s.sum(-1)"),
    ("SO212", "m = x.mean(1)\nreturn (x * x).mean(1) - m ** 2",
     "m = x.float().mean(1)\nreturn x.float().var(1) - m ** 2"),
    ("SO201", "return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + y)",
     "return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + y)"),
    ("SO210", "return (x[..., 2] - x[..., 0]) * (x[..., 3] - x[..., 1])",
     "return (x[..., 1:] - x[..., :-1]) * (x[..., 3] - y)"),
    ("SO210", "x1, y1, x2, y2 = x.unbind(-1)\nreturn (x2 - x1) * (y2 - y1)",
     "x1, y1, x2, y2 = x.unbind(-1)\nreturn (x2 - x1) * (x2 - y1)"),
    ("SO210", "wh = (torch.min(x, y) - torch.max(x, y + 1)).clamp(min=0)\nreturn wh[:, 0] * wh[:, 1]",
     "wh = (x - y).clamp(min=0)\nreturn wh[:, 0] * wh[:, 1]"),
    ("SO207", "l = x.masked_fill(y > 0, -math.inf).log_softmax(1)\nreturn l.exp() * l",
     "l = x.masked_fill(y > 0, -1e4).log_softmax(1)\nreturn l.exp() * l"),
    ("SO207", "return torch.tensor([1e10]).to(x) * y", "return torch.tensor([1e10]).to('cuda') * y"),
    ("SO207", "return torch.tensor(-1e9).to(x.dtype) * y", "return torch.tensor(-1e4).to(x.dtype) * y"),
]  # fmt: skip


@pytest.mark.parametrize("code, wrong, right", BODIES)
def test_in_a_layer(code, wrong, right):
    assert code in codes(method(wrong))
    assert code not in codes(method(right))


def test_what_prepares_data_is_no_half():
    index = method("return (x - y) / (x + y + 1e-10)", name="apply")
    assert codes(index) == ["SO206"]
    for base in ("BaseTransform", "K.IntensityAugmentationBase2D", "torch.utils.data.Dataset"):
        assert codes(index.replace("nn.Module", base)) == []


def test_a_norm_by_its_name():
    body = "return x.pow(2).mean(-1, keepdim=True)"
    norm = method(body, "x", "statistic").replace("Layer", "RMSNorm")
    assert codes(norm) == ["SO201"]
    assert codes(norm.replace("RMSNorm", "Layer")) == []
    assert codes(norm.replace("RMSNorm", "RMSE")) == []
    assert codes(norm.replace("x.pow", "x.float().pow")) == []


EPS = "class Trainer:\n    def advantages(self, r: torch.Tensor):\n        return r / (r.std() + self.args.adv_eps)\n"


@pytest.mark.parametrize("config", [
    "@dataclass\nclass Config:\n    adv_eps: float = {}\n",
    "@dataclass(frozen=True)\nclass Config:\n    adv_eps: float = {}\n",
    "parser.add_argument('--adv-eps', '-e', type=float, default={})\n",
])  # fmt: skip
def test_a_field_has_a_number(config):
    assert codes(config.format("1e-8") + EPS) == ["SO206"]
    assert codes(config.format("1e-4") + EPS) == []
    assert codes("@dataclass\nclass Other:\n    adv_eps: float = 1e-3\n" + config.format("1e-8") + EPS) == []  # which?


def test_an_optimizer_has_its_eps():
    source = """
    class Belief(torch.optim.Optimizer):
        def __init__(self, params, lr=1e-3, eps={}):
            super().__init__(params, dict(lr=lr, eps=eps))

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    m, s = self.state[p]["m"], self.state[p]["s"]
                    p.addcdiv_(m, s.sqrt().add_(group["eps"]))
    """
    assert codes(source.format("1e-8")) == ["SO206"]
    assert codes(source.format("1e-4")) == []


RETURNED = """
class Jensen:
    def pair(self, *logits):
        return [(x / 2).{op}(-1) for x in logits], [x.log_softmax(-1) for x in logits]

    def mix(self, a):
        return {of}

    def loss(self, a, b):
        (p, q), (lp, lq) = self.pair(a, b)
        return torch.log(p + q).mean() + self.mix(a).log().mean()
"""


def test_what_a_helper_returns():
    assert codes(RETURNED.format(op="softmax", of="torch.exp(a)")) == ["SO204"]
    assert codes(RETURNED.format(op="softplus", of="torch.exp(a)")) == []
    assert codes(RETURNED.format(op="softplus", of="torch.relu(a)")) == ["SO204"]
    assert codes(RETURNED.format(op="softplus", of="a.clamp(min=1e-2)")) == []


def test_what_a_list_holds():
    loss = "def loss(a, b):\n    made = [x.{}() for x in (a, b)]\n    return torch.log(made[0]).mean()\n"
    assert codes(loss.format("relu")) == ["SO204"]
    assert codes(loss.format("exp")) == []
    loop = "def loss(a, b):\n    for x in [y.{}() for y in (a, b)]:\n        n = torch.log(x).mean()\n    return n\n"
    assert codes(loop.format("relu")) == ["SO204"]
    assert codes(loop.format("exp")) == []


def test_a_sum_over_pairs():
    loss = "def loss(x, y):\n    y, n = y.half(), x.size(0)\n    return torch.sum((x[:, None] - y[None]).abs()) / {}\n"
    assert codes(loss.format("(n * n - n)")) == codes(loss.format("(n * (n - 1))")) == ["SO201"]
    assert codes(loss.format("n")) == []


def test_exponentials_of_targets():
    sinkhorn = "class Head:\n    @torch.no_grad()\n    def sinkhorn(self, x):\n        return torch.exp(x / {})\n\n"
    sinkhorn += "    def loss(self, a: torch.Tensor, b):\n        return (self.sinkhorn(a) * b).mean()\n"
    assert codes(sinkhorn.format("0.05")) == ["SO213"]
    assert codes(sinkhorn.format("2.0")) == []


def test_a_file_about_metrics_counts():
    source = method("return x / (y.abs() + 1e-16)")
    assert codes(source) == ["SO206"]
    assert codes("from ignite.metrics import Metric\n" + source) == []


def test_a_guard_in_a_loss_is_named_once():
    (finding,) = lint_source(HEADER + "def loss(x: torch.Tensor):\n    return torch.log10(x.abs() + 1e-8).mean()\n")
    assert finding.code == "SO206" and "eps=" in finding.message


@pytest.mark.parametrize("imports, found", [("", ["SO206"]), ("import scipy.stats\n", [])])
def test_what_has_a_mean_is_a_tensor_where_no_other_arrays_are(imports, found):
    source = "import torch\n" + imports + "def whiten(r):\n    return (r - r.mean()) / (r.std() + 1e-8)\n"
    assert [f.code for f in lint_source(source, rules=DEFAULT)] == found


@pytest.mark.parametrize("use, found", [("x ** 2", ["SO201"]), ("x.float() ** 2", [])])
def test_what_is_reduced_over_a_dim_is_a_tensor(use, found):
    assert codes(f"def rms_norm(x):\n    return x * (({use}).mean(dim=-1, keepdim=True) + 1e-5).rsqrt()\n") == found


@pytest.mark.parametrize("name", ["rms_energy", "exp_rmspe", "MeanRMSPE"])
def test_the_root_of_a_mean_of_squares_is_no_norm(name):
    root = "def {}(x):\n    return torch.sqrt((x ** 2).mean(dim=-1))\n"
    assert codes(root.format(name)) == [] and codes(root.format("rms")) == ["SO201"]


def test_the_areas_of_an_intersection():
    source = """
    import torch

    def overlaps(boxes1, boxes2):
        area = (boxes2[:, 2] - boxes2[:, 0]) * (boxes2[:, 3] - boxes2[:, 1])
        wh = (torch.min(boxes1[:, 2:], boxes2[:, 2:]) - torch.max(boxes1[:, :2], boxes2[:, :2])).clamp(min=0)
        return wh[:, 0] * wh[:, 1] / area
    """
    source = textwrap.dedent(source)
    assert [f.code for f in lint_source(source, rules=DEFAULT)] == ["SO210", "SO210"]
    assert not lint_source(source.replace("(boxes2[:, 2]", "(boxes2.float()[:, 2]").replace("wh[:, 1]", "2"))


def test_a_logarithm_of_exponentials_is_asked_about_in_losses():
    """Elsewhere the maximum may have been taken away out of sight."""
    body = "def {}(x):\n    return x.abs().exp().sum(1).log().mean()\n"
    assert codes(body.format("some_loss")) == ["SO211"]
    assert codes(body.format("evaluate_norm")) == []


def test_what_an_undisturbed_region_gives_is_wide():
    source = "@{}\ndef scale(x: torch.Tensor):\n    return x / (x.abs() + 1e-16)\n"
    assert codes(source.format("cached(maxsize=2)")) == ["SO206"]
    assert codes(source.format("default_precision(cast_inputs=torch.float32)")) == []
    source = """
    def crop(x: torch.Tensor):
        return x[..., 1:]

    def scale(y, x: torch.Tensor):
        with torch.autocast("cuda"{}):
            z = blur(y)
        return x / (crop(z) + 1e-16)
    """
    assert codes(source.format("")) == ["SO206"]
    assert codes(source.format(", enabled=False")) == []


def test_a_store_into_what_is_a_tensor_by_guess():
    source = "def fill(x: torch.Tensor, **options):\n    b = {}\n    b[..., 0] = -1e10\n    return b.unsqueeze(0)\n"
    assert codes(source.format("x.exp()")) == ["SO207"]
    assert codes(source.format("torch.zeros(3, **options)")) == []
