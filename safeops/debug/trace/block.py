"""Memory for a recorder's counts, on the device of the counted tensors."""

import ctypes
import math

import torch

from safeops.debug.common import scan

ROWS = 1 << 14  # rows per block: 1 MiB of counts
PICKS = 4  # most operands whose value at the result's first non-finite element is kept


class Block:
    """Rows of counts and picked values on one device."""

    def __init__(self, device):
        self.device, self.used = device, 0
        with torch.inference_mode(False):  # the tensors outlive the user's inference mode
            self.counts = zeros((ROWS, scan.COLUMNS), torch.int64, device)
            self.picks = zeros((ROWS, PICKS), torch.float64, device)
        # On the CPU the counts can be read at once, which costs less than a kernel that finds nothing to pick.
        memory = ctypes.c_int64 * (ROWS * scan.COLUMNS)
        self.seen = memory.from_address(self.counts.data_ptr()) if device.type == "cpu" else None

    def finite(self, row):
        """True if the row's values are known to be finite, so that there is nothing to pick."""
        return self.seen is not None and self.seen[row * scan.COLUMNS + scan.FIRST] == 0

    def clear(self):
        """Set what was used to 0."""
        if self.used and self.seen is not None:
            for x in (self.counts, self.picks):
                ctypes.memset(x.data_ptr(), 0, x[: self.used].nbytes)
        elif self.used:
            self.counts[: self.used].zero_()
            self.picks[: self.used].zero_()
        self.used = 0


def zeros(shape, dtype, device):
    """torch.zeros, on the CPU without OpenMP's threads: in a child that was forked from a process that has used them,
    torch's own waits for them for ever."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(bytearray(math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)
