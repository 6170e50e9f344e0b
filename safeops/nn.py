"""Modules of the losses, as in torch.nn: the options in the constructor, the tensors in the call."""

import torch

import safeops
from safeops import _check
from safeops._dtypes import LARGEST
from safeops.ops.losses._pointwise import REDUCTION
from safeops.ops.reductions._reduction import EMPTY


class _Loss(torch.nn.Module):
    """`forward(input, target, *, mask=None, weight=None, denominator=None)`: see the function of the same name."""

    function = None
    options = ("reduction", "empty")

    def __init__(self, *, reduction="mean", empty="zero"):
        super().__init__()
        _check.choice(type(self).__name__, "reduction", reduction, tuple(REDUCTION))
        _check.choice(type(self).__name__, "empty", empty, EMPTY)
        self.reduction = reduction
        self.empty = empty

    def forward(self, input, target, *, mask=None, weight=None, denominator=None):
        options = {name: getattr(self, name) for name in self.options}
        return type(self).function(input, target, mask=mask, weight=weight, denominator=denominator, **options)

    def __prepare_scriptable__(self):
        raise TypeError(
            f"{type(self).__name__}: torch.jit.script does not take it; use torch.compile or torch.export, or call "
            f"torch.ops.safeops.{type(self).function.__name__}(input, target, ...) in the script"
        )

    def extra_repr(self):
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in self.options)


class MSELoss(_Loss):
    """Module of `safeops.mse_loss`, which describes the arguments, shapes, dtypes and errors.

    Args:
        reduction, empty: the options, keyword-only.

    Called with (input, target, *, mask=None, weight=None, denominator=None).

    Example:
        >>> loss = safeops.nn.MSELoss()
        >>> loss(torch.tensor([1.0, 5.0]), torch.zeros(2), mask=torch.tensor([True, False]))
        tensor(1.)
    """

    function = staticmethod(safeops.mse_loss)


class L1Loss(_Loss):
    """Module of `safeops.l1_loss`, which describes the arguments, shapes, dtypes and errors.

    Args:
        reduction, empty: the options, keyword-only.

    Called with (input, target, *, mask=None, weight=None, denominator=None).

    Example:
        >>> safeops.nn.L1Loss(reduction="sum")(torch.tensor([1.0, -5.0]), torch.zeros(2))
        tensor(6.)
    """

    function = staticmethod(safeops.l1_loss)


class SmoothL1Loss(_Loss):
    """Module of `safeops.smooth_l1_loss`, which describes the arguments, shapes, dtypes and errors.

    Args:
        reduction, empty, beta: the options, keyword-only.

    Called with (input, target, *, mask=None, weight=None, denominator=None).

    Example:
        >>> safeops.nn.SmoothL1Loss(beta=2.0)(torch.tensor([1.0]), torch.zeros(1))
        tensor(0.2500)
    """

    function = staticmethod(safeops.smooth_l1_loss)
    options = (*_Loss.options, "beta")

    def __init__(self, *, reduction="mean", empty="zero", beta=1.0):
        super().__init__(reduction=reduction, empty=empty)
        _check.number("SmoothL1Loss", "beta", beta, minimum=0, maximum=LARGEST)
        self.beta = beta


class HuberLoss(_Loss):
    """Module of `safeops.huber_loss`, which describes the arguments, shapes, dtypes and errors.

    Args:
        reduction, empty, delta: the options, keyword-only.

    Called with (input, target, *, mask=None, weight=None, denominator=None).

    Example:
        >>> safeops.nn.HuberLoss(delta=2.0)(torch.tensor([4.0]), torch.zeros(1))
        tensor(6.)
    """

    function = staticmethod(safeops.huber_loss)
    options = (*_Loss.options, "delta")

    def __init__(self, *, reduction="mean", empty="zero", delta=1.0):
        super().__init__(reduction=reduction, empty=empty)
        _check.number("HuberLoss", "delta", delta, above=0, maximum=LARGEST)
        self.delta = delta
