"""The rules' part of docs/lint.md, from the rules themselves: `python -m safeops.lint.reference docs/lint.md`."""

import pathlib
import sys
import textwrap

from safeops.lint.rules import FAMILIES, RULES

BEGIN = "<!-- rules: begin (python -m safeops.lint.reference docs/lint.md) -->"
END = "<!-- rules: end -->"


def markdown():
    """One table of all rules, then a section each."""
    lines = ["| code | name | default | `--fix` |", "|---|---|---|---|"]
    for r in RULES.values():
        marks = ("yes" if r.default else "no", "yes" if r.rewrites else "")
        lines.append(f"| [{r.code}](#{r.code.lower()}-{r.name}) | {r.name} | {marks[0]} | {marks[1]} |")
    family = None
    for r in RULES.values():
        if r.code[:3] != family:
            family = r.code[:3]
            lines += ["", f"### {FAMILIES[family]}"]
        lines += ["", f"#### {r.code} {r.name}", "", f"{r.what} {r.why}", "", f"Instead: {r.fix}"]
        if r.rewrites:
            lines += ["", f"`--fix`: {r.rewrites}."]
        lines += ["", "```python", f"# {r.outcome}", _code(r.bad), "```", "", "```python", _code(r.good), "```"]
    return "\n".join(lines)


def _code(text):
    return textwrap.dedent(text).strip("\n")


def insert(document):
    """The document with its rules' part written anew."""
    head, _, rest = document.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not end:
        raise ValueError(f"the document has no {BEGIN} ... {END}")
    return f"{head}{BEGIN}\n\n{markdown()}\n\n{END}{tail}"


if __name__ == "__main__":
    path = pathlib.Path(sys.argv[1])
    path.write_text(insert(path.read_text()))
