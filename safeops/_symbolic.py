"""Numbers that a trace knows by a symbol: sizes, and options that differ from call to call.

Most ops make a constant of such a number, and each of its values is compiled anew; comparing it bounds the sizes that
an exported program takes. So the definitions get a 0-dim tensor in its place.
"""

import torch
from torch.compiler import is_compiling

SYMBOLIC = (torch.SymInt, torch.SymFloat)


def symbolic(x):
    """Whether x is such a number. (Dynamo shows them as plain ones.)"""
    if not is_compiling():
        return isinstance(x, SYMBOLIC)
    from torch.fx.experimental.symbolic_shapes import has_static_value  # imports sympy

    return isinstance(x, (int, float, *SYMBOLIC)) and not has_static_value(x)


def scalar(x, dtype, device):
    """A number as a 0-dim tensor."""
    if symbolic(x):  # added, because a sum is one of the few ops that keep a symbol; torch.full is none
        return torch.zeros((), dtype=dtype, device=device) + x
    return torch.full((), x, dtype=dtype, device=device)


def without_symbols(arguments, places):
    """The arguments of a definition, with tensors for the symbolic numbers among those at `places`."""
    device = arguments[0].device
    return [scalar(x, torch.float64, device) if i in places and symbolic(x) else x for i, x in enumerate(arguments)]
