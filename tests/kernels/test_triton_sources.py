"""What Triton 3.6 would not compile, by the kernels' sources alone."""

import ast
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "kernels"


def _calls_libdevice(statement):
    calls = (n for n in ast.walk(statement) if isinstance(n, ast.Call))
    return any(ast.unparse(n.func).startswith("libdevice.") for n in calls)


def _may_return(statement):
    return isinstance(statement, ast.If) and any(isinstance(n, ast.Return) for n in ast.walk(statement))


def test_nothing_for_one_dtype_alone_stands_behind_a_return():
    """Triton 3.6 compiles what stands behind the `return` of an `if` on constants. What libdevice has for fp32 alone
    raises there for fp64, and stands in an `else`."""
    called = 0
    for file in KERNELS.rglob("*.py"):
        for function in (n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.FunctionDef)):
            called += _calls_libdevice(function)
            for i, statement in enumerate(function.body):
                behind = any(_calls_libdevice(later) for later in function.body[i + 1 :])
                assert not (_may_return(statement) and behind), f"{file.name}: {function.name}"
    assert called >= 3
