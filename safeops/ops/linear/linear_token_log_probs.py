"""linear_token_log_probs: a linear layer and token_log_probs of its logits, computed in chunks."""

import torch

from safeops.core import check
from safeops.core.dtypes import compute_dtype
from safeops.core.foreign import refuse
from safeops.core.library import declare_raw
from safeops.core.matmul import matmul, without_autocast
from safeops.core.symbolic import as_operand
from safeops.ops.classification import _entries, _support
from safeops.ops.classification._classification import class_dim, refuse_missing_class, rows_of, validate_index
from safeops.ops.classification._logits import as_floats, validate_logits
from safeops.ops.classification.token_log_probs import (
    TokenLogProbs,
    TokenLogProbsOfSupport,
    _token_log_probs,
    each,
)
from safeops.ops.classification.token_log_probs import define as define_rows
from safeops.ops.linear import _rows
from safeops.ops.linear._chunks import NO_CLASS, blocks, keeps_sums, logits_of, products, scale_of
from safeops.ops.linear._entries import LinearEntries
from safeops.ops.linear._layer import LOGITS_DTYPE, in_one_dtype, validate_classes, validate_layer, wide_logits
from safeops.ops.linear._layer_op import LayerOp

NAME = "linear_token_log_probs"

# ---- definition


def define(
    input, linear_weight, target, linear_bias=None, mask=None, support=None, ignore_index=-100, temperature=1.0,
    softcap=0.0, wide=False,
):  # fmt: skip
    """Log probability, entropy and logsumexp of each row, as one tensor (3, N). Logits are in fp32 here, also if not
    wide."""
    compute = compute_dtype(input.dtype)
    _, keep, _ = rows_of(len(linear_weight), target, None, mask, ignore_index, compute)
    x = torch.where(keep.unsqueeze(-1), input, 0).to(compute)  # select before arithmetic: NaN * 0 is NaN
    logits = matmul(x, linear_weight.to(compute))
    logits = logits if linear_bias is None else logits + linear_bias.to(compute)
    logits = logits if support is None else _support.restrict(logits, support)
    return define_rows(logits.movedim(-1, class_dim(logits)), target, keep, ignore_index, temperature, softcap)


# ---- op


def _fake(input, *_):
    shape, dtype = (3, len(input)), compute_dtype(input.dtype)
    return input.new_empty(shape, dtype=dtype), input.new_empty(shape, dtype=dtype)


def _fake_backward(grad, input, linear_weight, *options):
    return tuple(_rows.empty_gradients(input, linear_weight, options[-3:]))


def _compute(input, linear_weight, target, linear_bias, mask, support, ignore_index, temperature, softcap, wide):
    """The forward in chunks of the rows: one product. The op of token_log_probs computes each chunk's results."""
    refuse_missing_class(NAME, target, mask, ignore_index, len(linear_weight), "linear_weight", linear_weight.shape)
    class_index, keep, _ = rows_of(len(linear_weight), target, None, mask, ignore_index, torch.float64)
    results, shape = _fake(input), (temperature, softcap)
    for part, logits in logits_of_rows(input, linear_weight, linear_bias, wide):
        if support is not None:
            logits.masked_fill_(~support[part], -float("inf"))
        of_part = _token_log_probs.forward(logits, class_index[part], keep[part], NO_CLASS, *shape)
        for whole, rows in zip(results, of_part):
            whole[:, part] = rows
    return results


def logits_of_rows(input, linear_weight, linear_bias, wide):
    """Yield (slice of the rows, their logits) per chunk, each in the memory of the one before."""
    size = max(1, min(len(input), _rows.rows_at_once(input, linear_weight, wide=wide)))
    dtype = compute_dtype(input.dtype) if keeps_sums(input, wide) else input.dtype
    buffer = input.new_empty(size, len(linear_weight), dtype=dtype)
    with without_autocast(input):
        for part in blocks(len(input), size):
            x = input[part]
            yield part, logits_of(x, linear_weight, linear_bias, buffer[: len(x)], wide)


def _compute_backward(
    grad, input, linear_weight, target, row_stats, linear_bias, mask, support, ignore_index, temperature, softcap, wide,
    *needs,
):  # fmt: skip
    class_index, keep, _ = rows_of(len(linear_weight), target, None, mask, ignore_index, torch.float64)
    options = support, temperature, softcap, wide, needs
    return gradients(grad, input, linear_weight, linear_bias, class_index, keep, row_stats, *options)


