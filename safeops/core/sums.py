"""Masked sum, mean and count: definitions, raw ops and records (`Op` instances). Other ops, losses and gradients call
them in place of aten's sum: on the CPU its result depends on the number of threads, and its fp32 error grows like n for
n terms. The public functions are in safeops/ops/reductions.
"""

import torch

from safeops.core import check
from safeops.core.definitions import accumulate, count_kept, kept, sum_over
from safeops.core.dtypes import FLOATING, compute_dtype
from safeops.core.library import declare_raw
from safeops.core.op import Op
from safeops.core.reduction import Reduction, as_dims, output_shape, validate

# ---- definition


def define(mean, input, mask, weight, dim, keepdim, empty_nan, dtype):
    """The masked sum (or mean) over the dims `dim`. Returns (value, denominator: count or sum of weights kept)."""
    # an fp64 weight may be out of fp32's range: it makes the computation fp64
    compute = compute_dtype(input.dtype, dtype, *(() if weight is None else (weight.dtype,)))
    keep = kept(mask, weight)
    terms = input.to(compute)
    if keep is not None:
        terms = torch.where(keep, terms, 0)  # select before arithmetic: NaN * 0 is NaN
    if weight is not None:
        weights = torch.where(keep, weight.to(compute), 0)
        terms = terms * weights
    total = accumulate(terms, dim, keepdim)
    count = count_kept(keep, input, dim, keepdim)
    denominator = count if weight is None else sum_over(weights, input, dim, keepdim)
    value = total
    if mean:
        value = total / torch.where(count > 0, denominator, 1).to(total.dtype)
    if keep is not None or empty_nan or mean:
        value = torch.where(count > 0, value, float("nan") if empty_nan else 0.0)
    return value.to(dtype), denominator


def define_count(input, mask=None, weight=None, dim=None, keepdim=False):
    dims = check.dims("masked_count", dim, input.dim())
    if mask is None and input.dtype == torch.bool:
        mask = input
    return count_kept(kept(mask, weight), input, dims, keepdim)


COUNT_DTYPES = (torch.int64, torch.int32, *FLOATING)

# ---- op

_SCHEMA = (
    "(Tensor input, Tensor? mask=None, Tensor? weight=None, int[]? dim=None, bool keepdim=False, bool empty_nan=False, "
    "ScalarType? dtype=None) -> (Tensor value, Tensor denominator)"
)


def _fake(input, mask=None, weight=None, dim=None, keepdim=False, empty_nan=False, dtype=None):
    shape = output_shape(input.shape, dim, keepdim)
    dtype = dtype or compute_dtype(input.dtype)
    return input.new_empty(shape, dtype=dtype), input.new_empty(shape, dtype=torch.float64)


def _fake_backward(grad, size, dtype, denominator=None, mask=None, weight=None, dim=None, keepdim=False):
    return grad.new_empty(size, dtype=dtype)


# Backward of the sum and of the mean. `denominator`, the forward's second result, is given for the mean only.
_masked_sum_backward = declare_raw(
    "_masked_sum_backward",
    "(Tensor grad, SymInt[] size, ScalarType dtype, Tensor? denominator=None, Tensor? mask=None, Tensor? weight=None, "
    "int[]? dim=None, bool keepdim=False) -> Tensor",
    fake=_fake_backward,
    triton="reductions.masked_sum.masked_sum_backward",
)


def _fake_count(input, mask=None, weight=None, dim=None, keepdim=False):
    return input.new_empty(output_shape(input.shape, dim, keepdim), dtype=torch.int64)


_masked_count = declare_raw(
    "_masked_count",
    "(Tensor input, Tensor? mask=None, Tensor? weight=None, int[]? dim=None, bool keepdim=False) -> Tensor",
    fake=_fake_count,
    composite=define_count,
    triton="reductions.masked_count.masked_count",
)


# ---- records


