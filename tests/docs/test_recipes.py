"""The programs of docs/recipes.md run to their last line, which asserts something."""

import pathlib
import re
import subprocess
import sys

import pytest

TEXT = (pathlib.Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
RECIPES = dict(re.findall(r"^## (.*?)\n.*?```python\n(.*?)```", TEXT, re.MULTILINE | re.DOTALL))


def outcome(code, folder):
    (folder / "recipe.py").write_text(code)
    return subprocess.run([sys.executable, "recipe.py"], cwd=folder, capture_output=True, text=True)


@pytest.mark.slow  # they import lightning, transformers, trl and monai, which `make test-slow` installs
@pytest.mark.parametrize("title", RECIPES)
def test_the_recipe_runs(title, tmp_path):
    code = RECIPES[title]
    assert "assert " in code.splitlines()[-1]
    run = outcome(code, tmp_path)
    assert run.returncode == 0, run.stderr


def test_every_recipe_is_found():
    assert len(RECIPES) == TEXT.count("```python") == TEXT.count("\n## ") == 10
