"""Argument checks, masking and reduction for losses of rows that are composed of other ops."""

import torch

from safeops.core import check, loss_reduction
from safeops.core.dtypes import compute_dtype


def same_shape(name, **operands):
    """Check that the operands are floating and have one shape. Returns the shape."""
    for key, x in operands.items():
        check.floating(name, key, x, numbers=True)
    (first, like), *others = operands.items()
    for key, x in others:
        if x.shape != like.shape:
            raise ValueError(f"{name}: {key} {check.shown(x)} must have the shape of {first} {check.shown(like)}")
    return like.shape


def vectors(name, **operands):
    """Check that the operands have one shape, with vectors along the last dim. Returns the shape without that dim."""
    first, like = next(iter(operands.items()))
    check.floating(name, first, like, numbers=True)
    if like.dim() == 0:
        raise ValueError(f"{name}: {first} must have vectors along its last dim, got shape ()")
    return same_shape(name, **operands)[:-1]


def one_a_row(name, key, x, vectors, rows, classes=False):
    """Check that x is real and has the shape `rows`: one number for each row of the operand `vectors`. classes: True if
    x holds class indices; the error then shows how to convert a one-hot x."""
    check.real(name, key, x)
    if x.shape != rows:
        raise ValueError(
            f"{name}: {key} {check.shown(x)} must have a number for each of the rows {check.shown(vectors, rows)}"
            f"{check.say(check.of_one_hot(key, x, vectors.shape, -1)) if classes else ''}"
        )


def validate_class_weight(name, weight, input):
    """Check that weight is (C,), a number for each class along input's last dim."""
    if weight is None:
        return
    check.floating(name, "weight", weight)
    classes = input.shape[-1]
    if tuple(weight.shape) != (classes,):
        raise ValueError(f"{name}: weight must be ({classes},), one a class, got {check.shown(weight)}")


def validate(name, rows, mask, weight, reduction, denominator, empty, **operands):
    """The checks that all losses of rows share. operands: {name: tensor}; the checks compare with the first."""
    (first, reference), *_ = operands.items()
    operands.pop(first)
    check.mask(name, mask, "the rows", reference, rows)
    check.weight(name, weight, "the rows", reference, rows)
    loss_reduction.validate_options(name, reduction, empty)
    loss_reduction.validate_denominator(name, reduction, denominator)
    check.same_device(name, first, reference, **operands, mask=mask, weight=weight, denominator=denominator)


def hinge(d):
    """max(d, 0) with slope 0 at 0, and NaN where d is NaN."""
    return torch.relu(d)


def finish(name, loss, keep, weight, reduction, denominator, empty):
    """Weigh, mask and reduce the rows' losses, in fp32 or fp64. The result has their dtype."""
    dtype, weights = loss.dtype, None
    if weight is not None:
        # an fp64 weight may be out of fp32's range: it makes the computation fp64
        compute = compute_dtype(dtype, weight.dtype)
        weights = torch.where(keep, weight.to(compute), 0).expand(loss.shape)
        loss = loss.to(compute) * weights
    if keep is not None:
        keep = keep.expand(loss.shape)
        loss = torch.where(keep, loss, 0)
    return loss_reduction.reduce(name, loss, keep, weights, reduction, denominator, empty).to(dtype)


# The text that replaces {arguments} in each docstring of these losses.
ARGUMENTS = """\
        mask: bool tensor, broadcastable to the rows; True = keep. Masked-out rows do not exist: NaN, inf or garbage
            there changes neither the loss nor a gradient, and their own gradient is exactly 0.
        weight: floating tensor, broadcastable to the rows; 0 means the same as masked out. Differentiable.
        reduction: "mean" divides the sum by the count of kept rows (by the sum of weights, with weights), "sum", or
            "none".
        denominator: number or 0-dim tensor that the mean divides by instead.
        empty: value of a mean or sum with nothing kept: "zero" (attached to the graph, zero gradients), "nan", or
            "raise" (ValueError; the host waits for the device, so the call cannot be compiled whole). With
            `denominator`, nothing is kept if that is 0; a call that keeps nothing of its own has the mean 0.

    Returns:
        fp32 for fp16, bf16 and fp32 operands, fp64 if one is fp64: 0-dim, or of the rows' shape for "none".
"""
# For functions whose `weight` holds class weights: their docstrings describe it.
ARGUMENTS_BY_CLASS = ARGUMENTS.replace(
    "        weight: floating tensor, broadcastable to the rows; 0 means the same as masked out. Differentiable.\n", ""
).replace("(by the sum of weights, with weights)", "(not by weights: as torch's)")
