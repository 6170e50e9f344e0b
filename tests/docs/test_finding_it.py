"""The examples of docs/finding-it.md print what the document says; `.../` stands for a folder."""

import pathlib
import re
import subprocess
import sys

import pytest

from safeops.debug import audit

TEXT = (pathlib.Path(__file__).parents[2] / "docs" / "finding-it.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", TEXT, re.DOTALL)


def printed(code, folder):
    (folder / "example.py").write_text(code)
    run = subprocess.run([sys.executable, "example.py"], cwd=folder, capture_output=True, text=True)
    return run.stdout + run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("code, expected", EXAMPLES, ids=["trace", "locate_errors", "no_sync", "audit"])
def test_the_example_prints_it(code, expected, tmp_path):
    lines = {shorter(line) for line in printed(code, tmp_path).splitlines()}
    for line in expected.splitlines():
        assert shorter(line) in lines, "\n".join(sorted(lines))


@pytest.mark.slow
def test_a_wrong_line_is_noticed(tmp_path):
    code, expected = EXAMPLES[0]
    lines = {shorter(line) for line in printed(code.replace("0.0, 0.5", "0.1, 0.5"), tmp_path).splitlines()}
    assert any(shorter(line) not in lines for line in expected.splitlines())


def test_every_code_of_the_audit_is_listed():
    assert set(re.findall(r"`([a-z-]{6,})`(?= \||, `b)", TEXT.rpartition("| code |")[2])) == set(audit.CODES)


def shorter(line):
    """Returns a line without folders, indentation, and the module that a traceback puts before an exception's name."""
    return re.sub(r"\S*example\.py", "example.py", re.sub(r"^[\w.]+\.(\w+Error: )", r"\1", line)).strip()
