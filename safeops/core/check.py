"""Argument checks of the public functions: errors that name the function, the argument, the shapes, dtypes or devices.

A call that runs the op's definition in torch ops runs them first. A call of a C++ kernel runs them only after the
kernel's memory-safety check has refused it. A Triton launcher, which checks almost nothing itself, runs them before
each new kind of call.
"""

import ctypes
import inspect
import operator
from typing import Literal, get_args

import torch
from torch.compiler import is_compiling

from safeops.core import private_torch
from safeops.core.dtypes import FLOATING, LARGEST
from safeops.core.foreign import meant
from safeops.core.symbolic import SYMBOLIC

LARGEST_DOUBLE = torch.finfo(torch.float64).max
Nonfinite = Literal["propagate", "skip", "raise"]  # how to treat losses and gradients that are inf or NaN
EMPTY = ("zero", "nan", "raise")  # values of the argument `empty`: the result where nothing is kept
NONFINITE = get_args(Nonfinite)
NUMBER = (int, float, *SYMBOLIC)
PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))  # (most tensors; this test is the fastest, so it is first)


def explain(validate, *arguments):
    """For `except` clauses: if validate(*arguments) raises, raise its error without the kernel's in the traceback."""
    try:
        validate(*arguments)
    except (TypeError, ValueError, IndexError) as error:
        raise error from None


def runs_when_called(function, region, called):
    """Refuse a generator or coroutine function: its body would run after the region that wraps it has ended."""
    for kind in ("generator", "coroutine", "asyncgen"):
        is_kind = getattr(inspect, f"is{kind}function")
        if is_kind(called) or is_kind(type(called).__call__):
            raise TypeError(
                f"{function}: function must not be a {kind} function, got {called!r}: its body runs when the {region} "
                f"has been left; use `with {function}():` inside it, around no yield and no await"
            )


def tensor(function, name, x):
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{function}: {name} must be a tensor, got {type(x).__name__}{meant(function, name, x)}")
    if kind := undense(x):
        raise TypeError(f"{function}: {name} must be a dense tensor, got {kind}")
    if x.dtype not in FLOATING and x.is_floating_point():
        raise TypeError(f"{function}: {name} must be of at least 16 bits where floating, got {x.dtype}")
    dimensions(function, name, x)


def dimensions(function, name, x, most=64):
    if x.dim() > most:
        raise ValueError(f"{function}: {name} must have at most {most} dimensions, got {x.dim()}")


def undense(x):
    """The kind of tensor x if it is not an ordinary dense one (masked, nested, sparse or quantized); else None."""
    if is_compiling():  # a trace has no such tensors, and cannot test for them
        return None
    if x.__class__ not in PLAIN and isinstance(x, torch.masked.MaskedTensor):
        return "a MaskedTensor (pass its data, and its mask beside it)"
    if x.is_nested:
        return "a nested one"
    if x.layout != torch.strided:
        return f"layout {x.layout}"
    return "a quantized one" if x.dtype not in FLOATING and x.is_quantized else None


def floating(function, name, x, numbers=False):
    """Check that x is floating. numbers: True if integers in x are no class indices: the error suggests x.float()."""
    tensor(function, name, x)
    if x.dtype not in FLOATING:
        remedy = meant(function, name, x) if name in ("weight", "negative_keys") else ""
        if numbers and not x.is_complex():
            remedy = remedy or say(f"{name}.float()")
        raise TypeError(
            f"{function}: {name} must be a floating point tensor of at least 16 bits, got {x.dtype}{remedy}"
        )


def real(function, name, x):
    """Check that x is a tensor of integers, bools, or one of the four floating dtypes."""
    tensor(function, name, x)
    if x.is_complex():
        raise TypeError(f"{function}: {name} must be real, got {x.dtype}")


def real_scalar(function, name, x):
    real(function, name, x)
    if x.dim() != 0:
        raise ValueError(f"{function}: {name} must be a number or a 0-dim tensor, got shape {shown(x)}")


