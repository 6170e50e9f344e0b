"""Which ops to wait for: sixteen places between the two where an error is known to lie."""

import json
import pathlib

PLACES = 16
FIRST = 64  # ops between two places while nothing is known


class Bisection:
    """Ordinals of ops within a step: an error lies in (low, high]. What is known is kept in a file."""

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
        """The error lies at or behind `first` and not behind `last`; what to tell the user."""
        if first == last:
            self.path.unlink(missing_ok=True)
            self.low = self.high = None
            return ""
        self.low, self.high = first - 1, last
        self.path.write_text(json.dumps({"low": self.low, "high": self.high}) + "\n")
        return f" (ops {first} to {last} of the step; run it again to narrow: {self.path} remembers)"
