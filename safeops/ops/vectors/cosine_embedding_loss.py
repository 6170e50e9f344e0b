"""cosine_embedding_loss: 1 - cos for pairs of vectors that belong together, max(cos - margin, 0) for other pairs."""

import torch

from safeops.core import check, loss_reduction, sums
from safeops.core.composed_loss import ARGUMENTS, finish, hinge, one_a_row, validate, vectors
from safeops.core.definitions import kept
from safeops.core.dtypes import FLOATING, LARGEST, compute_dtype
from safeops.core.foreign import refuse
from safeops.core.library import declare_raw, only
from safeops.core.op import Composed, Inner
from safeops.core.symbolic import symbolic
from safeops.ops.vectors.cosine_similarity import _cosine_similarity, cosine_similarity

NAME = "cosine_embedding_loss"
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64, *FLOATING)  # dtypes of targets that hold -1

# ---- definition


def definition(input1, input2, target, keep=None, margin=0.0):
    """The loss of each row. keep: bool, True for kept rows; None: all."""
    if keep is not None:  # select before arithmetic: NaN * 0 is NaN
        input1, input2 = (torch.where(keep.unsqueeze(-1), x, 0) for x in (input1, input2))
    cos = cosine_similarity(input1, input2, dim=-1, eps=None)
    apart = hinge(cos - margin)
    other = 0
    if target.is_floating_point():  # a NaN target gives NaN
        other = torch.where(target == target, 0, torch.nan).to(cos.dtype)
    return torch.where(target == 1, 1 - cos, torch.where(target == -1, apart, other))


# ---- op


def _fake(input1, input2, target, keep=None, margin=0.0):
    compute = compute_dtype(input1.dtype, input2.dtype)
    dtypes = compute, compute, torch.float64, torch.float64
    return tuple(input1.new_empty(target.shape, dtype=dtype) for dtype in dtypes)


_forward = declare_raw(
    "_cosine_embedding_loss",
    "(Tensor input1, Tensor input2, Tensor target, Tensor? keep=None, float margin=0.0) -> "
    "(Tensor loss, Tensor value, Tensor norm1, Tensor norm2)",
    fake=_fake,
    triton="vectors.cosine_embedding_loss.cosine_embedding_loss",
)
_backward = declare_raw(
    "_cosine_embedding_loss_backward",
    "(Tensor grad, Tensor input1, Tensor input2, Tensor target, Tensor value, Tensor norm1, Tensor norm2, "
    "float margin=0.0, bool need_input1=True, bool need_input2=True) -> (Tensor, Tensor)",
    fake=lambda grad, *rest: only(rest[-2:], rest[:2]),
    triton="vectors.cosine_embedding_loss.cosine_embedding_loss_backward",
)

# ---- record


class LossOfRow(Inner):
    """The record of the op that returns each row's loss."""

    differentiable = ("input1", "input2")

    def prepare(self, input1, input2, target, keep, margin):
        plain = not symbolic(margin) and abs(margin) <= LARGEST
        return plain and target.dtype in SIGNED, (input1, input2, target, keep, margin)

    def gradients(self, grad, needs, operands, results):
        x = operands
        return self.backward(grad, x.input1, x.input2, x.target, *results, x.margin, *needs[:2])


_loss_of_row = LossOfRow(NAME, _forward, _backward, definition)

# ---- public function


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
    "(Tensor input1, Tensor input2, Tensor target, float margin=0.0, *, Tensor? mask=None, Tensor? weight=None, "
    'str reduction="mean", Tensor? denominator=None, str empty="zero") -> Tensor',
    arguments=ARGUMENTS,
)
def cosine_embedding_loss(
    input1, input2, target, margin=0.0, *extra, mask=None, weight=None, reduction="mean", denominator=None,
    empty="zero", **unknown,
):  # fmt: skip
    """1 - cos where target is 1, max(cos - margin, 0) where it is -1, with cos the cosine of each pair of vectors.

    Then the mean over the kept pairs. As `torch.nn.functional.cosine_embedding_loss`, except that no sum of squares
    overflows (in torch that of an fp16 vector of length 300 does) or underflows, and that a zero vector has cosine 0
    and gradient 0.

    Args:
        input1: floating tensor (..., D), a vector along the last dim for each row.
        input2: floating tensor of `input1`'s shape.
        target: tensor (...), 1 or -1 for each row, of any real dtype; any other number makes the row's loss 0.
        margin: number, useful from -1 to 1; torch suggests 0 to 0.5.
        {arguments}

    Raises:
        TypeError: an input is not floating, `mask` is not bool, an option is of another type.
        ValueError: shapes do not fit, devices differ, unknown `reduction` or `empty`.

    Example:
        >>> x = torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 0.0]])
        >>> safeops.cosine_embedding_loss(x, x.flip(-1), torch.tensor([1, -1, 1]), reduction="none")
        tensor([0.0400, 0.0000, 1.0000])
    """
    if extra or unknown:
        refuse(cosine_embedding_loss, extra, unknown)
    rows = vectors(NAME, input1=input1, input2=input2)
    one_a_row(NAME, "target", target, input1, rows)
    validate(NAME, rows, mask, weight, reduction, denominator, empty, input1=input1, input2=input2, target=target)
    validate_options(NAME, reduction, empty, margin)
    keep = kept(mask, weight)
    exists = None if keep is None else keep.expand(rows)
    loss = _loss_of_row.call(input1, input2, target, exists, margin)
    return finish(NAME, loss, keep, weight, reduction, denominator, empty)
