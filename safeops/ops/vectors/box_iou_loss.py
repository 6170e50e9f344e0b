"""box_iou_loss: 1 - IoU of pairs of boxes, plus the terms of GIoU, DIoU or CIoU."""

import math

import torch

from safeops.core import check, loss_reduction
from safeops.core.composed_loss import ARGUMENTS, finish, hinge, validate, vectors
from safeops.core.definitions import gathered, kept
from safeops.core.dtypes import compute_dtype, to_one
from safeops.core.foreign import refuse
from safeops.core.library import declare_raw, only
from safeops.core.row_loss import RowLoss
from safeops.ops.classification._classification import has_missing_class, is_watched, validate_reduction

NAME = "box_iou_loss"
KINDS = "iou", "giou", "diou", "ciou"  # the raw op's `kind` is an index into this tuple

# ---- definition


def edges(boxes):
    """Returns (x1, y1, x2, y2), each of shape (...), of boxes (..., 4)."""
    return gathered(boxes, (boxes.dim() - 1,)).unbind(-1)


def extent(boxes):
    """(...): the smaller of width and height: negative for a box with x2 < x1 or y2 < y1, NaN for a box with a NaN."""
    x1, y1, x2, y2 = edges(boxes.detach())
    return torch.minimum(x2 - x1, y2 - y1)


def ratio(x, y, otherwise=0):
    """x / y; where y is 0, the constant `otherwise`, with gradient 0."""
    nothing = y == 0
    return torch.where(nothing, otherwise, x / torch.where(nothing, 1, y))


def to_ordinary_size(a, b):
    """Scale each pair of boxes by the power of two that brings the largest |coordinate| near 1: then areas fit."""
    largest = torch.maximum(a.detach().abs().amax(-1), b.detach().abs().amax(-1))
    scale = torch.where(largest.isfinite() & (largest > 0), largest, 1)
    scale = to_one(scale.clamp(min=torch.finfo(a.dtype).tiny)).unsqueeze(-1)
    return a * scale, b * scale


def losses(a, b, kind):
    """(...): the loss of each pair of boxes (..., 4)."""
    a, b = to_ordinary_size(a, b)
    (ax1, ay1, ax2, ay2), (bx1, by1, bx2, by2) = edges(a), edges(b)
    aw, ah, bw, bh = ax2 - ax1, ay2 - ay1, bx2 - bx1, by2 - by1
    w = hinge(torch.minimum(ax2, bx2) - torch.maximum(ax1, bx1))
    h = hinge(torch.minimum(ay2, by2) - torch.maximum(ay1, by1))
    # both: the intersection's area. rest: the area of each box outside the intersection, from terms of one sign.
    both, rest = w * h, (aw - w) * ah + w * (ah - h) + ((bw - w) * bh + w * (bh - h))
    union = both + rest
    loss = ratio(rest, union, 1)  # 1 - IoU
    if kind == 0:
        return loss
    hull_w = torch.maximum(ax2, bx2) - torch.minimum(ax1, bx1)
    hull_h = torch.maximum(ay2, by2) - torch.minimum(ay1, by1)
    if kind == 1:  # + (C - union) / C, with C the area of the hull
        return loss + (1 - ratio(union, hull_w * hull_h, 1))
    dx, dy = (ax1 - bx1 + (ax2 - bx2)) / 2, (ay1 - by1 + (ay2 - by2)) / 2  # between the centres
    distance = ratio(dx * dx + dy * dy, hull_w * hull_w + hull_h * hull_h)
    if kind == 2:
        return loss + distance
    # + alpha v, with v = (2 / pi (atan(bw / bh) - atan(aw / ah)))^2; alpha has no gradient. across = bw ah - aw bh
    lesser = aw + ah <= bw + bh  # differences times the smaller box's sides: no digits are lost
    w, h = torch.where(lesser, aw, bw), torch.where(lesser, ah, bh)
    across, along = (bw - aw) * h - w * (bh - ah), ah * bh + aw * bw
    point = (aw == 0) & (ah == 0) | (bw == 0) & (bh == 0)
    angle = torch.atan2(torch.where(point, 0, across), torch.where(point, 1, along)) * (2 / math.pi)
    v = angle * angle
    alpha = ratio(v, loss + v).detach()
    return loss + distance + alpha * v


