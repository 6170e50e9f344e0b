"""Symbolic numbers: sizes, and options that differ from call to call, which a trace holds as SymInt or SymFloat.

Most torch ops turn such a number into a constant, so that each new value compiles again. A comparison restricts the
sizes that an exported program accepts. So the definitions get a 0-dim tensor instead.
"""

import torch
from torch.compiler import is_compiling

from safeops.core import private_torch
from safeops.core.dtypes import saturate

SYMBOLIC = (torch.SymInt, torch.SymFloat)


def as_float(number):
    """An int as a float, since torch refuses ints beyond 64 bits. A symbolic number is returned as it is."""
    return float(number) if number.__class__ is int else number


def symbolic(x):
    """True if x is a symbolic number. (Code that Dynamo traces sees it as an int or float.)"""
    if not is_compiling():
        return isinstance(x, SYMBOLIC)
    return isinstance(x, (int, float, *SYMBOLIC)) and not private_torch.has_static_value(x)


def scalar(x, dtype, device):
    """A number as a 0-dim tensor."""
    if symbolic(x):  # a sum keeps the symbol; torch.full would make a constant of it
        return torch.full((), -0.0, dtype=dtype, device=device) + x  # (0.0 + x would turn x = -0.0 into 0.0)
    return torch.full((), float(x), dtype=dtype, device=device)


def as_operand(x, input):
    """A number as torch accepts it beside `input`. If symbolic: a 0-dim tensor. An int beside floats: a float."""
    if symbolic(x):
        return scalar(x, torch.float64, input.device)
    return saturate(x, torch.float64) if isinstance(x, int) and input.is_floating_point() else x
