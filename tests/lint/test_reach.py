"""Within a file the linter follows a loss's calls to methods, objects that it or its class made, and base classes."""

import textwrap

import pytest

from safeops_lint.check import lint_source
from tests.lint.programs import HEADER


def codes(source, **options):
    return [f.code for f in lint_source(HEADER + textwrap.dedent(source), **options)]


MADE = """
class Masked{base}:
    def __init__(self, n=1):
        {layer}

    def {method}(self, p: torch.Tensor):
        return p.log()

class RiskLoss(nn.Module):
    def __init__(self):
        self.masked = Masked()

    def forward(self, p):
        return {call}.mean()
"""


@pytest.mark.parametrize("base, method, call", [
    ("", "entropies", "Masked(3).entropies(p)"),
    ("", "entropies", "self.masked.entropies(p)"),
    ("", "__call__", "self.masked(p)"),
    ("(nn.Module)", "forward", "self.masked(p)"),
    ("(nn.Module)", "forward", "Masked()(p)"),
])  # fmt: skip
def test_what_a_loss_makes_is_part_of_it(base, method, call):
    def found(call, layer="self.n = n"):
        return codes(MADE.format(base=base, method=method, call=call, layer=layer))

    assert found(call) == ["SO204"]
    assert found("p") == []
    assert found(call, "self.n = nn.Linear(n, n)") == []  # a model, not a loss


def test_by_way_of_a_name():
    source = MADE.format(base="", method="entropies", call="made.entropies(p)", layer="self.n = n")
    assert codes(source.replace("        return made", "        made = Masked(3)\n        return made")) == ["SO204"]


BASES = """
class Objective:
    def __call__(self, p, q):
        return self.term(p, q).mean()

class Log(Objective):
    def term(self, p: torch.Tensor, q):
        return p.log()

class Other:
    def term(self, p: torch.Tensor, q):
        return p.log()
"""


def test_through_bases():
    assert codes(BASES) == ["SO204"]
    above = BASES.replace("class Log(Objective)", "class Above").replace("class Objective:", "class Objective(Above):")
    assert codes(above) == ["SO204"]
    assert codes(BASES.replace("Log(Objective)", "Log")) == []


def test_a_measure_that_a_loss_calls_has_a_gradient():
    measure = "def si_sdr(x, y):\n    return x.log() - (1 - y).log()\n"
    assert codes(measure) == []
    assert codes(measure + "def some_loss(x, y):\n    return si_sdr(x, y).mean()\n") == ["SO204", "SO204"]
    assert codes(measure + "def show(x, y):\n    return si_sdr(x, y).mean()\n") == []


def test_a_function_that_a_class_keeps_is_part_of_it():
    pair = "def pair(a, b):\n    return torch.sqrt(a - b)\n"
    keeps = "class Metric(nn.Module):\n    def __init__(self):\n        self.dist = {}\n"
    keeps += "    def forward(self, pred, target):\n        return self.dist(pred, target).mean()\n"
    assert codes(pair + keeps.format("pair")) == ["SO204"] and codes(pair + keeps.format("other")) == []


SSIM = """
class SSIM(nn.Module):
    def __init__(self):
        self.pool = nn.AvgPool2d(3, 1)

    def forward(self, x, y):
        mu = self.pool(x)
        return self.pool(x ** 2) - mu ** 2

class ViewLoss(nn.Module):
    def __init__(self):
        self.ssim = SSIM()

    def forward(self, x, y):
        return self.ssim(x, y).mean()
"""


def test_the_layer_of_a_loss():
    assert codes(SSIM) == ["SO212"]
