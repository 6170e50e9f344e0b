"""--fix turns a write through a mask into a new tensor only if no other name shares the written memory."""

import inspect
import itertools
import re

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

import safeops
from safeops_lint.check import fix_source, lint_source
from safeops_lint.memory import NEW
from safeops_lint.rules import RULES
from safeops_lint.syntax import PREFIXES, SYNONYMS
from tests.lint.programs import EVERY, program

# Programs in which another name shares z's memory before the write, and which return that name's value.
KNOWN = [
    "z = x / y\nout = {'z': z}\nz[z > 1] = 0\nreturn out['z']",
    "z = x / y\nrows = [z]\nz[z > 1] = 0\nreturn rows[0]",
    "z = x / y\nrows = []\nrows += [z]\nz[z > 1] = 0\nreturn rows[0]",
    "z = x / y\nrows = []\nrows += z\nz[z > 1] = 0\nreturn rows[0]",
    "z = x / y\nrows = (*[z],)\nz[z > 1] = 0\nreturn rows[0]",
    "z = x / y\nfirst, second = z, y\nz[z > 1] = 0\nreturn first * second",
    "z = x / y\npair = z, y\nfirst, _ = pair\nz[z > 1] = 0\nreturn first",
    "z = x / y\nrows = [z for _ in range(2)]\nz[z > 1] = 0\nreturn rows[1]",
    "z = x / y\nrows = [r for r in z]\nz[z > 1] = 0\nreturn rows[1]",
    "z = x / y\nfor r in z:\n    pass\nz[z > 1] = 0\nreturn r",
    "first = z = x / y\nz[z > 1] = 0\nreturn first",
    "z = x / y\nbest = z if x.shape else x\nz[z > 1] = 0\nreturn best",
    "z = x / y\nbest = z.shape and z\nz[z > 1] = 0\nreturn best",
    "z = x / y\na, b = z[:, :2], z[:, 2:]\nz[z > 1] = 0\nreturn a.sum() + b.sum()",
    "z = x / y\na = z[..., :2].mT\nz[z > 1] = 0\nreturn a",
    "z = x / y\na = z[torch.tensor(0)]\nz[z > 1] = 0\nreturn a",  # one row: a view
    "z = x / y\nf = lambda q=z: q\nz[z > 1] = 0\nreturn f()",
    "z = x / y\nf = lambda: z\nkept = f()\nz[z > 1] = 0\nreturn kept",
    "def f():\n    return z\nz = x / y\nkept = f()\nz[z > 1] = 0\nreturn kept",
    "z = x / y\na = torch.as_tensor(z)\nz[z > 1] = 0\nreturn a",
    "z = x / y\na = torch.atleast_2d(z)\nz[z > 1] = 0\nreturn a",
    "z = x / y\na = torch.einsum('ij->ji', z)\nz[z > 1] = 0\nreturn a",
    "z = x / y\na = z.detach().numpy(force=True)\nz[z > 1] = 0\nreturn torch.from_numpy(a)",
    "z = x / y\na = F.dropout(z, 0.0)\nz[z > 1] = 0\nreturn a",
    "z = x / y\na = F.relu(z, True)\nz[z > 1] = 0\nreturn a",
    "z = x / y\na = +z\nz[z > 1] = 0\nreturn a",
    "z = x / y\na = z.add_(1)\nz[z > 1] = 0\nreturn a",
    "z = x / y\na = z.double()\nz[z > 1] = 0\nreturn a",
    "z = x / y\na = torch.mul(x, 2, out=z)\nz[z > 1] = 0\nreturn a",
    "z = x / y\nif (a := z).sum() > 0:\n    pass\nz[z > 1] = 0\nreturn a",
    "z = x / y\nseen = set()\nseen.add(z)\nz[z > 1] = 0\nreturn seen.pop()",
    "z = x / y\nseen = {}\nseen[z] = 1\nz[z > 1] = 0\nreturn list(seen)[0]",
    "z = x / y\ny.also = z\nz[z > 1] = 0\nreturn y.also",
    "z = x / y\nheld = locals()\nz[z > 1] = 0\nreturn held['z']",
    "z = x / y\na = max([z, x], key=torch.sum)\nz[z > 1] = 0\nreturn a",
    "z = x / y\nz.retain_grad()\nz[z > 1] = 0\nz.sum().backward()\nreturn z.grad",
    # z itself shares memory with an argument
    "z = +x\nz[z > 1] = 0\nreturn x",
    "z = torch.atleast_2d(x)\nz[z > 1] = 0\nreturn x",
    "z = x.double()\nz[z > 1] = 0\nreturn x",
    "z = F.dropout(x, 0.0)\nz[z > 1] = 0\nreturn x",
    "z = F.relu(x, inplace=True)\nz[z > 1] = 0\nreturn x",
    "z = x[torch.tensor(0)]\nz[z > 1] = 0\nreturn x",
    "z = torch.add(y, 1, out=x)\nz[z > 1] = 0\nreturn x",
    # another name shares z's memory in one branch, or since the previous iteration
    "z = x\nif y.dim() > 5:\n    z = x / y\nz[z > 1] = 0\nreturn x",
    "if y.dim() > 5:\n    z = x / y\nelse:\n    z = x\nif y.dim() > 5:\n    z = x / y\nz[z > 1] = 0\nreturn x",
    "z, rows = x / y, []\nfor i in range(2):\n    z[z > 1.5 - i] = 0\n    rows.append(z)\nreturn rows[0]",
    "rows, z = [], x / y\nwhile len(rows) < 2:\n    z[z > 2 - len(rows)] = 0\n    rows.append(z)\nreturn rows[0]",
]


