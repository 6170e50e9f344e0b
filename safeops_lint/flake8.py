"""The flake8 plugin: `flake8 --select SO`. flake8 passes its tree and the lines; libcst parses the lines again."""

from safeops_lint import version
from safeops_lint.check import CannotLint, lint_source


class Plugin:
    """A plugin that flake8 calls with a file's tree. Files, codes and noqa are flake8's. Only likely findings are
    reported."""

    name = "safeops"
    version = version()

    def __init__(self, tree, lines, filename="(none)"):
        self.lines, self.filename = lines, filename

    def run(self):
        try:
            findings = lint_source("".join(self.lines), self.filename, noqa=False)
        except CannotLint:
            return  # the file does not parse, which flake8 reports itself
        for f in findings:
            yield f.line, f.column - 1, f"{f.code} {f.message}", type(self)
