"""The skeleton of the pointwise losses: one definition, one pair of raw ops, one Function, one call path.

A loss of the family is `PointwiseLoss(name, value)`, where `value(x, y, p0, p1)` is the loss of one element in torch.
"""

import warnings

import torch
from torch.compiler import is_compiling

from safeops import _check, _route
from safeops._dtypes import compute_dtype, readable
from safeops._library import Op, declare_public, declare_raw, document, like
from safeops._symbolic import scalar, symbolic
from safeops.ops._reduction import EMPTY, accumulate, kept
from safeops.ops.masked_sum import reduce_to

REDUCTION = {"none": 0, "mean": 1, "sum": 2}

# ---- definition


def define(
    value,
    input,
    target,
    mask=None,
    weight=None,
    reduction=1,
    p0=0.0,
    p1=0.0,
    empty_nan=False,
    denominator=None,
    divisor=None,
):
    """(loss, denominator): mean = sum(weight * value) / denominator over the kept elements."""
    dtype = compute_dtype(input.dtype, target.dtype)
    # a weight too small or too large for fp32 is read as it is
    compute = dtype if weight is None else compute_dtype(dtype, weight.dtype)
    x, y = torch.broadcast_tensors(input.to(compute), target.to(compute))
    keep = kept(mask, weight)
    if keep is not None:
        x, y = torch.where(keep, x, 0), torch.where(keep, y, 0)  # select before arithmetic
    loss = value(x, y, p0, p1)
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
    "(Tensor input, Tensor target, Tensor? mask=None, Tensor? weight=None, int reduction=1, float p0=0.0, "
    "float p1=0.0, bool empty_nan=False, Tensor? denominator=None, float? divisor=None) -> (Tensor, Tensor)"
)
_SCHEMA_BACKWARD = (
    "(Tensor grad, Tensor? denominator, Tensor input, Tensor target, Tensor? mask=None, Tensor? weight=None, "
    "float p0=0.0, float p1=0.0, bool need_input=True, bool need_target=False, ScalarType? input_dtype=None, "
    "ScalarType? target_dtype=None) -> (Tensor, Tensor)"
)


def _fake(input, target, mask=None, weight=None, reduction=1, *options):
    dtype = compute_dtype(input.dtype, target.dtype)
    if reduction:
        return input.new_empty((), dtype=dtype), input.new_empty((), dtype=torch.float64)
    shape = torch.broadcast_shapes(input.shape, target.shape)
    return like(input, shape, dtype), input.new_empty(0, dtype=torch.float64)


def _fake_backward(
    grad, denominator, input, target, mask=None, weight=None, p0=0.0, p1=0.0, need_input=True, need_target=False,
    input_dtype=None, target_dtype=None,
):  # fmt: skip
    shape = torch.broadcast_shapes(input.shape, target.shape)
    input_dtype, target_dtype = input_dtype or input.dtype, target_dtype or target.dtype
    return (
        like(input, shape, input_dtype) if need_input else input.new_empty(0, dtype=input_dtype),
        like(target, shape, target_dtype) if need_target else input.new_empty(0, dtype=target_dtype),
    )


# ---- autograd


def _function(raw, raw_backward, definition):
    class _Loss(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx, input, target, mask=None, weight=None, reduction=1, p0=0.0, p1=0.0, empty_nan=False, denominator=None,
            divisor=None,
        ):  # fmt: skip
            options = (reduction, p0, p1, empty_nan, denominator, divisor)
            loss, used = raw(input, target, mask, weight, *options)
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(input, target, mask, weight, denominator, used if reduction == 1 else None)
            ctx.options = (reduction, p0, p1, empty_nan, divisor)
            return loss

        @staticmethod
        def backward(ctx, grad):
            nothing = (None,) * (len(ctx.needs_input_grad) - 2)
            if grad is None:
                return None, None, *nothing
            input, target, mask, weight, denominator, used = ctx.saved_tensors
            reduction, p0, p1, empty_nan, divisor = ctx.options
            if _route.by_composite(grad):
                arguments = (input, target, mask, weight, reduction, p0, p1, empty_nan, denominator, divisor)
                return *_route.differentiable_backward(definition, arguments, grad)[:2], *nothing
            need_input, need_target = ctx.needs_input_grad[:2]
            input_dtype = target_dtype = None
            if input.shape != target.shape:
                # A broadcast operand's gradient is summed: nothing is rounded to half before that sum.
                shape = torch.broadcast_shapes(input.shape, target.shape)
                wide = compute_dtype(input.dtype, target.dtype)
                input_dtype = None if input.shape == shape else wide
                target_dtype = None if target.shape == shape else wide
            dx, dy = raw_backward(
                grad, used, input, target, mask, weight, p0, p1, need_input, need_target, input_dtype, target_dtype
            )
            return (
                reduce_to(dx, input.shape, input.dtype) if need_input else None,
                reduce_to(dy, target.shape, target.dtype) if need_target else None,
                *nothing,
            )

    return _Loss


