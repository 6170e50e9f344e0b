"""A linear layer's logits at some classes of each row, and of all others their logsumexp, in chunks of the logits.

    z_k = (x . w_{c_k} + b_{c_k}) / T, k = 1..K;   z_{K + 1} = log sum_{c not in c_1, ..., c_K} exp((x . w_c + b_c) / T)

A teacher given by its best classes is compared with these numbers. A chunk of logits, with -inf at the classes c_k, is
computed by cross_entropy's kernels: their logsumexp, and its slopes.
"""

import torch

from safeops.core import check
from safeops.core.dtypes import compute_dtype
from safeops.core.library import declare_raw
from safeops.core.matmul import without_autocast
from safeops.ops.classification._best_classes import BUCKET, RENORMALIZE, absent, existing, of_student, of_teacher
from safeops.ops.classification.cross_entropy import _cross_entropy, _overwrite
from safeops.ops.linear import _rows
from safeops.ops.linear._chunks import NO_CLASS, blocks, keeps_sums, logits_of, products, scale_of
from safeops.ops.linear._entries import LinearEntries
from safeops.ops.linear._layer import all_logits
from safeops.ops.linear._layer_op import LayerOp

INF = float("inf")

# ---- definition


def define(input, linear_weight, linear_bias, indices, keep=None, temperature=1.0, wide=False):
    """(N, K + 1). Logits are in fp32 here, also if not wide."""
    compute = compute_dtype(input.dtype)
    logits = all_logits(input, linear_weight, linear_bias, keep, compute)
    return of_student(logits, indices, keep, temperature, BUCKET, compute)


# ---- op


def _fake(input, linear_weight, linear_bias, indices, *_):
    dtype, (rows, count) = compute_dtype(input.dtype), indices.shape
    return input.new_empty((rows, count + 1), dtype=dtype), input.new_empty((2, rows), dtype=dtype)


def _columns(indices, exists, part):
    """Returns (columns of a chunk of classes, bool: True for an index in it). Column 0 stands for all other indices."""
    inside = exists & (indices >= part.start) & (indices < part.stop)
    return torch.where(inside, indices - part.start, 0), inside


def _add(chunk, columns, values):
    """Add values (N, K) to a chunk, in place. Only zeros are added to an element twice: the order does not matter. (On
    the CPU, scatter_add_ would make an fp32 copy of a half chunk.)"""
    rows = torch.arange(len(chunk), device=chunk.device).unsqueeze(1)
    return chunk.index_put_((rows, columns), values.to(chunk.dtype), accumulate=True)


def _without(logits, columns, inside):
    """The logits with -inf at the columns, in place."""
    return _add(logits, columns, torch.where(inside, -INF, 0.0))


def _compute(input, linear_weight, linear_bias, indices, keep, temperature, wide):
    """The forward in chunks of the rows."""
    results, row_stats = (x.fill_(-INF) for x in _fake(input, linear_weight, linear_bias, indices))
    every, options = slice(0, len(linear_weight)), (NO_CLASS, 0.0, 0.0, temperature, 0.0)
    exists = existing(indices, keep, every.stop)
    keep = exists.new_ones(len(input)) if keep is None else keep
    size = min(len(input), _rows.rows_at_once(input, linear_weight, wide=wide))
    buffer = input.new_empty(size, every.stop, dtype=results.dtype if keeps_sums(input, wide) else input.dtype)
    with without_autocast(input):
        for part in blocks(len(input) if every.stop else 0, max(1, size)):
            logits = logits_of(input[part], linear_weight, linear_bias, buffer[: len(input[part])], wide)
            columns, inside = _columns(indices[part], exists[part], every)
            own = logits.gather(1, columns).to(results.dtype) / temperature
            results[part, :-1] = torch.where(inside, own, -INF)
            operands = _without(logits, columns, inside), columns.new_zeros(len(columns)), None, keep[part]
            stats = _cross_entropy.forward(*operands, *options)[3]
            # (the kernel has NaN for a row whose logits are all -inf)
            row_stats[:, part] = torch.where(logits.amax(1) == -INF, -INF, stats)
    results[:, -1] = row_stats.sum(0)
    return results, row_stats


