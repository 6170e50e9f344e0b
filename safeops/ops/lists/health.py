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
            (size > 0) & (size <= 2.0**-25),  # of these: rounds to 0 in fp16
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
    """Count input i into row `row + i` of `out`: int64 (R, 8), zeros before the first count, on the inputs' device.

    Columns: 0 NaN, 1 inf, 2 -inf, 3 zeros of either sign, 4 subnormal in fp16 (0 < |x| < 2^-14), 5 those of them that
    are 0 in fp16 (|x| <= 2^-25), 6 the largest finite magnitude as the bits of a double, 7 numel minus the index of the
    first non-finite element in row-major order (0: all are finite). Columns 0 to 5 are added up, 6 and 7 are maxima:
    tensors that are counted into one row are counted together (column 7 has a meaning only for one shape).
    """
    HEALTH.either((out,), _health_, health_definition)(out, row, inputs)


def pick_(out, row, health, health_row, inputs, shape):
    """Write the first four inputs' values at one place into `out[row]`: float64 (R, 4).

    The place is that of the first non-finite element in `health[health_row]` (column 7), which counted a tensor of
    `shape`. The inputs are real and broadcast to `shape`. If all its elements are finite, nothing is written.
    """
    HEALTH.either((out,), _pick_, pick_definition)(out, row, health, health_row, inputs, shape)
