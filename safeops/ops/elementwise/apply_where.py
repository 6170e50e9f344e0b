"""apply_where: a function of the elements that a condition keeps; the others never reach it, forward or backward."""

from collections.abc import Callable, Sequence

import torch

from safeops.core import check
from safeops.core.dtypes import FLOATING, saturate
from safeops.core.symbolic import scalar, symbolic


def apply_where(
    condition: torch.Tensor,
    args: torch.Tensor | Sequence[torch.Tensor],
    f1: Callable[..., torch.Tensor],
    f2: Callable[..., torch.Tensor] | None = None,
    *,
    fill_value: torch.Tensor | complex | None = None,
) -> torch.Tensor:
    """`f1(*args)` where `condition` is True, elsewhere `f2(*args)` or `fill_value`.

    `torch.where(condition, f1(x), f2(x))` runs both functions on every element, and the NaN or inf slope of the branch
    that was not taken reaches the gradient of `x`. Here `f1` sees 1 where the condition is False, and `f2` sees 1 where
    it is True: nothing leaks, also to second order and under transforms.

    Name and arguments are those of array-api-extra's `apply_where`. Plain torch code, for any dtype but 8-bit floats.

    Args:
        condition: bool tensor; True = `f1`.
        args: tensor, or tuple of tensors, that broadcast with `condition`.
        f1: elementwise function of as many tensors as `args` has, returning one tensor.
        f2: such a function for the elements where `condition` is False.
        fill_value: in place of `f2`: a number (a finite one saturates to `f1`'s dtype) or a tensor that broadcasts.

    Returns:
        A tensor of the broadcast shape of `condition` and `args`, of the promoted dtype of both branches.

    Raises:
        TypeError: `condition` is not bool, `args` are not tensors, `f1` or `f2` cannot be called or returns no tensor.
        ValueError: shapes do not broadcast, devices differ, a function changes the shape, not exactly one of `f2` and
            `fill_value` is given.

    Example:
        >>> x = torch.tensor([1.0, 100.0], requires_grad=True)
        >>> safeops.apply_where(x > 50, x, lambda x: 1 + x, torch.exp).sum().backward()
        >>> x.grad
        tensor([2.7183, 1.0000])
    """
    args = tuple(args) if isinstance(args, (tuple, list)) else (args,)
    shape = _validate(condition, args, f1, f2, fill_value)
    args = [x.expand(shape) for x in args]  # else a function that ignores an arg might return a smaller shape
    kept = _call("f1", f1, [torch.where(condition, x, _one(x)) for x in args])
    if isinstance(fill_value, complex) and not kept.is_complex():
        raise TypeError(f"apply_where: fill_value must be real where f1 returns {kept.dtype}, got {fill_value}")
    if f2 is not None:
        other = _call("f2", f2, [torch.where(condition, _one(x), x) for x in args])
    elif isinstance(fill_value, torch.Tensor):
        other = fill_value
    else:
        other = scalar(fill_value, torch.float64, kept.device) if symbolic(fill_value) else fill_value
        other = saturate(other, kept.dtype) if kept.dtype in FLOATING else other
    return torch.where(condition, kept, other)


def _one(x):
    return torch.ones((), dtype=x.dtype, device=x.device)


def _call(name, function, args):
    result = function(*args)
    if not isinstance(result, torch.Tensor):
        raise TypeError(f"apply_where: {name} must return a tensor, got {type(result).__name__}")
    if result.shape != args[0].shape:
        raise ValueError(f"apply_where: {name} returned shape {check.shown(result)} for {check.shown(args[0])}")
    return result


def _validate(condition, args, f1, f2, fill_value):
    """Check the arguments. Returns the broadcast shape."""
    check.boolean("apply_where", "condition", condition, "True = f1")
    if not args:
        raise ValueError("apply_where: args is empty")
    operands = {"condition": condition} | {f"args[{i}]" if len(args) > 1 else "args": x for i, x in enumerate(args)}
    for name, x in operands.items():
        check.tensor("apply_where", name, x)
    for name, function in (("f1", f1), ("f2", f2)):
        if not callable(function) and not (name == "f2" and function is None):
            raise TypeError(f"apply_where: {name} must be a function, got {type(function).__name__}")
    if (f2 is None) == (fill_value is None):
        got = "both" if f2 is not None else "neither"
        raise ValueError(f"apply_where: needs either f2 or fill_value, got {got}")
    shape = check.broadcast("apply_where", **operands)
    if isinstance(fill_value, torch.Tensor):
        operands["fill_value"] = fill_value
        check.tensor("apply_where", "fill_value", fill_value)
        check.broadcasts_to("apply_where", "fill_value", fill_value, "condition and args", condition, shape)
    elif f2 is None and not isinstance(fill_value, (*check.NUMBER, complex)):
        raise TypeError(f"apply_where: fill_value must be a number or a tensor, got {type(fill_value).__name__}")
    check.same_device("apply_where", "condition", condition, **operands)
    return shape
