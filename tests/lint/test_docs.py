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


def test_the_table_of_precision_is_counted_right():
    rows = re.findall(r"^\| (SO\d|\*\*all\*\*) \|" + r" (\d+) \| (\d+) \| (\d+) \| ([\d.]*) \|" * 2 + "$", DOCS, re.M)
    *groups, total = rows
    assert total[0] == "**all**" and {r[0] for r in groups} == {code[:3] for code in RULES}
    for name, *numbers in rows:
        for reviewed, right, wrong, share in (numbers[:4], numbers[4:]):
            assert int(right) + int(wrong) <= int(reviewed), name  # the rest is arguable
            assert share == (f"{int(right) / int(reviewed):.2f}" if int(reviewed) else ""), name
    for i in (1, 2, 3, 5, 6, 7):
        assert sum(int(r[i]) for r in groups) == int(total[i])


def test_the_example_of_lint_source_runs():
    assert doctest.testmod(check) == (0, 2)  # failed, tried
