"""Count a tensor's values by kind, on its device: the columns of the table, and the kernels that fill them."""

import dataclasses
import math
import struct

import torch

from safeops.ops.lists.health import HEALTH, health_, pick_

COLUMNS = 8
NAN, POSITIVE_INF, NEGATIVE_INF, ZERO, SUBNORMAL, LOST, LARGEST, FIRST = range(COLUMNS)


@dataclasses.dataclass(frozen=True)
class Counts:
    """Counts of one tensor's values, by kind."""

    shape: tuple
    dtype: torch.dtype
    device: str
    nan: int
    positive_inf: int
    negative_inf: int
    zero: int
    subnormal: int  # 0 < |x| < 2^-14: subnormal or zero in fp16
    lost: int  # 0 < |x| <= 2^-25: zero in fp16
    largest: float  # the largest finite magnitude
    first: tuple | None  # index of the first element that is not finite

    @property
    def nonfinite(self):
        return self.nan + self.positive_inf + self.negative_inf

    @property
    def numel(self):
        return math.prod(self.shape)

    @property
    def type(self):
        return str(self.dtype).removeprefix("torch.")

    def __str__(self):
        return f"{self.type} {self.shape} on {self.device}"

    def kinds(self):
        """'3 NaN, 1 -inf of 64 elements'."""
        counted = ((self.nan, "NaN"), (self.positive_inf, "inf"), (self.negative_inf, "-inf"))
        result = ", ".join(f"{n} {name}" for n, name in counted if n)
        return f"{result or 'no NaN, no inf'} of {self.numel} element{'s' * (self.numel != 1)}"


def read(row, shape, dtype, device):
    """Counts from a row of the table."""
    values = row.tolist()
    first = None
    if values[FIRST]:
        flat, first = numel(shape, dtype) - values[FIRST], []
        for size in reversed(_real(shape, dtype)):
            flat, i = divmod(flat, size)
            first.insert(0, i)
        first = tuple(first[: len(shape)])
    largest = struct.unpack("d", struct.pack("q", values[LARGEST]))[0]
    return Counts(shape, dtype, device, *values[:LARGEST], largest, first)


def count(table, row, tensors):
    _HEALTH[table.is_cpu](table, row, [_countable(x) if x.dtype.is_complex else x for x in tensors])


def pick(table, row, counts, counted, operands, shape):
    pick_(table, row, counts, counted, operands, shape)


# Key: True for a table on the CPU. There the kernel is called without its Python layers, as it runs for every op.
_HEALTH = {
    True: HEALTH.eager[False][0] if HEALTH.cpu else health_,
    False: health_,
}


def _countable(x):
    return torch.view_as_real(x.detach().resolve_conj())


def _real(shape, dtype):
    return (*shape, 2) if dtype.is_complex else shape


def numel(shape, dtype):
    """How many real numbers are counted: a complex element is two."""
    return math.prod(shape) * (1 + dtype.is_complex)
