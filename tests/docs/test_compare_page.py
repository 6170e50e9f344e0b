"""The example of docs/compare.md prints what the page says."""

import pathlib
import re
import subprocess
import sys

import pytest

TEXT = (pathlib.Path(__file__).parents[2] / "docs" / "compare.md").read_text()
CODE, EXPECTED = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", TEXT, re.DOTALL).groups()


def lines(text):
    """The lines without torch's version, and with two digits of each number: the third may be a machine's own."""
    text = re.sub(r"\(torch [^)]*\)", "", text)
    return [re.sub(r"(\d\.\d)\d+(?!e)", r"\1", line) for line in text.splitlines()]


def printed(code, folder):
    (folder / "example.py").write_text(code)
    run = subprocess.run([sys.executable, "example.py"], cwd=folder, capture_output=True, text=True)
    return lines(run.stdout + run.stderr)


@pytest.mark.slow
def test_the_example_prints_it(tmp_path):
    assert printed(CODE, tmp_path) == lines(EXPECTED)


@pytest.mark.slow
def test_without_the_mistake_it_prints_something_else(tmp_path):
    text = "\n".join(printed(CODE.replace(".weight.data.T", ".weight.data"), tmp_path))
    assert "forward: no difference beyond rounding" in text and "backward: no difference beyond rounding" in text
