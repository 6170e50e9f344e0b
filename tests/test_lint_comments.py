"""scripts/lint_comments.py names comments and docstrings that begin without a subject, and nothing else."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "lint_comments.py"
PYTHON = '''"""The same of a module."""

#: By an attribute
A = 1  # Of one line
B = "# What a string holds"


def f():
    """Whether it holds."""
    # A comment whose second line goes on
    # By itself, which is no complaint.
    return 1  # same
    # What follows a comment at the end of a line
'''
CPP = """// The same in C++
/// What it holds.
int a;  // Of the left
int b;  // Offset of the right
/* By a block */
// It goes on
// By a second line.
"""


@pytest.mark.parametrize("name, text, lines", [("a.py", PYTHON, [1, 3, 4, 9, 13]), ("a.cpp", CPP, [1, 3, 5])])
def test_names_the_comments_without_a_subject(tmp_path, name, text, lines):
    path = tmp_path / name
    path.write_text(text)
    done = subprocess.run([sys.executable, SCRIPT, path], capture_output=True, text=True)
    assert [int(line.split(":")[1]) for line in done.stdout.splitlines()] == lines
    assert done.returncode == 1 and f"{len(lines)} comments" in done.stderr


def test_plain_comments_pass(tmp_path):
    path = tmp_path / "a.py"
    path.write_text("# This sums rows, by columns of the same width.\n")
    assert subprocess.run([sys.executable, SCRIPT, path], capture_output=True).returncode == 0