class MaskedReduction(Reduction):
    """The record of masked_sum (mean=False) or masked_mean (mean=True: the total is divided by the denominator)."""

    linear = 1

    def __init__(self, name, mean):
        def composite(input, mask=None, weight=None, dim=None, keepdim=False, empty_nan=False, dtype=None):
            dims = check.dims(name, dim, input.dim())
            value, denominator = define(
                mean, input, mask, weight, dims, keepdim, empty_nan, dtype or compute_dtype(input.dtype)
            )
            return value, denominator.to(torch.float64)

        def definition(*operands):
            return composite(*operands)[0]

        self.mean, self.saved = mean, ("denominator",) if mean else ()
        self.shards = "mean" if mean else "sum"
        forward = declare_raw(
            f"_{name}", _SCHEMA, fake=_fake, composite=composite, triton=f"reductions.masked_sum.{name}"
        )
        super().__init__(name, forward, _masked_sum_backward, definition)

    def gradients(self, grad, needs, operands, results):
        x, denominator = operands.input, results.denominator if self.mean else None
        options = operands.mask, operands.weight, operands.dim, operands.keepdim
        return (self.backward(grad, x.shape, x.dtype, denominator, *options),)


class MaskedCount(Op):
    differentiable, shards = (), "count"

    def prepare(self, input, mask, dim, keepdim, weight, dtype, empty):
        if dtype is not None or empty != "zero" or not isinstance(keepdim, bool):
            self.validate(input, mask, dim, keepdim, weight, dtype, empty)
        boolean = input.dtype == torch.bool
        takes = boolean or input.dtype in FLOATING
        if mask is None and not takes:
            self.validate(input, mask, dim, keepdim, weight, dtype, empty)
        if boolean and mask is input:
            mask = None
        elif boolean and mask is not None:
            self.validate(input, mask, dim, keepdim, weight, dtype, empty)  # (mask must not enlarge input)
            mask = input & mask
        return takes, (input, mask, weight, as_dims("masked_count", dim), keepdim)

    def validate(self, input, mask, dim, keepdim, weight, dtype, empty):
        check.tensor("masked_count", "input", input)
        validate("masked_count", input, mask, weight, dim, keepdim)
        if dtype is not None and dtype not in COUNT_DTYPES:
            raise TypeError(f"masked_count: dtype must be int64, int32 or a floating point dtype, got {dtype}")
        check.choice("masked_count", "empty", empty, check.EMPTY)
        if empty == "nan" and dtype not in FLOATING:
            raise ValueError(f'masked_count: empty="nan" needs a floating point dtype, got {dtype or torch.int64}')

    def validate_operands(self, input, mask, weight, dim, keepdim):
        self.validate(input, mask, dim, keepdim, weight, None, "zero")


masked_sum = MaskedReduction("masked_sum", mean=False)
masked_mean = MaskedReduction("masked_mean", mean=True)
masked_count = MaskedCount("masked_count", _masked_count, definition=define_count)
ALL = masked_sum, masked_mean, masked_count

# ---- functions through which other modules call these ops


def total(x, mask=None, dim=None, *, keepdim=False, weight=None, dtype=None, empty="zero"):
    """The masked sum."""
    return masked_sum.call(x, mask, dim, keepdim, weight, dtype, empty)


def mean(x, mask=None, dim=None, *, keepdim=False, weight=None, dtype=None, empty="zero"):
    """The masked mean."""
    return masked_mean.call(x, mask, dim, keepdim, weight, dtype, empty)


def count(x, mask=None, dim=None, *, keepdim=False, weight=None):
    """The number of kept elements, int64. For a bool x: the number of kept elements that are True."""
    return masked_count.call(x, mask, dim, keepdim, weight, None, "zero")


def sum_to(grad, shape, dtype):
    """Sum a gradient of the full broadcast shape to its operand's `shape`, and round it to `dtype` once, at the end."""
    if grad.is_complex():
        return torch.complex(*(sum_to(part, shape, part.dtype) for part in (grad.real, grad.imag)))
    lead = grad.dim() - len(shape)
    dims = [d for d in range(grad.dim()) if d < lead or shape[d - lead] != grad.shape[d]]
    return total(grad, dim=dims, keepdim=True, dtype=dtype).reshape(shape)
