"""Memory for a recorder's counts, on the device of the counted tensors."""

import ctypes

import torch

from safeops.debug.common import scan

ROWS = 1 << 14  # rows per block: 1 MiB of counts
PICKS = 4  # most operands whose value at the result's first non-finite element is kept


class Block:
    """Rows of counts and picked values on one device."""

    def __init__(self, device):
        self.device, self.used = device, 0
        with torch.inference_mode(False):  # the tensors outlive the user's inference mode
            self.counts = torch.zeros(ROWS, scan.COLUMNS, dtype=torch.int64, device=device)
            self.picks = torch.zeros(ROWS, PICKS, dtype=torch.float64, device=device)
        # On the CPU the counts can be read at once, which costs less than a kernel that finds nothing to pick.
        memory = ctypes.c_int64 * (ROWS * scan.COLUMNS)
        self.seen = memory.from_address(self.counts.data_ptr()) if device.type == "cpu" else None

    def finite(self, row):
        """True if the row's values are known to be finite, so that there is nothing to pick."""
        return self.seen is not None and self.seen[row * scan.COLUMNS + scan.FIRST] == 0
