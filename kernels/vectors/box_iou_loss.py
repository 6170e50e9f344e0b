"""box_iou_loss: 1 - IoU of each pair of boxes (x1, y1, x2, y2), with the terms of GIoU, DIoU and CIoU, and its
gradients. One kernel for both directions: a thread has a pair of boxes, which are two accesses if they are dense.
"""

import torch
import triton
import triton.language as tl

from ..engine.buffers import empty
from ..engine.elementwise import compute_dtype
from ..engine.indexing import INNER
from ..engine.math import atan_unit, rounded_quotient
from ..engine.operand import Operand, Parts, Space, constants
from ..engine.row import declare, one_per_row, part_of, tile_at
from ..engine.row_loss import add_up, own_class, reduction, upstream
from ..engine.row_plan import PICK, launch
from ..engine.scaling import power_below, reciprocal
from ..engine.tile import base_of, fetch, in_batch, offset_of, store

IOU, GIOU, DIOU, CIOU = (tl.constexpr(i) for i in range(4))  # KIND


@triton.jit
def edge_pointers(boxes, space, m, n, config):
    """Pointers to the edges of the boxes: (BM, 4), or (4, BN) for boxes across memory."""
    edge = tl.arange(0, 4)
    if config.AXIS == INNER and config.DENSE:
        size: tl.constexpr = boxes.pointer.dtype.element_ty.primitive_bitwidth // 8
        row = base_of(boxes, space) + offset_of(m, space.outer_shape, boxes.outer)
        pointer = tl.multiple_of(row, 4 * size if size < 4 else 16)[:, None] + edge[None, :]
    elif config.AXIS == INNER:
        pointer = own_class(edge[None, :], boxes, space, m, n, config)
    else:
        pointer = own_class(edge[:, None], boxes, space, m, n, config)
    return pointer


@triton.jit
def load_edges(boxes, space, m, n, inside, config):
    """Returns (x1, x2, y1, y2) of each row: (rows,) each."""
    tile = tl.load(edge_pointers(boxes, space, m, n, config), mask=inside, other=0).to(config.C)
    if config.AXIS != INNER:
        tile = tl.trans(tile)
    x, y = tl.split(tl.reshape(tile, (tile.shape[0], 2, 2)))
    x1, x2 = tl.split(x)
    y1, y2 = tl.split(y)
    return x1, x2, y1, y2


@triton.jit
def store_edges(boxes, space, m, n, x1, x2, y1, y2, inside, config):
    tile = tl.reshape(tl.join(tl.join(x1, x2), tl.join(y1, y2)), (x1.shape[0], 4))
    if config.AXIS != INNER:
        tile = tl.trans(tile)
    tl.store(edge_pointers(boxes, space, m, n, config), tile.to(boxes.pointer.dtype.element_ty), mask=inside)


@triton.jit
def is_upside_down(x1, x2, y1, y2):
    """True where width or height is negative, and neither is NaN."""
    width, height = x2 - x1, y2 - y1
    return ((width < 0) & (height == height)) | ((height < 0) & (width == width))


@triton.jit
def largest(x1, x2, y1, y2):
    return tl.maximum(tl.maximum(tl.abs(x1), tl.abs(x2)), tl.maximum(tl.abs(y1), tl.abs(y2)))


@triton.jit
def divisor(y):
    """y, or inf in place of 0: x / divisor(0) is 0."""
    return tl.where(y == 0, float("inf"), y)


@triton.jit
def lengths(a1, a2, b1, b2):
    """Along x or y, the lengths of a, b, their intersection and their hull, and the difference of their centres."""
    a, b = a2 - a1, b2 - b1
    both = tl.minimum(a2, b2) - tl.maximum(a1, b1)
    both = tl.where(both > 0, both, 0.0) + (a - a) + (b - b)  # NaN shows
    return a, b, both, tl.maximum(a2, b2) - tl.minimum(a1, b1), ((a1 - b1) + (a2 - b2)) * 0.5


@triton.jit
def turn(across, along):
    """atan2(across, along) for along >= 0, in quarters of a circle; 0 at the origin."""
    size = tl.abs(across)
    steep = size > along
    angle = atan_unit(tl.where(steep, along, size) / divisor(tl.where(steep, size, along))) * 0.6366197723675814
    angle = tl.where(steep, 1 - angle, angle)
    return tl.where(across < 0, -angle, angle)


