"""The losses of head_loss with a class per row: cross_entropy and token_log_probs."""

import torch

from safeops.core import check, loss_reduction
from safeops.core.dtypes import compute_dtype
from safeops.head import _support as of_head
from safeops.head._loss import NAME, Loss
from safeops.ops.classification import _support
from safeops.ops.classification._classification import (
    INDICES,
    normalized_weight,
    refuse_missing_class,
    rows_of,
    validate_index,
    validate_numbers,
    validate_reduction,
    validate_weight,
    weighed,
    without_weight_0,
)
from safeops.ops.classification._cross_entropy_of_support import validate_support
from safeops.ops.classification._logits import validate_logits
from safeops.ops.classification.cross_entropy import CrossEntropyOfSupport, _cross_entropy, cross_entropy
from safeops.ops.classification.token_log_probs import (
    TokenLogProbs,
    TokenLogProbsAndArgmax,
    TokenLogProbsOfSupport,
    _argmax_too,
    _token_log_probs,
    each,
    token_log_probs,
)
from safeops.ops.linear.linear_cross_entropy import MEMORY, linear_cross_entropy
from safeops.ops.linear.linear_token_log_probs import linear_token_log_probs

SUPPORT = "support", "support_threshold", "outside"


def restrict(loss, weight=None):
    """Take the rows that a support leaves out from a call's mask, and count those whose target is outside."""
    loss.support = of_head.validated(loss)
    _support.validate_outside(NAME, loss.support, loss.outside)
    if loss.support is None:
        return
    target, index, classes = loss.target, loss.ignore_index, loss.support.shape[-1]
    refuse_missing_class(NAME, target, loss.mask, index, classes, "support", loss.support.shape)
    if weight is not None:
        _, loss.mask, _ = rows_of(classes, target, weight, loss.mask, index, compute_dtype(weight.dtype))
    loss.mask, loss.count = _support.of_rows(NAME, loss.support, loss.outside, target, loss.mask, index)


class CrossEntropy(Loss):
    of_logits, of_layer = cross_entropy, linear_cross_entropy
    by_row, differentiable = ("mask", "row_weight", "support"), ("target", "weight")
    in_chunks = (
        *("weight", "mask", "reduction", "ignore_index", "label_smoothing", "z_loss", "row_weight", "temperature"),
        *("softcap", "denominator", "empty", "memory", *SUPPORT),
    )

    def validate(self):
        hidden, target, rows = self.hidden, self.target, tuple(self.shape)
        check.choice(NAME, "memory", self.memory, MEMORY)
        validate_reduction(NAME, hidden, self.reduction, self.denominator, self.empty)
        check.tensor(NAME, "target", target)
        self.probabilities = target.is_floating_point()
        if not self.probabilities and target.dtype not in INDICES:
            raise TypeError(
                f"{NAME}: target must be class indices, int64, int32 or uint8, or floating (probabilities), got "
                f"{target.dtype}"
            )
        if self.probabilities:
            check.floating(NAME, "target", target)
        if tuple(target.shape[:-1] if self.probabilities else target.shape) != rows:
            raise ValueError(
                f"{NAME}: target {check.shown(target)} must have the shape of hidden's rows {check.shown(hidden, rows)}"
            )
        if self.probabilities and self.ignore_index >= 0:
            raise ValueError(f"{NAME}: ignore_index {self.ignore_index} is for class indices, target is {target.dtype}")
        validate_index(NAME, self.ignore_index)
        validate_numbers(NAME, self.label_smoothing, self.z_loss)
        validate_logits(NAME, self.temperature, self.softcap)
        validate_weight(NAME, self.weight)
        check.mask(NAME, self.mask, "the rows", hidden, rows)
        check.same_device(NAME, "hidden", hidden, target=target, mask=self.mask, weight=self.weight)
        self.own_mask = self.mask
        if self.row_weight is not None:
            self.own_mask = without_weight_0(NAME, self.row_weight, self.mask, hidden, rows)

    def fits_layer(self):
        return super().fits_layer() and not (self.probabilities and len(self.shape) > 1)

    def flatten(self):
        if self.row_weight is not None:  # (cast before it is expanded: its gradient is summed in this dtype)
            self.row_weight = self.row_weight.to(compute_dtype(self.hidden.dtype, self.row_weight.dtype))
        self.mask = self.own_mask
        if self.support is not None:
            validate_support(NAME, self.target, self.outside, self.label_smoothing)
        restrict(self, self.weight)
        super().flatten()
        self.keep = self.mask
        if not self.probabilities:
            self.keep = (self.target.long() != self.ignore_index) & (True if self.mask is None else self.mask)

    def validate_classes(self, classes):
        shape = (*self.shape, classes)
        of_head.validate_classes(self, classes)
        if self.weight is not None and len(self.weight) != classes:
            raise ValueError(f"{NAME}: weight must be ({classes},), one a class, got {check.shown(self.weight)}")
        if not self.probabilities:
            of = classes, "the head's logits", shape
            refuse_missing_class(NAME, self.target, self.mask, self.ignore_index, *of)
        elif self.target.shape[-1] != classes:
            raise ValueError(
                f"{NAME}: target {check.shown(self.target)} of probabilities must have the {classes} classes of the "
                f"head's logits {shape}"
            )

    def begin(self, logits):
        super().begin(logits)
        own_mean = self.weight is not None and self.reduction == "mean" and self.denominator is None
        if own_mean and self.z_loss != 0 and not self.probabilities:
            of_rows = self.target, self.mask, self.ignore_index, self.row_weight
            self.weight = normalized_weight(self.given["weight"], logits, logits.dim() - 1, *of_rows)

    def rows(self, logits, part, replaced):
        target, weight, mask = (self.operand(key, part, replaced) for key in ("target", "weight", "mask"))
        numbers = self.ignore_index, self.label_smoothing, self.z_loss, self.temperature, self.softcap
        logits = of_head.restricted(self, logits, part)
        return (_cross_entropy.call(logits, target, weight, mask, *numbers)[0],)

    def is_linear(self):
        return super().is_linear(self.row_weight, self.denominator)

    def finish(self, loss):
        weights, dtype = None, loss.dtype
        if self.probabilities:
            keep = torch.ones_like(loss, dtype=torch.bool) if self.mask is None else self.mask
        else:
            compute = dtype if self.weight is None else compute_dtype(dtype, self.weight.dtype)
            numbers = self.mask, self.ignore_index, compute
            _, keep, weights = rows_of(self.classes, self.target, self.weight, *numbers)
        if self.row_weight is not None:
            loss, weights = weighed(loss, keep, weights, self.row_weight)
        options = self.reduction, self.denominator, self.empty
        return loss_reduction.reduce(NAME, loss, keep, weights, *options).to(dtype)

    def shown(self, result):
        result = result.reshape(self.shape) if self.reduction == "none" else result
        return result if self.support is None else CrossEntropyOfSupport(result, self.count)


