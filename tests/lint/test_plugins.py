"""flake8 and pre-commit find the linter by its entry points, and flake8 runs it."""

import pathlib
import subprocess
import sys

import yaml

from safeops_lint import command
from safeops_lint.config import _toml
from safeops_lint.rules import RULES

ROOT = pathlib.Path(__file__).parents[2]
BAD = "import torch\n\n\ndef loss(x):\n    return torch.log(x).mean()\n\n\n"
BAD += "def log_loss(x):\n    return torch.log(x)  # noqa: SO204\n"


def test_entry_point():
    import importlib

    project = _toml().loads((ROOT / "pyproject.toml").read_text())["project"]
    ((prefix, target),) = project["entry-points"]["flake8.extension"].items()
    module, _, name = target.partition(":")
    assert prefix == "SO" and getattr(importlib.import_module(module), name).name == "safeops"


def test_flake8_runs_it(tmp_path):
    (tmp_path / "a.py").write_text(BAD)
    (tmp_path / "clean.py").write_text("import numpy\n\n\ndef loss(x):\n    return numpy.log(x)\n")
    (tmp_path / ".flake8").write_text("[flake8]\nselect = SO\n")  # no other configuration is needed
    done = subprocess.run(
        [sys.executable, "-m", "flake8", "-j1", "."], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    expected = "./a.py:5:12: SO204 nothing keeps the argument of log inside its domain; use safeops.safe_log\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, expected, "")


def test_pre_commit_hooks(tmp_path, capsys):
    hooks = {hook["id"]: hook for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())}
    assert set(hooks) == {"safeops-lint", "safeops-lint-fix"}
    (tmp_path / "a.py").write_text(BAD)
    for name, left in (("safeops-lint", 1), ("safeops-lint-fix", 0)):
        hook = hooks[name]
        assert hook["types_or"] == ["python", "pyi", "jupyter"] and hook["language"] == "system"
        program, *arguments = hook["entry"].split()
        assert program == "safeops-lint"
        assert command.main([*arguments, *hook.get("args", []), str(tmp_path / "a.py")]) == left
    assert "safe_log" in (tmp_path / "a.py").read_text()


def test_codes_fit_flake8():
    assert all(code.startswith("SO") and code[2:].isdigit() for code in RULES)