def define(input, target, mask=None, kind=0):
    """Returns (losses, keep), of the rows' shape."""
    keep = torch.ones_like(input[..., 0], dtype=torch.bool) if mask is None else mask.expand(input.shape[:-1])
    for x in (input, target):
        keep = keep & check.in_range(torch.where(extent(x) < 0, -1, 0), 1, keep)
    compute = compute_dtype(input.dtype, target.dtype)
    a, b = (torch.where(keep.unsqueeze(-1), x.to(compute), 0) for x in (input, target))  # select before arithmetic
    return torch.where(keep, losses(a, b, kind), 0), keep


# ---- op


def _fake(input, target, mask=None, kind=0):
    rows, dtype = input.shape[:-1], compute_dtype(input.dtype, target.dtype)
    return input.new_empty(rows, dtype=dtype), input.new_empty(rows, dtype=torch.bool)


def _fake_reduced(input, target, *_):
    dtype = compute_dtype(input.dtype, target.dtype)
    return input.new_empty((), dtype=dtype), input.new_empty((), dtype=torch.float64)


def _fake_backward(grad, input, target, mask, kind, *needed):
    return only(needed, (input, target))


OPERANDS = "Tensor input, Tensor target, Tensor? mask=None, int kind=0"
NEEDED = "bool need_input=True, bool need_target=True"
_forward = declare_raw(
    "_box_iou_loss",
    f"({OPERANDS}) -> (Tensor loss, Tensor keep)",
    fake=_fake,
    composite=define,
    triton="vectors.box_iou_loss.box_iou_loss",
)
_backward = declare_raw(
    "_box_iou_loss_backward",
    f"(Tensor grad, {OPERANDS}, {NEEDED}) -> (Tensor, Tensor)",
    fake=_fake_backward,
    triton="vectors.box_iou_loss.box_iou_loss_backward",
)
_reduced = declare_raw(
    "_box_iou_loss_reduced",
    f"({OPERANDS}, bool mean=True, bool empty_nan=False) -> (Tensor loss, Tensor denominator)",
    fake=_fake_reduced,
    triton="vectors.box_iou_loss.box_iou_loss_reduced",
)
_reduced_backward = declare_raw(
    "_box_iou_loss_reduced_backward",
    f"(Tensor grad, Tensor? denominator, {OPERANDS}, {NEEDED}) -> (Tensor, Tensor)",
    fake=lambda grad, denominator, *operands: _fake_backward(grad, *operands),
    triton="vectors.box_iou_loss.box_iou_loss_reduced_backward",
)

# ---- record


class BoxIouLoss(RowLoss):
    """The record of box_iou_loss. Forward and backward read the boxes once; backward writes their gradients."""

    module, example = "BoxIouLoss", "torch.tensor([[0.0, 0, 2, 2]]), torch.tensor([[1.0, 0, 2, 2]])"
    differentiable, visible, saved = ("input", "target"), 2, ()

    def prepare(self, input, target, mask, kind):
        takes = kind.__class__ is str and kind in KINDS
        return takes and not is_watched(input), (input, target, mask, KINDS.index(kind) if takes else 0)

    def validate(self, input, target, mask, kind):
        rows = vectors(self.name, input=input, target=target)
        if input.shape[-1] != 4:
            raise ValueError(
                f"{self.name}: input must have the 4 numbers x1, y1, x2, y2 along its last dim, got "
                f"{check.shown(input)}"
            )
        check.mask(self.name, mask, "the rows", input, rows)
        check.same_device(self.name, "input", input, target=target, mask=mask)
        check.choice(self.name, "kind", kind, KINDS)
        for key, x in (("input", input), ("target", target)):
            wrong = extent(x) < 0
            if has_missing_class(torch.where(wrong, -1, 0), mask, None, 1):
                wrong = wrong if mask is None else wrong & mask
                box = x.detach()[wrong][0].tolist()  # noqa: SO101  (an error is on its way)
                raise ValueError(f"{self.name}: {key} has the box {box} with x2 < x1 or y2 < y1: boxes are corners")

    def validate_operands(self, input, target, mask, kind):
        if kind not in range(len(KINDS)):
            raise ValueError(f"{self.name}: kind must be a number from 0 to {len(KINDS) - 1}, got {kind}")
        self.validate(input, target, mask, KINDS[kind])

    def validate_options(self, name, reduction, empty, kind):
        """Check the options of a module's constructor."""
        loss_reduction.validate_options(name, reduction, empty)
        check.choice(name, "kind", kind, KINDS)

    def gradients_of(self, backward, upstream, needs, operands):
        return backward(*upstream, *operands, *needs[:2])


