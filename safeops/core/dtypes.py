"""Dtype rules of the contract: what an op computes in, and what it returns."""

import torch
from torch.compiler import is_compiling

HALF = (torch.float16, torch.bfloat16)
WIDE = (torch.float32, torch.float64)
FLOATING = (*WIDE, *HALF)  # `in` compares one by one: the usual fp32 comes first

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}

SMALLEST, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def compute_dtype(*dtypes):
    """fp64 if one of the dtypes is fp64, else fp32. Nothing is computed in half: half operands are widened."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def widens(x):
    """True if a definition computes in fp64 on x's device. Second derivatives come from the definition: at x = 1e-40
    their terms overflow fp32, and inf times an upstream gradient of 0 would be NaN, not 0.

    False on MPS, which has no fp64, and under torch.compile on a GPU: there a definition runs in place of a kernel, has
    no second derivative, and fp64 may be 64 times slower."""
    kind = x.device.type
    return kind == "cpu" or not (kind == "mps" or is_compiling())


def wide(x):
    """x in fp64 if `widens(x)`, else x."""
    return x.double() if widens(x) else x


def wide_on_cpu(x):
    """x in fp64 on the CPU, where aten's fp32 sums are less exact than on a GPU; elsewhere x."""
    return x.double() if x.device.type == "cpu" else x


def to_one(x):
    """The power of two s with |s x| in [1, 2), for finite x != 0. s is clamped to normal numbers, [tiny, 1 / tiny]."""
    tiny = torch.finfo(x.dtype).tiny
    return (2 * torch.frexp(x)[0] / x).clamp(tiny, 1 / tiny)


def readable(scalar):
    """An integer 0-dim tensor as fp64, which the kernels read (exact up to 2^53); any other tensor as it is."""
    integer = not (scalar.is_floating_point() or scalar.is_complex() or scalar.dtype == torch.bool)
    return scalar.double() if integer else scalar


def signed(x):
    """x of uint16, uint32 or uint64, for which torch has few kernels, as the signed dtype of the same bits."""
    return x.to(_SIGNED.get(x.dtype, x.dtype))


def where(condition, x, other):
    """torch.where for two tensors of one dtype, also uint16, uint32 and uint64, which torch before 2.13 refuses."""
    return torch.where(condition, signed(x), signed(other)).to(x.dtype)


def saturate(value, dtype):
    """A finite number or 0-dim tensor, clamped to the range of a floating `dtype`. inf and NaN stay."""
    if isinstance(value, torch.Tensor):
        return saturate_tensor(value, dtype)
    largest = torch.finfo(dtype).max
    if largest < abs(value) < float("inf"):  # before float(): an int may be too large for a double
        return largest if value > 0 else -largest
    return float(value)


def filled(x, shape, value):
    """A tensor of `shape` in x's dtype whose elements are all `value`, a number or a 0-dim tensor."""
    if isinstance(value, torch.Tensor):
        return value.to(x.dtype).expand(shape)
    return x.new_full(shape, value)


def fill_of(value, dtype):
    """A number or 0-dim tensor in the range of `dtype`: larger values saturate; for bool it is `value != 0`."""
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
    """A real 0-dim tensor in an integer `dtype`, saturated. NaN becomes 0: to raise, the host would have to wait."""
    if scalar.dtype == dtype:
        return scalar
    info = torch.iinfo(dtype)
    low, high = info.min, min(info.max, 2**63 - 1)
    if scalar.is_floating_point():
        wide = scalar.double().nan_to_num(0)
        # 2^63 - 1 and 2^64 - 1 are not doubles. A value v >= 2^63 of uint64 stands in int64 as v - 2^64, the same bits.
        over, upper = wide >= float(info.max), (wide >= 2.0**63) & (info.max > high)
        integer = torch.where(over, 0, torch.where(upper, wide - 2.0**64, wide.clamp(min=low))).long()
        return torch.where(over, info.max if info.max == high else -1, integer).to(dtype)
    integer = scalar.long()
    if scalar.dtype == torch.uint64:
        integer = torch.where(integer < 0, high, integer)
    return integer.clamp(low, high).to(dtype)


def saturate_tensor(wide, dtype):
    """Replace finite values of `wide` that overflow `dtype` by dtype's largest, with gradient 0. Keeps wide's dtype."""
    # (not `&`: Inductor refuses it where `wide` comes from a symbolic number)
    over = torch.logical_and(overflows(wide, dtype), wide.isfinite())
    return torch.where(over, largest_like(wide, dtype), wide)


def overflows(wide, dtype):
    """True where `wide` would be inf in `dtype`. For half, compare with the limit: Inductor may skip a cast to half."""
    if dtype not in HALF:
        return wide.to(dtype).isinf()
    info = torch.finfo(dtype)
    middle = info.max / (2 - info.eps) * (2 - info.eps / 2)  # halfway to the next power of two
    return wide.float().abs() >= middle  # (torch rounds fp64 to half via fp32)


def largest_like(wide, dtype):
    """The largest finite value of `dtype` with the signs of `wide`, in wide's dtype."""
    return torch.full_like(wide, torch.finfo(dtype).max).copysign(wide).detach()
