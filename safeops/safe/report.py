"""The report of a safe mode: which function was replaced by which twin, at which line, how often."""

import threading
from typing import NamedTuple

from safeops.debug.common.source import line

_LOCK = threading.Lock()  # one for all reports: it is held for a microsecond


class Replacement(NamedTuple):
    """One torch function that called its twin at one line. In a compiled function the count is 1, for the trace."""

    function: str
    twin: str
    file: str
    line: int
    count: int


class Remark(NamedTuple):
    """A remark on a line: a torch function was not replaced, or a finite sum has NaN gradients."""

    function: str
    remark: str
    file: str
    line: int
    count: int


class Report:
    """The replacements and remarks of a safe mode. Prints as a table.

    Attributes:
        replacements: list of `Replacement` (function, twin, file, line, count), in the order of their first call.
        remarks: list of `Remark` (function, remark, file, line, count): calls not replaced, and problems that stay.
    """

    def __init__(self):
        # Keyed by bare code positions: a line is looked up when the report is read, not at each call.
        self._counts, self._remarks = {}, {}

    def _note(self, function, twin, place, traced=False):
        """place: (code, offset) of the user's frame, or (file, line) in a trace. Repeated traces count once."""
        key = function, twin, place
        with _LOCK:
            self._counts[key] = 1 if traced else self._counts.get(key, 0) + 1

    def _remark(self, function, remark, place):
        """Count a remark. True if it is the first of its kind at this place."""
        key = function, remark, place
        with _LOCK:
            self._remarks[key] = self._remarks.get(key, 0) + 1
            return self._remarks[key] == 1

    @property
    def replacements(self):
        return [Replacement(*key, count) for key, count in _by_line(self._counts).items()]

    @property
    def remarks(self):
        return [Remark(*key, count) for key, count in _by_line(self._remarks).items()]

    def __str__(self):
        remarks = "".join(f"\n  {x.function} at {x.file}:{x.line} is {x.remark}" for x in self.remarks)
        return self._table() + remarks

    def _table(self):
        rows = self.replacements
        if not rows:
            return "safe_mode: nothing was replaced"
        cells = [("count", "torch", "safeops", "line")]
        cells += [(str(x.count), x.function, x.twin, f"{x.file}:{x.line}") for x in rows]
        widths = [max(len(row[i]) for row in cells) for i in range(3)]
        calls, lines = sum(x.count for x in rows), len({x[2:4] for x in rows})
        text = "\n".join(
            f"  {count:>{widths[0]}}  {function:<{widths[1]}}  {twin:<{widths[2]}}  {place}"
            for count, function, twin, place in cells
        )
        return f"safe_mode: {_plural(calls, 'call')} replaced in {_plural(lines, 'line')}\n{text}"


def _by_line(entries):
    """Returns {(function, text, file, line): count}. entries: {(function, text, code position): count}."""
    with _LOCK:
        counts = list(entries.items())
    result = {}
    for (function, text, place), count in counts:
        key = function, text, *line_of(place)
        result[key] = result.get(key, 0) + count
    return result


def line_of(place):
    """(file, line) of a place."""
    if place is None:
        return "?", 0
    if isinstance(place[0], str):
        return place
    where = line(place)
    return where.file, where.number


def _plural(count, name):
    return f"{count} {name}{'s' * (count != 1)}"
