"""box_iou_loss: a box is a vector of four numbers."""

import torch

from safeops.core.domain import box
from safeops.core.op import registry
from safeops.testing import Bad
from tests.ops import gpu
from tests.ops.bad_calls import BadIndex
from tests.ops.operands import data, plain
from tests.ops.row_loss import bad_calls, row_loss


def _quotient(x, y):
    return torch.where(y == 0, 0, x / torch.where(y == 0, 1, y))


def _area(sides):
    return sides[..., 0] * sides[..., 1]


def box_iou(x, y, kind="iou"):
    """Returns the papers' loss. Where a divisor is 0: a union of area 0 has IoU 0, a hull of area 0 adds 0, and the
    aspect ratio of a point adds 0."""
    x1, x2, y1, y2 = x[..., :2], x[..., 2:], y[..., :2], y[..., 2:]
    both = _area(torch.relu(torch.minimum(x2, y2) - torch.maximum(x1, y1)))
    union = _area(x2 - x1) + _area(y2 - y1) - both
    loss, hull = 1 - _quotient(both, union), torch.maximum(x2, y2) - torch.minimum(x1, y1)
    if kind == "giou":
        return loss + _quotient(_area(hull) - union, _area(hull))
    if kind in ("diou", "ciou"):
        added = _quotient(((x1 + x2 - y1 - y2) / 2).square().sum(-1), hull.square().sum(-1))
    if kind == "ciou":
        angle, other = (torch.atan2(t[..., 0], t[..., 1]) for t in (x2 - x1, y2 - y1))
        point = (x2 == x1).all(-1) | (y2 == y1).all(-1)
        v = (2 / torch.pi * torch.where(point, 0, other - angle)) ** 2
        added = added + _quotient(v, loss + v).detach() * v
    return loss if kind == "iou" else loss + added


def _sizes(x, y, kind="iou"):
    """Sizes of the terms: a term is at most 2, and changes by at most 2 when an edge moves by the box's extent."""
    least = torch.cat([t[..., 2:] - t[..., :2] for t in (x, y)], -1).amin(-1, keepdim=True)
    slope = 8 / torch.where(least > 0, least, 1)
    return x.new_full(x.shape[:-1], 6.0), (slope, slope)


def _torch(x, y, kind="iou", reduction="none"):
    return box_iou(x, y, kind)


def _case(n, dtype, seed):
    boxes = tuple(box(gpu.numbers(n - n % 4, dtype, seed + i).view(-1, 4)).flatten() for i in range(2))
    op = registry["box_iou_loss"]
    return gpu.Case(lambda x, y: op.call(x.view(-1, 4), y.view(-1, 4), None, "ciou")[0], boxes)


_boxes = torch.arange(8.0).reshape(2, 4)
row_loss(
    "box_iou_loss",
    box_iou,
    _sizes,
    _torch,
    lambda seed: tuple(box(data(5, 4, seed=10 * seed + i)) for i in range(2)),
    {"input": box(plain()[:, :4]), "target": box(plain(1)[:, :4])},
    {"kind": "diou"},  # not "ciou": numerical derivatives would not hold its alpha constant
    [
        *bad_calls("box_iou_loss", ("input", "target"), (), {}, width=4),
        Bad((_boxes[:, :3], _boxes[:, :3]), {}, ValueError, ("box_iou_loss", "input", "4 numbers", "(2, 3)")),
        Bad((_boxes, _boxes), {"kind": "IoU"}, ValueError, ("box_iou_loss", "kind", "IoU", "giou")),
        Bad((_boxes, _boxes), {"kind": 1}, (TypeError, ValueError), ("box_iou_loss", "kind", "1")),
        BadIndex(
            (_boxes.flip(1), _boxes), {}, ValueError, ("box_iou_loss", "input", "x2 < x1", "[3.0, 2.0, 1.0, 0.0]")
        ),
        BadIndex((_boxes, -_boxes), {}, ValueError, ("box_iou_loss", "target", "x2 < x1")),
    ],
    gpu=_case,
    skip={
        "kept_nonfinite": "an infinite x1 is beyond x2: tests/contract/vectors/test_boxes.py has what shows",
        "uninitialized": "a row has four numbers, never none: tests/contract/vectors/test_boxes.py has no rows",
    },
)