_box_iou_loss = BoxIouLoss(NAME, _forward, _backward, define, _reduced, _reduced_backward)

# ---- public function


@_box_iou_loss.public(
    '(Tensor input, Tensor target, *, str kind="iou", Tensor? mask=None, Tensor? weight=None, '
    'str reduction="mean", Tensor? denominator=None, str empty="zero") -> Tensor',
    arguments=ARGUMENTS,
)
def box_iou_loss(
    input, target, *extra, kind="iou", mask=None, weight=None, reduction="mean", denominator=None, empty="zero",
    **unknown,
):  # fmt: skip
    """1 - IoU of each pair of boxes, with IoU = intersection / union of their areas; the mean over the kept rows.

    With C the area of the smallest box around both, d the distance of their centres and c the diagonal of that box:

        "iou"   1 - IoU
        "giou"  1 - IoU + (C - union) / C                Rezatofighi et al., "Generalized IoU", 2019
        "diou"  1 - IoU + d^2 / c^2                      Zheng et al., "Distance-IoU loss", 2020
        "ciou"  1 - IoU + d^2 / c^2 + alpha v            v = 4 / pi^2 (atan(w' / h') - atan(w / h))^2 of target and
                                                         input, alpha = v / (1 - IoU + v), a constant in the gradient

    Half is computed in fp32, where no area overflows (256 by 256 pixels are inf in fp16). Each pair is scaled by its
    own size: boxes of 1e20 or 1e-20 pixels are as exact as any.

    No eps is added. Where the union is 0 the IoU is 0, and where C or c is 0 its term is 0, with gradient 0. The aspect
    ratio of a box without width and height counts as the other's: v is 0.

    Equal boxes with an area have loss 0 and gradient 0: where two edges are equal, each gets half of the slope of their
    minimum or maximum, as in torch. Boxes that touch have an intersection of 0, with gradient 0.

    Args:
        input: floating tensor (..., 4), a box (x1, y1, x2, y2) for each row, x1 <= x2 and y1 <= y2.
        target: floating tensor of `input`'s shape. Differentiable.
        kind: "iou", "giou", "diou" or "ciou".
        {arguments}

    Raises:
        TypeError: an operand is not floating, `mask` is not bool, an option is of another type.
        ValueError: shapes do not fit, devices differ, unknown `kind`, `reduction` or `empty`; on the CPU, a box of a
            kept row with x2 < x1 or y2 < y1, before anything is written (RuntimeError where the call is compiled). On
            CUDA, and under torch.func's transforms, such a row is masked out, which `safeops.debug.audit` reports.

    Example:
        >>> a, b = torch.tensor([[0.0, 0.0, 2000.0, 2000.0]]), torch.tensor([[1000.0, 0.0, 2000.0, 2000.0]])
        >>> safeops.box_iou_loss(a.half(), b.half())
        tensor(0.5000)
    """
    if extra or unknown:
        refuse(box_iou_loss, extra, unknown)
    validate_reduction(NAME, input, reduction, denominator, empty)
    if weight is not None:
        rows = vectors(NAME, input=input, target=target)
        validate(NAME, rows, mask, weight, reduction, denominator, empty, input=input, target=target)
        mask = kept(mask, weight)
    operands = input, target, mask, kind
    reduced = _box_iou_loss.reduced
    if weight is None and reduced.serves(input, target, reduction, denominator, empty):
        return reduced.call(*operands, reduction == "mean", empty == "nan")
    loss, keep = _box_iou_loss.call(*operands)
    if weight is None:
        return loss_reduction.reduce(NAME, loss, keep, None, reduction, denominator, empty)
    return finish(NAME, loss, keep, weight, reduction, denominator, empty)
