"""Memory for the counts of a recorder, on the device of what it counts."""

import ctypes

import torch

from safeops.debug.common import scan

ROWS = 1 << 14  # of one block: 1 MiB
PICKS = 4  # operands whose value at the first bad element is kept


class Block:
    """Rows of counts and picked values on one device."""

    def __init__(self, device):
        self.device, self.used = device, 0
        with torch.inference_mode(False):  # they outlive the user's
            self.counts = torch.zeros(ROWS, scan.COLUMNS, dtype=torch.int64, device=device)
            self.picks = torch.zeros(ROWS, PICKS, dtype=torch.float64, device=device)  # of the same rows
        # On the CPU the counts can be read as they are taken, which costs less than a kernel that finds nothing to do.
        memory = ctypes.c_int64 * (ROWS * scan.COLUMNS)
        self.seen = memory.from_address(self.counts.data_ptr()) if device.type == "cpu" else None

    def finite(self, row):
        """Known to be finite: no values to pick."""
        return self.seen is not None and self.seen[row * scan.COLUMNS + scan.FIRST] == 0
