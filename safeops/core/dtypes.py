"""Dtype rules of the contract: what an op computes in, and what it returns."""

import torch
from torch.compiler import is_compiling

HALF = (torch.float16, torch.bfloat16)
WIDE = (torch.float32, torch.float64)
FLOATING = (*WIDE, *HALF)  # `in` compares one by one: the usual fp32 comes first

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}

SMALLEST, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def compute_dtype(*dtypes):
    """fp64 where one of the dtypes is, else fp32: half is read, never computed in."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def widens(x):
    """True if a definition computes in fp64 beside x: where it runs to be differentiated again. What the derivatives of
    1e-40 are made of does not fit fp32, and times an upstream gradient of 0 it must be 0.

    Not where there is no fp64, nor under torch.compile on a GPU: there definitions are all that runs, nothing is
    differentiated again, and fp64 may cost 64 times as much."""
    kind = x.device.type
    return kind == "cpu" or not (kind == "mps" or is_compiling())


def wide(x):
    """x in fp64, where that `widens`."""
    return x.double() if widens(x) else x


def wide_on_cpu(x):
    """x in fp64 on the CPU, whose sums in fp32 are the less exact ones."""
    return x.double() if x.device.type == "cpu" else x


def to_one(x):
    """The power of two that brings a finite x, which is not 0, to [1, 2): as far as it is a normal number."""
    tiny = torch.finfo(x.dtype).tiny
    return (2 * torch.frexp(x)[0] / x).clamp(tiny, 1 / tiny)


def readable(scalar):
    """A 0-dim tensor as the kernels read it: floating. An int64 count becomes fp64, which holds it exactly to 2^53."""
    integer = not (scalar.is_floating_point() or scalar.is_complex() or scalar.dtype == torch.bool)
    return scalar.double() if integer else scalar


def signed(x):
    """uint16, uint32 and uint64, for which torch has few kernels, as the signed dtype of the same bits."""
    return x.to(_SIGNED.get(x.dtype, x.dtype))


def where(condition, x, other):
    """torch.where for two tensors of any one dtype (before torch 2.13 it does not know those above)."""
    return torch.where(condition, signed(x), signed(other)).to(x.dtype)


def saturate(value, dtype):
    """A finite number, or 0-dim tensor, brought into the range of a floating `dtype`; inf and nan pass."""
    if isinstance(value, torch.Tensor):
        return saturate_tensor(value, dtype)
    largest = torch.finfo(dtype).max
    if largest < abs(value) < float("inf"):  # first: an integer may be too large for any float
        return largest if value > 0 else -largest
    return float(value)


def filled(x, shape, value):
    """A tensor of x's dtype that holds a number, or a 0-dim tensor, everywhere."""
    if isinstance(value, torch.Tensor):
        return value.to(x.dtype).expand(shape)
    return x.new_full(shape, value)


def fill_of(value, dtype):
    """A number, or a 0-dim tensor, as `dtype` holds it: saturated."""
    if dtype in FLOATING:
        return saturate(value, dtype)
    if dtype.is_complex:
        return saturate(value, torch.float64 if dtype == torch.complex128 else torch.float32)
    if dtype == torch.bool:
        return value != 0
    if isinstance(value, torch.Tensor):
        return _integer(value, dtype)
    info = torch.iinfo(dtype)
    if value in (float("inf"), -float("inf")):
        return info.max if value > 0 else info.min
    return max(info.min, min(info.max, int(value)))


def _integer(scalar, dtype):
    """The value of a real 0-dim tensor. A NaN is 0: to refuse it would be to wait for it."""
    if scalar.dtype == dtype:
        return scalar
    info = torch.iinfo(dtype)
    low, high = info.min, min(info.max, 2**63 - 1)
    if scalar.is_floating_point():
        wide = scalar.double().nan_to_num(0)
        # 2^63 - 1 and 2^64 - 1 are no doubles. int64 holds what is beyond it as the same bits less 2^64.
        over, upper = wide >= float(info.max), (wide >= 2.0**63) & (info.max > high)
        integer = torch.where(over, 0, torch.where(upper, wide - 2.0**64, wide.clamp(min=low))).long()
        return torch.where(over, info.max if info.max == high else -1, integer).to(dtype)
    integer = scalar.long()
    if scalar.dtype == torch.uint64:
        integer = torch.where(integer < 0, high, integer)
    return integer.clamp(low, high).to(dtype)


def saturate_tensor(wide, dtype):
    """`wide` with finite values that would be inf in `dtype` at its largest finite one, with gradient 0; still wide."""
    # (Inductor takes no & of these where `wide` comes from a number that a trace knows by a symbol.)
    over = torch.logical_and(overflows(wide, dtype), wide.isfinite())
    return torch.where(over, largest_like(wide, dtype), wide)


def overflows(wide, dtype):
    """Where `wide` is infinite in `dtype`. Compared, not cast: Inductor keeps half in fp32, where nothing overflows."""
    if dtype not in HALF:
        return wide.to(dtype).isinf()
    info = torch.finfo(dtype)
    middle = info.max / (2 - info.eps) * (2 - info.eps / 2)  # of the largest number and the next power of two
    return wide.float().abs() >= middle  # (torch rounds fp64 to half by way of fp32)


def largest_like(wide, dtype):
    """The largest finite magnitude of `dtype`, with the signs of `wide` and in its (at least as wide) dtype."""
    return torch.full_like(wide, torch.finfo(dtype).max).copysign(wide).detach()