def evaluated(source):
    torch.manual_seed(0)
    x, y = torch.rand(3, 4, dtype=torch.float64) * 3, torch.rand(3, 4, dtype=torch.float64) + 0.5
    scope = {}
    exec(source, scope)
    leaves = x.requires_grad_(), y.requires_grad_()
    return scope["loss"](*("retain_grad" in source and leaves or (x.detach(), y.detach())))


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("body", KNOWN)
def test_what_another_name_sees_is_told_and_left_alone(body):
    source = program("x, y", body)
    assert fix_source(source, rules=EVERY)[0].count("masked_fill") == 0
    assert "SO103" in {f.code for f in lint_source(source, rules=EVERY)}
    by_hand = re.sub(r"\bz\[(z > .*)\] = 0", r"z = z.masked_fill(\1, 0)", source)
    assert by_hand != source
    old, new = evaluated(source), evaluated(by_hand)
    assert old is not None and (new is None or not torch.equal(old, new)), "this case shows no difference"


# Programs in which no other name shares z's memory, so that a new tensor makes no difference.
HARMLESS = [
    "z = x / y\nz[z > 1] = 0\nreturn z",
    "z: torch.Tensor = x / y\nz[z > 1] = 0\nreturn z",
    "z = x / y; z[z > 1] = 0\nreturn z",
    "z = x.exp()\nm = z.mean() + (z > 2).sum() + -z.sum()\nz[z > 1] = 0\nreturn z * m",
    "z = torch.relu(x)\nn = z.shape[0] * z.size(1) * len(z)\nz[z > 1] = 0\nreturn z / n",
    "z = F.relu(x)\nw = y.type_as(z) + torch.zeros_like(z)\nz[z > 1] = 0\nreturn z * w",
    "z = x[y > 0]\nw = z.view(-1).sum() + z[:2].sum() + z[z > 2].sum()\nz[z > 1] = 0\nreturn z * w",
    "z = x - y\nw = y.clone()\nw.add_(z)\nw[0] = z.mean()\nz[z > 1] = 0\nreturn z * w",
    "z = x - y\nz += 1\nz.clamp_(min=-2)\nz[0] = 3\nz[z > 1] = 0\nz[z > 0.5] = 0.5\nreturn z",
    "z = x - y\ntotal = 0\ntotal += z\nz[z > 1] = 0\nreturn z * total",
    "z = x - y\nw = torch.cat([z, y]) + torch.cat((z, x))\nz[z > 1] = 0\nreturn z.sum() * w",
    "z = x - y\nif z.sum() > 0:\n    z = x * y\n    z[z > 1] = 0\nz[z > 1] = 0\nreturn z",
    "z = x\nz = z / y\nz[z > 1] = 0\nreturn z + x",
    "rows = []\nfor i in range(2):\n    z = x / (y + i)\n    z[z > 1] = 0\n    rows.append(z)\nreturn sum(rows)",
    "def f():\n    return z * 2\ndef g(z):\n    return z\nz = x / y\nw = f()\nz[z > 1] = 0\nreturn g(z) * w",
    "z = x - y\nassert z.isfinite().all(), f'{z}'\nprint(z.shape)\nz[z > 1] = 0\nreturn (z if y.shape else x).sum()",
    "z = x - y\nw = F.mse_loss(z, y) + torch.where(y > 0, z, y).sum()\nz[z > 1] = 0\nreturn z * w",
    "z = x / y\nz[z > 1] = 0\nout = {'z': z}\nreturn out['z']",
]


