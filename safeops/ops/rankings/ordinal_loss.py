"""ordinal_loss: classes in an order, as the binary questions "is the class above k?" (CORN and CORAL)."""

import torch

from safeops.core import check, loss_reduction, sums
from safeops.core.composed_loss import ARGUMENTS, finish, one_a_row, validate, vectors
from safeops.core.definitions import gathered, kept
from safeops.core.dtypes import compute_dtype
from safeops.core.foreign import refuse
from safeops.core.op import Composed
from safeops.ops.classification._classification import INDICES, refuse_missing_class
from safeops.ops.losses.binary_cross_entropy_with_logits import (
    _binary_cross_entropy_with_logits,
    binary_cross_entropy_with_logits,
)

NAME = "ordinal_loss"
KINDS = ("corn", "coral")

# ---- definition


def define(logits, target, keep, kind):
    """Returns (the sum of each row's questions, how many questions the row is asked, bool: True for kept rows)."""
    target = target.long().unsqueeze(-1)
    keep = torch.ones_like(target, dtype=torch.bool) if keep is None else keep.unsqueeze(-1)
    keep = keep & check.in_range(target, logits.shape[-1] + 1, keep)
    level = torch.ones_like(logits, dtype=torch.int64).cumsum(-1) - 1  # (..., K - 1): k of the question
    asked = keep.expand(logits.shape) if kind == "coral" else keep & (target >= level)
    above = (target > level).to(compute_dtype(logits.dtype))
    terms = binary_cross_entropy_with_logits(logits, above, mask=asked, reduction="none")
    return sums.total(terms, dim=-1), sums.count(asked, dim=-1), keep[..., 0]


# ---- record


def validate_options(name, reduction, empty, kind):
    loss_reduction.validate_options(name, reduction, empty)
    check.choice(name, "kind", kind, KINDS)


_ordinal_loss = Composed(
    NAME,
    _binary_cross_entropy_with_logits,
    *sums.ALL,
    module="OrdinalLoss",
    example="torch.tensor([[1.0, -0.5], [2.0, 0.5]]), torch.tensor([1, 2])",
    validate_options=validate_options,
)
_ordinal_loss.kinds = KINDS

# ---- public function


@_ordinal_loss.public(
    '(Tensor logits, Tensor target, *, str kind="corn", Tensor? mask=None, Tensor? weight=None, '
    'str reduction="mean", Tensor? denominator=None, str empty="zero") -> Tensor',
    arguments=ARGUMENTS,
)
def ordinal_loss(
    logits, target, *extra, kind="corn", mask=None, weight=None, reduction="mean", denominator=None, empty="zero",
    **unknown,
):  # fmt: skip
    """Binary cross entropy of the questions "is the class above k?", for classes in an order, of K - 1 logits a row.

        coral   l_i = sum_k log(1 + e^-x_k) where y > k, + log(1 + e^x_k) where y <= k, over all k in [0, K - 1)
        corn    the same over the k <= y alone

    With coral, sigmoid(x_k) is P(y > k); the logits of a row should differ by biases alone (one weight vector), so that
    the probabilities fall with k. The mean is over the rows. Cao, Mirjalili and Raschka, "Rank consistent ordinal
    regression for neural networks", 2020, with equal weights of the questions.

    With corn, sigmoid(x_k) is P(y > k | y > k - 1), which a row teaches only if y > k - 1. Their product is P(y > k),
    for any last layer. The mean is over the questions that the kept rows are asked, min(y + 1, K - 1) each, as in the
    paper. Shi, Cao and Raschka, "Deep neural networks for rank-consistent ordinal regression based on conditional
    probabilities", 2021. To divide by another number (of all micro-batches), give `denominator`.

    The predicted class is the count of k with P(y > k) > 1 / 2: `(x.sigmoid() > 0.5).sum(-1)` with coral,
    `(x.sigmoid().cumprod(-1) > 0.5).sum(-1)` with corn.

    Args:
        logits: floating tensor (..., K - 1), of K classes.
        target: int64, int32 or uint8 tensor (...), the class y of each row, in [0, K).
        kind: "corn" or "coral".
        {arguments}

    Raises:
        IndexError: on the CPU, a row that `mask` keeps has a class out of range; elsewhere such a row is masked out.
        TypeError: `logits` is not floating, `target` does not hold integers, `mask` is not bool.
        ValueError: shapes do not fit, devices differ, unknown `kind`, `reduction` or `empty`.

    Example:
        >>> logits = torch.tensor([[0.0, 0.0], [0.0, torch.inf], [torch.nan, 0.0]])
        >>> target, keep = torch.tensor([0, 2, 1]), torch.tensor([True, True, False])
        >>> safeops.ordinal_loss(logits, target, kind="coral", mask=keep, reduction="none")
        tensor([1.3863, 0.6931, 0.0000])
        >>> safeops.ordinal_loss(logits, target, mask=keep, reduction="none")
        tensor([0.6931, 0.6931, 0.0000])
    """
    if extra or unknown:
        refuse(ordinal_loss, extra, unknown)
    check.choice(NAME, "kind", kind, KINDS)
    rows = vectors(NAME, logits=logits)
    one_a_row(NAME, "target", target, logits, rows, classes=True)
    if target.dtype not in INDICES:
        raise TypeError(f"{NAME}: target must be int64, int32 or uint8 (classes), got {target.dtype}")
    validate(NAME, rows, mask, weight, reduction, denominator, empty, logits=logits, target=target)
    keep = kept(mask, weight)
    keep = None if keep is None else keep.expand(rows)
    refuse_missing_class(NAME, target, keep, None, logits.shape[-1] + 1, "logits", logits.shape)
    loss, asked, keep = define(gathered(logits, (logits.dim() - 1,)), target, keep, kind)
    if kind == "corn":  # the mean over questions is the mean of the rows' means, weighted by how many they are
        keep, asked = keep & (asked > 0), asked.to(loss.dtype)
        loss, weight = loss / asked.clamp(min=1), asked if weight is None else asked * weight
    return finish(NAME, loss, keep, weight, reduction, denominator, empty)
