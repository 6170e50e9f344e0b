"""token_log_probs: the log probability of each row's class, and the row's entropy and logsumexp."""

from typing import NamedTuple

import torch

from safeops.core import check
from safeops.core.dtypes import compute_dtype, wide_on_cpu
from safeops.core.foreign import refuse
from safeops.core.library import declare_raw
from safeops.core.op import Op
from safeops.core.private_torch import saved_by_name
from safeops.core.symbolic import as_operand
from safeops.ops.classification import _entries, _support
from safeops.ops.classification._classification import (
    INDICES,
    class_dim,
    gather_classes,
    is_watched,
    refuse_missing_class,
    row_shape,
    rows_of,
    validate_index,
)
from safeops.ops.classification._logits import as_floats, shaped, slope_of_shape, validate_logits
from safeops.ops.classification.cross_entropy import is_certain

NAME = "token_log_probs"
INF = float("inf")


@saved_by_name
class TokenLogProbs(NamedTuple):
    log_prob: torch.Tensor
    entropy: torch.Tensor
    logsumexp: torch.Tensor


@saved_by_name
class TokenLogProbsAndArgmax(NamedTuple):
    log_prob: torch.Tensor
    entropy: torch.Tensor
    logsumexp: torch.Tensor
    argmax: torch.Tensor
    correct: torch.Tensor


@saved_by_name
class TokenLogProbsOfSupport(NamedTuple):
    log_prob: torch.Tensor
    entropy: torch.Tensor
    logsumexp: torch.Tensor
    outside: torch.Tensor


# ---- definition; the classes are in the dim `class_dim`


def define(input, target, mask=None, ignore_index=-100, temperature=1.0, softcap=0.0):
    """Log probability, entropy and logsumexp of each row, as one tensor (3, *rows)."""
    input, dim = gather_classes(input), class_dim(input)
    compute = compute_dtype(input.dtype)
    class_index, keep, _ = rows_of(input.shape[dim], target, None, mask, ignore_index, compute)
    x = torch.where(keep.unsqueeze(dim), input, 0)  # select before arithmetic: NaN * 0 is NaN
    x = shaped(wide_on_cpu(x.to(compute)), temperature, softcap)
    if x.shape[dim] == 0:
        return x.sum(dim).to(compute).expand(3, *keep.shape)  # 0, but in the graph
    certain = is_certain(x, class_index, dim)
    x = torch.where(certain.unsqueeze(dim), 0, x)
    log_p = torch.log_softmax(x, dim)
    p = log_p.exp()
    log_prob = log_p.gather(dim, class_index.unsqueeze(dim)).squeeze(dim)
    entropy = -(p * torch.where(p == 0, 0, log_p)).sum(dim)
    log_sum = torch.where(log_prob.isnan(), log_prob, torch.logsumexp(x, dim))
    rows = [torch.where(certain, limit, x) for x, limit in ((log_prob, 0), (entropy, 0), (log_sum, INF))]
    return torch.where(keep, torch.stack(rows), 0).to(compute)


def define_argmax(input, target, mask=None, ignore_index=-100, *shape):
    """Returns (the tensor of `define`, argmax, correct). argmax: the first class of each row's largest logit; correct:
    True where argmax is the row's own class."""
    rows, input, dim = define(input, target, mask, ignore_index, *shape), gather_classes(input), class_dim(input)
    _, keep, _ = rows_of(input.shape[dim], target, None, mask, ignore_index, torch.float64)
    x = torch.where(keep.unsqueeze(dim), input.detach(), 0)  # select before arithmetic: NaN * 0 is NaN
    argmax = x.argmax(dim) if x.shape[dim] else torch.zeros_like(keep, dtype=torch.int64)
    return rows, argmax, keep & (argmax == target)


