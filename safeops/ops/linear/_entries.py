"""The logits of a linear layer at the entries of a CSR support: one class of one row each.

    logit_e = x_r . w_c + b_c   for the row r and the class c of entry e

Rows of the input and of the weight are gathered for some entries at a time, and multiplied: neither the logits of all
classes nor the gathered rows of all entries exist. Backward gathers them again. Products and sums are in fp32.
"""

import torch

from safeops.core.dtypes import compute_dtype
from safeops.core.library import declare_raw
from safeops.ops.linear._layer_op import LayerOp

AT_ONCE = 2**22  # elements of the gathered rows of a chunk: its three or four temporaries take 16 MiB each in fp32

# ---- definition


def define(input, linear_weight, row, classes, exists, linear_bias=None):
    """The logit of each entry, (E,); 0 where it does not exist."""
    compute, kept = compute_dtype(input.dtype), exists.unsqueeze(1)
    x, w = (torch.where(kept, t[index], 0).to(compute) for t, index in ((input, row), (linear_weight, classes)))
    logits = (x * w).sum(1)
    return logits if linear_bias is None else logits + torch.where(exists, linear_bias[classes], 0).to(compute)


# ---- op


def _chunks(input, row):
    size = max(1, AT_ONCE // max(1, input.shape[1]))
    return [slice(first, first + size) for first in range(0, len(row), size)]


def _compute(input, linear_weight, row, classes, exists, linear_bias):
    logits = _fake(input, linear_weight, row)
    for part in _chunks(input, row):
        logits[part] = define(input, linear_weight, row[part], classes[part], exists[part], linear_bias)
    return logits


def _compute_backward(grad, input, linear_weight, row, classes, exists, linear_bias, *needs):
    """d_x_r = sum_e g_e w_c, d_w_c = sum_e g_e x_r, d_b_c = sum_e g_e, summed in fp32 and rounded once."""
    compute = compute_dtype(input.dtype, grad.dtype)
    need_input, need_weight, need_bias = needs
    d_input, d_weight, d_bias = (
        x.new_zeros(x.shape, dtype=compute) for x in _fake_backward(grad, input, linear_weight, *needs)
    )
    for part in _chunks(input, row):
        rows, columns, kept = row[part], classes[part], exists[part].unsqueeze(1)
        g = grad[part].to(compute).unsqueeze(1)
        if need_input:  # select after the product: a row that is not kept may be 0 times inf or NaN
            _add(d_input, rows, torch.where(kept, g * linear_weight[columns], 0))
        if need_weight:
            _add(d_weight, columns, torch.where(kept, g * input[rows], 0))
        if need_bias:
            _add(d_bias, columns, torch.where(kept, g, 0).squeeze(1))
    return d_input.to(input.dtype), d_weight.to(input.dtype), d_bias.to(input.dtype)


def _add(to, index, rows):
    """to[index] += rows. On a GPU index_add_ would add in any order; index_put_ sorts."""
    if to.is_cpu:
        to.index_add_(0, index, rows)
    else:
        to.index_put_((index,), rows, accumulate=True)


def _fake(input, linear_weight, row, *_):
    return input.new_empty(len(row), dtype=compute_dtype(input.dtype))


def _fake_backward(grad, input, linear_weight, *options):
    shapes = input.shape, linear_weight.shape, linear_weight.shape[:1]
    return tuple(input.new_empty(s if need else [0] * len(s)) for s, need in zip(shapes, options[-3:]))


_OPERANDS = "Tensor input, Tensor linear_weight, Tensor row, Tensor classes, Tensor exists, Tensor? linear_bias=None"
_forward = declare_raw("_linear_entries", f"({_OPERANDS}) -> Tensor", fake=_fake, composite=_compute)
_backward = declare_raw(
    "_linear_entries_backward",
    f"(Tensor grad, {_OPERANDS}, bool need_input=True, bool need_weight=True, bool need_bias=True) "
    "-> (Tensor, Tensor, Tensor)",
    fake=_fake_backward,
    composite=_compute_backward,
)

# ---- record


class LinearEntries(LayerOp):
    """I/O: forward reads a row of the input and one of the weight for each entry; backward reads them again, and writes
    both gradients. Saved: the operands."""

    def __init__(self, name):
        super().__init__(name, _forward, _backward, define)

    def gradients(self, grad, needs, operands, results):
        return self.backward(grad, *operands, needs[0], needs[1], needs[5])
