"""The linter's findings. They are plain data without libcst's nodes, so that processes can exchange them."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Edit:
    """Replace the bytes [start, end) of the file's UTF-8 text by `text`."""

    start: int
    end: int
    text: str


@dataclasses.dataclass(frozen=True)
class Finding:
    """A finding: what a rule reports at one place in a file. Lines and columns count from 1, columns in characters, as
    every output format needs them."""

    path: str
    line: int
    column: int
    end_line: int
    end_column: int
    code: str
    message: str
    edits: tuple = ()  # Edits, which are applied together or not at all
    imports_safeops: bool = False  # the edits call safeops, so the file must import it
    likely: bool = True  # False: possible only, as a caller or the data may well prevent it
    cell: int | None = None  # in a notebook: number of the cell, from 1; `line` is then the line in that cell

    @property
    def fixable(self):
        return bool(self.edits)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Says which file could not be linted, and why. The exit code is then 2."""

    path: str
    message: str
    line: int | None = None
    column: int | None = None
