"""health: counts of NaN, inf, zeros and fp16 subnormals in tensors, and the values at a non-finite element."""

import torch

from safeops.core.dtypes import compute_dtype
from safeops.core.library import declare_raw
from safeops.ops.lists._scan import Scan, nothing

COLUMNS = ("nan", "inf", "minus_inf", "zero", "fp16_subnormal", "fp16_zero", "largest", "first_bad")


def health_definition(out, row, inputs):
    for i, x in enumerate(inputs):
        if x.numel() == 0:
            continue
        x = x.reshape(-1).to(compute_dtype(x.dtype))
        size, finite = x.abs(), x.isfinite()
        n = x.numel()
        counts = (
            x.isnan(),
            x == float("inf"),
            x == -float("inf"),
            x == 0,
            (size > 0) & (size < 2.0**-14),  # subnormal in fp16
            (size > 0) & (size <= 2.0**-25),  # rounds to 0 in fp16
        )
        largest = torch.where(finite, size, 0).amax().double().view(torch.int64)
        first = torch.where(finite.all(), 0, n - (~finite).to(torch.uint8).argmax())
        to = out[row + i]
        to[:6] += torch.stack([c.sum() for c in counts])
        torch.maximum(to[6:], torch.stack((largest, first)), out=to[6:])


def pick_definition(out, row, health, health_row, inputs, shape):
    shape = torch.Size(shape)
    n, first = shape.numel(), health[health_row, 7]
    if n == 0:
        return
    rest, place = (n - first).clamp(0, n - 1).reshape(1), []
    for size in reversed(shape):
        place.insert(0, rest % size)
        rest = rest // size
    for i, x in enumerate(inputs[:4]):
        value = x.expand(shape)[tuple(place)].double() if shape else x.double()
        out[row, i] = torch.where(first > 0, value.reshape(()), out[row, i])


_health_ = declare_raw(
    "_health_",
    "(Tensor(a!) out, int row, Tensor[] inputs) -> ()",
    fake=nothing,
    composite=health_definition,
)
_pick_ = declare_raw(
    "_pick_",
    "(Tensor(a!) out, int row, Tensor health, int health_row, Tensor[] inputs, SymInt[] shape) -> ()",
    fake=nothing,
    composite=pick_definition,
)
HEALTH = Scan("health", _health_, also=(_pick_,))
HEALTH.user = "debug.trace"


def health_(out, row, inputs):
    """Add the counts of input i to row `row + i` of `out`: int64 (R, 8), on the inputs' device, initialized to 0.

    Columns: 0 NaN, 1 inf, 2 -inf, 3 zeros of either sign, 4 subnormal in fp16 (0 < |x| < 2^-14), 5 zero in fp16
    (0 < |x| <= 2^-25, also in column 4), 6 the largest finite magnitude as the bits of a double, 7 numel minus the
    index of the first non-finite element in row-major order (0: all are finite). Several tensors may be counted into
    one row: columns 0 to 5 add up, 6 and 7 keep the maximum (column 7 is meaningful only if all have one shape).
    """
    HEALTH.either((out,), _health_, health_definition)(out, row, inputs)


def pick_(out, row, health, health_row, inputs, shape):
    """Write the values of the first four inputs at one element into `out[row]`: float64 (R, 4).

    The element is the first non-finite one of the tensor of `shape` that `health_` counted in `health[health_row]`
    (column 7). The inputs are real and broadcast to `shape`. If the tensor was finite, nothing is written.
    """
    HEALTH.either((out,), _pick_, pick_definition)(out, row, health, health_row, inputs, shape)
