"""The linter's findings, as plain data that can be passed between processes and needs no libcst."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Edit:
    """Replace the bytes [start, end) of the file's UTF-8 text by `text`."""

    start: int
    end: int
    text: str


@dataclasses.dataclass(frozen=True)
class Finding:
    """One place in one file. Lines and columns count from 1, in characters, as every output format wants them."""

    path: str
    line: int
    column: int
    end_line: int
    end_column: int
    code: str
    message: str
    edits: tuple = ()  # of Edit: applied together or not at all
    imports_safeops: bool = False  # the edits use `safeops.`
    likely: bool = True  # False: a caller or the data may well prevent it
    cell: int | None = None  # of a notebook, from 1; line is then the line in the cell

    @property
    def fixable(self):
        return bool(self.edits)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A file that could not be linted (exit code 2), and why."""

    path: str
    message: str
    line: int | None = None
    column: int | None = None