def same_device(function, reference_name, reference, **others):
    """Check that tensors are on one device, and DTensors on one mesh. A 0-dim tensor may be plain beside DTensors."""
    for name, x in others.items():
        if not isinstance(x, torch.Tensor):
            continue
        if x.device != reference.device:
            raise ValueError(f"{function}: {name} is on {x.device}, {reference_name} on {reference.device}")
        if x.__class__ in PLAIN and reference.__class__ in PLAIN:
            continue
        if x.dim() and reference.dim() and mesh(x) != mesh(reference):
            result = (f"{shown(t)} of {mesh(t) or 'no mesh'}" for t in (x, reference))
            raise TypeError(
                f"{function}: {name} and {reference_name} must be DTensors of one mesh, or neither of them one; got "
                f"{' and '.join(result)}"
            )


def mesh(x):
    """The device mesh of a DTensor; None for every other tensor. (isinstance would need DTensor, a slow import.)"""
    return None if x.__class__ in PLAIN else getattr(x, "device_mesh", None)


def shown(x, shape=None):
    """The text of a shape in errors: x's, or `shape`, with the placements if x is a DTensor."""
    how = "" if mesh(x) is None else f" as {list(x.placements)}"
    return f"{tuple(x.shape if shape is None else shape)}{how}"


def full_value(function, value):
    """value() as a plain tensor for the host to read. A DTensor is gathered: every rank reads the same values."""
    try:
        x = value()
        return x if mesh(x) is None else x.full_tensor()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        from safeops.core.group import here, is_running  # (it imports this file)

        if not is_running():
            raise
        raise RuntimeError(f"{here(function)}: what the host needs of all ranks could not be had: {error}") from error


def may_look(x):
    """True if the host may read a tensor's values: it is on the CPU, outside of traces and transforms."""
    return x.is_cpu and x.__class__ in PLAIN and not is_compiling() and not private_torch.transforms_active()


def read(x):
    """The value of a 0-dim fp32 or fp64 tensor for which `may_look` is True.

    It is read from memory: x.item() takes longer, and counts as a wait for a device.
    """
    return (ctypes.c_float if x.dtype == torch.float32 else ctypes.c_double).from_address(x.data_ptr()).value


def no_dtensor(function, name, x):
    if mesh(x) is not None:
        raise TypeError(f"{function}: {name} must be no DTensor: pass what this rank holds (to_local, full_tensor)")


def stretches(size, other):
    """True if a dim of size `size` broadcasts to a dim of size `other`."""
    return size == 1 or size == other  # (not `in (1, other)`: in Dynamo that is False for symbolic sizes)


def broadcast(function, **operands):
    """The common shape of the named tensors."""
    # by hand: an exception of torch.broadcast_shapes cannot be caught inside a trace
    common = [1] * max(x.dim() for x in operands.values())
    for x in operands.values():
        for d, size in enumerate(reversed(x.shape), 1):
            if size != 1 and not stretches(common[-d], size):
                shapes = " and ".join(f"{name} {shown(x)}" for name, x in operands.items())
                remedy = ""
                for key, y in operands.items():  # (Dynamo traces neither max nor a generator with a key here)
                    for z in operands.values():
                        remedy = remedy or reshaped(key, y, z.shape)
                raise ValueError(f"{function}: {shapes} do not broadcast{say(remedy)}")
            common[-d] = size if common[-d] == 1 else common[-d]
    return torch.Size(common)


def broadcasts_to(function, name, x, target_name, target, shape=None):
    """Check that x broadcasts to `shape` (None: the shape of `target`) without enlarging it."""
    shape = target.shape if shape is None else shape
    if not fits(x.shape, shape):
        raise ValueError(
            f"{function}: {name} {shown(x)} does not broadcast to {target_name} {shown(target, shape)}"
            f"{say(reshaped(name, x, shape))}"
        )


