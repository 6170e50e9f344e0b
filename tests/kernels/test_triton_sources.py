"""The kernels' sources contain no code after a `return`, which Triton 3.6 may be unable to compile."""

import ast
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "kernels"


def _is_jit(function):
    return any(ast.unparse(decorator) == "triton.jit" for decorator in function.decorator_list)


def _may_return(statement):
    return isinstance(statement, ast.If) and any(isinstance(n, ast.Return) for n in ast.walk(statement))


def behind_a_return(source):
    """Returns the device functions with code after an `if` that may return."""
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef) and _is_jit(n)]
    return [f.name for f in functions if any(map(_may_return, f.body[:-1]))]


def test_nothing_stands_behind_a_return():
    """No code follows a constant `if` that returns: Triton 3.6 would compile it even where the `if` holds. For fp64
    that would be code for fp32 alone, such as fast functions and 32-bit casts. Such code must stand in an `else`."""
    files = list(KERNELS.rglob("*.py"))
    assert len(files) > 40
    for file in files:
        assert not behind_a_return(file.read_text()), file.name


def test_what_stands_behind_one_is_found():
    body = "@triton.jit\ndef log(x):\n    if x.dtype == tl.float64:\n        return tl.log(x)\n"
    assert behind_a_return(body + "    return rough(x)\n") == ["log"]
    assert behind_a_return(body + "    else:\n        return rough(x)\n") == []