def _row_stats(input, target, mask, ignore_index, temperature, softcap, entropy):
    """For backward, (3, *rows): maximum (the largest logit), log_total (logsumexp - maximum), entropy."""
    dim, compute = class_dim(input), compute_dtype(input.dtype)
    _, keep, _ = rows_of(input.shape[dim], target, None, mask, ignore_index, compute)
    x = shaped(torch.where(keep.unsqueeze(dim), input.detach(), 0).double(), temperature, softcap)
    maximum = x.amax(dim) if x.shape[dim] else x.sum(dim)
    log_total = torch.logsumexp(x - maximum.unsqueeze(dim), dim)
    maximum = torch.where((maximum == INF) & entropy.isnan(), torch.nan, maximum)  # (+inf marks a certain row)
    return torch.where(keep, torch.stack([maximum, log_total, entropy.double()]), 0).to(compute)


def _composite(input, target, *options):
    rows = define(input, target, *options)
    return rows, _row_stats(input, target, *options, rows[1].detach())


def _composite_argmax(input, target, *options):
    rows, *best = define_argmax(input, target, *options)
    return rows, *best, _row_stats(input, target, *options, rows[1].detach())


def _composite_backward(
    grad, input, target, row_stats, mask=None, ignore_index=-100, temperature=1.0, softcap=0.0, partial=False
):
    """p (c - a - b (log p + H)), plus a at the row's class. a, b, c: upstream gradients of log_prob, entropy H and
    logsumexp. partial: `input` holds some of the classes, perhaps not the row's own."""
    dim, compute = class_dim(input), compute_dtype(input.dtype, grad.dtype)
    class_index, own, _ = rows_of(input.shape[dim], target, None, mask, ignore_index, compute)
    keep = own
    if partial:
        keep = torch.ones_like(own) if mask is None else mask.expand(own.shape)
    maximum, log_total, entropy, a, b, c = (x.to(compute).unsqueeze(dim) for x in (*row_stats, *grad))
    keep = keep.unsqueeze(dim) & (maximum != INF)  # (the results of a certain row are constant)
    x = torch.where(keep, input, 0).to(compute)
    log_p = (shaped(x, temperature, softcap) - torch.where(keep, maximum, 0)) - log_total
    p = log_p.exp()
    slope = p * (c - a - b * torch.where(p == 0, 0, log_p + entropy))
    slope = slope.scatter_add(dim, class_index.unsqueeze(dim), torch.where(own.unsqueeze(dim), a, 0))
    if softcap or temperature != 1:
        slope = slope * slope_of_shape(x, temperature, softcap)
    return torch.where(keep, slope, 0).to(input.dtype)


# ---- op


def _fake(input, *_):
    dtype, rows = compute_dtype(input.dtype), row_shape(input)
    return input.new_empty((3, *rows), dtype=dtype), input.new_empty((3, *rows), dtype=dtype)


def _fake_argmax(input, *_):
    rows, row_stats = _fake(input)
    shape = rows.shape[1:]
    return rows, input.new_empty(shape, dtype=torch.int64), input.new_empty(shape, dtype=torch.bool), row_stats


_OPERANDS = (
    "Tensor input, Tensor target, Tensor? mask=None, int ignore_index=-100, float temperature=1.0, float softcap=0.0"
)
_forward = declare_raw(
    "_token_log_probs",
    f"({_OPERANDS}) -> (Tensor rows, Tensor row_stats)",
    fake=_fake,
    composite=_composite,
    triton="classification.token_log_probs.token_log_probs",
)
_forward_argmax = declare_raw(
    "_token_log_probs_argmax",
    f"({_OPERANDS}) -> (Tensor rows, Tensor argmax, Tensor correct, Tensor row_stats)",
    fake=_fake_argmax,
    composite=_composite_argmax,
    triton="classification.token_log_probs.token_log_probs_argmax",
)
_backward = declare_raw(
    "_token_log_probs_backward",
    "(Tensor grad, Tensor input, Tensor target, Tensor row_stats, Tensor? mask=None, int ignore_index=-100, "
    "float temperature=1.0, float softcap=0.0, bool partial=False) -> Tensor",  # partial: input has some classes
    fake=lambda grad, input, *_: torch.empty_like(input),
    composite=_composite_backward,
    triton="classification.token_log_probs.token_log_probs_backward",
)

# ---- record


