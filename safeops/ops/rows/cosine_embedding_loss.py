"""cosine_embedding_loss: vectors that belong together at an angle of 0, others at no less than a margin allows."""

import torch

from safeops.core import check, loss_reduction, sums
from safeops.core.op import Composed
from safeops.core.symbolic import as_operand
from safeops.ops.rows._row_loss import ARGUMENTS, finish, hinge, one_a_row, select, validate, vectors
from safeops.ops.rows.cosine_similarity import _cosine_similarity, cosine_similarity

NAME = "cosine_embedding_loss"


def validate_options(name, reduction, empty, margin):
    loss_reduction.validate_options(name, reduction, empty)
    check.number(name, "margin", margin)


_cosine_embedding_loss = Composed(
    NAME,
    _cosine_similarity,
    *sums.ALL,
    module="CosineEmbeddingLoss",
    example="torch.eye(2), torch.ones(2, 2), torch.tensor([1, -1])",
    validate_options=validate_options,
)


@_cosine_embedding_loss.public(
    "(Tensor input1, Tensor input2, Tensor target, *, Tensor? mask=None, Tensor? weight=None, "
    'str reduction="mean", Tensor? denominator=None, str empty="zero", float margin=0.0) -> Tensor',
    arguments=ARGUMENTS,
)
def cosine_embedding_loss(
    input1, input2, target, *, mask=None, weight=None, reduction="mean", denominator=None, empty="zero", margin=0.0
):
    """1 - cos where target is 1, max(cos - margin, 0) where it is -1, of the cosine of each pair of vectors.

    The mean over the kept pairs. As `torch.nn.functional.cosine_embedding_loss`, whose cosines come from sums of
    squares that overflow (an fp16 vector of 300 and more) and vanish; here a zero vector has cosine 0 and gradient 0.

    Args:
        input1: floating tensor (..., D), a vector along the last dim for each row.
        input2: floating tensor of `input1`'s shape.
        target: tensor (...), 1 or -1 for each row, of any real dtype; any other number makes the row's loss 0.
        margin: number; from -1 to 1 it means something, torch suggests 0 to 0.5.
        {arguments}

    Raises:
        TypeError: an input is not floating, `mask` is not bool, an option is of another type.
        ValueError: shapes do not fit, devices differ, unknown `reduction` or `empty`.

    Example:
        >>> x = torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 0.0]])
        >>> safeops.cosine_embedding_loss(x, x.flip(-1), torch.tensor([1, -1, 1]), reduction="none")
        tensor([0.0400, 0.0000, 1.0000])
    """
    rows = vectors(NAME, input1=input1, input2=input2)
    one_a_row(NAME, "target", target, input1, rows)
    validate(NAME, rows, mask, weight, reduction, denominator, empty, input1=input1, input2=input2, target=target)
    validate_options(NAME, reduction, empty, margin)
    keep, (x1, x2) = select(mask, weight, input1, input2)
    cos = cosine_similarity(x1, x2)
    apart = hinge(cos - as_operand(margin, cos))
    other = 0
    if target.is_floating_point():  # a target of NaN shows
        other = torch.where(target == target, 0, torch.nan).to(cos.dtype)
    loss = torch.where(target == 1, 1 - cos, torch.where(target == -1, apart, other))
    return finish(NAME, loss, keep, weight, reduction, denominator, empty)
