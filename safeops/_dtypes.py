"""Dtype rules of the contract: what an op computes in, and what it returns."""

import torch

HALF = (torch.float16, torch.bfloat16)
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

SMALLEST, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def compute_dtype(*dtypes):
    """fp64 where one of the dtypes is, else fp32: half is read, never computed in."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def readable(scalar):
    """A 0-dim tensor as the kernels read it: floating. An int64 count becomes fp64, which holds it exactly to 2^53."""
    integer = not (scalar.is_floating_point() or scalar.is_complex() or scalar.dtype == torch.bool)
    return scalar.double() if integer else scalar


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


def saturate_tensor(wide, dtype):
    """`wide` with finite values that would be inf in `dtype` at its largest finite one, with gradient 0; still wide."""
    over = wide.to(dtype).isinf() & wide.isfinite()
    return torch.where(over, largest_like(wide, dtype), wide)


def largest_like(wide, dtype):
    """The largest finite magnitude of `dtype`, with the signs of `wide` and in its (at least as wide) dtype."""
    return torch.full_like(wide, torch.finfo(dtype).max).copysign(wide).detach()