# ---- call path


class PointwiseLoss:
    """A pointwise loss: declares the raw ops, and is the call path of the public function."""

    def __init__(self, name, value):
        self.name = name

        def definition(*arguments):
            return define(value, *arguments)[0]

        def composite(*arguments):
            loss, denominator = define(value, *arguments)
            return loss, denominator.to(torch.float64)

        raw = declare_raw(f"_{name}", _SCHEMA, fake=_fake, composite=composite, triton=f"{name}.{name}")
        backward = declare_raw(
            f"_{name}_backward", _SCHEMA_BACKWARD, fake=_fake_backward, triton=f"{name}.{name}_backward"
        )
        function = _function(raw, backward, definition)
        self.op = Op(name, (f"_{name}", f"_{name}_backward"), "Triton", raw, function, definition)

    def call(self, input, target, mask, weight, reduction, denominator, empty, p0=0.0, p1=0.0):
        try:
            code = REDUCTION[reduction]
            if weight is None and denominator is None and empty == "zero":  # most calls, and the short way
                # (Truth would bind the sizes that an exported p0 comes from.)
                options = (None, code, p0) if code != 1 or p0.__class__ is not float or p0 else ()
                if p1.__class__ is not float or p1:
                    options = (None, code, p0, p1)
                kernel = _route.kernel(self.op, input, target, mask)
            else:
                tensor, divisor = None, denominator
                if isinstance(denominator, torch.Tensor):
                    tensor, divisor = readable(denominator), None
                elif symbolic(denominator):
                    tensor, divisor = scalar(denominator, torch.float64, input.device), None
                options = (weight, code, p0, p1, empty == "nan", tensor, divisor)
                kernel = None
                special = denominator is not None and code != 1 or isinstance(divisor, bool)
                special = special or (tensor is not None and (tensor.dim() != 0 or tensor.dtype == torch.bool))
                if empty in EMPTY and not special and not _route.requires_grad(weight, tensor):
                    kernel = _route.kernel(self.op, input, target, mask, weight, tensor)
            if kernel is not None:
                if input.shape != target.shape or empty == "raise" or kernel is self.op.traced:
                    self._attend(input, target, mask, weight, reduction, denominator, empty)
                if (input.requires_grad or target.requires_grad) and torch.is_grad_enabled():
                    return kernel.apply(input, target, mask, *options)
                return kernel.raw(input, target, mask, *options)[0]
        except Exception:
            _check.explain(self._validate, input, target, mask, weight, reduction, denominator, empty)
            raise
        self._attend(input, target, mask, weight, reduction, denominator, empty)
        return self.op.composite(input, target, mask, *options)

    def _attend(self, input, target, mask, weight, reduction, denominator, empty):
        """What a caller must hear before any work: bad arguments, shapes that differ, nothing kept."""
        self._validate(input, target, mask, weight, reduction, denominator, empty)
        if input.shape != target.shape and not is_compiling():  # a warning cannot be traced
            warnings.warn(
                f"{self.name}: target {tuple(target.shape)} is broadcast with input {tuple(input.shape)}; "
                "make the shapes equal (expand copies nothing) if that is meant",
                stacklevel=4,
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

    def _validate(self, input, target, mask, weight, reduction, denominator, empty):
        _check.floating(self.name, "input", input)
        _check.floating(self.name, "target", target)
        shape = _check.broadcast(self.name, input=input, target=target)
        _check.mask(self.name, "mask", mask, "input and target", shape)
        _check.weight(self.name, weight, "input and target", shape)
        _check.choice(self.name, "reduction", reduction, tuple(REDUCTION))
        _check.choice(self.name, "empty", empty, EMPTY)
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

    Returns:
        fp32 for fp16, bf16 and fp32 operands, fp64 if one is fp64: 0-dim, or of the operands' shape for "none".
"""


def declare_loss(function, parameters=""):
    """Register a public loss as `safeops::<op>`; `parameters` is its own part of the schema."""
    document(function, ARGUMENTS)
    declare_public(
        function,
        f"{function.__name__}(Tensor input, Tensor target, *, Tensor? mask=None, Tensor? weight=None, "
        f'str reduction="mean", Tensor? denominator=None, str empty="zero"{parameters}) -> Tensor',
    )
