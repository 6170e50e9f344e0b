"""Shared by the pointwise losses.

A loss of the family is `PointwiseLoss(name, module, value, *parameters)`: `value(x, y, *parameters)` is the loss of one
element in torch ops, `module` the name of its class in safeops.nn. A loss of three tensors is a `TernaryLoss`.
"""

import inspect
import math
import warnings
from typing import NamedTuple

import torch
from torch.compiler import is_compiling

from safeops.core import check, sums
from safeops.core.definitions import accumulate, kept
from safeops.core.domain import any_number
from safeops.core.dtypes import LARGEST, compute_dtype
from safeops.core.foreign import sign
from safeops.core.library import declare_raw, like
from safeops.core.loss_reduction import (
    REDUCTION,
    divide,
    raise_if_nothing_kept,
    split,
    validate_denominator,
    validate_options,
)
from safeops.core.op import Op
from safeops.core.sums import sum_to

# ---- definition


def define(value, tensors, mask, weight, denominator, reduction, *options):
    """Returns (loss, denominator). reduction: 0: loss is elementwise; 1: the mean, sum(weight * value) / denominator
    over the kept elements; 2: the sum. tensors: the operands of `value`; the third may be None."""
    *parameters, empty_nan, divisor = options
    dtype = _dtype(tensors)
    # an fp64 weight may be out of fp32's range: it makes the computation fp64
    compute = dtype if weight is None else compute_dtype(dtype, weight.dtype)
    operands = torch.broadcast_tensors(*(x.to(compute) for x in tensors if x is not None))
    keep = kept(mask, weight)
    if keep is not None:
        operands = [torch.where(keep, x, 0) for x in operands]  # select before arithmetic: NaN * 0 is NaN
    operands = iter(operands)
    loss = value(*(x if x is None else next(operands) for x in tensors), *parameters)
    if weight is not None:
        weights = torch.where(keep, weight.to(compute), 0)
        loss = loss * weights
    if keep is not None:
        loss = torch.where(keep, loss, 0)
    if reduction == 0:
        return loss.to(dtype), loss.new_empty(0)
    total = accumulate(loss, ())
    count = torch.full((), loss.numel(), device=loss.device) if keep is None else keep.expand(loss.shape).sum()
    has_denominator = denominator is not None or divisor is not None
    if denominator is None:
        denominator = count if weight is None else accumulate(weights.expand(loss.shape), ())
        if divisor is not None:
            denominator = torch.full((), divisor, dtype=torch.float64, device=loss.device)
    if reduction == 1:
        value = divide(total, count, denominator.to(total.dtype), has_denominator, empty_nan)
        used = torch.where(denominator == 0, float("inf"), denominator) if has_denominator else denominator
        return value.to(dtype), used
    return torch.where(count > 0, total, float("nan") if empty_nan else 0.0).to(dtype), denominator


def _dtype(tensors):
    return compute_dtype(*(x.dtype for x in tensors if x is not None))


def _shape(tensors):
    return torch.broadcast_shapes(*(x.shape for x in tensors if x is not None))


# ---- op

# {tensors} is replaced by the tensors' schema, with the names that the public function gives them.
_SCHEMA = (
    "({tensors}, Tensor? mask=None, Tensor? weight=None, Tensor? denominator=None, "
    "int reduction=1{parameters}, bool empty_nan=False, float? divisor=None) -> (Tensor loss, Tensor denominator)"
)
_SCHEMA_BACKWARD = (
    "(Tensor grad, Tensor? denominator, {tensors}, Tensor? mask=None, Tensor? weight=None"
    "{parameters}, {needs}, {dtypes}) -> ({results})"
)


def _fake(count):
    def fake(*operands):
        tensors, reduction = operands[:count], operands[count + 3]
        input, dtype = tensors[0], _dtype(tensors)
        if reduction:
            return input.new_empty((), dtype=dtype), input.new_empty((), dtype=torch.float64)
        return like(input, _shape(tensors), dtype), input.new_empty(0, dtype=torch.float64)

    return fake


def _fake_backward(count):
    def fake(grad, denominator, *operands):
        tensors, needs, dtypes = operands[:count], operands[-2 * count : -count], operands[-count:]
        shape, input = _shape(tensors), tensors[0]
        # (for a tensor that is None, the kernel returns an fp32 tensor without elements)
        types = [dtype or (torch.float32 if x is None else x.dtype) for x, dtype in zip(tensors, dtypes)]
        return tuple(
            like(x, shape, dtype) if need else input.new_empty(0, dtype=dtype)
            for x, need, dtype in zip(tensors, needs, types)
        )

    return fake


