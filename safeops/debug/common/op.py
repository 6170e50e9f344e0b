"""The record of an op that ran."""

import math


class Slot:
    """Placeholder for a tensor among an op's arguments. row: its row in the table of counts. pick: its index among the
    operands' values at the result's first non-finite element. Each may be None."""

    __slots__ = ("row", "pick")

    def __init__(self, row, pick):
        self.row, self.pick = row, pick


class Op:
    """An op that ran: the rows of counts of the tensors that it read and wrote, and the place of its call."""

    __slots__ = (
        "index", "func", "facts", "node", "sequence", "frames", "in_engine", "module", "arguments", "keywords",
        "inputs", "outputs", "pick", "differentiable", "root", "scaled", "leaf", "before", "masked", "met", "through",
    )  # fmt: skip

    def slots(self):
        return [x for x in (*self.arguments, *self.keywords.values()) if isinstance(x, Slot)]

    def on_purpose(self):
        """True if the user wrote a number that is not finite: masked_fill(x, mask, -inf), full(n, nan)."""
        numbers = [x for x in (*self.arguments, *self.keywords.values()) if isinstance(x, float)]
        return self.facts.constant and any(not math.isfinite(x) for x in numbers)