def gradients(
    grad, input, linear_weight, linear_bias, class_index, keep, row_stats, support, temperature, softcap, wide, needs,
    **finish,
):  # fmt: skip
    """The backward in chunks of the classes: three products. token_log_probs' backward computes each chunk's slopes.
    class_index: relative to linear_weight's first class. finish: for `products`."""
    compute, shape = compute_dtype(input.dtype, grad.dtype), (temperature, softcap)
    x = torch.where(keep.unsqueeze(1), input, 0)
    grad = torch.where(keep, grad, 0)
    of_log_prob, of_entropy, of_sum = grad.double().abs()
    # a bound of each row's |slope|: p |log p + H| is at most 1 + H, with the entropy H in row_stats[2]
    largest = (2 * of_log_prob + of_sum + of_entropy * (1 + row_stats[2].abs())) / temperature
    scale = scale_of(x, linear_weight, largest)
    grad, partial = (grad if scale is None else grad * scale).to(compute), True

    def slopes(logits, part):
        index = class_index - part.start
        if support is not None:
            logits.masked_fill_(~support[:, part], -float("inf"))
        return _token_log_probs.backward(grad, logits, index, row_stats, keep, NO_CLASS, *shape, partial)

    return products(x, linear_weight, linear_bias, keep, slopes, scale, compute, needs, wide, **finish)


_OPERANDS = (
    "Tensor? linear_bias=None, Tensor? mask=None, Tensor? support=None, int ignore_index=-100, float temperature=1.0, "
    "float softcap=0.0, bool wide=False"
)
_forward = declare_raw(
    "_linear_token_log_probs",
    f"(Tensor input, Tensor linear_weight, Tensor target, {_OPERANDS}) -> (Tensor rows, Tensor row_stats)",
    fake=_fake,
    composite=_compute,
)
_backward = declare_raw(
    "_linear_token_log_probs_backward",
    f"(Tensor grad, Tensor input, Tensor linear_weight, Tensor target, Tensor row_stats, {_OPERANDS}, "
    "bool need_input=True, bool need_weight=True, bool need_bias=True) -> (Tensor, Tensor, Tensor)",
    fake=_fake_backward,
    composite=_compute_backward,
)

# ---- record


class LinearTokenLogProbs(LayerOp):
    """The record of linear_token_log_probs. Matrix products of N x D x C: one in forward, three in backward, which
    computes the logits again. Saved: the operands, and three numbers a row."""

    shards = "linear_log_probs"

    def __init__(self):
        super().__init__(NAME, _forward, _backward, define)

    def prepare(
        self, input, linear_weight, target, linear_bias, mask, support, ignore_index, temperature, softcap, wide
    ):
        shape = as_floats(NAME, temperature, softcap)
        return True, (input, linear_weight, target, linear_bias, mask, support, ignore_index, *shape, wide)

    def gradients(self, grad, needs, operands, results):
        input, linear_weight, target, *rest = operands
        needs = needs[0], needs[1], needs[3]
        return self.backward(grad, input, linear_weight, target, results.row_stats, *rest, *needs)


_linear_entries = LinearEntries(NAME)  # (it has the function's name; `_linear_token_log_probs` stays in the registry)
_linear_token_log_probs = LinearTokenLogProbs()

# ---- public function


_PUBLIC = (
    "(Tensor input, Tensor linear_weight, Tensor target, *, Tensor? linear_bias=None, Tensor? mask=None, "
    "int ignore_index=-100, float temperature=1.0, float? softcap=None, ScalarType? logits_dtype=None{}) -> "
    "(Tensor log_prob, Tensor entropy, Tensor logsumexp{})"
)


