"""Writes the list of rules in docs/lint.md from the rules' texts: `python -m safeops_lint.reference docs/lint.md`."""

import pathlib
import sys

from safeops_lint.rules import FAMILIES, RULES

BEGIN = "<!-- rules: begin (python -m safeops_lint.reference docs/lint.md) -->"
END = "<!-- rules: end -->"


def markdown():
    """Returns a section for each family of rules: what happens, why, what to write instead, what `--fix` does."""
    lines = []
    for family, title in FAMILIES.items():
        lines += ["", f"### {family}: {title.lower()}"]
        for rule in (r for r in RULES.values() if r.code.startswith(family)):
            lines += ["", f"**{rule.code} {rule.name}.** {rule.what} {rule.why} *Instead:* {rule.fix}"]
            lines += [f"*`--fix`:* {rule.rewrites}."] if rule.rewrites else []
    return "\n".join(lines[1:])


def insert(document):
    """Returns the document with a new list of rules between BEGIN and END."""
    head, _, rest = document.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not end:
        raise ValueError(f"the document has no {BEGIN} ... {END}")
    return f"{head}{BEGIN}\n\n{markdown()}\n\n{END}{tail}"


if __name__ == "__main__":
    path = pathlib.Path(sys.argv[1])
    path.write_text(insert(path.read_text()))