def fits(shape, other):
    """True if `shape` broadcasts to `other`."""
    return len(shape) <= len(other) and all(map(stretches, reversed(shape), reversed(other)))


def say(expression):
    """The end of an error: the expression that works, if it is known."""
    return f": say {expression}" if expression else ""


def reshaped(name, x, shape):
    """The expression that adds or removes dim 1 of x (one channel), so that x broadcasts to `shape`; or ""."""
    if 0 < x.dim() == len(shape) - 1 and fits((x.shape[0], 1, *x.shape[1:]), shape):
        return f"{name}.unsqueeze(1)"
    if x.dim() == len(shape) + 1 > 1 and x.shape[1] == 1 and fits((x.shape[0], *x.shape[2:]), shape):
        return f"{name}.squeeze(1)"
    return ""


def classes_first(name, x, target):
    """The expression that makes x (N, d1, ..., C) fit a target, or "". Target (N, d1, ...): the classes move to dim 1;
    target (N d1 ...,): the rows are flattened."""
    if x.dim() > 2 and target.shape == x.shape[:-1]:
        return f"{name}.transpose(1, 2)" if x.dim() == 3 else f"{name}.movedim(-1, 1)"
    if x.dim() > 2 and target.shape == (x.shape[:-1].numel(),):
        return f"{name}.flatten(0, -2)"
    return ""


def of_one_hot(name, x, shape, dim):
    """The expression that turns a one-hot x into class indices, if x holds bools or integers in `shape`; or ""."""
    if tuple(x.shape) != tuple(shape) or x.is_floating_point() or x.is_complex():
        return ""
    return f"{name}.int().argmax({dim})" if x.dtype == torch.bool else f"{name}.argmax({dim})"


def mask(function, x, target_name, target, shape=None):
    if x is None:
        return
    boolean(function, "mask", x, "True = keep")
    broadcasts_to(function, "mask", x, target_name, target, shape)


def boolean(function, name, x, sense):
    tensor(function, name, x)
    if x.dtype != torch.bool:
        kept = f"{name} > 0.5" if x.is_floating_point() else f"{name} != 0"
        # a float mask has 0 and 1, or it is additive: 0 where scores are kept, very negative elsewhere
        additive = f" (an additive mask: {name} == 0)" if x.is_floating_point() and sense == "True = keep" else ""
        raise TypeError(f"{function}: {name} must be a bool tensor ({sense}), got {x.dtype}{say(kept)}{additive}")


def weight(function, x, target_name, target, shape=None):
    if x is None:
        return
    floating(function, "weight", x)
    broadcasts_to(function, "weight", x, target_name, target, shape)


# Callbacks (index, size, wrong) that safeops.debug.audit adds, to report class indices out of range where none raises.
watchers = []


def in_range(index, size, counts):
    """Bool: True where an index is in [0, size). Where the bool `counts` is True, `watchers` get the wrong indices."""
    inside = (index >= 0) & (index < size)
    if watchers and not is_compiling():
        for watch in watchers:
            watch(index, size, counts & ~inside)
    return inside


def choice(function, name, value, options):
    if not isinstance(value, str) or value not in options:
        allowed = ", ".join(map(repr, options))
        raise ValueError(f"{function}: {name} must be one of {allowed}, got {shown_value(function, value)}")


def double(function, name, value):
    """Check that an int is in the range of a double: no op can compute with a larger int."""
    if isinstance(value, int) and not -LARGEST_DOUBLE <= value <= LARGEST_DOUBLE:
        raise ValueError(f"{function}: {name} must be at most {LARGEST_DOUBLE:.3g} in magnitude, got a larger integer")


def boolean_flag(function, name, value):
    if not isinstance(value, bool):
        raise TypeError(f"{function}: {name} must be True or False, got {shown_value(function, value)}")


