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
    """Of four samples: (findings, right, wrong, share), by rule, by group, and all."""
    rows = re.findall(r"^\| (SO\d+|\*\*all\*\*) \|((?: \d+ \| \d+ \| \d+ \| [\d.]* \|){4})$", DOCS, re.M)
    table = {name: [x.strip() for x in cells.split("|")[:-1]] for name, cells in rows}
    groups = {name for name in table if len(name) == 3}
    assert groups == {code[:3] for code in RULES} and set(table) - groups - {"**all**"} <= set(RULES)
    for name, numbers in table.items():
        below = groups if name == "**all**" else [x for x in table if len(x) == 5 and x.startswith(name)]
        for i in (0, 4, 8, 12):
            reviewed, right, wrong = map(int, numbers[i : i + 3])
            assert right + wrong <= reviewed, name  # the rest is arguable
            assert numbers[i + 3] == (f"{right / reviewed:.2f}" if reviewed else ""), name
            for j in range(i, i + 3):
                assert int(numbers[j]) == sum(int(table[x][j]) for x in below), name


def test_the_example_of_lint_source_runs():
    assert doctest.testmod(check) == (0, 2)  # failed, tried
