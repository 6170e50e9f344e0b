"""The pointwise losses: what they have in common.

A loss of the family is `PointwiseLoss(name, module, value, *parameters)`, where `value(x, y, *parameters)` is the loss
of one element in torch, and `module` the name of its class in safeops.nn.
"""

import math
import warnings
from typing import NamedTuple

import torch
from torch.compiler import is_compiling

from safeops import _check
from safeops._definitions import accumulate, kept
from safeops._dtypes import LARGEST, compute_dtype, readable
from safeops._library import declare_raw, like
from safeops._op import Op
from safeops._symbolic import scalar, symbolic

REDUCTION = {"none": 0, "mean": 1, "sum": 2}

# ---- definition


def define(value, input, target, mask, weight, denominator, reduction, *options):
    """(loss, denominator): mean = sum(weight * value) / denominator over the kept elements."""
    *parameters, empty_nan, divisor = options
    dtype = compute_dtype(input.dtype, target.dtype)
    # a weight too small or too large for fp32 is read as it is
    compute = dtype if weight is None else compute_dtype(dtype, weight.dtype)
    x, y = torch.broadcast_tensors(input.to(compute), target.to(compute))
    keep = kept(mask, weight)
    if keep is not None:
        x, y = torch.where(keep, x, 0), torch.where(keep, y, 0)  # select before arithmetic
    loss = value(x, y, *parameters)
    if weight is not None:
        weights = torch.where(keep, weight.to(compute), 0)
        loss = loss * weights
    if keep is not None:
        loss = torch.where(keep, loss, 0)
    if reduction == 0:
        return loss.to(dtype), loss.new_empty(0)
    total = accumulate(loss, ())
    count = torch.full((), loss.numel(), device=loss.device) if keep is None else keep.expand(loss.shape).sum()
    if denominator is None:
        denominator = count if weight is None else accumulate(weights.expand(loss.shape), ())
        if divisor is not None:
            denominator = torch.full((), divisor, dtype=compute, device=loss.device)
    if reduction == 1:
        total = total / torch.where(count > 0, denominator, 1).to(total.dtype)
    return torch.where(count > 0, total, float("nan") if empty_nan else 0.0).to(dtype), denominator


# ---- op

_SCHEMA = (
    "(Tensor input, Tensor target, Tensor? mask=None, Tensor? weight=None, Tensor? denominator=None, "
    "int reduction=1{parameters}, bool empty_nan=False, float? divisor=None) -> (Tensor, Tensor)"
)
_SCHEMA_BACKWARD = (
    "(Tensor grad, Tensor? denominator, Tensor input, Tensor target, Tensor? mask=None, Tensor? weight=None"
    "{parameters}, bool need_input=True, bool need_target=False, ScalarType? input_dtype=None, "
    "ScalarType? target_dtype=None) -> (Tensor, Tensor)"
)


def _fake(input, target, mask, weight, denominator, reduction, *options):
    dtype = compute_dtype(input.dtype, target.dtype)
    if reduction:
        return input.new_empty((), dtype=dtype), input.new_empty((), dtype=torch.float64)
    shape = torch.broadcast_shapes(input.shape, target.shape)
    return like(input, shape, dtype), input.new_empty(0, dtype=torch.float64)


def _fake_backward(grad, denominator, input, target, mask, weight, *options):
    shape = torch.broadcast_shapes(input.shape, target.shape)
    need_input, need_target, input_dtype, target_dtype = options[-4:]
    input_dtype, target_dtype = input_dtype or input.dtype, target_dtype or target.dtype
    return (
        like(input, shape, input_dtype) if need_input else input.new_empty(0, dtype=input_dtype),
        like(target, shape, target_dtype) if need_target else input.new_empty(0, dtype=target_dtype),
    )


# ---- record


class Parameter(NamedTuple):
    """A number that the user gives: minimum <= x, or above < x; x <= maximum."""

    name: str
    default: float
    minimum: float | None = None
    above: float | None = None
    maximum: float = LARGEST

    def check(self, function, x):
        _check.number(function, self.name, x, minimum=self.minimum, above=self.above, maximum=self.maximum)

    def range(self):
        """Its ends, both included."""
        return self.minimum if self.above is None else math.nextafter(self.above, math.inf), self.maximum


