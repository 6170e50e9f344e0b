"""info_nce_loss with the other rows' keys as negatives. For half vectors on CUDA, kernels compute it without storing
the (N, N) logits."""

import torch
from torch.compiler import is_compiling

from safeops.core.dtypes import HALF, compute_dtype
from safeops.core.library import declare_raw
from safeops.core.matmul import matmul, sums_wide, takes_half
from safeops.core.op import Op
from safeops.core.symbolic import as_operand
from safeops.ops.classification.cross_entropy import cross_entropy
from safeops.ops.vectors.normalize import normalize

WIDEST = 1024  # the largest D of vectors (N, D) that the kernels take

# ---- definition


def factors(temperature, query, *keys):
    """Returns (query, *keys, half): vectors whose products are the logits, and the argument `half` of `matmul`."""
    compute = compute_dtype(query.dtype, *(x.dtype for x in keys))
    half = query.dtype if takes_half(query, *keys) else None
    query, *keys = (normalize(x.to(compute), dim=-1, eps=None) for x in (query, *keys))
    return *over_temperature(temperature, half, query, *keys), half


def over_temperature(temperature, half, query, *keys):
    """Scales unit vectors so that their products are cos / temperature. half: the argument of `matmul`, or None."""
    temperature = as_operand(temperature, query)
    if half is None:
        return query / temperature, *keys
    # both factors are divided by sqrt(temperature): fp16 then holds them for temperatures down to 1e-9
    root = (temperature.to(query.dtype) if isinstance(temperature, torch.Tensor) else temperature) ** 0.5
    return tuple(x / root for x in (query, *keys))


def define(query, key, keep=None, temperature=None, number=1.0):
    """The losses (N,). keep: bool, True for kept rows; None: all. temperature: 0-dim tensor, or None: then `number`."""
    if keep is not None:
        query, key = (torch.where(keep.unsqueeze(-1), x, 0) for x in (query, key))
    logits = matmul(*factors(number if temperature is None else temperature, query, key))  # (own key: diagonal)
    if keep is not None:
        logits = torch.where(keep, logits, float("-inf"))  # the key of a row that is not kept is no class
    target = logits.new_ones(query.shape[:1], dtype=torch.int64).cumsum(0) - 1
    return cross_entropy(logits, target, mask=keep, reduction="none")


# ---- op


def _fake(query, key, keep=None, temperature=None, number=1.0):
    rows, columns = query.shape
    padded = -(-rows // 128) * 128  # the padding of kernels/vectors/info_nce.py
    width = max(64, 1 << (columns - 1).bit_length()) if columns <= 256 else -(-columns // 64) * 64
    return (
        query.new_empty(query.shape[:1], dtype=torch.float32),
        query.new_empty((2, padded, width)),
        query.new_empty((6, padded), dtype=torch.float32),
    )


def _fake_backward(grad, units, row_stats, temperature, number, columns, need_query, need_key):
    rows = grad.shape[0]
    return (
        units.new_empty((rows if need_query else 0, columns)),
        units.new_empty((rows if need_key else 0, columns)),
        grad.new_empty((rows if need_query else 0,), dtype=torch.float64),
    )


forward = declare_raw(
    "_info_nce",
    "(Tensor query, Tensor key, Tensor? keep=None, Tensor? temperature=None, float number=1.0) "
    "-> (Tensor loss, Tensor units, Tensor row_stats)",
    fake=_fake,
    triton="vectors.info_nce.info_nce",
)
backward = declare_raw(
    "_info_nce_backward",
    "(Tensor grad, Tensor units, Tensor row_stats, Tensor? temperature, float number, int columns, "
    "bool need_query=True, bool need_key=True) -> (Tensor, Tensor, Tensor)",
    fake=_fake_backward,
    triton="vectors.info_nce_backward.info_nce_backward",
)


# ---- record


class InfoNCE(Op):
    """The record of the losses with the other rows' keys as negatives. It has the name of info_nce_loss, so that errors
    name the loss; the record of info_nce_loss, created later, stays in the registry."""

    differentiable = ("query", "key", "temperature")

    def prepare(self, *operands):
        query, key, keep = operands[:3]
        one_dtype = query.dtype == key.dtype and query.dtype in HALF
        takes = one_dtype and sums_wide(query.device) and query.shape[1] <= WIDEST and not is_compiling()
        return takes, operands

    def validate(self, *operands):
        """Nothing to do: the public function has validated its arguments."""

    def gradients(self, grad, needs, operands, results):
        t, number = operands.temperature, operands.number
        columns = operands.query.shape[1]
        *grads, strength = self.backward(grad, *results, t, number, columns, needs[0] or needs[3], needs[1])
        return *grads, (-(strength.sum() / t)).to(t.dtype) if needs[3] else None
