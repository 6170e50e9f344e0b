"""nll_loss: minus the log probability of each row's class, from log probabilities."""

import torch

from safeops.core.dtypes import compute_dtype
from safeops.core.foreign import refuse
from safeops.core.library import declare_raw
from safeops.core.loss_reduction import reduce, validate_options
from safeops.ops.classification._classification import (
    ARGUMENTS,
    INDICES,
    Classification,
    class_dim,
    gather_classes,
    is_watched,
    row_shape,
    rows_of,
    validate_index,
    validate_reduction,
)

# ---- definition


def define(input, target, weight=None, mask=None, ignore_index=-100):
    """Returns (loss, keep, weights that a mean divides by), each of the rows' shape; no weights: an empty tensor."""
    input, dim, dtype = gather_classes(input), class_dim(input), compute_dtype(input.dtype)
    # an fp64 weight may be out of fp32's range: it makes the computation fp64
    compute = dtype if weight is None else compute_dtype(dtype, weight.dtype)
    place, keep, weights = rows_of(input.shape[dim], target, weight, mask, ignore_index, compute)
    if input.shape[dim] == 0:
        loss = input.to(compute).sum(dim)  # 0, but in the graph
    else:
        target_value = input.gather(dim, place.unsqueeze(dim)).squeeze(dim).to(compute)
        loss = -torch.where(keep, target_value, 0)  # select before arithmetic: NaN * 0 is NaN
    loss = loss if weights is None else torch.where(keep, loss * weights, 0)
    loss = loss.to(dtype)
    return loss, keep, loss.new_empty(0) if weights is None else weights


# ---- op


def _fake(input, target, weight=None, mask=None, ignore_index=-100):
    shape, dtype = row_shape(input), compute_dtype(input.dtype)
    wide = dtype if weight is None else compute_dtype(dtype, weight.dtype)
    return (
        input.new_empty(shape, dtype=dtype),
        input.new_empty(shape, dtype=torch.bool),
        input.new_empty(0, dtype=dtype) if weight is None else input.new_empty(shape, dtype=wide),
    )


def _fake_reduced(*operands):
    loss, *_ = _fake(*operands[:-2])
    return loss.new_empty(()), loss.new_empty((), dtype=torch.float64)


def _fake_backward(grad, size, dtype, target, weight=None, mask=None, ignore_index=-100):
    return grad.new_empty(size, dtype=dtype)


_forward = declare_raw(
    "_nll_loss",
    "(Tensor input, Tensor target, Tensor? weight=None, Tensor? mask=None, int ignore_index=-100) -> "
    "(Tensor loss, Tensor keep, Tensor weights)",
    fake=_fake,
    composite=define,
    triton="classification.nll_loss.nll_loss",
)
_backward = declare_raw(
    "_nll_loss_backward",
    "(Tensor grad, SymInt[] size, ScalarType dtype, Tensor target, Tensor? weight=None, Tensor? mask=None, "
    "int ignore_index=-100) -> Tensor",
    fake=_fake_backward,
    triton="classification.nll_loss.nll_loss_backward",
)

_reduced = declare_raw(
    "_nll_loss_reduced",
    "(Tensor input, Tensor target, Tensor? weight=None, Tensor? mask=None, int ignore_index=-100, bool mean=True, "
    "bool empty_nan=False) -> (Tensor loss, Tensor denominator)",
    fake=_fake_reduced,
    triton="classification.nll_loss.nll_loss_reduced",
)
_reduced_backward = declare_raw(
    "_nll_loss_reduced_backward",
    "(Tensor grad, Tensor? denominator, SymInt[] size, ScalarType dtype, Tensor target, Tensor? weight=None, "
    "Tensor? mask=None, int ignore_index=-100) -> Tensor",
    fake=lambda grad, denominator, *operands: _fake_backward(grad, *operands),
    triton="classification.nll_loss.nll_loss_reduced_backward",
)

# ---- record


class NLLLoss(Classification):
    """I/O: forward reads one element of each row; backward writes the gradient. The input is not saved."""

    linear = 1
    saved = ()

    def prepare(self, input, target, weight, mask, ignore_index):
        if is_watched(input):
            return False, (input, target, weight, mask, ignore_index)
        if target.dtype not in INDICES[:2]:
            if target.dtype != torch.uint8:
                return False, ()
            target = target.to(torch.int32)
        if ignore_index.__class__ is not int:
            validate_index(self.name, ignore_index)
        return True, (input, target, weight, mask, ignore_index)

    def validate(self, input, target, weight, mask, ignore_index):
        self.validate_input(input, target)
        self.validate_indices(input, target)
        self.validate_common(input, target, weight, mask, ignore_index)

    def validate_options(self, name, reduction, empty, ignore_index):
        """Check the options of a module's constructor."""
        validate_options(name, reduction, empty)
        validate_index(name, ignore_index)

    def gradients_of(self, backward, upstream, needs, operands):
        input, *rest = operands
        return (backward(*upstream, input.shape, input.dtype, *rest),)


_nll_loss = NLLLoss("nll_loss", "NLLLoss", _forward, _backward, define, _reduced, _reduced_backward)
_nll_loss.example = "torch.tensor([[-0.5, -1.0], [-2.0, -0.25]]), torch.tensor([0, 1])"

# ---- public function


@_nll_loss.public(
    '(Tensor input, Tensor target, Tensor? weight=None, *, Tensor? mask=None, str reduction="mean", '
    'int ignore_index=-100, Tensor? denominator=None, str empty="zero") -> Tensor',
    arguments=ARGUMENTS,
)
def nll_loss(
    input, target, weight=None, *extra, mask=None, reduction="mean", ignore_index=-100, denominator=None, empty="zero",
    **unknown,
):  # fmt: skip
    """-w_y input_y of each row, y its class and w the class weights; the mean over the kept rows.

    The negative log likelihood of log probabilities, such as those of `masked_log_softmax`. For logits, `cross_entropy`
    is one pass in place of two.

    Like torch.nn.functional.nll_loss, except that a mean of nothing is `empty` and not NaN, and that half is summed and
    returned in fp32: sums in half are inf beyond 65504.

    Args:
        input: (N, C), (C,) or (N, C, d1, ...) floating tensor of log probabilities.
        target: class indices in [0, C), int64, int32 or uint8, of shape (N,), () or (N, d1, ...).
        {arguments}

    Example:
        >>> log_p = torch.tensor([[-0.5, -1.0], [-2.0, torch.nan]])
        >>> safeops.nll_loss(log_p, torch.tensor([0, 1]), mask=torch.tensor([True, False]))
        tensor(0.5000)
    """
    if extra or unknown:
        refuse(nll_loss, extra, unknown)
    validate_reduction("nll_loss", input, reduction, denominator, empty)
    operands = input, target, weight, mask, ignore_index
    if _nll_loss.reduced.serves(input, target, reduction, denominator, empty):
        return _nll_loss.reduced.call(*operands, reduction == "mean", empty == "nan")
    loss, keep, weights = _nll_loss.call(*operands)
    return reduce("nll_loss", loss, keep, None if weight is None else weights, reduction, denominator, empty)
