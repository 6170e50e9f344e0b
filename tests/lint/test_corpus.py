"""Losses written for this: every hazard is named on its line, and what is sound is left alone.

A hazard that a caller or the data may well keep away (SO201?) is named where the rule is asked for, and then only.
"""

import pathlib
import re

import pytest

from safeops.lint.check import lint_source
from tests.lint.programs import DEFAULT

CORPUS = pathlib.Path(__file__).parent / "corpus"
HAZARDS = (CORPUS / "hazards.py").read_text()
WANTED = {
    number: re.findall(r"SO\d+\??", line.partition("  # ")[2])
    for number, line in enumerate(HAZARDS.splitlines(), 1)
    if "  # SO" in line
}


@pytest.fixture(scope="module")
def found():
    codes = {}
    for f in lint_source(HAZARDS, rules=DEFAULT, noqa=False):
        codes.setdefault(f.line, set()).add(f.code + "?" * (not f.likely))
    return codes


def test_a_default_run_names_what_is_likely(found):
    likely = {(line, code) for line, codes in found.items() for code in codes if "?" not in code}
    assert {(f.line, f.code) for f in lint_source(HAZARDS, noqa=False)} == likely


@pytest.mark.parametrize("line", WANTED, ids=lambda n: f"{n}-{HAZARDS.splitlines()[n - 1].strip()[:50]}")
def test_hazard_is_named(line, found):
    assert set(WANTED[line]) <= found.get(line, set())


def test_nothing_else_is_named(found):
    lines = HAZARDS.splitlines()
    likely = {n: {code for code in codes if "?" not in code} for n, codes in found.items()}
    other = {n: (lines[n - 1].strip(), codes - set(WANTED.get(n, ()))) for n, codes in likely.items()}
    assert {n: o for n, o in other.items() if o[1]} == {}


def test_sound_losses_are_left_alone():
    source = (CORPUS / "sound.py").read_text()
    assert [(f.line, f.code, f.message) for f in lint_source(source)] == []
