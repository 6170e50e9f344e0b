"""--fix: what a rewrite looks like: parentheses, lines, indentation and comments."""

import ast
import textwrap

import pytest
import torch

from safeops.lint.check import fix_source
from safeops.lint.layout import on_one_line
from tests.lint.programs import EVERY, HEADER, program


@pytest.mark.parametrize("text, after", [
    ("return (x * x).sum()", "return safeops.masked_sum_of_squares(x)"),
    ("return ((x * x).sum()).sqrt()", "return safeops.safe_norm(x)"),
    ("return (x / x.norm(dim=1, keepdim=True)).mean()", "return safeops.normalize(x, dim=1).mean()"),
    ("return(x / x.sum())", "return(safeops.safe_div(x, x.sum()))"),
    ("return torch.sqrt(torch.sum((x - y) ** 2, dim=1))", "return safeops.safe_norm(x - y, dim=1)"),
    ("return torch.sqrt(torch.sum((x - y) ** 2, dim=(1, 2)))", "return safeops.safe_norm(x - y, dim=(1, 2))"),
    ("return torch.log((x - y)).mean()", "return safeops.safe_log(x - y).mean()"),
    ("return (x - y).sqrt().mean()", "return safeops.safe_sqrt(x - y).mean()"),
    ("return torch.where((y) != 0, (x - 1) / (y), 0)", "return safeops.safe_div(x - 1, y)"),
    ("return x.masked_fill((y > 0), (-1e9)).sum()", "return safeops.masked_fill(x, y > 0, -1e9).sum()"),
    (
        "return F.softmax(x.masked_fill((y > 2), -math.inf), dim=-1)",
        "return safeops.masked_softmax(x, ~(y > 2), dim=-1)",
    ),
    ("return (x / x.sum()) * 2", "return safeops.safe_div(x, x.sum()) * 2"),
])  # fmt: skip
def test_a_call_needs_no_parentheses_of_its_own(text, after):
    assert fix_source(program("x, y", text), rules=EVERY)[0].endswith(f"    {after}\n")


SPREAD = """
    ratio = (
        torch.log(
            x,
        )  # kept
        / torch.sum(
            y,
        )
    )
    length = torch.sqrt(
        torch.sum(
            (x - y) ** 2,
            dim=-1,
        )
    )
    return ratio.sum() + length.sum()  # last
"""


def test_what_spans_lines_is_rewritten_and_keeps_its_comments():
    source = HEADER + "def loss(x, y):" + SPREAD
    new, count = fix_source(source)
    assert count and fix_source(new)[1] == 0 and ast.parse(new)
    assert new.count("# kept") == new.count("# last") == 1
    assert "length = safeops.safe_norm(x - y, dim=-1)\n" in new and "safeops.safe_log(x)" in new
    values = []
    for text in (source, new):
        scope = {}
        exec(compile(text, "<loss>", "exec"), scope)
        values.append(scope["loss"](torch.arange(1.0, 7).reshape(2, 3), torch.ones(2, 3)))
    torch.testing.assert_close(*values)


LONG = "the_difference_of_the_prediction_and_the_targets"
LINES = [
    (
        """
        return (x  # first
                + y) / torch.sum(x)
        """,
        """
        return safeops.safe_div(
            (x  # first
                + y),
            torch.sum(x),
        )
        """,
    ),
    (
        f"""
        {LONG} = x / 3
        return {LONG} / {LONG}.sum()
        """,
        f"""
        {LONG} = x / 3
        return safeops.safe_div(
            {LONG},
            {LONG}.sum(),
        )
        """,
    ),
    (
        """
        return (
            torch.log(x)
            / torch.sum(
                y,
            )
        )
        """,
        "return safeops.safe_div(safeops.safe_log(x), torch.sum(y))",
    ),
    (
        """
        if x.ndim:
            y = torch.stack(
                [
                    x,  # first
                    y,
                ]
            ) / torch.sum(
                x
                - y
            )
        return y
        """,
        """
        if x.ndim:
            y = safeops.safe_div(
                torch.stack(
                    [
                        x,  # first
                        y,
                    ]
                ),
                torch.sum(x - y),
            )
        return y
        """,
    ),
    (
        f"""
        return torch.log(
            x
            - y).mean(dim=(-1,
                           )) + {" + ".join(["x.mean()"] * 9)}
        """,
        f"""
        return safeops.safe_log(x - y).mean(dim=(-1,
                           )) + {" + ".join(["x.mean()"] * 9)}
        """,
    ),
    (
        f"""
        return torch.log(
            x
            - y).mean() + {" + ".join(["x.mean()"] * 9)}
        """,
        f"""
        return safeops.safe_log(
            x - y,
        ).mean() + {" + ".join(["x.mean()"] * 9)}
        """,
    ),
]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("before, after", LINES)
def test_lines(before, after, newline):
    before, after = (program("x, y", textwrap.dedent(t).strip()).replace("\n", newline) for t in (before, after))
    assert fix_source(before, rules=EVERY)[0] == after.replace("import nn", f"import nn{newline}import safeops")


@pytest.mark.parametrize("text, line", [
    ("f(\n    x,\n    y,\n)", "f(x, y)"), ("f(\n    *x, **y,\n)", "f(*x, **y)"), ("[\n    x,\n]", "[x]"),
    ("(\n    x,\n    y,\n)", "(x, y)"), ("(\n    x,\n)", "(x,)"), ("x in (\n    y,\n)", "x in (y,)"),
    ("x[\n    0,\n]", "x[0,]"), ("x[\n    0,\n    1\n]", "x[0, 1]"), ("{\n    1: x,\n}", "{1: x}"),
    ("x\n.sum(\n)\n[0]", "x.sum()[0]"), ("x + \\\n    y", "x + y"), ("x if y\nelse z", "x if y else z"),
    ("f'{x}  a' 'b'\n'c'", "f'{x}  a' 'b' 'c'"), ("f(x,  # why\n)", None), ('f("""a\n""")', None),
])  # fmt: skip
def test_on_one_line(text, line):
    assert on_one_line(text) == line
    if line is not None:
        assert ast.dump(ast.parse(f"({text}\n)")) == ast.dump(ast.parse(line))
