"""docs/lint.md says what the rules say, and the README what the command does."""

import doctest
import pathlib
import re

from safeops.lint import check, reference
from safeops.lint.rules import RULES

ROOT = pathlib.Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "lint.md").read_text()


def test_the_rules_part_is_that_of_the_rules():
    assert reference.insert(DOCS) == DOCS, "run: python -m safeops.lint.reference docs/lint.md"


def test_links_of_the_table_lead_somewhere():
    links = re.findall(r"\]\(#([\w-]+)\)", DOCS)
    headings = {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in re.findall(r"^#+ (.*)$", DOCS, re.M)}
    assert len(links) >= len(RULES) and set(links) <= headings


def test_codes_in_the_text_exist():
    assert set(re.findall(r"\bSO\d{3}\b", DOCS)) == set(RULES)


def test_the_tables_of_precision_are_counted_right():
    """A row a draw: right of all (share) in each group and in all, how many wrong; then the rules of SO2."""
    rows = [line.split("|")[1:-1] for line in DOCS.splitlines() if re.match(r"\| [\w-]+(th|nd|rd|st), \d+", line)]
    counts = []
    for name, *cells, wrong in rows:
        found = [tuple(map(int, re.findall(r"(\d+) of (\d+)", cell)[0])) if cell.strip() else (0, 0) for cell in cells]
        for (right, of), cell in zip(found, cells):
            assert "(" not in cell or f"({right / of:.2f})" in cell, name
        assert found[-1] == tuple(map(sum, zip(*found[:-1]))) and int(wrong) <= found[-1][1] - found[-1][0], name
        counts.append(found)
    assert len(counts) == 21
    all_, middle, late = (
        [tuple(map(sum, zip(*cells))) for cells in zip(*draws)] for draws in (counts, counts[3:8], counts[8:])
    )
    so2 = late[1]
    for right, of in (all_[0], all_[2], middle[1], so2):
        assert f"{right} of {of} ({right / of:.2f})" in DOCS
    rules = re.findall(r"^\| SO2[\dSO, ]* \| (\d+) \| (\d+) \| (\d+) \|$", DOCS, re.M)
    right, wrong, arguable = (sum(int(row[i]) for row in rules) for i in range(3))
    assert (right, right + wrong + arguable) == so2


def test_the_example_of_lint_source_runs():
    assert doctest.testmod(check) == (0, 2)  # failed, tried
