"""Scans over lists of tensors, one launch for a list: what their values are like, their norm, a factor for all.

Raw ops, for safeops.debug and safeops.amp; they know nothing of autograd. Each function here takes the kernel where
the device has one that may be trusted, else its definition. Tensors of a list are on one device and may differ in
dtype (fp16, bf16, fp32, fp64), shape and strides. Nothing is read by the host.
"""

import torch

from safeops._dtypes import compute_dtype
from safeops._library import declare_raw
from safeops._op import Op
from safeops._route import route
from safeops._torch import foreach_norm


class Scan(Op):
    """Of a list. The route is asked for one tensor of it: they are on one device."""

    owner = "C++/CUDA"
    differentiable = ()
    compiled = ("cpu", "cuda")


# ---- health: what the values of a tensor are like

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


def _nothing(*args):
    return None


_health_ = declare_raw(
    "_health_",
    "(Tensor(a!) out, int row, Tensor[] inputs) -> ()",
    fake=_nothing,
    composite=health_definition,
)
_pick_ = declare_raw(
    "_pick_",
    "(Tensor(a!) out, int row, Tensor health, int health_row, Tensor[] inputs, SymInt[] shape) -> ()",
    fake=_nothing,
    composite=pick_definition,
)
HEALTH = Scan("health", _health_, also=(_pick_,))


def health_(out, row, inputs):
    """Count each input into a row of `out`, from `row` on: zeros before, int64 (R, 8), on the inputs' device.

    Columns: 0 NaN, 1 inf, 2 -inf, 3 zeros of either sign, 4 subnormal in fp16 (0 < |x| < 2^-14), 5 those of them that
    are 0 in fp16 (|x| <= 2^-25), 6 the largest finite magnitude as the bits of a double, 7 numel minus the index of the
    first non-finite element in row-major order (0: all are finite). Sums and maxima, so a row may be counted into
    again: it then says of all what they have together (column 7 means something only for one shape).
    """
    (_health_ if route(HEALTH, (out,)) else health_definition)(out, row, inputs)


def pick_(out, row, health, health_row, inputs, shape):
    """Write the values at the place that `health[health_row, 7]` names into `out[row]`: float64 (R, 4).

    Of the first four inputs, real tensors that broadcast to `shape`, whose row of health it is. Where that row has
    found nothing, nothing is written.
    """
    (_pick_ if route(HEALTH, (out,)) else pick_definition)(out, row, health, health_row, inputs, shape)


# ---- norm of all elements together


def norm_definition(inputs, ord):
    inputs = [x for x in inputs if x.numel()] or [inputs[0].new_zeros(1)]
    scale = inputs[0].new_ones((), dtype=torch.float64)
    if ord not in (1, float("inf")) and (ord > 2 or torch.float64 in {x.dtype for x in inputs}):
        # powers may leave the range of doubles: of the largest element they are 1
        largest = torch.stack([x.abs().amax().double() for x in inputs]).amax()
        scale = torch.where((largest > 0) & largest.isfinite(), largest, 1)
        inputs = [x.double() / scale for x in inputs]
    norms = foreach_norm(inputs, ord, dtype=torch.float64)
    return torch.linalg.vector_norm(torch.stack(norms), ord) * scale


_grad_norm = declare_raw(
    "_grad_norm",
    "(Tensor[] inputs, float ord) -> Tensor",
    fake=lambda inputs, ord: inputs[0].new_empty((), dtype=torch.float64),
    composite=norm_definition,
)
NORM = Scan("grad_norm", _grad_norm)


def norm(inputs, ord):
    """The `ord`-norm (above 0, or inf) of all elements of at least one tensor: a 0-dim fp64 tensor."""
    has_kernel = ord in (1, 2, float("inf")) and route(NORM, inputs[:1])
    return (_grad_norm if has_kernel else norm_definition)(inputs, ord)


# ---- one factor for all


def scale_definition(tensors, factor):
    # A factor of which fp32 would lose digits, or all, is lifted into its range by a power of two: no copy in fp64.
    lift = torch.where(factor.abs() < torch.finfo(torch.float32).tiny, 2.0**100, 1.0)
    for x in tensors:
        wide = compute_dtype(x.dtype)
        x.copy_(x.to(wide) * (factor * lift).to(wide) * lift.reciprocal().to(wide))


_scale_ = declare_raw(
    "_scale_",
    "(Tensor(a!)[] tensors, Tensor factor) -> ()",
    fake=_nothing,
    composite=scale_definition,
)
SCALE = Scan("clip_grad_norm_", _scale_)


def scale_(tensors, factor):
    """Multiply each tensor by a 0-dim floating tensor, in fp32 (fp64 for fp64): one rounding, whatever the size of the
    factor; by 1: left as it is."""
    if tensors:
        (_scale_ if route(SCALE, (factor,)) else scale_definition)(tensors, factor)
