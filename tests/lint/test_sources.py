"""The linter handles code it was not written for: installed libraries, Python's syntax tests and random programs."""

import pathlib
import re
import sysconfig
import tokenize
from unittest import mock

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from safeops_lint.check import CannotLint, fix_source, lint_source
from safeops_lint.rules import RULES
from safeops_lint.run import Options, lint_paths
from tests.lint.programs import program

SITE = pathlib.Path(sysconfig.get_path("purelib"))
MORE = "torchmetrics", "torch/distributions", "torch/optim"
LIBRARIES = ["piq", "torch/nn", *(pytest.param(x, marks=pytest.mark.exhaustive) for x in MORE)]
EVERY = list(RULES.values())


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_installed_library(library):
    """On a whole library the linter must not crash; rewritten files must parse, need no second run, and keep all other
    lines."""
    folder = SITE / library
    assert folder.is_dir(), f"{library} is not installed (requirements-sources.txt)"
    outcome = lint_paths([str(folder)], Options(select=("ALL",), mode="diff", jobs=1))
    assert outcome.problems == [] and outcome.files > 10
    assert all(f.code in RULES and f.line >= 1 and f.column >= 1 for f in outcome.findings)
    assert library != "torchmetrics" or outcome.fixed > 0
    for path, old, new in outcome.changed:
        check_rewrite(old, new, path, EVERY)


def check_rewrite(old, new, path="<string>", rules=None):
    compile(new, path, "exec", dont_inherit=True)
    assert fix_source(new, path, rules) == (new, 0), "a second run finds more to rewrite"
    with mock.patch("safeops_lint.check.PASSES", 1):  # one pass at a time, as a rewrite may enable another
        while (step := fix_source(old, path, rules)[0]) != old:
            check_lines(old, step, lint_source(old, path, rules))
            old = step
    assert old == new


def check_lines(old, new, findings):
    """Asserts that only lines that an edit touches differ (besides a new import), and that all comments stay."""
    touched = set()
    for edit in (edit for finding in findings for edit in finding.edits):
        lines = (old.encode()[:at].count(b"\n") for at in (edit.start, edit.end))
        touched |= set(range(next(lines), next(lines) + 1))
    kept = [line for i, line in enumerate(old.splitlines()) if i not in touched]
    rest = iter(new.splitlines())
    assert all(line in rest for line in kept), "a line that no edit touches has changed"
    assert comments(old) == comments(new)


def comments(text):
    """Returns the comments of a file, in order."""
    return re.findall(r"#[^\n\r]*", text)


# ---- Python's syntax

TESTS = pathlib.Path(sysconfig.get_path("stdlib")) / "test"
SYNTAX = ["patma", "fstring", "coroutines", "named_expressions", "positional_only_arg", "generators"]
SYNTAX += ["exception_group", "unpack_ex", "decorators", "with", "typing", "dictcomps", "global"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SYNTAX)
def test_every_syntax_is_read(name):
    path = TESTS / f"test_{name}.py"
    if not path.exists():
        pytest.skip("this Python comes without its tests")
    with tokenize.open(path) as file:
        source = file.read()
    head = "import torch\nimport torch.nn.functional as F\n"
    position = 0
    if "from __future__" in source:
        position = source.index("from __future__")
        position = source.index("\n", position) + 1
    source = source[:position] + head + source[position:]
    # Some calls are renamed to torch functions, and tests to losses, so that the rules apply.
    source = re.sub(r"(?<!def )\b(assertEqual|assertTrue)\(", "torch.log(", source)
    source = re.sub(r"\bdef test_", "def loss_", source)
    findings = lint_source(source, str(path), EVERY)
    assert all(f.code in RULES for f in findings)
    new, _ = fix_source(source, str(path), EVERY)
    check_rewrite(source, new, str(path), EVERY)


# ---- random programs

