"""triplet_margin_loss: an anchor should be nearer to a positive than to a negative, by a margin."""

import torch

from safeops.core import check, loss_reduction
from safeops.core.composed_loss import ARGUMENTS, finish, hinge, validate, vectors
from safeops.core.definitions import kept
from safeops.core.dtypes import compute_dtype
from safeops.core.foreign import refuse
from safeops.core.library import declare_raw, only
from safeops.core.row_loss import RowLoss
from safeops.core.symbolic import symbolic
from safeops.ops.classification._classification import validate_reduction
from safeops.ops.reductions.masked_norm import masked_norm

NAME = "triplet_margin_loss"

# ---- definition


def _distance(x, y, p, eps):
    """The p-norm of x - y + eps for each row, as in torch; 0 for equal vectors, with gradient 0."""
    norm = masked_norm((x - y).add_(eps), dim=-1, ord=p)
    return torch.where((x != y).any(-1) | norm.isnan(), norm, 0)  # (equal infs: inf - inf is NaN, and shows)


def _composite(anchor, positive, negative, keep, margin=1.0, p=2.0, eps=1e-6, swap=False):
    """Returns (losses, near, far, apart), of the rows' shape. Backward reads the distances: anchor to positive, anchor
    to negative, and, with swap, positive to negative (else empty). keep: bool, True for kept rows; None: all."""
    compute = compute_dtype(anchor.dtype, positive.dtype, negative.dtype)
    a, b, c = (x.to(compute) for x in (anchor, positive, negative))
    if keep is not None:  # select before arithmetic: NaN * 0 is NaN
        a, b, c = (torch.where(keep.unsqueeze(-1), x, 0) for x in (a, b, c))
    near, far = _distance(a, b, p, eps), _distance(a, c, p, eps)
    apart = _distance(b, c, p, eps) if swap else near.new_empty(0)
    loss = hinge(near - (torch.minimum(far, apart) if swap else far) + margin)
    loss = loss if keep is None else torch.where(keep, loss, 0)
    return loss, *(x.to(torch.float64) for x in (near, far, apart))


def definition(*operands):
    return _composite(*operands)[0]


# ---- op


def _fake(anchor, positive, negative, keep, margin, p, eps, swap):
    rows = anchor.shape[:-1]
    loss = anchor.new_empty(rows, dtype=compute_dtype(anchor.dtype, positive.dtype, negative.dtype))
    return loss, *(anchor.new_empty(shape, dtype=torch.float64) for shape in (rows, rows, rows if swap else 0))


def _fake_reduced(*operands):
    loss, *distances = _fake(*operands[:-2])
    return loss.new_empty(()), loss.new_empty((), dtype=torch.float64), *distances


def _fake_backward(grad, anchor, positive, negative, near, far, apart, margin, eps, swap, *needed):
    return only(needed, (anchor, positive, negative))


_forward = declare_raw(
    "_triplet_margin_loss",
    "(Tensor anchor, Tensor positive, Tensor negative, Tensor? keep, float margin=1.0, float p=2.0, float eps=1e-6, "
    "bool swap=False) -> (Tensor loss, Tensor near, Tensor far, Tensor apart)",
    fake=_fake,
    composite=_composite,
    triton="vectors.triplet_margin_loss.triplet_margin_loss",
)
_backward = declare_raw(
    "_triplet_margin_loss_backward",
    "(Tensor grad, Tensor anchor, Tensor positive, Tensor negative, Tensor near, Tensor far, Tensor apart, "
    "float margin=1.0, float eps=1e-6, bool swap=False, bool need_anchor=True, bool need_positive=True, "
    "bool need_negative=True) -> (Tensor, Tensor, Tensor)",
    fake=_fake_backward,
    triton="vectors.triplet_margin_loss_backward.triplet_margin_loss_backward",
)
_reduced = declare_raw(
    "_triplet_margin_loss_reduced",
    "(Tensor anchor, Tensor positive, Tensor negative, Tensor? keep, float margin=1.0, float p=2.0, float eps=1e-6, "
    "bool swap=False, bool mean=True, bool empty_nan=False) "
    "-> (Tensor loss, Tensor denominator, Tensor near, Tensor far, Tensor apart)",
    fake=_fake_reduced,
    triton="vectors.triplet_margin_loss.triplet_margin_loss_reduced",
)
_reduced_backward = declare_raw(
    "_triplet_margin_loss_reduced_backward",
    "(Tensor grad, Tensor? denominator, Tensor anchor, Tensor positive, Tensor negative, Tensor near, Tensor far, "
    "Tensor apart, float margin=1.0, float eps=1e-6, bool swap=False, bool need_anchor=True, "
    "bool need_positive=True, bool need_negative=True) -> (Tensor, Tensor, Tensor)",
    fake=lambda grad, denominator, *operands: _fake_backward(grad, *operands),
    triton="vectors.triplet_margin_loss_backward.triplet_margin_loss_reduced_backward",
)

# ---- record


