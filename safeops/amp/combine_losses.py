"""combine_losses: the weighted sum of several losses, computed wide, with a choice for terms that are not finite."""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from safeops.core import check
from safeops.core.definitions import kept
from safeops.core.dtypes import compute_dtype
from safeops.core.private_torch import saved_by_name
from safeops.core.symbolic import scalar


@saved_by_name
class CombinedLosses(NamedTuple):
    """The result of `combine_losses`. All values stay on the device, so the host does not wait for them."""

    total: torch.Tensor  # (): to call backward on
    terms: torch.Tensor  # (number of losses,): weight * loss, finite or not, detached
    finite: torch.Tensor  # (number of losses,) bool: True for finite terms
    names: tuple[str, ...]  # of the losses, in the same order


def _refuse_attribute(self, name):
    what = f"combine_losses: its result is (total, terms, finite, names) and has no {name!r}"
    call = "()" if callable(getattr(torch.Tensor, name, None)) else ""
    raise AttributeError(f"{what}: say .total.{name}{call}" if hasattr(torch.Tensor, name) else what)


CombinedLosses.__getattr__ = _refuse_attribute  # (in the class it would tell type checkers that any attribute exists)


def combine_losses(
    losses: Mapping[str, torch.Tensor | tuple[torch.Tensor, torch.Tensor | float]],
    *,
    nonfinite: check.Nonfinite = "propagate",
) -> CombinedLosses:
    """The sum of weight * loss over named losses, with each loss's term, all on the device.

    It replaces `loss_a + 0.1 * loss_b + ...`, which in half overflows (an fp16 loss of 700 times a weight of 100) and
    rounds each product, and `if torch.isfinite(loss_b)`, which waits for the GPU at each step. Each loss is widened
    before its weight is applied. Values to log are in `terms`: read them when they are wanted, all at once.

    Args:
        losses: dict {name: loss} or {name: (loss, weight)}. A loss is a floating tensor of shape () or (1,), a weight a
            number or a 0-dim tensor, which is differentiable; 1 where there is none. With weight 0 the loss does not
            exist: its term is 0 and finite, its gradient 0, whatever its value.
        nonfinite: what happens if a term, weight * loss, is inf or NaN. `"propagate"`: the total shows it. `"skip"`:
            the total sums the other terms, the host does not wait, and the gradient that goes into the loss and its
            weight is exactly 0. (The loss's own backward may still turn an upstream gradient of 0 into NaN, as 0 / 0
            does in plain torch; the functions of safeops do not.) If no term is finite the total is NaN, as no loss is
            left, and all gradients are 0. `"raise"`: FloatingPointError that names the term; this synchronizes, and
            cannot be compiled whole.

    Returns:
        `(total, terms, finite, names)`, a named tuple. total: 0-dim, fp32, or fp64 if a loss is. terms: the weighted
        losses in that dtype, one for each, in the order of the dict, without a gradient; a skipped one shows its value.
        finite: bool, True for finite terms. names: the names in the same order.

    Raises:
        TypeError: `losses` is no dict, a name no string, a loss no floating tensor, a weight no number or real tensor.
        ValueError: `losses` is empty, a loss or a weight has dimensions, devices differ, unknown `nonfinite`.
        FloatingPointError: with `nonfinite="raise"`, a term is not finite.

    Example:
        >>> x = torch.tensor([3.0, 0.0], requires_grad=True)
        >>> losses = {"data": x.square().mean(), "prior": (1 / x[1], 0.1)}
        >>> total, terms, finite, names = safeops.combine_losses(losses, nonfinite="skip")
        >>> total.item(), terms, finite, names
        (4.5, tensor([4.5000,    inf]), tensor([ True, False]), ('data', 'prior'))
    """
    names, values, weights = _read(losses, nonfinite)
    dtype = compute_dtype(*(x.dtype for x in values))
    compute, device = torch.float64, values[0].device  # fp64: a weight may be too small or too large for fp32
    # (a kernel writes a weight that is a number: a copy from the host would wait)
    w = torch.stack([w.to(compute) if isinstance(w, torch.Tensor) else scalar(w, compute, device) for w in weights])
    x = torch.stack([x.to(compute) for x in values])
    keep = kept(None, w)
    terms = _weigh(x.detach(), w.detach(), keep).to(dtype)
    finite = terms.isfinite()
    if nonfinite == "raise":
        _refuse(names, terms, finite)
    if nonfinite == "skip":
        keep = keep & finite
    total = _weigh(x, w, keep).sum().to(dtype)
    if nonfinite == "skip":
        total = torch.where(finite.any(), total, float("nan"))
    return CombinedLosses(total, terms, finite, names)


def _weigh(x, w, keep):
    # Select before arithmetic: inf * 0 is NaN, and so would be the gradient.
    return torch.where(keep, x, 0) * torch.where(keep, w, 0)


def _read(losses, nonfinite):
    """Check the caller's losses; returns (names, losses, weights)."""
    check.choice("combine_losses", "nonfinite", nonfinite, check.NONFINITE)
    if not isinstance(losses, Mapping):
        raise TypeError(f"combine_losses: losses must be a dict of named losses, got {type(losses).__name__}")
    if not losses:
        raise ValueError("combine_losses: losses is empty: there is nothing to combine")
    names, values, weights = tuple(losses), [], []
    for name, entry in losses.items():
        if not isinstance(name, str):
            raise TypeError(f"combine_losses: the name of a loss must be a string, got {name!r}")
        what, weight_of = f"loss {name!r}", f"the weight of {name!r}"
        loss, weight = entry, 1.0
        if isinstance(entry, (tuple, list)):
            if len(entry) != 2:
                raise ValueError(f"combine_losses: {what} must be a tensor or (tensor, weight), got {len(entry)} items")
            loss, weight = entry
        if not isinstance(loss, torch.Tensor):
            got = type(loss).__name__
            raise TypeError(
                f"combine_losses: {what} must be a 0-dim tensor or (tensor, weight), got {got} for the tensor"
            )
        check.floating("combine_losses", what, loss)
        if loss.shape == (1,):
            loss = loss.reshape(())
        if loss.dim():
            raise ValueError(f"combine_losses: {what} must be a 0-dim tensor, got shape {tuple(loss.shape)}: reduce it")
        if isinstance(weight, torch.Tensor):
            check.real_scalar("combine_losses", weight_of, weight)
            if weight.dtype == torch.bool:
                raise TypeError(f"combine_losses: {weight_of} must be a real number, got {weight.dtype}")
        else:
            check.number("combine_losses", weight_of, weight)
        values.append(loss)
        weights.append(weight)
        check.same_device("combine_losses", f"loss {names[0]!r}", values[0], **{what: loss, weight_of: weight})
    return names, values, weights


def _refuse(names, terms, finite):
    if finite.all():  # the only synchronization if all terms are finite
        return
    bad = ", ".join(f"{name!r} is {x}" for name, x, ok in zip(names, terms.tolist(), finite.tolist()) if not ok)
    raise FloatingPointError(f'combine_losses: nonfinite="raise": {bad} (weight * loss)')