def shown_value(function, x):
    """The text of a value in errors; a tensor's numbers are not shown."""
    return f"a tensor{meant(function, '', x)}" if isinstance(x, torch.Tensor) else repr(x)


def is_number(value):
    return isinstance(value, NUMBER) and not isinstance(value, bool)


def number(function, name, value, *, minimum=None, above=None, maximum=None):
    if not is_number(value):
        kind = type(value).__name__
        raise TypeError(f"{function}: {name} must be a number, got {kind}{meant(function, name, value)}")
    double(function, name, value)
    if isinstance(value, SYMBOLIC):  # comparing a symbol restricts the sizes that an exported program accepts
        value = private_torch.value_at_trace(value)
        if value is None:
            return
    if maximum is not None and not value <= maximum:
        raise ValueError(f"{function}: {name} must be at most {maximum:.3g}, got {value}")
    if minimum is not None and not value >= minimum:
        raise ValueError(f"{function}: {name} must be at least {minimum}, got {value}")
    if above is not None and not value > above:
        raise ValueError(f"{function}: {name} must be greater than {above}, got {value}")


def usual_floor(eps):
    """True for an eps that every op accepts, None or a float above 0: a small call then skips the validation."""
    return eps is None or eps.__class__ is float and not is_compiling() and 0 < eps <= LARGEST


def exists(function, name, value, dtype):
    """Check that a value is not NaN if dtype is an integer or bool."""
    if not (dtype.is_floating_point or dtype.is_complex) and value != value:
        raise ValueError(f"{function}: {name} {value} does not exist in {dtype}")


def output_dtype(function, dtype):
    if dtype is not None and dtype not in FLOATING:
        raise TypeError(f"{function}: dtype must be a floating point dtype, got {dtype}")


def dims(function, dim, ndim):
    """dim as a sorted tuple of non-negative dims; None and () mean all of them."""
    if dim is None:
        return tuple(range(ndim))
    axes = integers(function, dim)
    rank = max(ndim, 1)  # a 0-dim tensor accepts 0 and -1, as torch does
    for d in axes:
        if not -rank <= d < rank:
            raise IndexError(f"{function}: dim {d} is out of range for an input of {ndim} dimensions")
    resolved = sorted(d % rank for d in axes)
    if len(set(resolved)) != len(resolved):
        raise ValueError(f"{function}: dim {dim!r} names a dimension twice")
    return tuple(resolved)[:ndim] or tuple(range(ndim))


def integers(function, dim):
    """An int, or a tuple or list of ints, as a tuple. Bools raise, and so do tensors, which the host would read."""
    values = dim if isinstance(dim, (tuple, list)) else (dim,)
    try:
        if any(isinstance(d, (bool, torch.Tensor)) for d in values):
            raise TypeError
        return tuple(map(operator.index, values))
    except TypeError:
        got = shown_value(function, dim)
        raise TypeError(f"{function}: dim must be an int, a tuple of ints or None, got {got}") from None


def one_dim(function, dim, ndim):
    """dim counted from 0, for a function that takes exactly one."""
    try:
        (d,) = (dim,) if dim.__class__ is int else integers(function, (dim,))
    except TypeError:
        raise TypeError(f"{function}: dim must be an int, got {shown_value(function, dim)}") from None
    rank = max(ndim, 1)  # a 0-dim tensor accepts 0 and -1, as torch does
    if not -rank <= d < rank:
        raise IndexError(f"{function}: dim {d} is out of range for an input of {ndim} dimensions")
    return d % rank


def raise_if_empty(name, nothing, input, dim):
    """Raise if a result has no kept element. nothing(): a bool tensor, True for such results; the host waits for it."""
    nothing = full_value(name, nothing)
    empty = int(nothing.sum())
    if empty:
        raise ValueError(
            f'{name}: empty="raise": nothing is kept for {empty} of {nothing.numel()} results '
            f"(input {shown(input)}, dim {dim})"
        )
