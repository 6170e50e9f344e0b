"""Bisect a step's ops: choose the ops to wait for, PLACES of them within the interval that holds the error."""

import json
import pathlib

PLACES = 16
FIRST = 64  # until the first error, each 64th op is waited for


class Bisection:
    """Bounds on the failing op: its ordinal within the step lies in (low, high]. A file keeps them between runs."""

    def __init__(self, state):
        self.path = pathlib.Path(state)
        self.low = self.high = None
        if self.path.exists():
            try:
                bounds = json.loads(self.path.read_text())
                self.low, self.high = int(bounds["low"]), int(bounds["high"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"locate_errors: {self.path} holds no state of a bisection: {error}") from None

    def stops_at(self, ordinal):
        if self.low is None:
            return ordinal % FIRST == 0
        if not self.low <= ordinal <= self.high:
            return False
        width = max(1, -(-(self.high - self.low) // PLACES))
        return ordinal == self.high or (ordinal - self.low) % width == 0

    def narrow(self, first, last):
        """Store that the failing ordinal lies in [first, last]. Returns text to append to the error message."""
        if first == last:
            self.path.unlink(missing_ok=True)
            self.low = self.high = None
            return ""
        self.low, self.high = first - 1, last
        self.path.write_text(json.dumps({"low": self.low, "high": self.high}) + "\n")
        return f" (ops {first} to {last} of the step; run it again to narrow: {self.path} remembers)"
