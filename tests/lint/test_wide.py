"""An eps of 1e-8 is reported unless the value it is added to is certainly fp32."""

import pytest
import torch
from torch.testing._internal.autocast_test_lists import AutocastTestLists
from torch.testing._internal.common_methods_invocations import op_db

from safeops_lint.check import lint_source
from safeops_lint.tables import HALVED, NO_HALF, RAISED
from tests.lint.programs import EVERY, HEADER, program

# (body with a {}, text in its place that makes the value certainly fp32, text that does not)
PAIRS = [
    # times a tensor of the default dtype (fp32), half becomes fp32; a number does not change the dtype
    ("s = x * {}\nreturn torch.log(s + 1e-8).mean()", "torch.rand(4, device=x.device)", "torch.rand(4, dtype=x.dtype)"),
    ("s = torch.zeros(4){}\nfor i in range(4):\n    s = s + x[i]\nreturn torch.log(s + 1e-8).mean()", "", ".to(x)"),
    # parts of complex numbers, which are hardly ever half
    ("return torch.log(x.{} + 1e-8).mean()", "real.abs()", "abs()"),
    ("return torch.log({}(x) + 1e-8).mean()", "to_one_hot", "model"),
    # a cast of an unknown value
    ("y = flat(y){}\nreturn torch.log(x * y + 1e-8).mean()", ".float()", ""),
    ("y = flat(y).to({})\nreturn torch.log(x * y + 1e-8).mean()", "torch.float32", "x.dtype"),
    # autocast converts the operands of matrix products to half, even fp32 ones
    ("s = {}\nreturn torch.log(s + 1e-8).mean()", "x.float() * y.float()", "x.float() @ y.float()"),
    ("s = {}\nreturn torch.log(s + 1e-8).mean()", "(x @ y).float()", "F.conv2d(x.float(), y.float())"),
    ("s = F.scaled_dot_product_attention(x.float(), y.float(), y.float()){}\nreturn torch.log(s * x + 1e-8).mean()",
     ".float()", ""),
    ("fc = nn.Linear(3, 3)\np = torch.sigmoid(fc(x.float()){})\nreturn torch.log(p + 1e-8).mean()", ".float()", ""),
    ("with torch.autocast('cuda', enabled=False):\n    with torch.autocast('cuda', enabled={}):\n"
     "        return torch.log(x * y + 1e-8).mean()", "False", "True"),
    # autocast that is switched off
    ("with torch.autocast('cuda', enabled={}):\n    s = x.float() @ y.float()\nreturn torch.log(s + 1e-8).mean()",
     "False", "True"),
    # stacked tensors: one of them fp32
    ("return torch.log(torch.stack([x{}, y]) + 1e-8).mean()", ".float()", ""),
]  # fmt: skip


@pytest.mark.parametrize("body, wide, half", PAIRS, ids=lambda x: x[:50])
def test_an_eps_in_fp32_holds(body, wide, half):
    def codes(part):
        return {f.code for f in lint_source(program("x, y, model", body.format(part)), rules=EVERY)}

    assert "SO206" not in codes(wide) and "SO206" in codes(half)


# (body with a {}, text in its place that keeps the argument of the root or logarithm from 0, text that does not)
GUARDS = [
    ("return torch.log((x - y).clamp(min={})).mean()", "self.lowest", "0"),
    ("return torch.log((x - y).clamp(min={})).mean()", "lowest", "0.0"),
    ("return torch.log((x - y).clamp(min={})).mean()", "lowest", "y"),
]  # fmt: skip


@pytest.mark.parametrize("body, guard, none", GUARDS, ids=lambda x: x[:50])
def test_a_guard_by_name_or_at_the_zeros(body, guard, none):
    def codes(part):
        source = HEADER + "class SomeLoss(nn.Module):\n    def forward(self, x, y, lowest):\n"
        lines = body.format(part).replace("\n", "\n        ")
        return {f.code for f in lint_source(f"{source}        {lines}\n")}

    assert "SO204" not in codes(guard) and "SO204" in codes(none)


def test_a_variance_is_no_probability():
    def codes(name):
        return [f.code for f in lint_source(program(name, f"return torch.log({name}).mean()"))]

    assert codes("pred") == ["SO204"] and codes("pred_var") == []


LEAVES = [
    "if len(d) > 3:\n    d = d.detach()\nreturn d.mean()",
    "loss = x.mean() * 0\nfor e in d:\n    loss = loss + e\nreturn loss",
    "if (e := d * 2) is not None:\n    return e.mean()\nreturn x.mean()",
]


@pytest.mark.parametrize("rest", LEAVES)
def test_where_a_root_may_leave_with_its_gradient(rest):
    assert "SO204" in {f.code for f in lint_source(program("x, y", f"d = torch.sqrt((x - y).abs())\n{rest}"))}


def test_a_graph_that_is_switched_on_again():
    body = "with torch.no_grad():\n    with torch.{}():\n        return torch.sqrt((x - y).abs()).mean()"
    codes = [[f.code for f in lint_source(program("x, y", body.format(n)))] for n in ("enable_grad", "no_grad")]
    assert codes == [["SO204"], []]


def test_the_names_are_those_of_torchs_own_tables():
    has_half = {}
    for op in op_db:
        for name in {op.name.rpartition(".")[2], *(alias.name.rpartition(".")[2] for alias in op.aliases)}:
            has_half[name] = has_half.get(name, False) or torch.float16 in op.dtypesIfCUDA
    assert [name for name in sorted(NO_HALF) if has_half.get(name, True)] == []
    lists = AutocastTestLists(torch.device("cpu"))
    for known, names in ((HALVED, ["torch_fp16"]), (RAISED, ["torch_fp32", "nn_fp32", "methods_fp32"])):
        by_autocast = {case[0] for name in names for case in getattr(lists, name)}
        called = {name for name in by_autocast if hasattr(torch.Tensor, name) or hasattr(torch.nn.functional, name)}
        assert called - {"__pow__"} <= known and len(called) > 15