# ---- record


class Parameter(NamedTuple):
    """A number that the user passes: minimum <= x or above < x, and x <= maximum. sample: the number in test calls."""

    name: str
    default: float
    minimum: float | None = None
    above: float | None = None
    maximum: float = LARGEST
    sample: float | None = None

    kind = float

    def check(self, function, x):
        check.number(function, self.name, x, minimum=self.minimum, above=self.above, maximum=self.maximum)

    def range(self):
        """(the least number, the largest number) allowed, both included."""
        return self.minimum if self.above is None else math.nextafter(self.above, math.inf), self.maximum


class Flag(NamedTuple):
    """A bool that the user passes, to choose between two formulas. sample: the bool in test calls."""

    name: str
    default: bool
    sample: bool | None = None

    kind = bool

    def check(self, function, x):
        check.boolean_flag(function, self.name, x)

    def range(self):
        return False, True


# The text that replaces {arguments} in each docstring of the family.
OPERANDS = """\
        input: floating tensor, the prediction.
        target: floating tensor of `input`'s shape. One that only broadcasts is accepted with a warning (without one
            where the call is compiled). Differentiable.
"""
ARGUMENTS = """\
        mask: bool tensor, broadcastable to the shape of the loss; True = keep. Masked-out elements do not exist: NaN,
            inf or garbage there changes neither the loss nor a gradient, and their own gradient is exactly 0.
        weight: floating tensor, broadcastable to the shape of the loss; 0 means the same as masked out. Differentiable.
        reduction: "mean" divides the sum by the count of kept elements (by the sum of weights, with weights), "sum",
            or "none". Weights that cancel leave a mean of inf or NaN: nothing is hidden.
        denominator: number or 0-dim tensor that the mean divides by instead. For exact gradient accumulation pass the
            count (with weights: their sum) over all micro-batches. DDP averages gradients over the ranks: there pass
            that over all ranks divided by their number, `safeops.distributed.global_count`.
        empty: value of a mean or sum with nothing kept: "zero" (attached to the graph, zero gradients), "nan", or
            "raise" (ValueError before any work; the host waits for the device, so the call cannot be compiled whole).
            With `denominator`, nothing is kept if that is 0; a call that keeps nothing of its own has the mean 0.

    Returns:
        fp32 for fp16, bf16 and fp32 operands, fp64 if one is fp64: 0-dim, or of the operands' shape for "none".

    Raises:
        TypeError: an operand is not floating, `mask` is not bool, an option is of another type.
        ValueError: shapes do not broadcast, devices differ, unknown `reduction` or `empty`, a number out of range.
"""

# For losses whose weighted mean divides by the count of elements, as torch's does.
ARGUMENTS_BY_COUNT = ARGUMENTS.replace(
    "the count of kept elements (by the sum of weights, with weights)",
    "the count of elements the mask keeps, not by weights, as torch's",
)


