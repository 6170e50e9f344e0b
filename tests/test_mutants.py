"""scripts/mutants.py: the changed code can run, and the tests that it names exist."""

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def mutants():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
        spec = importlib.util.spec_from_file_location("mutants", ROOT / "scripts" / "mutants.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module


def sources(mutants):
    for place in mutants.SHARES:
        for path in (ROOT / place).rglob("*"):
            if path.suffix in mutants.SOURCES:
                yield path, path.relative_to(ROOT).as_posix()


def test_every_source_has_tests(mutants):
    for _, name in sources(mutants):
        stages = mutants.stages(name)
        files = [word for stage in stages for word in stage if word.startswith("tests/")]
        assert files and all((ROOT / file).exists() for file in files), (name, stages)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_mutant_differs_in_one_place_and_compiles(mutants):
    for path, name in sources(mutants):
        text, results = path.read_text(), list(mutants.mutations(path, name))
        for m in results:
            assert text[m["start"] : m["stop"]] == m["old"] != m["text"]
            assert text.count("\n", 0, m["start"]) == m["line"] - 1
        for m in results[::9] if path.suffix == ".py" else ():
            ast.parse(text[: m["start"]] + m["text"] + text[m["stop"] :])


def test_the_kinds_of_change(mutants, tmp_path):
    def changes(name, text):
        path = tmp_path / name
        path.write_text(text)
        return {(m["old"], m["text"]) for m in mutants.mutations(path, name)}

    python = changes(
        "a.py", "def f(x, n=0):\n    if x < 1 and n:\n        return -x\n    return where(x, x + 2, max(x, n))\n"
    )
    assert python == {
        ("<", "<="), ("1", "0"), ("and", "or"), ("x < 1 and n", "False"), ("-x", "(x)"), ("-x", "None"), ("+", "-"),
        ("2", "3"), ("max", "min"), ("where(x, x + 2, max(x, n))", "(x + 2)"), ("where(x, x + 2, max(x, n))", "None"),
        ("x", "~(x)"),
    }  # fmt: skip
    triton = changes("b.py", "v = tl.load(p, mask=k, other=0.0)\ntl.store(p, v, mask=k)\n")
    assert triton == {(", other=0.0", ""), ("0.0", "1.0"), (", mask=k", "")}
    cpp = changes("c.cpp", "if (n == 0) return;  // n < 2\nx = kept_or_zero(k != 0, y - std::min(a, 7));\n")
    assert cpp == {
        ("(n == 0)", "(false)"), ("==", "!="), ("0", "1"), ("kept_or_zero(k != 0, y - std::min(a, 7))",
        "(y - std::min(a, 7))"), ("!=", "=="), ("-", "+"), ("min", "max"), ("7", "8"),
    }  # fmt: skip


def test_the_same_seed_draws_the_same_mutants(mutants):
    def first(seed):
        draw = mutants.drawn(seed, "safeops/amp")
        return [(m["path"], m["start"], m["text"]) for m, _ in zip(draw, range(9))]

    assert first(1) == first(1) != first(2)
    assert len({(path, start) for path, start, _ in first(1)}) == 9
