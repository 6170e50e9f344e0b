"""quantile_loss: the pinball loss, with different weights for predictions that are too high and too low."""

import torch

from safeops.core import check
from safeops.core.definitions import absolute
from safeops.core.domain import any_number, probability
from safeops.core.dtypes import compute_dtype
from safeops.core.foreign import refuse
from safeops.ops.losses._pointwise import OPERANDS, Parameter, PointwiseLoss, TernaryLoss


def value(x, y, quantile):
    d = x - y
    a = absolute(d)
    terms = (1 - quantile, torch.where(d > 0, a, 0)), (quantile, torch.where(d > 0, 0, a))
    # Where the factor is 0, an infinite difference adds 0, not NaN.
    return sum(factor * torch.where(part.isinf() & (factor == 0), 0, part) for factor, part in terms)


def value_of_each(x, y, quantile):
    """`value` for a tensor of quantiles. A quantile outside [0, 1] gives NaN."""
    return value(x, y, torch.where((quantile >= 0) & (quantile <= 1), quantile, torch.nan))


class Quantiles(Parameter):
    """The parameter `quantile`: a number from 0 to 1, a list or tuple of such numbers, or a tensor (Q,)."""

    def check(self, function, x):
        if isinstance(x, torch.Tensor) and x.dim() == 1:
            return check.floating(function, self.name, x)
        for each in x if isinstance(x, (list, tuple)) else (x,):
            super().check(function, each)


# The record for several quantiles. It has the loss's name, for errors; `_quantile_loss`, created later, replaces it.
_of_each = TernaryLoss(
    "quantile_loss",
    None,
    value_of_each,
    domain=(any_number, any_number, probability),
    names=("input", "target", "quantile"),
    kernel="quantiles_loss",
    warns=False,
)
_quantile_loss = PointwiseLoss(
    "quantile_loss", "QuantileLoss", value, Quantiles("quantile", 0.5, minimum=0, maximum=1, sample=0.75)
)
_quantile_loss.parts = (_of_each,)

_OVERLOAD = (
    ".{}(Tensor input, Tensor target, *, Tensor? mask=None, Tensor? weight=None, "
    'str reduction="mean", Tensor? denominator=None, str empty="zero", {} quantile) -> Tensor'
)


@_quantile_loss.public(OPERANDS, _OVERLOAD.format("several", "float[]"), _OVERLOAD.format("tensor", "Tensor"))
def quantile_loss(
    input, target, *extra, mask=None, weight=None, reduction="mean", denominator=None, empty="zero", quantile=0.5,
    **unknown,
):  # fmt: skip
    """Pinball loss: quantile |d| where d = input - target < 0, (1 - quantile) d above; the mean over the kept elements.

    Its minimum is the quantile of the target: with 0.9, nine of ten targets lie below it. With 0.5 it is half of
    `l1_loss`. The derivative at 0 is 0. Koenker and Bassett, "Regression Quantiles", 1978.

    Several quantiles are predicted at once along the last dim: `input` is (..., Q), and `target` (...), (..., 1) or
    (..., Q). The mean is over all of them. It is half of pytorch-forecasting's QuantileLoss, which doubles each term.

    `mask` and `weight` broadcast to `input`, even if the target is (...). Those of points are (..., 1): pass a mask of
    the target's shape as `mask.unsqueeze(-1)` (with Q points it would be read as a mask of quantiles).

    Args:
        quantile: which quantile of the target to predict, from 0 to 1; or Q of them, a list or tuple of numbers or a
            tensor (Q,), for the Q predictions along the last dim. A number in a tensor is not checked: outside [0, 1]
            it gives NaN. Several are read in the compute dtype.
        {arguments}

    Example:
        >>> safeops.quantile_loss(torch.tensor([1.0, -1.0]), torch.zeros(2), quantile=0.75, reduction="none")
        tensor([0.2500, 0.7500])
        >>> safeops.quantile_loss(torch.tensor([[1.0, -1.0]]), torch.zeros(1), quantile=[0.25, 0.5], reduction="none")
        tensor([[0.7500, 0.5000]])
        >>> input, target = torch.tensor([[1.0, -1.0], [3.0, 3.0]]), torch.tensor([0.0, torch.nan])
        >>> safeops.quantile_loss(input, target, quantile=[0.25, 0.5], mask=target.isfinite().unsqueeze(-1))
        tensor(0.6250)
    """
    if extra or unknown:
        refuse(quantile_loss, extra, unknown)
    if not isinstance(quantile, (list, tuple, torch.Tensor)):
        if not check.is_number(quantile) and hasattr(quantile, "__len__"):  # such as a numpy array
            _quantile_loss.parameters[0].check("quantile_loss", quantile)
        return _quantile_loss.call(input, target, mask, weight, reduction, denominator, empty, quantile)
    quantile, target = _along_last_dim(input, target, quantile)
    return _of_each.call(input, target, quantile, mask, weight, reduction, denominator, empty)


def _along_last_dim(input, target, quantile):
    """Returns (quantile as a tensor (Q,), target with as many dims as input)."""
    name = "quantile_loss"
    for key, x in {"input": input, "target": target}.items():
        check.floating(name, key, x, numbers=True)
    count = len(quantile) if not isinstance(quantile, torch.Tensor) or quantile.dim() == 1 else None
    if count is None or input.dim() == 0 or count != input.shape[-1]:
        raise ValueError(
            f"{name}: quantile must be a number, or one for each of input's last dim {check.shown(input)}, got "
            f"{count if count is not None else check.shown(quantile)}"
        )
    if target.dim() == input.dim() - 1 and target.shape == input.shape[:-1]:
        target = target.unsqueeze(-1)
    elif target.shape[:-1] != input.shape[:-1] or target.dim() == 0 or not check.stretches(target.shape[-1], count):
        raise ValueError(
            f"{name}: target {check.shown(target)} must be {tuple(input.shape[:-1])}, {(*input.shape[:-1], 1)} or "
            f"input's {check.shown(input)}, of which the last dim are the {count} quantiles"
        )
    _quantile_loss.parameters[0].check(name, quantile)
    if not isinstance(quantile, torch.Tensor):  # filled on the device: a copy from the host would wait
        dtype = compute_dtype(input.dtype, target.dtype)
        quantile = torch.cat([input.new_full((1,), each, dtype=dtype) for each in quantile] or [input.new_empty(0)])
    return quantile, target