class PointwiseLoss(Op):
    """The record of a pointwise loss."""

    sum_to = staticmethod(sum_to)
    shards = "loss"
    names = "input", "target"  # the names of the loss's tensors
    optional = False  # True: the last tensor may be None
    by_count = False  # True: a weighted mean divides by the count, not by the weights, as in torch
    reductions = tuple(REDUCTION)
    kernel = None  # the raw op's name, if it differs from the loss's
    warns = True  # True: a call warns if the second tensor broadcasts

    def __init__(self, name, module, value, *parameters, **fields):
        """fields: values of the class attributes above for this loss, such as by_count=True."""
        vars(self).update(fields)
        count = self.count = len(self.names)
        self.domain = self.domain or (any_number,) * count
        self.differentiable = self.names
        self.constant = "weight", "denominator"

        def composite(*operands):
            loss, denominator = define(value, operands[:count], *operands[count:])
            return loss, denominator.to(torch.float64)

        def definition(*operands):
            return define(value, operands[:count], *operands[count:])[0]

        self.module, self.parameters = module, parameters
        self.ranges = [(x.kind, *x.range(), x.default) for x in parameters]
        self.sample = {x.name: x.default if x.sample is None else x.sample for x in parameters}
        self.schema = "".join(f", {x.kind.__name__} {x.name}={x.default}" for x in parameters)
        optional = ["?" if self.optional and x == self.names[-1] else "" for x in self.names]
        self.tensors_schema = ", ".join(f"Tensor{mark} {x}" for x, mark in zip(self.names, optional))
        # A third tensor is optional in every raw op, so that all kernels of three tensors have one signature.
        raw = ", ".join(f"Tensor{'?' * (i > 1)} {x}" for i, x in enumerate(self.names))
        pieces = {
            "tensors": raw,
            "parameters": self.schema,
            "needs": ", ".join(f"bool need_{x}={x == self.names[0]}" for x in self.names),
            "dtypes": ", ".join(f"ScalarType? {x}_dtype=None" for x in self.names),
            "results": ", ".join(["Tensor"] * count),
        }
        kernel = self.kernel = self.kernel or name
        triton = f"losses.{kernel}.{kernel}"
        forward = declare_raw(
            f"_{kernel}", _SCHEMA.format(**pieces), fake=_fake(count), composite=composite, triton=triton
        )
        backward = declare_raw(
            f"_{kernel}_backward",
            _SCHEMA_BACKWARD.format(**pieces),
            fake=_fake_backward(count),
            triton=f"{triton}_backward",
        )
        super().__init__(name, forward, backward, definition)

    def prepare(self, input, target, mask, weight, reduction, denominator, empty, *parameters):
        code = REDUCTION[reduction]
        short = code == 1  # True if all operands after the mask have their defaults
        for x, (kind, low, high, default) in zip(parameters, self.ranges):
            if x.__class__ is not kind or not low <= x <= high:
                self.validate_options(self.name, reduction, empty, *parameters)
            short = short and x.__class__ is kind and x == default
        if input.shape != target.shape or empty == "raise":
            self.validate_shapes((input, target), mask, weight, reduction, denominator, empty)
        if self.by_count and weight is not None:
            denominator = self.with_count((input, target), mask, reduction, denominator)
        if weight is None and denominator is None and empty == "zero":  # most calls
            return True, (input, target, mask) if short else (input, target, mask, None, None, code, *parameters)
        tensor, divisor = split(denominator, input)
        takes = empty in check.EMPTY and (denominator is None or code == 1 and not isinstance(divisor, bool))
        takes = takes and (divisor is None or divisor >= 0)
        takes = takes and (tensor is None or tensor.dim() == 0 and tensor.dtype != torch.bool)
        return takes, (input, target, mask, weight, tensor, code, *parameters, empty == "nan", divisor)

    def with_count(self, tensors, mask, reduction, denominator):
        """The denominator of a weighted mean: the count of elements that the mask keeps. With a mask this is one more
        launch, because the loss's kernels count elements with a weight other than 0."""
        if reduction != "mean" or denominator is not None:
            return denominator
        shape = _shape(tensors)
        if mask is None:
            return shape.numel()
        check.mask(self.name, mask, " and ".join(self.names[:2]), tensors[0], shape)
        return sums.count(mask.expand(shape))

    def validate_shapes(self, tensors, mask, weight, reduction, denominator, empty):
        """Before any work: raise for bad arguments, warn of a broadcast, raise if nothing is kept (empty="raise")."""
        self.validate(*tensors, mask, weight, reduction, denominator, empty)
        (first, x), (second, y), *_ = zip(self.names, tensors)
        if self.warns and x.shape != y.shape and not is_compiling():  # a warning cannot be traced
            remedy = check.reshaped(second, y, x.shape) if x.numel() == y.numel() else ""
            warnings.warn(
                f"{self.name}: {second} {check.shown(y)} is broadcast with {first} {check.shown(x)}; "
                "make the shapes equal (expand copies nothing) if that is meant"
                f"{remedy and f', else say {remedy}'}",
                stacklevel=5,
            )
        if empty == "raise" and reduction != "none":
            shapes = ", ".join(f"{name} {check.shown(x)}" for name, x in zip(self.names, tensors) if x is not None)
            keep = kept(mask, None if self.by_count and reduction == "mean" else weight)
            raise_if_nothing_kept(self.name, keep, _shape(tensors), shapes, denominator)

    def validate(self, *arguments):
        tensors, (mask, weight, reduction, denominator, empty, *parameters) = _parted(arguments, self.count)
        named = dict(zip(self.names, tensors))
        if self.optional and named[self.names[-1]] is None:
            del named[self.names[-1]]
        for name, x in named.items():
            check.floating(self.name, name, x, numbers=True)
        shape = check.broadcast(self.name, **named)
        operands = " and ".join(self.names[:2])
        check.mask(self.name, mask, operands, tensors[0], shape)
        check.weight(self.name, weight, operands, tensors[0], shape)
        self.validate_options(self.name, reduction, empty, *parameters)
        validate_denominator(self.name, reduction, denominator)
        first, *others = self.names
        others = {name: named.get(name) for name in others}
        check.same_device(self.name, first, named[first], **others, mask=mask, weight=weight, denominator=denominator)

    def validate_operands(self, *operands):
        tensors, (mask, weight, denominator, code, *parameters, _, divisor) = _parted(operands, self.count)
        denominator = divisor if denominator is None else denominator
        self.validate(*tensors, mask, weight, tuple(REDUCTION)[code], denominator, "zero", *parameters)

    def validate_options(self, name, reduction, empty, *parameters):
        """Check the options, which a module's constructor takes."""
        validate_options(name, reduction, empty, self.reductions)
        for x, parameter in zip(parameters, self.parameters):
            parameter.check(name, x)

    def gradients(self, grad, needs, operands, results):
        tensors, parameters = operands[: self.count], operands[self.count + 4 : -2]
        dtypes = (None,) * self.count
        if any(x is not None and x.shape != tensors[0].shape for x in tensors[1:]):
            # A broadcast operand's gradient is summed to its shape later: it stays wide, and is rounded after the sum.
            shape, wide = _shape(tensors), _dtype(tensors)
            dtypes = (None if x is None or x.shape == shape else wide for x in tensors)
        denominator, needs = results.denominator if operands.reduction == 1 else None, needs[: self.count]
        kept = operands.mask, operands.weight
        return self.backward(grad, denominator, *tensors, *kept, *parameters, *needs, *dtypes)

    def public(self, operands=OPERANDS, *overloads):
        """operands: docstring text on the tensors; "" if the function documents them. overloads: further schemas."""

        def declare(function):
            text = operands + (ARGUMENTS_BY_COUNT if self.by_count else ARGUMENTS)
            if "batchmean" in self.reductions:
                batchmean = '"batchmean", the sum divided by the size of the first dim, or "none".\n            '
                text = text.replace('or "none". ', batchmean)
            schemas = self._public_schema(function), *overloads
            return super(PointwiseLoss, self).public(*schemas, arguments=text)(function)

        return declare

    def _public_schema(self, function):
        """The public op's schema, from the signature of its function."""
        kinds = {"reduction": "str", "empty": "str"} | {x.name: x.kind.__name__ for x in self.parameters}
        arguments = []
        for name, x in inspect.signature(sign(function)).parameters.items():
            if x.kind is x.KEYWORD_ONLY and "*" not in arguments:
                arguments.append("*")
            kind = kinds.get(name) or ("Tensor" if x.default is x.empty else "Tensor?")
            default = f'"{x.default}"' if kind == "str" else x.default
            arguments.append(f"{kind} {name}" if x.default is x.empty else f"{kind} {name}={default}")
        return f"({', '.join(arguments)}) -> Tensor"


