"""The losses of head_loss that compare with a teacher: divergences of the two rows of logits."""

import torch
from torch.nn.functional import linear

from safeops.core import check
from safeops.core.composed_loss import finish, validate
from safeops.core.definitions import kept
from safeops.core.dtypes import compute_dtype
from safeops.head import _support as of_head
from safeops.head._loss import NAME, Loss
from safeops.ops.classification._best_classes import validate_form
from safeops.ops.divergences import _support
from safeops.ops.divergences._divergence import divergence, validate_options
from safeops.ops.linear._layer import validate_layer

BEST = "target_values", "target_indices"


class Divergence(Loss):
    op, swap, beta, own_defaults = None, False, 0.5, {"target_head": None}
    by_row = ("exists", "target_values", "target_indices", "support")
    differentiable = ("target", "target_weight", "target_bias", "target_values")
    in_chunks = (
        *("mask", "weight", "reduction", "denominator", "empty", "temperature", "beta", "target_head"),
        *("target_weight", "target_bias", "target_values", "target_indices", "tail", "support"),
        "support_threshold",
    )

    def validate(self):
        hidden, target, rows = self.hidden, self.target, tuple(self.shape)
        best = [x for x in (self.target_values, self.target_indices) if x is not None]
        validate_form(NAME, target, self.target_values, self.target_indices, self.tail)
        operands = {"hidden": hidden} | ({} if target is None else {"target": target})
        for key, x in operands.items():
            check.floating(NAME, key, x)
        for key, x in zip(("target", *BEST), (target, self.target_values, self.target_indices)):
            if x is not None and (x.dim() != len(rows) + 1 or tuple(x.shape[:-1]) != rows):
                raise ValueError(
                    f"{NAME}: {key} {check.shown(x)} must have a vector for each of hidden's rows "
                    f"{check.shown(hidden, rows)}"
                )
        if self.target_head is not None:
            if not callable(self.target_head):
                raise TypeError(
                    f"{NAME}: target_head must be a module or function, got {type(self.target_head).__name__}"
                )
            if target is None or self.target_weight is not None or self.target_bias is not None:
                raise TypeError(f"{NAME}: target_head needs target, and replaces target_weight and target_bias")
        elif self.target_weight is not None:
            if target is None:
                raise TypeError(f"{NAME}: target_weight needs target, the teacher's vectors")
            validate_layer(
                NAME, target, self.target_weight, self.target_bias, ("target", "target_weight", "target_bias")
            )
        elif self.target_bias is not None:
            raise TypeError(f"{NAME}: target_bias needs target_weight")
        operands |= dict(zip(BEST, best))
        validate(NAME, self.shape, self.mask, self.weight, self.reduction, self.denominator, self.empty, **operands)
        validate_options(NAME, self.reduction, self.empty, self.temperature, self.beta)

    def flatten(self):
        self.keep, self.support = kept(self.mask, self.weight), of_head.validated(self)
        if self.support is not None:
            self.keep = _support.with_classes(NAME, self.support, self.keep, self.shape)
        self.exists = self.keep
        super().flatten()
        self.keep = self.exists
        if self.weight is not None:  # (cast before it is expanded: its gradient is summed in this dtype)
            self.weight = self.weight.to(compute_dtype(self.weight.dtype)).expand(self.shape).reshape(-1)

    def validate_classes(self, classes):
        of_head.validate_classes(self, classes)
        if self.target_weight is not None:
            own = len(self.target_weight)
        elif self.target is not None and self.target_head is None:
            own = self.target.shape[-1]
        else:
            return
        if own != classes:
            key = "target" if self.target_weight is None else "target_weight"
            raise ValueError(
                f"{NAME}: {key} {check.shown(getattr(self, key))} must have the {classes} classes of the head's logits "
                f"{(*self.shape, classes)}"
            )

    def rows(self, logits, part, replaced):
        restriction = None if self.support is None else self.support[part], None
        keys = "target", "exists", "target_values", "target_indices", "target_weight", "target_bias"
        target, exists, *best, weight, bias = (self.operand(key, part, replaced) for key in keys)
        if target is not None and exists is not None and (weight is not None or self.target_head is not None):
            target = torch.where(exists.unsqueeze(-1), target, 0)  # select before arithmetic: NaN * 0 is NaN
        if self.target_head is not None:
            with torch.no_grad():
                target = self.target_head(target)
            if not isinstance(target, torch.Tensor) or target.shape != logits.shape:
                what = check.shown(target) if isinstance(target, torch.Tensor) else type(target).__name__
                raise ValueError(f"{NAME}: target_head must return logits {check.shown(logits)}, got {what}")
        elif weight is not None:
            target = linear(target, weight, bias)
        best, options = (*best, self.tail), (exists, None, "none", None, "zero", self.temperature)
        return (divergence(NAME, self.op, logits, target, *options, best, restriction, self.beta, self.swap),)

    def is_linear(self):
        return super().is_linear(self.weight, self.denominator)

    def finish(self, loss):
        options = self.reduction, self.denominator, self.empty
        return finish(NAME, loss, self.keep, self.weight, *options)

    def shown(self, result):
        return result.reshape(self.shape) if self.reduction == "none" else result
