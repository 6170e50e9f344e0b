"""masked_softmax and masked_log_softmax."""

import torch

from safeops.testing import Bad, Sample
from tests.ops.bad_calls import KEEP, X, bad_dims, bad_inputs, bad_masks
from tests.ops.gpu import masked
from tests.ops.operands import data, mask, plain, plain_mask
from tests.ops.record import NO_SUM, NO_WEIGHT, NOT_SAFE, ONE_OPERAND, Record

# ---- definitions


def _softmax(input, mask, dim):
    """Returns (x - maximum, sum of exp(x - maximum), keep). The maximum is a constant: it cancels."""
    keep = torch.ones_like(input, dtype=torch.bool) if mask is None else mask.expand(input.shape)
    if input.dim() and input.shape[dim] == 0:
        return input, input.sum(dim, keepdim=True), keep
    top = torch.where(keep, input.detach(), -torch.inf).amax(dim, keepdim=True)
    centred = torch.where(keep, input - top, 0)
    total = torch.where(keep, centred.exp(), 0).sum(dim, keepdim=True)
    return centred, torch.where(keep.any(dim, keepdim=True), total, 1), keep


def masked_softmax(input, mask=None, dim=-1):
    centred, total, keep = _softmax(input, mask, dim)
    return torch.where(keep, torch.where(keep, centred, 0).exp() / total, 0)


def masked_log_softmax(input, mask=None, dim=-1):
    centred, total, keep = _softmax(input, mask, dim)
    return torch.where(keep, centred - total.log(), -torch.inf)


# ---- tolerances: the magnitudes ("sizes") of the terms that cancel in a row's values and gradients


def _size(t, dim):
    """Returns the largest finite magnitude of each row of t."""
    t = t.double().nan_to_num(0, 0, 0).abs()
    return t if not t.numel() else t.amax(dim, keepdim=True)


def softmax_terms(sample, outcome):
    """Sizes of the terms. exp(x - maximum) has a relative error of |x - maximum| roundings; the gradient
    y (g - sum g y) has the terms y g."""
    dim = sample.kwargs.get("dim", -1)
    y = outcome.values[0]
    value = (y - torch.xlogy(y, y)).nan_to_num(0, 0, 0)
    if not outcome.grads:
        return value, {}
    return value, {0: value * 2 * _size(outcome.upstream[0], dim)}


def log_softmax_terms(sample, outcome):
    """Sizes of the terms of the value x - maximum - log(sum) and of the gradient g - y sum g."""
    dim = sample.kwargs.get("dim", -1)
    value = 1 + _size(outcome.values[0], dim)
    if not outcome.grads:
        return value, {}
    length = sample.shape()[dim] if sample.shape() else 1
    return value, {0: (1 + outcome.values[0].exp() * length) * _size(outcome.upstream[0], dim)}


# ---- softmax


def _softmax_samples(log):
    # smooth: gradcheck may run. Masked log_softmax has -inf, with no finite differences: test_rows.py of the contract
    # checks it.
    smooth = not log
    yield Sample((data(3, 5), mask(3, 5)), mask=1, smooth=smooth, name="rows", slow=True)
    yield Sample((data(4, 5),), name="no mask", slow=log)
    yield Sample((data(4, 6), mask(4, 6, seed=1)), {"dim": 0}, mask=1, smooth=smooth, name="columns")
    yield Sample((data(3, 5), mask(5)), {"dim": 1}, mask=1, smooth=smooth, name="mask broadcast")
    four = data(2, 3, 4, 5)
    yield Sample((four, mask(2, 1, 4, 5)), {"dim": 1}, mask=1, smooth=smooth, name="channels of four")
    yield Sample((four, mask(3, 1, 1)), {"dim": -2}, mask=1, smooth=smooth, name="inner dim of four")
    empty = mask(3, 5)
    empty[1] = False
    yield Sample((data(3, 5), empty), mask=1, smooth=smooth, name="a row without anything")
    yield Sample((data(7) * 10, mask(7)), {"dim": 0}, mask=1, smooth=smooth, name="one row, far apart")


def _record_softmax(definition, twin, scale, skip=None, **fields):
    name = definition.__name__
    large = torch.ones(3, 2, 5, dtype=torch.bool)

    def pattern(input, mask=None, dim=-1):
        x = input if mask is None else input.masked_fill(~mask, float("-inf"))
        return twin(x, dim)

    Record(
        name,
        definition,
        _softmax_samples(log=twin is torch.log_softmax),
        bad_calls=[
            *bad_masks(name, lambda m: ((X, m), {})),
            Bad((X, large), {}, ValueError, (name, "mask", "(3, 2, 5)", "(2, 5)")),
            *bad_inputs(name),
            *bad_dims(name, X, KEEP),
        ],
        call={"input": plain(), "mask": plain_mask(), "dim": 1},
        gpu=masked(name, scale),
        dtype_rule="input",
        torch_equivalent=pattern,
        skip=NO_SUM | NOT_SAFE | ONE_OPERAND | NO_WEIGHT | (skip or {}),
        **fields,
    )


_record_softmax(
    masked_softmax,
    torch.softmax,
    8,  # factor of a GPU case's input: most softmax values then fit fp16
    {"gradient_overflow": "no gradient is larger than what arrives"},
    row_terms=softmax_terms,
)
_record_softmax(masked_log_softmax, torch.log_softmax, 1, row_terms=log_softmax_terms)
