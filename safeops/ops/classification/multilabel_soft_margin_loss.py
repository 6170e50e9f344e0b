"""multilabel_soft_margin_loss: the binary cross entropy of each class, averaged over the classes."""

from safeops.core import check, loss_reduction, sums
from safeops.core.composed_loss import ARGUMENTS_BY_CLASS, finish, validate, vectors
from safeops.core.foreign import refuse
from safeops.core.op import Composed
from safeops.ops.losses.binary_cross_entropy_with_logits import (
    _binary_cross_entropy_with_logits,
    binary_cross_entropy_with_logits,
)

NAME = "multilabel_soft_margin_loss"

_multilabel_soft_margin_loss = Composed(
    NAME,
    _binary_cross_entropy_with_logits,
    *sums.ALL,
    module="MultiLabelSoftMarginLoss",
    buffers=("weight",),
    example="torch.tensor([[2.0, -1.0], [0.0, 3.0]]), torch.eye(2)",
    validate_options=loss_reduction.validate_options,
)


@_multilabel_soft_margin_loss.public(
    '(Tensor input, Tensor target, Tensor? weight=None, *, Tensor? mask=None, str reduction="mean", '
    'Tensor? denominator=None, str empty="zero") -> Tensor',
    arguments=ARGUMENTS_BY_CLASS,
)
def multilabel_soft_margin_loss(
    input, target, weight=None, *extra, mask=None, reduction="mean", denominator=None, empty="zero", **unknown,
):  # fmt: skip
    """The mean over the classes of weight (y log(1 + e^-x) + (1 - y) log(1 + e^x)), for logits x and labels y.

    Then the mean over the kept rows. As `torch.nn.functional.multilabel_soft_margin_loss`, except that an infinite
    logit with the right label has loss 0 and gradient 0, where torch has NaN.

    Args:
        input: floating tensor (..., C), a logit for each class in each row.
        target: floating tensor of `input`'s shape, from 0 to 1. Differentiable.
        weight: floating tensor, broadcastable to `input`'s shape, such as (C,), a weight for each class. An element of
            weight 0 has loss 0 and gradient 0, and counts in the means. Differentiable.
        {arguments}

    Raises:
        TypeError: an operand is not floating, `mask` is not bool, an option is of another type.
        ValueError: shapes do not fit, devices differ, unknown `reduction` or `empty`.

    Example:
        >>> input, target = torch.tensor([[0.0, torch.inf], [torch.nan, 0.0]]), torch.ones(2, 2)
        >>> safeops.multilabel_soft_margin_loss(input, target, mask=torch.tensor([True, False]))
        tensor(0.3466)
    """
    if extra or unknown:
        refuse(multilabel_soft_margin_loss, extra, unknown)
    rows = vectors(NAME, input=input, target=target)
    check.weight(NAME, weight, "input", input, input.shape)
    validate(NAME, rows, mask, None, reduction, denominator, empty, input=input, target=target)
    check.same_device(NAME, "input", input, weight=weight)
    each, classes = None if mask is None else mask.unsqueeze(-1), input.shape[-1]  # (..., 1)
    options = {"mask": each, "weight": weight}
    if reduction == "none" or not classes or reduction == "sum" and empty == "nan":
        terms = binary_cross_entropy_with_logits(input, target, **options, reduction="none")
        return finish(NAME, sums.mean(terms, dim=-1), mask, None, reduction, denominator, empty)
    if empty == "raise":
        losses = f"losses {check.shown(input, rows)}"
        loss_reduction.raise_if_nothing_kept(NAME, mask, rows, losses, denominator)
        empty = "zero"
    total = binary_cross_entropy_with_logits(
        input, target, **options, reduction=reduction, denominator=denominator, empty=empty
    )
    return total if reduction == "mean" and denominator is None else total / classes
