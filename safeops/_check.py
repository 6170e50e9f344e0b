"""Argument checks of the public functions: errors that name the function, the argument, the shapes, dtypes or devices.

They run before any work on the composite route, and on the kernel route once a kernel's memory-safety check refused.
"""

import operator

import torch
from torch.compiler import is_compiling

from safeops._dtypes import FLOATING

LARGEST_DOUBLE = torch.finfo(torch.float64).max


def explain(validate, *arguments):
    """Raise what `validate` finds, without the kernel's own refusal in the traceback: for `except` clauses."""
    try:
        validate(*arguments)
    except (TypeError, ValueError, IndexError) as error:
        raise error from None


def tensor(function, name, x):
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{function}: {name} must be a tensor, got {type(x).__name__}")
    if is_compiling():  # a trace has no such tensors, and may not ask
        return
    if x.layout != torch.strided:
        raise TypeError(f"{function}: {name} must be a dense tensor, got layout {x.layout}")
    if x.is_nested:
        raise TypeError(f"{function}: {name} must be a dense tensor, got a nested one")


def floating(function, name, x):
    tensor(function, name, x)
    if x.dtype not in FLOATING:
        raise TypeError(f"{function}: {name} must be a floating point tensor of at least 16 bits, got {x.dtype}")


def real(function, name, x):
    """A tensor of integers, bools, or one of the four floating dtypes."""
    tensor(function, name, x)
    if x.is_complex() or x.is_quantized or (x.is_floating_point() and x.dtype not in FLOATING):
        raise TypeError(f"{function}: {name} must be real, of at least 16 bits where floating, got {x.dtype}")


def same_device(function, reference_name, reference, **others):
    for name, x in others.items():
        if isinstance(x, torch.Tensor) and x.device != reference.device:
            raise ValueError(f"{function}: {name} is on {x.device}, {reference_name} on {reference.device}")


def broadcast(function, **operands):
    """The common shape of the named tensors."""
    # by hand: an exception of torch.broadcast_shapes cannot be caught inside a trace
    common = [1] * max(x.dim() for x in operands.values())
    for x in operands.values():
        for d, size in enumerate(reversed(x.shape), 1):
            if size != 1 and common[-d] not in (1, size):
                shapes = " and ".join(f"{name} {tuple(x.shape)}" for name, x in operands.items())
                raise ValueError(f"{function}: {shapes} do not broadcast")
            common[-d] = size if common[-d] == 1 else common[-d]
    return torch.Size(common)


def broadcasts_to(function, name, x, target_name, shape):
    """x must broadcast to `shape` without enlarging it."""
    sizes = tuple(x.shape)
    fits = len(sizes) <= len(shape) and all(s in (1, t) for s, t in zip(reversed(sizes), reversed(shape)))
    if not fits:
        raise ValueError(f"{function}: {name} {sizes} does not broadcast to {target_name} {tuple(shape)}")


def mask(function, name, x, target_name, shape, sense="True = keep"):
    if x is None:
        return
    boolean(function, name, x, sense)
    broadcasts_to(function, name, x, target_name, shape)


def boolean(function, name, x, sense):
    tensor(function, name, x)
    if x.dtype != torch.bool:
        raise TypeError(f"{function}: {name} must be a bool tensor ({sense}), got {x.dtype}")


def weight(function, x, target_name, shape):
    if x is None:
        return
    floating(function, "weight", x)
    broadcasts_to(function, "weight", x, target_name, shape)


def choice(function, name, value, options):
    if value not in options:
        allowed = ", ".join(map(repr, options))
        raise ValueError(f"{function}: {name} must be one of {allowed}, got {value!r}")


def double(function, name, value):
    """A Python number must be one that a double has: of an integer beyond, nothing can be computed."""
    if isinstance(value, int) and not -LARGEST_DOUBLE <= value <= LARGEST_DOUBLE:
        raise ValueError(f"{function}: {name} must be at most {LARGEST_DOUBLE:.3g} in magnitude, got a larger integer")


def boolean_flag(function, name, value):
    if not isinstance(value, bool):
        raise TypeError(f"{function}: {name} must be True or False, got {value!r}")


def number(function, name, value, *, minimum=None, above=None, maximum=None):
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{function}: {name} must be a number, got {type(value).__name__}")
    double(function, name, value)
    if maximum is not None and not value <= maximum:
        raise ValueError(f"{function}: {name} must be at most {maximum:.3g}, got {value}")
    if minimum is not None and not value >= minimum:
        raise ValueError(f"{function}: {name} must be at least {minimum}, got {value}")
    if above is not None and not value > above:
        raise ValueError(f"{function}: {name} must be greater than {above}, got {value}")


def exists(function, name, value, dtype):
    """Among integers there is no NaN."""
    if value != value and not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"{function}: {name} {value} does not exist in {dtype}")


def output_dtype(function, dtype):
    if dtype is not None and dtype not in FLOATING:
        raise TypeError(f"{function}: dtype must be a floating point dtype, got {dtype}")


def dims(function, dim, ndim):
    """dim as a sorted tuple of non-negative dims; None and () mean all of them."""
    if dim is None:
        return tuple(range(ndim))
    try:
        if bool in map(type, dim if isinstance(dim, (tuple, list)) else (dim,)):
            raise TypeError
        given = (operator.index(dim),) if not isinstance(dim, (tuple, list)) else tuple(map(operator.index, dim))
    except TypeError:
        raise TypeError(f"{function}: dim must be an int, a tuple of ints or None, got {dim!r}") from None
    rank = max(ndim, 1)  # a 0-dim tensor accepts 0 and -1, as torch does
    for d in given:
        if not -rank <= d < rank:
            raise IndexError(f"{function}: dim {d} is out of range for an input of {ndim} dimensions")
    resolved = sorted(d % rank for d in given)
    if len(set(resolved)) != len(resolved):
        raise ValueError(f"{function}: dim {dim!r} names a dimension twice")
    return tuple(resolved)[:ndim] or tuple(range(ndim))


def one_dim(function, dim, ndim):
    """dim counted from 0, where a function takes exactly one."""
    try:
        d = operator.index(dim)
    except TypeError:
        raise TypeError(f"{function}: dim must be an int, got {dim!r}") from None
    rank = max(ndim, 1)  # a 0-dim tensor accepts 0 and -1, as torch does
    if isinstance(dim, bool):
        raise TypeError(f"{function}: dim must be an int, got {dim!r}")
    if not -rank <= d < rank:
        raise IndexError(f"{function}: dim {d} is out of range for an input of {ndim} dimensions")
    return d % rank