def _compute_backward(grad, row_stats, input, linear_weight, linear_bias, indices, keep, temperature, wide, *needs):
    """The backward in chunks of the classes.

    d/dx_c = g_k / T for c = c_k, else g_{K + 1} p_c / T, p the softmax of the others over T."""
    compute = compute_dtype(input.dtype, grad.dtype)
    exists = existing(indices, keep, len(linear_weight))
    keep = exists.new_ones(len(input)) if keep is None else keep
    x, grad = torch.where(keep.unsqueeze(1), input, 0), torch.where(keep.unsqueeze(1), grad, 0)
    largest = grad.double().abs().amax(1) / temperature
    scale = scale_of(x, linear_weight, largest)
    grad = (grad if scale is None else grad * scale).to(compute)
    own, of_others = grad[:, :-1] / temperature, grad[:, -1].contiguous()
    has_others, first = keep & (row_stats[0] != -INF), indices.new_zeros(len(x))
    maximum, log_total = row_stats.to(compute)

    def slopes(logits, part):
        """The slopes of others, in place of the logits, and those of the best classes. (The kernel subtracts g at the
        class of a row, here the first of the chunk: that column is computed apart.)"""
        columns, inside = _columns(indices, exists, part)
        x_first = _without(logits, columns, inside)[:, 0].to(compute)
        of_first = of_others * ((x_first / temperature - maximum) - log_total).exp() / temperature
        _overwrite(of_others, logits, first, row_stats, None, has_others, NO_CLASS, 0.0, 0.0, temperature, 0.0)
        logits[:, 0] = torch.where(has_others, of_first, 0)
        return _add(logits, columns, torch.where(inside, own, 0))

    return products(x, linear_weight, linear_bias, keep, slopes, scale, compute, needs, wide)


_OPERANDS = (
    "Tensor input, Tensor linear_weight, Tensor? linear_bias, Tensor indices, Tensor? keep=None, "
    "float temperature=1.0, bool wide=False"
)
_forward = declare_raw(
    "_linear_best_classes", f"({_OPERANDS}) -> (Tensor logits, Tensor row_stats)", fake=_fake, composite=_compute
)
_backward = declare_raw(
    "_linear_best_classes_backward",
    f"(Tensor grad, Tensor row_stats, {_OPERANDS}, bool need_input=True, bool need_weight=True, bool need_bias=True) "
    "-> (Tensor, Tensor, Tensor)",
    fake=lambda grad, row_stats, input, weight, *rest: tuple(_rows.empty_gradients(input, weight, rest[-3:])),
    composite=_compute_backward,
)

# ---- record


class LinearBestClasses(LayerOp):
    """Matrix products of N x D x C: one in forward, three in backward, which computes the logits again. Saved: the
    operands, and two numbers a row."""

    def __init__(self, name):
        super().__init__(name, _forward, _backward, define)

    def gradients(self, grad, needs, operands, results):
        return self.backward(grad, results.row_stats, *operands, *needs[:3])


class BestClasses:
    """Makes the two distributions of each row for a teacher given by its best classes, and a linear layer's logits."""

    def __init__(self, name):
        # (they have the function's name: the record of the function itself is made later, and stays in the registry)
        self.bucket, self.entries = LinearBestClasses(name), LinearEntries(name)

    def distributions(self, layer, values, indices, keep, temperature, wide, tail):
        """`distributions` of _best_classes.py in ops/classification, for the logits of a layer."""
        input, linear_weight, _ = layer
        compute, classes = compute_dtype(input.dtype, values.dtype), len(linear_weight)
        exists = existing(indices, keep, classes)
        teacher = of_teacher(values, indices, exists, classes, tail, compute)
        if tail == BUCKET or check.mesh(input) is not None:  # (DTensors have no rule for the layer's entries)
            student = self.bucket.call(*layer, indices.long(), keep, temperature, wide)
        else:
            student = self._known(layer, indices, exists) / temperature
        if tail == RENORMALIZE:
            student = torch.where(exists, student[..., : indices.shape[-1]], absent(exists, tail))
        return student.to(compute), teacher

    def _known(self, layer, indices, exists):
        """The logits of the classes alone: no product with all classes."""
        input, linear_weight, linear_bias = layer
        rows = torch.arange(indices.shape[0], device=indices.device).unsqueeze(1).expand(indices.shape)
        operands = (torch.where(exists, x, 0).reshape(-1) for x in (rows, indices.long()))
        logits = self.entries.call(input, linear_weight, *operands, exists.reshape(-1), linear_bias)
        return logits.reshape(indices.shape)