class TripletMarginLoss(RowLoss):
    """The record of triplet_margin_loss. Kernels compute p = 2; for other orders the definition runs."""

    module, example = "TripletMarginLoss", "torch.eye(2), torch.ones(2, 2), torch.zeros(2, 2)"
    differentiable = ("anchor", "positive", "negative")

    def __init__(self, *arguments):
        super().__init__(*arguments)
        # operand 5 is p, which chooses a formula: in a trace it stays a number
        self.numbers = self.reduced.numbers = tuple(i for i in self.numbers if i != 5)

    def prepare(self, anchor, positive, negative, keep, margin, p, eps, swap):
        operands = anchor, positive, negative, keep, margin, p, eps, swap
        plain = margin.__class__ is float and p.__class__ is float and eps.__class__ is float and swap.__class__ is bool
        if not (plain and margin > 0 and p == 2 and eps >= 0):
            self.validate(*operands)
        return not symbolic(p) and p == 2, operands

    def validate(self, anchor, positive, negative, keep, *numbers):
        vectors(self.name, anchor=anchor, positive=positive, negative=negative)
        check.same_device(self.name, "anchor", anchor, positive=positive, negative=negative)
        self.validate_numbers(self.name, *numbers)

    def validate_options(self, name, reduction, empty, *numbers):
        """Check the options of a module's constructor."""
        loss_reduction.validate_options(name, reduction, empty)
        self.validate_numbers(name, *numbers)

    def validate_numbers(self, name, margin, p, eps, swap):
        check.number(name, "margin", margin, above=0)
        check.number(name, "p", p, above=0)
        check.number(name, "eps", eps, minimum=0)
        check.boolean_flag(name, "swap", swap)

    def losses(self, *operands):
        return self.definition(*operands), operands[3]

    def gradients_of(self, backward, upstream, needs, operands, *distances):
        anchor, positive, negative, _, margin, _, eps, swap = operands
        return backward(*upstream, anchor, positive, negative, *distances, margin, eps, swap, *needs[:3])


_triplet_margin_loss = TripletMarginLoss(NAME, _forward, _backward, definition, _reduced, _reduced_backward)

# ---- public function


@_triplet_margin_loss.public(
    "(Tensor anchor, Tensor positive, Tensor negative, float margin=1.0, float p=2.0, float eps=1e-6, "
    'bool swap=False, *, Tensor? mask=None, Tensor? weight=None, str reduction="mean", Tensor? denominator=None, '
    'str empty="zero") -> Tensor',
    arguments=ARGUMENTS,
)
def triplet_margin_loss(
    anchor, positive, negative, margin=1.0, p=2.0, eps=1e-6, swap=False, *extra, mask=None, weight=None,
    reduction="mean", denominator=None, empty="zero", **unknown,
):  # fmt: skip
    """max(|anchor - positive| - |anchor - negative| + margin, 0) for each row; the mean over the kept rows.

    As `torch.nn.functional.triplet_margin_loss`, but half is computed in fp32. The distance of equal vectors is 0 with
    gradient 0. (In torch it is the length of the vector (eps, ..., eps), with a gradient that pushes the two apart
    along it.) Balntas et al., "Learning local feature descriptors with triplets", 2016.

    Args:
        anchor: floating tensor (..., D), a vector along the last dim for each row.
        positive: floating tensor of `anchor`'s shape.
        negative: floating tensor of `anchor`'s shape.
        margin: number greater than 0.
        p: order of the norm, greater than 0; other orders than 2 run as plain torch operations.
        eps: number that is added to each difference, at least 0: torch's, in fp32.
        swap: True: the distance of positive and negative replaces that of anchor and negative where it is smaller.
        {arguments}

    Raises:
        TypeError: an operand is not floating, `mask` is not bool, an option is of another type.
        ValueError: shapes do not fit, devices differ, unknown `reduction` or `empty`, a number out of range.

    Example:
        >>> anchor, far = torch.zeros(2, 2), torch.tensor([[3.0, 4.0], [0.3, 0.4]])
        >>> safeops.triplet_margin_loss(anchor, anchor, far, reduction="none", eps=0.0)
        tensor([0.0000, 0.5000])
    """
    if extra or unknown:
        refuse(triplet_margin_loss, extra, unknown)
    validate_reduction(NAME, anchor, reduction, denominator, empty)
    keep = exists = None
    if mask is not None or weight is not None:
        operands = {"anchor": anchor, "positive": positive, "negative": negative}
        rows = vectors(NAME, **operands)
        validate(NAME, rows, mask, weight, reduction, denominator, empty, **operands)
        keep = kept(mask, weight)
        exists = keep.expand(rows).contiguous()
    operands = anchor, positive, negative, exists, margin, p, eps, swap
    reduced = _triplet_margin_loss.reduced
    if weight is None and reduced.serves(anchor, positive, reduction, denominator, empty):
        return reduced.call(*operands, reduction == "mean", empty == "nan")
    loss = _triplet_margin_loss.call(*operands)
    return finish(NAME, loss, keep, weight, reduction, denominator, empty)