@pytest.mark.parametrize("body", HARMLESS)
def test_what_nothing_else_holds_is_rewritten(body):
    source = program("x, y", body)
    new, count = fix_source(source, rules=[RULES["SO103"]])
    assert count == len(re.findall(r"\bz\[z > [.\d]+\] =", source)) and "safeops.masked_fill(z" in new
    assert torch.equal(evaluated(source), evaluated(new))


# (how z is made from x, the condition, the number that is written)
UNSIGNED = [("x + 0", "== 127", "-100"), ("x.clone().abs()", "> 2", "-1"), ("-x", "> 2", "-1")]
FLOATING = [
    ("x / y", "== 1", "-1"),
    ("x * 0.5 - y", "== 1", "-1"),
    ("torch.log(x).abs()", "> 2", "-1"),
    ("x.float() + 1", "> 2", "-1"),
    ("x + 0", "> 2.5", "-1"),
    ("x + 0", "> 2", "-1.0"),
    ("x + 0", "> 2", "1"),
]


@pytest.mark.parametrize("made, condition, number", [*UNSIGNED, *FLOATING])
def test_a_negative_number_is_filled_into_what_is_floating(made, condition, number):
    source = program("x, y", f"z = {made}\nz[z {condition}] = {number}\nreturn (z - y).float().mean()")
    new, count = fix_source(source, rules=[RULES["SO103"]])
    assert count == ((made, condition, number) in FLOATING) and ("safeops.masked_fill(z" in new) == count
    assert [f.code for f in lint_source(source, rules=[RULES["SO103"]])] == ["SO103"]


def test_an_unsigned_tensor_takes_a_negative_number_modulo_256():
    x = torch.tensor([1, 127], dtype=torch.uint8)
    filled = safeops.masked_fill(x, x == 127, -100)
    x[x == 127] = -100
    assert x[1] == 156 and filled[1] == 0


def tensors(value):
    if isinstance(value, (tuple, list)):
        return [t for part in value for t in tensors(part)]
    return [value] if isinstance(value, torch.Tensor) and value.layout == torch.strided and value.numel() else []


def results_of(op, dtype):
    """Yields (operands, results) of an op, for the samples of torch's own tests."""
    samples = op.sample_inputs("cpu", dtype, set_seed=False) if dtype in op.dtypes else ()
    for sample in itertools.islice(samples, 30):
        operands = tensors([sample.input, *sample.args, *sample.kwargs.values()])
        yield operands, tensors(op.op(sample.input, *sample.args, **sample.kwargs))


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_what_is_called_new_is_no_operands_memory():
    prefixes = {name.removeprefix("torch").removeprefix(".") for name in PREFIXES}
    tried = set()
    for op in op_db:
        paths = (name.rpartition(".") for name in (op.name, *(alias.name for alias in op.aliases)))
        names = {SYNONYMS.get(name, name) for prefix, _, name in paths if prefix in prefixes}
        for dtype in (torch.float32, torch.int64, torch.bool) if names & NEW else ():
            for operands, results in results_of(op, dtype):
                shared = {t.untyped_storage().data_ptr() for t in operands}
                assert shared.isdisjoint(t.untyped_storage().data_ptr() for t in results), op.name
                tried |= names
    assert NEW - tried <= {"copy", "fill", "new_tensor", "zero"}, "torch has no samples of these"
    functions = {name: getattr(torch.nn.functional, name, None) for name in NEW}
    optional = {
        n for n, f in functions.items() if inspect.isfunction(f) and "inplace" in inspect.signature(f).parameters
    }
    assert optional == {"relu"}, "they may work in place"