class PointwiseLoss(Op):
    """A pointwise loss."""

    differentiable = (0, 1)
    broadcasts = True
    constant = slice(3, 5)  # weight, denominator

    def __init__(self, name, module, value, *parameters):
        def definition(*operands):
            return define(value, *operands)[0]

        def composite(*operands):
            loss, denominator = define(value, *operands)
            return loss, denominator.to(torch.float64)

        self.module, self.parameters, self.ranges = module, parameters, [(*x.range(), x.default) for x in parameters]
        self.schema = "".join(f", float {parameter.name}={parameter.default}" for parameter in parameters)
        schema, schema_backward = (x.format(parameters=self.schema) for x in (_SCHEMA, _SCHEMA_BACKWARD))
        forward = declare_raw(f"_{name}", schema, fake=_fake, composite=composite, triton=f"losses.{name}.{name}")
        backward = declare_raw(
            f"_{name}_backward", schema_backward, fake=_fake_backward, triton=f"losses.{name}.{name}_backward"
        )
        super().__init__(name, forward, backward, definition)

    def prepare(self, input, target, mask, weight, reduction, denominator, empty, *parameters):
        code = REDUCTION[reduction]
        short = code == 1  # whether trailing defaults are all that follows the mask
        for x, (low, high, default) in zip(parameters, self.ranges):
            if x.__class__ is not float or not low <= x <= high:
                self.validate_options(self.name, reduction, empty, *parameters)
            short = short and x.__class__ is float and x == default
        if input.shape != target.shape or empty == "raise":
            self._attend(input, target, mask, weight, reduction, denominator, empty)
        if weight is None and denominator is None and empty == "zero":  # most calls, and the short way
            return True, (input, target, mask) if short else (input, target, mask, None, None, code, *parameters)
        tensor, divisor = None, denominator
        if isinstance(denominator, torch.Tensor):
            tensor, divisor = readable(denominator), None
        elif symbolic(denominator):
            tensor, divisor = scalar(denominator, torch.float64, input.device), None
        takes = empty in _check.EMPTY and (denominator is None or code == 1 and not isinstance(divisor, bool))
        takes = takes and (tensor is None or tensor.dim() == 0 and tensor.dtype != torch.bool)
        return takes, (input, target, mask, weight, tensor, code, *parameters, empty == "nan", divisor)

    def _attend(self, input, target, mask, weight, reduction, denominator, empty):
        """What a caller must hear before any work: shapes that differ, nothing kept."""
        self.validate(input, target, mask, weight, reduction, denominator, empty)
        if input.shape != target.shape and not is_compiling():  # a warning cannot be traced
            warnings.warn(
                f"{self.name}: target {tuple(target.shape)} is broadcast with input {tuple(input.shape)}; "
                "make the shapes equal (expand copies nothing) if that is meant",
                stacklevel=5,
            )
        if empty == "raise" and reduction != "none":
            # One synchronisation: the documented price of empty="raise".
            keep = kept(mask, weight)
            size = torch.broadcast_shapes(input.shape, target.shape)
            if size.numel() == 0 or (keep is not None and not bool(_check.whole(keep.any()))):
                raise ValueError(
                    f'{self.name}: empty="raise": nothing is kept '
                    f"(input {tuple(input.shape)}, target {tuple(target.shape)})"
                )

    def validate(self, input, target, mask, weight, reduction, denominator, empty, *parameters):
        _check.floating(self.name, "input", input)
        _check.floating(self.name, "target", target)
        shape = _check.broadcast(self.name, input=input, target=target)
        _check.mask(self.name, "mask", mask, "input and target", shape)
        _check.weight(self.name, weight, "input and target", shape)
        self.validate_options(self.name, reduction, empty, *parameters)
        if denominator is not None:
            if reduction != "mean":
                raise ValueError(f'{self.name}: denominator needs reduction="mean", got {reduction!r}')
            if not isinstance(denominator, torch.Tensor):
                _check.number(self.name, "denominator", denominator)
            else:
                _check.real_scalar(self.name, "denominator", denominator)
                if denominator.dtype == torch.bool:
                    raise TypeError(f"{self.name}: denominator must be a real number, got {denominator.dtype}")
        _check.same_device(self.name, "input", input, target=target, mask=mask, weight=weight, denominator=denominator)

    def validate_options(self, name, reduction, empty, *parameters):
        """Those that are no tensors: what a module's constructor takes."""
        _check.choice(name, "reduction", reduction, tuple(REDUCTION))
        _check.choice(name, "empty", empty, _check.EMPTY)
        for x, parameter in zip(parameters, self.parameters):
            parameter.check(name, x)

    def gradients(self, grad, needs, operands, results):
        input, target, mask, weight, _, reduction, *parameters, _, _ = operands
        dtypes = None, None
        if input.shape != target.shape:
            # A broadcast operand's gradient is summed: nothing is rounded to half before that sum.
            shape = torch.broadcast_shapes(input.shape, target.shape)
            wide = compute_dtype(input.dtype, target.dtype)
            dtypes = (None if x.shape == shape else wide for x in (input, target))
        denominator = results[0] if reduction == 1 else None
        return self.backward(grad, denominator, input, target, mask, weight, *parameters, *needs[:2], *dtypes)

    def public(self):
        return super().public(
            "(Tensor input, Tensor target, *, Tensor? mask=None, Tensor? weight=None, "
            f'str reduction="mean", Tensor? denominator=None, str empty="zero"{self.schema}) -> Tensor',
            arguments=ARGUMENTS,
        )


# What the docstring of every loss says of its arguments, in place of {arguments}.
ARGUMENTS = """\
        input: floating tensor, the prediction.
        target: floating tensor of `input`'s shape; one that only broadcasts is taken, with a warning. Differentiable.
        mask: bool tensor, broadcastable to the shape of the loss; True = keep. Masked-out elements do not exist: NaN,
            inf or garbage there changes neither the loss nor a gradient, and their own gradient is exactly 0.
        weight: floating tensor, broadcastable to the shape of the loss; 0 means the same as masked out. Differentiable.
        reduction: "mean" divides the sum by the count of kept elements (by the sum of weights, with weights), "sum",
            or "none". Weights that cancel leave a mean of inf or NaN: nothing is hidden.
        denominator: number or 0-dim tensor that the mean divides by instead. Gradient accumulation is exact with the
            count (with weights: their sum) over all micro-batches; DDP, which averages gradients over the ranks, with
            that over all ranks divided by their number.
        empty: value of a mean or sum with nothing kept: "zero" (attached to the graph, zero gradients), "nan", or
            "raise" (ValueError before any work; synchronises to know, and cannot be compiled whole).
        {own}

    Returns:
        fp32 for fp16, bf16 and fp32 operands, fp64 if one is fp64: 0-dim, or of the operands' shape for "none".

    Raises:
        TypeError: an operand is not floating, `mask` is not bool, an option is of another type.
        ValueError: shapes do not broadcast, devices differ, unknown `reduction` or `empty`, a number out of range.
"""