@triton.jit
def loss_and_slopes(x, y, KIND: tl.constexpr):
    """Returns (the loss, its slopes by the lengths along x, its slopes by the lengths along y)."""
    xa, xb, x_both, x_hull, x_apart = x
    ya, yb, y_both, y_hull, y_apart = y
    # the intersection, and what each box has outside of it: no sum cancels
    both = x_both * y_both
    rest = ((xa - x_both) * ya + x_both * (ya - y_both)) + ((xb - x_both) * yb + x_both * (yb - y_both))
    area = both + rest  # the area of the union
    by = divisor(area)
    iou = rounded_quotient(both, by)
    loss = tl.where(area == 0, 1.0, rest / by)
    # d(iou) = ((1 + iou) d(both) - iou d(areas)) / union. Terms that may cancel are quotients, so no product is fused.
    dxa, dxb, dx_both = iou * ya / by, iou * yb / by, -(1 + iou) * y_both / by
    dya, dyb, dy_both = iou * xa / by, iou * xb / by, -(1 + iou) * x_both / by
    zero = loss * 0
    dx_hull, dy_hull, dx_apart, dy_apart = zero, zero, zero, zero
    if KIND == GIOU:  # loss += 1 - union / hull
        hull = x_hull * y_hull
        of = divisor(hull)
        part = rounded_quotient(area, of)
        loss += tl.where(hull == 0, 0.0, 1 - part)
        dxa, dxb, dx_both, dx_hull = dxa - ya / of, dxb - yb / of, dx_both + y_both / of, part * y_hull / of
        dya, dyb, dy_both, dy_hull = dya - xa / of, dyb - xb / of, dy_both + x_both / of, part * x_hull / of
    if KIND >= DIOU:  # loss += (distance of the centres)^2 / (diagonal of the hull)^2
        c = divisor(x_hull * x_hull + y_hull * y_hull)
        distance = (x_apart * x_apart + y_apart * y_apart) / c
        dx_apart, dx_hull = 2 * x_apart / c, -2 * distance * x_hull / c
        dy_apart, dy_hull = 2 * y_apart / c, -2 * distance * y_hull / c
        if KIND == CIOU:  # loss += alpha v: v compares the boxes' aspect ratios
            lesser = xa + ya <= xb + yb  # the smaller box: its sides times the differences do not cancel
            w, h = tl.where(lesser, xa, xb), tl.where(lesser, ya, yb)
            angle = turn((xb - xa) * h - w * (yb - ya), ya * yb + xa * xb)
            angle = tl.where((xa == 0) & (ya == 0) | (xb == 0) & (yb == 0), 0.0, angle)  # a point has no shape
            v = angle * angle
            alpha = v / divisor(loss + v)
            slope = 2 * alpha * angle * 0.6366197723675814  # 2 / pi
            of_a, of_b = slope / divisor(xa * xa + ya * ya), slope / divisor(xb * xb + yb * yb)
            dxa, dxb = dxa - of_a * ya, dxb + of_b * yb
            dya, dyb = dya + of_a * xa, dyb - of_b * xb
            loss += alpha * v
        loss += distance
    dx_both, dy_both = tl.where(x_both == 0, 0.0, dx_both), tl.where(y_both == 0, 0.0, dy_both)
    return loss, (dxa, dxb, dx_both, dx_hull, dx_apart), (dya, dyb, dy_both, dy_hull, dy_apart)


@triton.jit
def share_of_lesser(x, y):
    """The slope of min(x, y) by x, and of max(x, y) by y: 1, 0, or 1/2 where they are equal."""
    return tl.where(x == y, 0.5, tl.where(x < y, 1.0, 0.0))


@triton.jit
def edge_slopes(slopes, a1, a2, b1, b2):
    """The slopes by the edges along x or y, from those by the lengths."""
    a, b, both, hull, apart = slopes
    low, high, half = share_of_lesser(b1, a1), share_of_lesser(a2, b2), apart * 0.5
    da1, da2 = half - a - low * both - (1 - low) * hull, half + a + high * both + (1 - high) * hull
    db1, db2 = -half - b - (1 - low) * both - low * hull, b - half + (1 - high) * both + high * hull
    return da1, da2, db1, db2


BoxConfig = constants("KIND DENSE REDUCE EMPTY_NAN AXIS BM BN VEC C I")