def _parted(x, count):
    return x[:count], x[count:]


def by_batch(name, input, reduction, denominator):
    """Returns (reduction, denominator). "batchmean" becomes a mean that divides by the size of the first dim."""
    if not isinstance(reduction, str) or reduction != "batchmean" or not isinstance(input, torch.Tensor):
        return reduction, denominator
    if denominator is not None:
        raise ValueError(f'{name}: denominator needs reduction="mean", got "batchmean"')
    return "mean", input.shape[0] if input.dim() else 1


class TernaryLoss(PointwiseLoss):
    """The record of a loss of three tensors. If `optional`, the third may be None."""

    def prepare(self, input, target, third, mask, weight, reduction, denominator, empty, *parameters):
        if input.shape != target.shape or empty == "raise" or (third is not None and third.shape != input.shape):
            self.validate_shapes((input, target, third), mask, weight, reduction, denominator, empty)
            empty = "zero" if empty == "raise" else empty
        if self.by_count and weight is not None:
            tensors = (input, target) if third is None else (input, target, third)
            denominator = self.with_count(tensors, mask, reduction, denominator)
        # (input in place of target: super().prepare would only compare their shapes, which is done)
        takes, operands = super().prepare(input, input, mask, weight, reduction, denominator, empty, *parameters)
        return takes, (input, target, third, *operands[2:])