class LogProbs(Loss):
    of_logits, of_layer = token_log_probs, linear_token_log_probs
    by_row = ("mask", "support")
    in_chunks = ("mask", "ignore_index", "temperature", "softcap", "with_argmax", *SUPPORT)

    def validate(self):
        hidden, target, rows = self.hidden, self.target, tuple(self.shape)
        check.tensor(NAME, "target", target)
        if target.dtype not in INDICES:
            raise TypeError(f"{NAME}: target must be class indices, int64, int32 or uint8, got {target.dtype}")
        if tuple(target.shape) != rows:
            raise ValueError(
                f"{NAME}: target {check.shown(target)} must have the shape of hidden's rows {check.shown(hidden, rows)}"
            )
        check.mask(NAME, self.mask, "the rows", hidden, rows)
        check.same_device(NAME, "hidden", hidden, target=target, mask=self.mask)
        validate_index(NAME, self.ignore_index)
        validate_logits(NAME, self.temperature, self.softcap)
        check.boolean_flag(NAME, "with_argmax", self.with_argmax)

    def flatten(self):
        if self.support is not None and self.with_argmax:
            raise TypeError(f"{NAME}: with_argmax does not go with support")
        restrict(self)
        super().flatten()
        self.keep = (self.target.long() != self.ignore_index) & (True if self.mask is None else self.mask)

    def validate_classes(self, classes):
        of_head.validate_classes(self, classes)
        of = classes, "the head's logits", (*self.shape, classes)
        refuse_missing_class(NAME, self.target, self.mask, self.ignore_index, *of)

    def rows(self, logits, part, replaced):
        target, mask = (self.operand(key, part, replaced) for key in ("target", "mask"))
        logits = of_head.restricted(self, logits, part)
        op = _argmax_too if self.with_argmax else _token_log_probs
        results = op.call(logits, target, mask, self.ignore_index, self.temperature, self.softcap)
        return results if self.with_argmax else (results,)

    def is_linear(self):
        return False

    def finish(self, rows, *others):
        kind = TokenLogProbsAndArgmax if others else TokenLogProbs
        return kind(*each(rows), *others)

    def shown(self, result):
        rows = (row.reshape(self.shape) for row in result)
        return type(result)(*rows) if self.support is None else TokenLogProbsOfSupport(*rows, self.count)