@triton.jit
def box_kernel(
    x: Operand, y: Operand, mask: Operand, grad: Operand, loss: Operand, keep: Operand, used: Operand, dx: Operand,
    dy: Operand, denominator: Operand, partial: tl.pointer_type, counter: tl.pointer_type, space: Space, parts: Parts,
    config: BoxConfig,
):  # fmt: skip
    """Writes loss or, given a grad, dx and dy. REDUCE: `loss` is the sum or mean of all rows, `used` its divisor."""
    C: tl.constexpr = config.C
    ACROSS: tl.constexpr = 1 if config.AXIS == INNER else 0
    _, group, batch, block = part_of(1, parts.across, config.I)
    space = in_batch(space, batch, (x, y, mask, grad, loss, keep, used, dx, dy))
    m, n = tile_at(space, block, 0, config)
    inside = one_per_row(space, m, n, config)  # one number per row: (BM, 1), or (1, BN) for rows across memory
    ax1, ax2, ay1, ay2 = load_edges(x, space, m, n, inside, config)
    bx1, bx2, by1, by2 = load_edges(y, space, m, n, inside, config)
    upside_down = is_upside_down(ax1, ax2, ay1, ay2) | is_upside_down(bx1, bx2, by1, by2)
    scale = reciprocal(power_below(tl.maximum(largest(ax1, ax2, ay1, ay2), largest(bx1, bx2, by1, by2))))
    ax1, ax2, ay1, ay2 = ax1 * scale, ax2 * scale, ay1 * scale, ay2 * scale
    bx1, bx2, by1, by2 = bx1 * scale, bx2 * scale, by1 * scale, by2 * scale
    value, of_x, of_y = loss_and_slopes(lengths(ax1, ax2, bx1, bx2), lengths(ay1, ay2, by1, by2), config.KIND)
    kept = inside & ~tl.expand_dims(upside_down, ACROSS)
    if mask is not None:
        kept &= fetch(mask, space, m, n, inside, True)
    if grad is not None:
        g = tl.where(kept, upstream(grad, denominator, space, m, n), 0.0).to(C)
        exists, g = tl.reshape(kept, scale.shape), tl.reshape(g, scale.shape)
        dax1, dax2, dbx1, dbx2 = edge_slopes(of_x, ax1, ax2, bx1, bx2)
        day1, day2, dby1, dby2 = edge_slopes(of_y, ay1, ay2, by1, by2)
        if dx is not None:
            x1, x2 = tl.where(exists, dax1 * g * scale, 0.0), tl.where(exists, dax2 * g * scale, 0.0)
            y1, y2 = tl.where(exists, day1 * g * scale, 0.0), tl.where(exists, day2 * g * scale, 0.0)
            store_edges(dx, space, m, n, x1, x2, y1, y2, inside, config)
        if dy is not None:
            x1, x2 = tl.where(exists, dbx1 * g * scale, 0.0), tl.where(exists, dbx2 * g * scale, 0.0)
            y1, y2 = tl.where(exists, dby1 * g * scale, 0.0), tl.where(exists, dby2 * g * scale, 0.0)
            store_edges(dy, space, m, n, x1, x2, y1, y2, inside, config)
    else:
        value = tl.where(kept, tl.expand_dims(value, ACROSS), 0.0)
        if config.REDUCE:
            add_up(value, kept, value, loss, used, partial, counter, group, parts.groups, config, False)
        else:
            store(loss, space, m, n, value, inside, True)
            store(keep, space, m, n, kept, inside, True)


BOX = declare(box_kernel)
PER_ROW = (2, 3, 4, 5, 6, 9)
OPTIONS = {"phases": PICK, "held": 16}


def is_dense(x):
    """True if each box is one access, or two of 16 bytes: a plan knows addresses modulo 16 alone."""
    begins = x.data_ptr() % min(4 * x.itemsize, 16)
    return x.stride(-1) == 1 and not any(step % 4 for step in x.stride()[:-1]) and begins == 0


def prepare(input, target, mask, kind, mean=None, empty_nan=False, grad=None, denominator=None, needed=(False, False)):
    """Returns (results, arguments of row_plan.launch, its constants). mean: True for the mean of all rows, False for
    the sum, None for each row's loss. grad: the results are gradients. A mean has a denominator, and one grad."""
    rows, dtype, device = input.shape[:-1], compute_dtype(input, target), input.device
    loss = keep = used = None
    slopes = tuple(torch.empty_like(x) if wanted else None for x, wanted in zip((input, target), needed))
    if grad is not None:
        results = slopes
    elif mean is None:
        results = loss, keep = empty(rows, dtype, device), empty(rows, torch.bool, device)
    else:
        results = loss, used = empty((), dtype, device), empty((), torch.float64, device)
    per_row = (None if t is None else t.expand(rows).unsqueeze(-1) for t in (mask, grad, loss, keep, used, denominator))
    *numbers, by = per_row
    tensors = input, target, *numbers, *slopes, by
    dense = all(is_dense(x) for x in (input, target, *slopes) if x is not None)
    plan = BOX, tensors, PER_ROW, input.shape, input.dim() - 1, compute_dtype(input, target, grad)
    return results, plan, {"KIND": kind, "DENSE": dense} | reduction(mean, empty_nan)


def box_iou_loss(input, target, mask=None, kind=0):
    results, plan, constants = prepare(input, target, mask, kind)
    if input.numel():
        launch("box_iou_loss", *plan, (), constants, **OPTIONS)
    return results


def box_iou_loss_reduced(input, target, mask=None, kind=0, mean=True, empty_nan=False):
    """Returns (the mean or sum of all rows, what a mean divides by). There must be a row."""
    results, plan, constants = prepare(input, target, mask, kind, mean, empty_nan)
    launch("box_iou_loss", *plan, (), constants, **OPTIONS)
    return results


def box_iou_loss_reduced_backward(grad, denominator, input, target, mask=None, kind=0, *needed):
    """grad: one number per row; 0-dim for the sum or mean of all rows. denominator: a mean's divisor, or None."""
    needed = needed or (True, True)
    slopes, plan, constants = prepare(input, target, mask, kind, grad=grad, denominator=denominator, needed=needed)
    if input.numel() and any(needed):
        launch("box_iou_loss_backward", *plan, (), constants, **OPTIONS)
    return tuple(x.new_empty(0) if dx is None else dx for x, dx in zip((input, target), slopes))


def box_iou_loss_backward(grad, *operands):
    return box_iou_loss_reduced_backward(grad, None, *operands)
