"""triplet_margin_with_distance_loss: triplet_margin_loss with the caller's distance function."""

import torch

from safeops.core import check, loss_reduction
from safeops.core.composed_loss import finish, hinge, validate, vectors
from safeops.core.definitions import kept
from safeops.core.dtypes import compute_dtype
from safeops.core.foreign import refuse, sign
from safeops.ops.vectors.triplet_margin_loss import triplet_margin_loss

NAME = "triplet_margin_with_distance_loss"


@sign
def triplet_margin_with_distance_loss(
    anchor, positive, negative, *extra, distance_function=None, margin=1.0, swap=False, reduction="mean", mask=None,
    weight=None, denominator=None, empty="zero", **unknown,
):  # fmt: skip
    """max(distance(anchor, positive) - distance(anchor, negative) + margin, 0) of each row; the mean over the kept.

    As `torch.nn.functional.triplet_margin_with_distance_loss`. Balntas et al., "Learning local feature descriptors with
    triplets", 2016.

    The distance function gets the operands in their own dtype: `fp32_region(distance_function)` computes in fp32.
    Margin and mean are in fp32. Rows that are not kept reach it as constants, so that they add nothing to the gradients
    of its parameters.

    Args:
        anchor: tensor (B, ...), something to compare for each row; floating where there is no `distance_function`.
        positive: tensor of as many dims; of `anchor`'s shape where there is no `distance_function`.
        negative: tensor like `positive`.
        distance_function: takes two tensors and returns floating distances: (B,), or with more of the operands' dims.
            None: the Euclidean distance in fp32, as `triplet_margin_loss`.
        margin: number greater than 0.
        swap: True: the distance of positive and negative replaces that of anchor and negative where it is smaller.
        reduction: "mean" divides the sum by the count of kept distances (by the sum of weights, with weights), "sum",
            or "none".
        mask: bool tensor with the distances' dims, of their sizes or 1; True = keep.
        weight: floating tensor with the distances' dims; 0 means the same as masked out. Differentiable.
        denominator: number or 0-dim tensor that the mean divides by instead.
        empty: value of a mean or sum with nothing kept: "zero", "nan", or "raise".

    Returns:
        fp32 for fp16, bf16 and fp32 distances, fp64 if one is fp64: 0-dim, or of the distances' shape for "none".

    Raises:
        TypeError: an operand or a distance is not floating, `distance_function` cannot be called, an option is of
            another type.
        ValueError: shapes do not fit, devices differ, unknown `reduction` or `empty`, a number out of range.

    Example:
        >>> anchor, far = torch.zeros(2, 2), torch.tensor([[3.0, 4.0], [0.3, 0.4]])
        >>> safeops.triplet_margin_with_distance_loss(
        ...     anchor, anchor, far, distance_function=lambda a, b: (a - b).abs().sum(-1), reduction="none")
        tensor([0.0000, 0.3000])
    """
    if extra or unknown:
        refuse(triplet_margin_with_distance_loss, extra, unknown)
    loss_reduction.validate_options(NAME, reduction, empty)
    check.number(NAME, "margin", margin, above=0)
    check.boolean_flag(NAME, "swap", swap)
    options = {"mask": mask, "weight": weight, "reduction": reduction, "denominator": denominator, "empty": empty}
    operands = {"anchor": anchor, "positive": positive, "negative": negative}
    if distance_function is None:
        vectors(NAME, **operands)
        return triplet_margin_loss(anchor, positive, negative, margin=margin, swap=swap, **options)
    if not callable(distance_function):
        raise TypeError(f"{NAME}: distance_function cannot be called, got {type(distance_function).__name__}")
    for key, x in operands.items():
        check.tensor(NAME, key, x)
        if x.dim() != anchor.dim():
            raise ValueError(f"{NAME}: {key} {check.shown(x)} must have the dims of anchor {check.shown(anchor)}")
    check.same_device(NAME, "anchor", anchor, **operands)
    if mask is not None:
        check.boolean(NAME, "mask", mask, "True = keep")
    if weight is not None:
        check.floating(NAME, "weight", weight)
    for key, x in (("mask", mask), ("weight", weight)):
        if x is not None:
            if x.dim() > anchor.dim() or not all(map(check.stretches, x.shape, anchor.shape)):
                raise ValueError(
                    f"{NAME}: {key} {check.shown(x)} must have the first dims of anchor {check.shown(anchor)}"
                )
    keep, rows = kept(mask, weight), operands.values()
    if keep is not None:  # select before arithmetic: a triplet that is not kept becomes the constants 1, 2 and 3
        exists = keep.reshape(*keep.shape, *[1] * (anchor.dim() - keep.dim()))
        rows = [torch.where(exists, x, point) for point, x in enumerate(rows, 1)]
    a, p, n = rows
    near, far = _distance(distance_function, a, p), _distance(distance_function, a, n)
    if swap:
        far = torch.minimum(far, _distance(distance_function, p, n))
    loss = hinge(near - far + margin)
    validate(NAME, loss.shape, mask, weight, reduction, denominator, empty, anchor=anchor)
    return finish(NAME, loss, keep, weight, reduction, denominator, empty)


def _distance(function, x, y):
    distance = function(x, y)
    check.floating(NAME, "distance_function's result", distance)
    return distance.to(compute_dtype(distance.dtype))
