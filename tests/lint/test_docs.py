"""docs/lint.md agrees with the rules, and the README with the command."""

import doctest
import pathlib
import re

from safeops_lint import check, reference
from safeops_lint.rules import RULES

ROOT = pathlib.Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "lint.md").read_text()


def test_the_rules_part_is_that_of_the_rules():
    assert reference.insert(DOCS) == DOCS, "run: python -m safeops_lint.reference docs/lint.md"


def test_codes_in_the_text_exist():
    assert set(re.findall(r"\bSO\d{3}\b", DOCS)) == set(RULES)


def test_the_example_of_lint_source_runs():
    assert doctest.testmod(check) == (0, 2)  # (failures, examples)
