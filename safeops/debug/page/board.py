"""The history of a traced run for TensorBoard: scalars by module and step, histograms over the modules."""

import re

from safeops.debug.page.history import LARGEST, LOST, NONFINITE, NUMEL, PHASES, SUBNORMAL

SHARES = {"underflow": SUBNORMAL, "becomes_0": LOST, "nonfinite": NONFINITE}


class Board:
    """Writes to `writer`, a SummaryWriter or another object with add_scalar and add_histogram."""

    def __init__(self, writer):
        self.writer, self.shown = writer, set()

    def add(self, step, names, column):
        """column: this step's values, (names, 2 phases, quantities)."""
        for phase, word in enumerate(PHASES):
            cells = column[:, phase]
            for name, cell in zip(names, cells.tolist()):
                if cell[NUMEL]:
                    self._scalars(word, re.sub(r"[^-\w.]+", "_", name).strip("_"), cell, step)
            positive = cells[:, LARGEST][cells[:, LARGEST] > 0]
            if len(positive):
                # log2 of each module's largest magnitude: fp16's normal numbers lie between -14 and 16
                self.writer.add_histogram(f"trace_{word}/log2_largest", positive.log2(), step)

    def _scalars(self, word, name, cell, step):
        self.writer.add_scalar(f"trace_{word}_largest/{name}", cell[LARGEST], step)
        for kind, quantity in SHARES.items():
            tag = f"trace_{word}_{kind}/{name}"
            # A share that stays 0 is left out: most are, and each scalar costs as much as an op.
            if cell[quantity] or tag in self.shown:
                self.shown.add(tag)
                self.writer.add_scalar(tag, cell[quantity] / cell[NUMEL], step)
