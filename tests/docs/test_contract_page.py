"""The table of docs/contract.md names every check of the harness, and no test that does not exist."""

import re
from pathlib import Path

from safeops.testing import CHECKS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/contract.md").read_text()
TABLE = re.search(r"^\| clause \|.*?\n\n", PAGE, re.MULTILINE | re.DOTALL).group()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.splitlines()[2:] if line]


def test_each_check_has_its_clause():
    named = [name for row in ROWS for name in filter(None, row[1].split(", "))]
    assert sorted(named) == sorted(CHECKS)


def test_each_clause_has_a_row_and_something_that_holds_it():
    clauses = re.findall(r"^(\d+)\. ", PAGE, re.MULTILINE)
    assert len(clauses) == 15 and "| fifteen clauses that " in (ROOT / "README.md").read_text()
    assert [row[0] for row in ROWS][: len(clauses)] == clauses
    assert all(row[1] or row[2] for row in ROWS)


def test_the_tests_exist():
    paths = re.findall(r"tests/[\w/.]*\w", PAGE)
    assert len(paths) > 20 and not [path for path in paths if not (ROOT / path).exists()]
