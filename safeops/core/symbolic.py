"""Numbers that a trace knows by a symbol: sizes, and options that differ from call to call.

Most ops make a constant of such a number, and each of its values is compiled anew; comparing it bounds the sizes that
an exported program takes. So the definitions get a 0-dim tensor in its place.
"""

import torch
from torch.compiler import is_compiling

from safeops.core import private_torch
from safeops.core.dtypes import saturate

SYMBOLIC = (torch.SymInt, torch.SymFloat)


def as_float(number):
    """An int as a float, which torch takes of any size; a number that a trace knows by a symbol as it is."""
    return float(number) if number.__class__ is int else number


def symbolic(x):
    """True if x is such a number. (Dynamo shows them as plain ones.)"""
    if not is_compiling():
        return isinstance(x, SYMBOLIC)
    return isinstance(x, (int, float, *SYMBOLIC)) and not private_torch.has_static_value(x)


def scalar(x, dtype, device):
    """A number as a 0-dim tensor."""
    if symbolic(x):  # added, because a sum is one of the few ops that keep a symbol; torch.full is none
        return torch.full((), -0.0, dtype=dtype, device=device) + x  # (of -0.0, 0.0 would make 0.0)
    return torch.full((), float(x), dtype=dtype, device=device)


def as_operand(x, input):
    """A number as torch's operations take it beside `input`: a tensor if symbolic, and no integer beyond 64 bits."""
    if symbolic(x):
        return scalar(x, torch.float64, input.device)
    return saturate(x, torch.float64) if isinstance(x, int) and input.is_floating_point() else x