class TokenLogProbsOp(Op):
    """I/O: forward reads the logits; backward reads them, and writes their gradient. Saved: three numbers a row."""

    compiled = ("cpu", "cuda")
    shards = "log_probs"

    def prepare(self, logits, target, mask, ignore_index, temperature, softcap):
        if logits.dim() > 2:
            logits = logits.movedim(-1, 1)
        operands = logits, target, mask, ignore_index
        if softcap is not None or temperature.__class__ is not float or temperature != 1.0:
            operands += as_floats(NAME, temperature, softcap)
        if target.dtype is torch.uint8:
            operands = logits, target.to(torch.int32), *operands[2:]
        elif target.dtype not in INDICES or type(ignore_index) is not int:  # (Dynamo before 2.13 gets __class__ wrong)
            return False, operands
        return not is_watched(logits), operands

    def validate(self, logits, target, mask, ignore_index, temperature, softcap):
        check.floating(NAME, "logits", logits)
        check.tensor(NAME, "target", target)
        if logits.dim() == 0:
            raise ValueError(f"{NAME}: logits must have a last dim of classes, got shape ()")
        if target.dtype not in INDICES:
            remedy = check.say(check.of_one_hot("target", target, logits.shape, -1))
            raise TypeError(f"{NAME}: target must be int64, int32 or uint8 (class indices), got {target.dtype}{remedy}")
        rows = logits.shape[:-1]
        if target.shape != rows:
            raise ValueError(
                f"{NAME}: target {check.shown(target)} must have the shape {tuple(rows)} of the rows of logits "
                f"{check.shown(logits)}, whose last dim are the classes"
                f"{check.say(check.of_one_hot('target', target, logits.shape, -1))}"
            )
        check.mask(NAME, mask, "the rows", logits, rows)
        validate_index(NAME, ignore_index)
        validate_logits(NAME, temperature, softcap)
        check.same_device(NAME, "logits", logits, target=target, mask=mask)
        refuse_missing_class(NAME, target, mask, ignore_index, logits.shape[-1], "logits", logits.shape)

    def validate_operands(self, input, target, mask, ignore_index, temperature, softcap):
        logits = input.movedim(1, -1) if input.dim() > 2 else input
        self.validate(logits, target, mask, ignore_index, temperature, softcap or None)

    def gradients(self, grad, needs, operands, results):
        input, target, *rest = operands
        return (self.backward(grad, input, target, results.row_stats, *rest),)


class ArgmaxToo(TokenLogProbsOp):
    """The record of with_argmax=True: two more results, argmax and correct, without gradients. It has the function's
    name, so that its errors name the function; `_token_log_probs`, created after it, stays in the registry."""

    visible = 3
    saved = ("row_stats",)
    differentiated = staticmethod(define)


_argmax_too = ArgmaxToo(NAME, _forward_argmax, _backward, define_argmax)
_token_log_probs = TokenLogProbsOp(NAME, _forward, _backward, define)
_token_log_probs.parts = (_argmax_too,)

# ---- public function


_PUBLIC = (
    "(Tensor logits, Tensor target, *, Tensor? mask=None, int ignore_index=-100, float temperature=1.0, "
    "float? softcap=None{}) -> (Tensor log_prob, Tensor entropy, Tensor logsumexp{})"
)


