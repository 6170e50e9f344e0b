"""The example of docs/recorder.md prints what the page says."""

import pathlib
import re
import subprocess
import sys

import pytest

TEXT = (pathlib.Path(__file__).parents[2] / "docs" / "recorder.md").read_text()
CODE, EXPECTED = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", TEXT, re.DOTALL).groups()


def lines(text):
    """The lines without the folder of a file, without step and numbers: which row is 0 first may be a machine's own."""
    text = re.sub(r"[\w./-]*/(?=example.py|flight)|[.]{3}/", "", text)
    return [re.sub(r"-?\d+(\.\d+)?(e[-+]\d+)?", "0", line) for line in text.splitlines()]


@pytest.mark.slow
def test_the_example_prints_it(tmp_path):
    (tmp_path / "example.py").write_text(CODE)
    run = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True)
    printed = lines(run.stdout)
    assert not run.stderr, run.stderr
    for line in lines(EXPECTED):
        assert line in printed, run.stdout