@_linear_token_log_probs.public(
    _PUBLIC.format("", ""),
    ".support"
    + _PUBLIC.format(', Tensor[] support, Tensor? support_threshold=None, str outside="-inf"', ", Tensor outside"),
    arguments=LOGITS_DTYPE + _support.ARGUMENTS,
)
def linear_token_log_probs(
    input, linear_weight, target, *extra, linear_bias=None, mask=None, ignore_index=-100, temperature=1.0, softcap=None,
    logits_dtype=None, support=None, support_threshold=None, outside="-inf", **unknown,
):  # fmt: skip
    """`token_log_probs` of the logits input @ linear_weight.T + linear_bias, computed in chunks.

    The losses of PPO, GRPO and DPO are made of its results, here from the last hidden states.

    Eight million logits exist at a time, or an eighth of all (on a GPU those of 1,024 rows at least), and half as many
    with logits_dtype=torch.float32. The backward computes the logits again: four products in all. Second
    derivatives, functorch transforms and `torch.export` compute all logits at once, in fp32.

    Products are in the operands' dtype. All that is computed from the logits is in fp32, and so are sums over chunks.
    Each gradient is rounded once, at the end.

    With a bool `support` that is the same, and chunks of logits are filled with -inf. With one in CSR form there are no
    products of matrices and no logits of other classes: rows of the weight are gathered for the entries of the support,
    at most 16 MiB in fp32 at a time (and as much of the input), and multiplied in fp32, of half operands too. The
    backward gathers them again. A few numbers an entry are saved, and a gradient of half is summed in an fp32 buffer.

    Args:
        input: (..., D) floating tensor, a vector for each row.
        linear_weight: (C, D) tensor of `input`'s dtype. Under autocast they may differ: both are cast to its dtype.
        target: class indices in [0, C), int64, int32 or uint8, of shape (...).
        linear_bias: (C,) tensor of `input`'s dtype.
        mask: bool tensor, broadcastable to the rows' shape (...); True = keep. A masked-out row is 0 in all three,
            whatever its input holds, and its gradient is exactly 0.
        ignore_index: a row of this class is masked out.
        temperature: divides the logits, above 0.
        softcap: above 0: a logit x is read as softcap tanh(x / softcap), before the temperature. None: x as it is.
        {arguments}

    Returns:
        A named tuple (log_prob, entropy, logsumexp), each of shape (...): fp32 for half and fp32 operands, fp64 for
        fp64. With `support` (log_prob, entropy, logsumexp, outside), over its classes; outside: how many kept rows have
        a target that is not in their support, an int64 number on the device.

    Raises:
        IndexError: on the CPU, a row that `mask` keeps has a class that does not exist and is not `ignore_index`. On
            other devices, and under torch.func's transforms, such a row is masked out.
        TypeError: an operand or option is of another type or dtype.
        ValueError: shapes do not fit, devices differ, a number out of range.

    Example:
        >>> input, linear_weight = torch.eye(2), torch.tensor([[2.0, 0.0], [0.0, 0.0]])
        >>> safeops.linear_token_log_probs(input, linear_weight, torch.tensor([0, -100])).log_prob
        tensor([-0.1269,  0.0000])
    """
    if extra or unknown:
        refuse(linear_token_log_probs, extra, unknown)
    validate_layer(NAME, input, linear_weight, linear_bias)
    validate_classes(NAME, input, linear_weight, target, mask)
    validate_index(NAME, ignore_index)
    validate_logits(NAME, temperature, softcap)
    wide = wide_logits(NAME, logits_dtype, input, linear_weight, linear_bias)
    refuse_missing_class(NAME, target, mask, ignore_index, len(linear_weight), "linear_weight", linear_weight.shape)
    of = {"input": input, "linear_weight": linear_weight}
    support = _support.validate(NAME, support, support_threshold, (*target.shape, len(linear_weight)), **of)
    _support.validate_outside(NAME, support, outside)
    input, linear_weight, linear_bias = in_one_dtype(input, linear_weight, linear_bias)
    rows = target.shape
    mask = None if mask is None else mask.expand(rows)
    if check.mesh(input) is None:  # (a DTensor keeps its dims, any of which may be sharded)
        input, target = input.reshape(target.numel(), input.shape[-1]), target.reshape(-1)
        mask = None if mask is None else mask.reshape(-1)
    layer = input, linear_weight, linear_bias
    if isinstance(support, tuple):
        shape = as_operand(temperature, input), as_operand(softcap or 0.0, input)
        results, outside = _of_entries(support, outside, layer, target, mask, ignore_index, *shape)
        return TokenLogProbsOfSupport(*(row.reshape(rows) for row in each(results)), outside)
    if support is not None:
        support = support.reshape(*target.shape, len(linear_weight))
        mask, outside = _support.of_rows(NAME, support, outside, target, mask, ignore_index)
    operands = *layer[:2], target, layer[2], mask, support, ignore_index, temperature, softcap, wide
    results = [row.reshape(rows) for row in each(_linear_token_log_probs.call(*operands))]
    return TokenLogProbs(*results) if support is None else TokenLogProbsOfSupport(*results, outside)


def _of_entries(support, outside, layer, *options):
    input, linear_weight, linear_bias = layer

    def gather(e):
        return _linear_entries.call(input, linear_weight, e.row, e.classes, e.exists, linear_bias)

    return _entries.log_probs(NAME, support, outside, gather, len(linear_weight), *options)