@_token_log_probs.public(
    _PUBLIC.format("", ""),
    ".with_argmax" + _PUBLIC.format(", bool with_argmax", ", Tensor argmax, Tensor correct"),
    ".support"
    + _PUBLIC.format(', Tensor[] support, Tensor? support_threshold=None, str outside="-inf"', ", Tensor outside"),
    arguments=_support.ARGUMENTS,
)
def token_log_probs(
    logits, target, *extra, mask=None, ignore_index=-100, temperature=1.0, softcap=None, with_argmax=False,
    support=None, support_threshold=None, outside="-inf", **unknown,
):  # fmt: skip
    """log softmax(logits) at the class `target`, the entropy and the logsumexp of each row of logits.

        log_prob = x_y - L,   entropy = -sum_c p_c log p_c,   L = log sum_c exp x_c,   p_c = exp(x_c - L)

    The losses of PPO, GRPO and DPO are made of these three. Each is differentiable, alone and together.

    The forward reads the logits once, in any layout and dtype, and computes in fp32. The backward reads them once more
    and writes their gradient, the only allocation of their size.

    A class of -inf does not exist: its gradient is 0, and it adds nothing to the entropy. If the row's own logit alone
    is +inf, log_prob and entropy are 0, logsumexp is inf, and the gradient is 0, as in `cross_entropy`. Every other inf
    or NaN in a kept row gives NaN.

    Args:
        logits: (..., C) floating tensor.
        target: class indices in [0, C), int64, int32 or uint8, of shape (...).
        mask: bool tensor, broadcastable to the rows' shape (...); True = keep. A masked-out row is 0 in all three,
            whatever its logits hold, and its gradient is exactly 0.
        ignore_index: a row of this class is masked out.
        temperature: divides the logits, above 0.
        softcap: above 0: a logit x is read as softcap tanh(x / softcap), before the temperature. None: x as it is.
        with_argmax: if True, two more results from the same read: `argmax`, the first class of the largest logit, as
            `torch.argmax` (NaN is the largest), and `correct`, True where that is `target`. A masked-out row has argmax
            0 and is not correct: `correct.sum()` over the count of kept rows is the accuracy.
        {arguments}

    Returns:
        A named tuple (log_prob, entropy, logsumexp), each of shape (...): fp32 for fp16, bf16 and fp32 logits, fp64
        for fp64. With `with_argmax` (log_prob, entropy, logsumexp, argmax, correct), the last of int64 and bool. With
        `support` (log_prob, entropy, logsumexp, outside), over its classes; outside: how many kept rows have a target
        that is not in their support, an int64 number on the device.

    Raises:
        IndexError: on the CPU, a row that `mask` keeps has a class that does not exist and is not `ignore_index`; it is
            raised before anything is written (RuntimeError where the call is compiled). On other devices, and under
            torch.func's transforms, such a row is masked out.
        TypeError: an operand or option is of another type or dtype.
        ValueError: shapes do not fit, devices differ, a number out of range.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.0, torch.nan]])
        >>> safeops.token_log_probs(logits, torch.tensor([0, -100])).log_prob
        tensor([-0.2395,  0.0000])
        >>> kept, probable = torch.tensor([[1.0, 2.0, 0.0, 9.0]]), torch.tensor([[True, True, True, False]])
        >>> safeops.token_log_probs(kept, torch.tensor([1]), support=probable).log_prob
        tensor([-0.4076])
    """
    if extra or unknown:
        refuse(token_log_probs, extra, unknown)
    if support is not None or support_threshold is not None or outside != "-inf":
        support = support, support_threshold
        return _of_support(logits, target, mask, ignore_index, temperature, softcap, support, outside, with_argmax)
    arguments = logits, target, mask, ignore_index, temperature, softcap
    if with_argmax is False:
        return TokenLogProbs(*each(_token_log_probs.call(*arguments)))
    check.boolean_flag(NAME, "with_argmax", with_argmax)
    rows, argmax, correct = _argmax_too.call(*arguments)
    return TokenLogProbsAndArgmax(*each(rows), argmax, correct)


def _of_support(logits, target, mask, ignore_index, temperature, softcap, support, outside, with_argmax):
    _token_log_probs.validate(logits, target, mask, ignore_index, temperature, softcap)
    support = _support.validate(NAME, *support, logits.shape, logits=logits)
    _support.validate_outside(NAME, support, outside)
    if with_argmax:
        raise TypeError(f"{NAME}: with_argmax does not go with support")
    if isinstance(support, tuple):
        shape = as_operand(temperature, logits), as_operand(softcap or 0.0, logits)
        options = logits.shape[-1], target, mask, ignore_index, *shape
        rows, count = _entries.log_probs(NAME, support, outside, lambda entries: entries.gather(logits), *options)
    else:
        keep, count = _support.of_rows(NAME, support, outside, target, mask, ignore_index)
        rows = _token_log_probs.call(
            _support.restrict(logits, support), target, keep, ignore_index, temperature, softcap
        )
    return TokenLogProbsOfSupport(*each(rows), count)


def each(rows):
    # (not unbind: its results must not be written in place)
    return rows[0], rows[1], rows[2]
