"""Code that Triton 3.6 would not compile, found in the kernels' sources alone."""

import ast
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "kernels"


def _is_jit(function):
    return any(ast.unparse(decorator) == "triton.jit" for decorator in function.decorator_list)


def _may_return(statement):
    return isinstance(statement, ast.If) and any(isinstance(n, ast.Return) for n in ast.walk(statement))


def behind_a_return(source):
    """The device functions in which something stands behind an `if` that may return."""
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef) and _is_jit(n)]
    return [f.name for f in functions if any(map(_may_return, f.body[:-1]))]


def test_nothing_stands_behind_a_return():
    """Triton 3.6 compiles what stands behind the `return` of an `if` on constants: for fp64, too, what fp32 alone has,
    such as fast functions and 32 bits. It stands in an `else`."""
    files = list(KERNELS.rglob("*.py"))
    assert len(files) > 40
    for file in files:
        assert not behind_a_return(file.read_text()), file.name


def test_what_stands_behind_one_is_found():
    body = "@triton.jit\ndef log(x):\n    if x.dtype == tl.float64:\n        return tl.log(x)\n"
    assert behind_a_return(body + "    return rough(x)\n") == ["log"]
    assert behind_a_return(body + "    else:\n        return rough(x)\n") == []
