"""The flake8 plugin: `flake8 --select SO`. flake8 passes its tree and the lines; libcst parses the lines again."""

from safeops_lint import version
from safeops_lint.check import CannotLint, lint_source


class Plugin:
    """An ast-tree plugin. flake8 chooses codes, files and noqa; the rules outside the default set do not run here."""

    name = "safeops"
    version = version()

    def __init__(self, tree, lines, filename="(none)"):
        self.lines, self.filename = lines, filename

    def run(self):
        try:
            findings = lint_source("".join(self.lines), self.filename, noqa=False)
        except CannotLint:
            return  # flake8 reports files that do not parse itself
        for f in findings:
            yield f.line, f.column - 1, f"{f.code} {f.message}", type(self)
