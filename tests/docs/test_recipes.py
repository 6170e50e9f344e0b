"""The programs of docs/recipes.md run to the end; the last line of each is an assertion."""

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


@pytest.mark.slow  # the programs import lightning, transformers, trl and monai, which `make test-slow` installs
@pytest.mark.parametrize("title", RECIPES)
def test_the_recipe_runs(title, tmp_path):
    code = RECIPES[title]
    assert "assert " in code.splitlines()[-1]
    run = outcome(code, tmp_path)
    assert run.returncode == 0, run.stderr


def test_every_recipe_is_found():
    assert len(RECIPES) == TEXT.count("```python") == TEXT.count("\n## ") == 22


def test_its_lines_fit_a_screen():
    """Code lines must fit a screen 1280 pixels wide without scrolling: beside the table of contents code has 909
    pixels, and a letter is at most 0.62 times the font size of 13 pixels wide."""
    longest = max((line for code in RECIPES.values() for line in code.splitlines()), key=len)
    assert len(longest) <= 110 < 909 / (0.62 * 13), longest
    css = (pathlib.Path(__file__).parents[2] / "docs" / "style.css").read_text()
    assert ".md-typeset pre > code { font-size: 0.65rem; }" in css  # 0.65 of 20 pixels is 13
    script = (pathlib.Path(__file__).parents[2] / "scripts" / "docs_site.py").read_text()
    assert '"recipes.md": ["navigation"]' in script


def test_what_the_recipes_import_is_named():
    text = TEXT.partition("## A loss of MONAI")[2]
    assert "pip install monai scipy" in text.partition("```")[0]
