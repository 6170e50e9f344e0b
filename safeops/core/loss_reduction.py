"""The reduction that the losses of all families share: the arguments `reduction`, `denominator` and `empty`."""

import torch
from torch.compiler import is_compiling

from safeops.core import check, sums
from safeops.core.dtypes import readable
from safeops.core.group import here
from safeops.core.private_torch import awaited
from safeops.core.symbolic import scalar, symbolic

REDUCTION = {"none": 0, "mean": 1, "sum": 2}


def validate_options(name, reduction, empty, reductions=tuple(REDUCTION)):
    check.choice(name, "reduction", reduction, reductions)
    check.choice(name, "empty", empty, check.EMPTY)


def validate_denominator(name, reduction, denominator):
    if denominator is None:
        return
    if reduction != "mean":
        raise ValueError(f'{name}: denominator needs reduction="mean", got {reduction!r}')
    if not isinstance(denominator, torch.Tensor):
        return check.number(name, "denominator", denominator, minimum=0)
    check.real_scalar(name, "denominator", denominator)
    if denominator.dtype == torch.bool:
        raise TypeError(f"{name}: denominator must be a real number, got {denominator.dtype}")


def split(denominator, input):
    """Returns (0-dim tensor or None, number or None): a denominator as raw ops take it, in one of the two at most."""
    if isinstance(denominator, torch.Tensor) or symbolic(denominator):
        return as_divisor(denominator, input), None
    return None, denominator


def as_divisor(denominator, input):
    """A denominator as a 0-dim tensor."""
    if isinstance(denominator, torch.Tensor):
        return readable(wait_for(divisor_of(input, denominator)))
    return scalar(denominator, torch.float64, input.device)


def divisor_of(x, denominator):
    """The denominator as x can be divided by it: unchanged if both have one device mesh or none, else gathered."""
    if check.mesh(x) == check.mesh(denominator):
        return denominator
    return check.full_value("denominator", lambda: denominator)


def wait_for(denominator):
    """Wait for a denominator whose all-reduce still runs. The result is a plain tensor, which kernels take."""
    if denominator.__class__ in check.PLAIN or is_compiling():  # (a compiled graph waits by itself)
        return denominator
    try:
        return awaited(denominator)
    except RuntimeError as error:
        raise RuntimeError(f"{here('global_count')}: its all-reduce failed, or another's before it: {error}") from error


def raise_if_nothing_kept(name, keep, shape, operands, denominator=None):
    """Raise if nothing is kept (for empty="raise"); the host waits for the device. operands: shapes, for the error."""
    if denominator is not None:
        zero = wait_for(denominator) == 0
        nothing = bool(check.full_value(name, lambda: zero) if isinstance(zero, torch.Tensor) else zero)
    else:
        nothing = torch.Size(shape).numel() == 0 or (keep is not None and not bool(check.full_value(name, keep.any)))
    if nothing:
        raise ValueError(f'{name}: empty="raise": nothing is kept ({operands})')


def reduce(name, loss, keep, weight, reduction, denominator, empty):
    """The mean or sum of `loss`, by the kernels of masked_sum and masked_mean, or `loss` itself for "none".

    loss: fp32 or fp64, 0 where it is not kept. keep: bool of loss's shape, or None: all. weight: loss's shape, or None.
    The mean divides by `denominator` (number or 0-dim tensor), else by the sum of the kept weights, else by the count.
    """
    if empty == "raise" and reduction != "none":
        raise_if_nothing_kept(name, keep, loss.shape, f"losses {check.shown(loss)}", denominator)
    if reduction == "none":
        return loss
    empty = "zero" if empty == "raise" else empty
    if reduction == "mean" and weight is None and denominator is None:
        return sums.mean(loss, keep, empty=empty)
    if reduction == "sum":
        return sums.total(loss, keep, empty=empty)
    total = sums.total(loss, keep)
    count = sums.count(loss, keep)
    return _mean(total.double(), count, keep, weight, denominator, empty).to(loss.dtype)


def reduce_sum(name, total, keep, weight, reduction, denominator, empty, dtype):
    """`reduce` for losses that are summed already. total: their sum, fp64. keep, weight: one element per loss."""
    if empty == "raise":
        raise_if_nothing_kept(name, keep, keep.shape, f"losses {check.shown(keep)}", denominator)
    count = sums.count(keep)
    if reduction == "mean":
        return _mean(total, count, keep, weight, denominator, empty).to(dtype)
    return torch.where(count > 0, total, float("nan") if empty == "nan" else 0).to(dtype)


def _mean(total, count, keep, weight, denominator, empty):
    """total (0 if nothing is kept) divided by denominator, else by the sum of the kept weights, else by count."""
    has_denominator = denominator is not None
    if not has_denominator:
        denominator = count if weight is None else sums.total(weight, keep)
    elif not isinstance(denominator, torch.Tensor):
        denominator = scalar(denominator, torch.float64, total.device)
    return divide(total, count, wait_for(divisor_of(total, denominator)).double(), has_denominator, empty == "nan")


def over(total, denominator, empty):
    """total / denominator, as in `divide`. total: a sum, 0 where nothing is kept. denominator: the caller's."""
    return _mean(total.double(), torch.ones_like(total), None, None, denominator, empty).to(total.dtype)


def divide(total, count, denominator, has_denominator, empty_nan):
    """total / denominator; where nothing is kept, 0 (NaN with empty_nan). has_denominator: the caller gave it, as the
    count over all micro-batches and ranks: nothing is kept if it is 0; a call with count 0 and another denominator has
    the mean 0. Else nothing is kept if count is 0. Such a total is divided by inf: value and gradient are 0."""
    nothing = denominator == 0 if has_denominator else count == 0
    value = torch.where(count > 0, total / torch.where((count == 0) | nothing, float("inf"), denominator), 0)
    return torch.where(nothing, float("nan"), value) if empty_nan else value