NAMES = st.sampled_from(["x", "y", "mask", "target", "pred", "n", "self.w", "eps", "loss"])
NUMBERS = st.sampled_from(["0", "1", "2", "0.5", "-1", "1e-8", "1e-12", "-1e9", 'float("-inf")', "1e5"])
UNARY = [
    "torch.log({})", "{}.sqrt()", "torch.sum({})", "{}.mean()", "({}).pow(2)", "{}.exp()", "~{}", "-{}", "F.relu({})",
    "{}.float()", "{}.clamp_(min=1e-8)", "{}.isnan()", "({})**2", "{}.sum(dim=-1, keepdim=True)", "{}.softmax(-1)",
    'torch.sqrt(\n        {}  # why\n    )', "[{} for x in y]", "(lambda x: {})(y)", "f'{{{}}}'", "torch.nonzero({})",
]  # fmt: skip
BINARY = [
    "({} + {})", "({} - {})", "({} * {})", "{} / {}", "({} > {})", "{}[{}]", "torch.where({}, {}, 0)", "({} ** {})",
    "torch.where({0} != 0, {1} / {0}, 0)", "{}.masked_fill({}, -1e9)", "F.mse_loss({}, {})", "({} if {} else 0)",
    "F.softmax({}.masked_fill({}, float('-inf')), dim=-1)", "torch.log({} + {})", "({} := {})", "{}.div({})",
]  # fmt: skip


def grow(inner):
    one = st.tuples(st.sampled_from(UNARY), inner).map(lambda t: t[0].format(t[1]))
    two = st.tuples(st.sampled_from(BINARY), inner, inner).map(lambda t: t[0].format(*t[1:]))
    return one | two


EXPRESSIONS = st.recursive(NAMES | NUMBERS, grow, max_leaves=6)
STATEMENTS = st.tuples(
    st.sampled_from(
        [
            "x = {}",
            "return {}",
            "{}",
            "y[{}] = 0",
            "x[mask] = {}",
            "x = y = {}",
            "if {}:\n        pass",
            "x += {}",
            "y /= {}",
        ]
        + [
            "for i in {}:\n        x[x > i] = 0  # i",
            "with torch.autocast('cuda'):\n        loss = ({}).mean()",
            "assert {}",
        ]
        + [
            "y = ({}).clamp(min=0)\n    y.clamp_(max=1)",
            "x, y = {}, 1",
            "print({})",
            "del y",
            "y: int = {}",
            "raise E({})",
        ]
    ),
    EXPRESSIONS,
).map(lambda t: t[0].format(t[1]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::SyntaxWarning")  # random programs cause it
@settings(max_examples=250, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(STATEMENTS, min_size=1, max_size=5), st.sampled_from(["\n", "\r\n"]), st.sampled_from(["    ", "\t"]))
@example(["if torch.where(x != 0, x / x, 0):\n        pass", "x = torch.log(torch.log(self.w))"], "\n", "    ")
def test_made_up_programs(statements, newline, indent):
    body = "".join(f"    {s}  # {i}\n" if "\n" not in s else f"    {s}\n" for i, s in enumerate(statements))
    source = f"import torch\nimport torch.nn.functional as F\n\n\ndef loss(self, x, y, mask, target, pred, n):\n{body}"
    source = source.replace("    ", indent).replace("\n", newline)
    try:
        lint_source(source, rules=EVERY)
    except CannotLint:
        return  # invalid syntax, such as `1 := x`
    new, _ = fix_source(source, rules=EVERY)
    assert newline == "\n" or "\n" not in new.replace("\r\n", "")
    check_rewrite(source, new, rules=EVERY)


def test_operands_given_by_name_are_no_crash():
    body = """\
both = torch.cat(tensors=[x, y], dim=0)
square = torch.mean(input=torch.abs(input=both), dim=0) ** 2
loss = torch.abs(input=0.5 - torch.sum(input=square, dim=0)).clip(min=0.0, max=1.0)
return torch.log(input=torch.softmax(input=both, dim=1)).mean() / torch.norm(input=x) + loss"""
    lint_source(program("x, y", body), rules=EVERY)


FORMULAS = ["torch.log({})", "torch.sqrt({})", "torch.exp({} / 0.05)", "torch.log1p(torch.exp({}))", "({}).pow(0.5)"]
FORMULAS += ["torch.log(torch.exp({0}) / torch.exp({0}).sum(1))", "(x * y).mean() - ({0}).mean() * ({0}).mean()"]
OPERANDS = ["torch.div(x, other=y)", "torch.sub(x, other=y)", "torch.mul(2, other=x)", "torch.sub(1, other=x)"]
OPERANDS += [
    "x.sub(other=y)",
    "torch.where(x > 0, input=-x, other=x)",
    "torch.where(condition=x > 0, input=-x, other=x)",
]
OPERANDS += ["torch.add(input=x, other=y)", "torch.sum(dim=1, a=x)", "torch.nansum()", "x[(y > 0), :]"]


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("operand", OPERANDS)
def test_a_second_operand_by_name_is_no_crash(formula, operand):
    lint_source(program("x, y", f"return {formula.format(operand)}.mean()"), rules=EVERY)
