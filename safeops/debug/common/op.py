"""The record of an op that ran."""

import math


class Slot:
    """Stands where a tensor stood among an op's arguments."""

    __slots__ = ("row", "pick")

    def __init__(self, row, pick):
        self.row, self.pick = row, pick


class Op:
    """The rows of counts that an op read and wrote, and the place of its call."""

    __slots__ = (
        "index", "func", "facts", "node", "sequence", "frames", "in_engine", "module", "arguments", "keywords",
        "inputs", "outputs", "pick", "differentiable", "root", "scaled", "leaf", "before", "masked", "met", "through",
    )  # fmt: skip

    def slots(self):
        return [x for x in (*self.arguments, *self.keywords.values()) if isinstance(x, Slot)]

    def on_purpose(self):
        """A number that is not finite, written by the user: masked_fill(x, mask, -inf), full(n, nan)."""
        numbers = [x for x in (*self.arguments, *self.keywords.values()) if isinstance(x, float)]
        return self.facts.constant and any(not math.isfinite(x) for x in numbers)
