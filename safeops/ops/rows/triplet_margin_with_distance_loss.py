"""triplet_margin_with_distance_loss: triplet_margin_loss of any distance."""

import torch

from safeops.core import check, loss_reduction
from safeops.core.definitions import kept
from safeops.core.dtypes import compute_dtype
from safeops.ops.rows._matmul import without_autocast
from safeops.ops.rows._row_loss import finish, hinge, validate
from safeops.ops.rows.triplet_margin_loss import triplet_margin_loss

NAME = "triplet_margin_with_distance_loss"


def triplet_margin_with_distance_loss(
    anchor, positive, negative, *, distance_function=None, margin=1.0, swap=False, reduction="mean", mask=None,
    weight=None, denominator=None, empty="zero",
):  # fmt: skip
    """max(distance(anchor, positive) - distance(anchor, negative) + margin, 0) of each row; the mean over the kept.

    As `torch.nn.functional.triplet_margin_with_distance_loss`, with the distance in fp32 and outside autocast. Rows
    that are not kept reach it as constants, so that no gradient of theirs reaches its parameters. Balntas et al.,
    "Learning local feature descriptors with triplets", 2016.

    Args:
        anchor: floating tensor (B, ...), something to compare for each row.
        positive: floating tensor of `anchor`'s shape.
        negative: floating tensor of `anchor`'s shape.
        distance_function: of two tensors, to the distances: (B,), or as many dims of the operands as it likes. None:
            the Euclidean distance, `triplet_margin_loss`.
        margin: number greater than 0.
        swap: whether the distance of positive and negative counts, where it is less than that of the anchor and the
            negative.
        reduction: "mean" divides the sum by the count of kept distances (by the sum of weights, with weights), "sum",
            or "none".
        mask: bool tensor with the distances' dims, of their sizes or 1; True = keep.
        weight: floating tensor with the distances' dims; 0 means the same as masked out. Differentiable.
        denominator: number or 0-dim tensor that the mean divides by instead.
        empty: value of a mean or sum with nothing kept: "zero", "nan", or "raise".

    Returns:
        fp32 for fp16, bf16 and fp32 operands, fp64 if one is fp64: 0-dim, or of the distances' shape for "none".

    Raises:
        TypeError: an operand is not floating, `distance_function` cannot be called, an option is of another type.
        ValueError: shapes do not fit, devices differ, unknown `reduction` or `empty`, a number out of range.

    Example:
        >>> anchor, far = torch.zeros(2, 2), torch.tensor([[3.0, 4.0], [0.3, 0.4]])
        >>> safeops.triplet_margin_with_distance_loss(
        ...     anchor, anchor, far, distance_function=lambda a, b: (a - b).abs().sum(-1), reduction="none")
        tensor([0.0000, 0.3000])
    """
    loss_reduction.validate_options(NAME, reduction, empty)
    check.number(NAME, "margin", margin, above=0)
    check.boolean_flag(NAME, "swap", swap)
    options = {"mask": mask, "weight": weight, "reduction": reduction, "denominator": denominator, "empty": empty}
    operands = {"anchor": anchor, "positive": positive, "negative": negative}
    for key, x in operands.items():
        check.floating(NAME, key, x)
        if x.shape != anchor.shape:
            raise ValueError(f"{NAME}: {key} {check.shown(x)} must have the shape of anchor {check.shown(anchor)}")
    check.same_device(NAME, "anchor", anchor, **operands)
    if distance_function is None:
        return triplet_margin_loss(anchor, positive, negative, margin=margin, swap=swap, **options)
    if not callable(distance_function):
        raise TypeError(f"{NAME}: distance_function cannot be called, got {type(distance_function).__name__}")
    if mask is not None:
        check.boolean(NAME, "mask", mask, "True = keep")
    if weight is not None:
        check.floating(NAME, "weight", weight)
    for key, x in (("mask", mask), ("weight", weight)):
        if x is not None:
            sizes = zip(x.shape, anchor.shape)
            if x.dim() > anchor.dim() or any(size not in (1, n) for size, n in sizes):
                raise ValueError(
                    f"{NAME}: {key} {check.shown(x)} must have the first dims of anchor {check.shown(anchor)}"
                )
    compute = compute_dtype(*(x.dtype for x in operands.values()))
    wide = [x.to(compute) for x in operands.values()]
    keep = kept(mask, weight)
    if keep is not None:  # select before arithmetic: three points that differ stand for a triplet that is not kept
        rows = keep.reshape(*keep.shape, *[1] * (anchor.dim() - keep.dim()))
        wide = [torch.where(rows, x, point) for point, x in enumerate(wide, 1)]
    a, p, n = wide
    with without_autocast(anchor):
        near, far = distance_function(a, p), distance_function(a, n)
        if swap:
            far = torch.minimum(far, distance_function(p, n))
    loss = hinge(near - far + margin)
    validate(NAME, loss.shape, mask, weight, reduction, denominator, empty, anchor=anchor)
    return finish(NAME, loss, keep, weight, reduction, denominator, empty)
