"""In the README and the pages of docs/ all Python examples run, and all links have a target."""

import ast
import builtins
import inspect
import operator
import re
from pathlib import Path

import pytest

import safeops
import safeops.integrations.transformers

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# {page: the number of its examples that run in this test}, in order, after the README's, where a reader begins.
RUN_HERE = {
    **{"README.md": 1, "functions.md": 3, "distributed.md": 2, "contract.md": 1, "safe-mode.md": 1, "index.md": 1},
}
# These pages have a test of their own.
RUN_ELSEWHERE = {
    *("compare.md", "distributed.md", "finding-it.md", "lint.md", "recipes.md", "recorder.md"),
    "what-really-happens.md",
}


def examples(name):
    (page,) = [page for page in PAGES if page.name == name]
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)[: RUN_HERE[name]]


@pytest.mark.parametrize("name", RUN_HERE)
def test_the_examples_run(name):
    scope = {}
    for code in examples("README.md") + (examples(name) if name != "README.md" else []):
        exec(compile(code, name, "exec"), scope)
        if "loss" in scope:
            assert scope["loss"].dtype == safeops.mse_loss(scope["y"], scope["y"]).dtype
            assert scope["loss"].isfinite()
            assert all(p.isfinite().all() for p in scope["model"].parameters())
    if name == "functions.md":
        assert scope["p"].grad.isfinite().all()  # the example masks before it divides
        assert scope["norm"].isfinite() and scope["norm"] > 0


def undefined(code):
    """Returns the names that a program reads but never defines."""
    known, read = set(dir(builtins)), set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else known).add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            known |= {(name.asname or name.name).partition(".")[0] for name in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            known.add(node.name)
        elif isinstance(node, ast.arg):
            known.add(node.arg)
    return read - known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_block_stands_alone_or_says_what_it_continues(page):
    blocks = re.findall(r"((?:[^\n]+\n)*)\n?```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    for before, code in blocks:
        if page.name == "what-really-happens.md":  # its first paragraph says that these are imported
            code = f"import torch, safeops\nimport torch.nn.functional as F\n{code}"
        missing = undefined(code)
        assert "README.md#" in before or all(f"`{name}`" in before or f"`{name} =" in before for name in missing), code
    assert len(blocks) == page.read_text().count("```python")


def test_no_example_escapes():
    counts = {page.name: page.read_text().count("```python") for page in PAGES if page.name not in RUN_ELSEWHERE}
    here = {name: count for name, count in RUN_HERE.items() if name not in RUN_ELSEWHERE}
    assert {name: count for name, count in counts.items() if count} == here


def test_the_readme_is_short():
    assert len(PAGES[0].read_text().splitlines()) <= 150


def test_the_first_install_is_one_that_works():
    """No version is published, so a command that installs from the package index must say so, and must come after the
    commands that install from a checkout."""
    text = (ROOT / "docs" / "install.md").read_text()
    assert "No version is published yet" in text.partition("```")[0]
    commands = re.findall(r"^(?:pip|make) .*?(?=  +#)", text, re.MULTILINE)
    assert commands == ["pip install .", "make wheel && pip install dist/*.whl"]
    assert re.search(r"^wheel:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for page in PAGES:
        for sentence in re.split(r"\.\s", page.read_text()):
            assert not re.search(r"pip install '?safeops\b", sentence) or "Once 0.1.0 is published" in sentence, page


def test_every_function_has_its_row():
    text = (ROOT / "docs" / "functions.md").read_text()
    names = [name for name in safeops.__all__ if inspect.isfunction(getattr(safeops, name))]
    assert [name for name in names if not re.search(rf"^\|.*`{name}\b.*\|", text, re.MULTILINE)] == []


def test_the_speed_of_the_readme_is_that_of_its_page():
    rows = [[row for row in page.read_text().splitlines() if re.match(r"\| `.*(\d [|].*){5}", row)] for page in PAGES]
    readme, speed = rows[0], rows[PAGES.index(ROOT / "docs" / "speed.md")]
    assert len(readme) == 10 and set(readme) <= set(speed)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_pages_name_exists(page):
    for name in re.findall(r"`safeops\.(\w+(?:\.\w+)*)", page.read_text()):
        operator.attrgetter(name)(safeops)


def anchors(page):
    """Returns the anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def without_code(page):
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for path, anchor in re.findall(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]*))?\)", without_code(page)):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"
