"""ctc_loss: torch's connectionist temporal classification, in fp32, with a gradient that is never NaN."""

import torch
import torch.nn.functional as F

from safeops.core import check, loss_reduction
from safeops.core.composed_loss import finish, validate
from safeops.core.definitions import kept
from safeops.core.dtypes import compute_dtype
from safeops.core.foreign import refuse, sign
from safeops.core.matmul import without_autocast
from safeops.ops.classification._classification import refuse_missing_class

NAME = "ctc_loss"
FLOOR = -1e30  # replaces a log-probability of -inf, for which torch's gradient is NaN

# ---- definition


def losses(log_probs, labels, input_lengths, target_lengths, keep, blank):
    """The loss (N,) of each sequence, inf where no alignment gives its labels. log_probs: (T, N, C), in the compute
    dtype; labels: (N, S)."""
    frames = torch.arange(len(log_probs), device=log_probs.device).unsqueeze(-1)
    exists = frames < input_lengths.to(log_probs.device)  # (T, N)
    exists = exists if keep is None else exists & keep
    x = torch.where(exists.unsqueeze(-1), log_probs, 0)  # select before arithmetic: NaN * 0 is NaN
    x = torch.where(x == -torch.inf, FLOOR, x)
    with without_autocast(x):
        # (zero_infinity: for labels that do not fit their frames, the gradient is 0)
        loss = F.ctc_loss(x, labels, input_lengths, target_lengths, blank, "none", zero_infinity=True)
    # Each label needs a frame, and two equal neighbors a blank frame between them.
    equal = (labels[:, 1:] == labels[:, :-1]) & listed(labels, target_lengths)[:, 1:]
    needed = target_lengths.to(x.device) + equal.sum(-1).to(x.device)
    return torch.where((loss > -FLOOR / 100) | (needed > input_lengths.to(x.device)), torch.inf, loss)


def listed(labels, lengths):
    """Bool (N, S): True where a label belongs to its sequence (not to the padding)."""
    return torch.arange(labels.shape[-1], device=labels.device) < lengths.to(labels.device).unsqueeze(-1)


def padded(targets, lengths):
    """Concatenated labels (sum(lengths),) as a table (N, S). Entries after a sequence's length are arbitrary labels."""
    lengths = lengths.to(targets.device)
    place = torch.arange(max(len(targets), 1), device=targets.device) + (lengths.cumsum(0) - lengths).unsqueeze(-1)
    targets = targets if len(targets) else targets.new_zeros(1)
    return targets[place.clamp(max=len(targets) - 1)]


# ---- checks


def validate_options(reduction, empty, blank, zero_infinity):
    loss_reduction.validate_options(NAME, reduction, empty)
    if isinstance(blank, bool) or not isinstance(blank, int):
        raise TypeError(f"{NAME}: blank must be an int, got {type(blank).__name__}")
    check.boolean_flag(NAME, "zero_infinity", zero_infinity)


def _lengths(key, x, batch, largest, of):
    """Lengths as an int64 tensor. Their range is checked on the CPU alone, where nothing waits for a device."""
    x = x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=torch.int64)
    if x.is_floating_point() or x.dtype == torch.bool:
        raise TypeError(f"{NAME}: {key} must be integers, got {x.dtype}")
    if x.shape != batch:
        raise ValueError(f"{NAME}: {key} {check.shown(x)} must be {tuple(batch)}, one a sequence")
    if type(x) is torch.Tensor and x.device.type == "cpu" and x.numel() and not torch.compiler.is_compiling():
        least, most = int(x.min()), int(x.max())
        if least < 0 or most > largest:
            raise ValueError(f"{NAME}: {key} must be from 0 to {largest}, {of}, got {least if least < 0 else most}")
    return x.long()


# ---- public function


@sign
def ctc_loss(
    log_probs, targets, input_lengths, target_lengths, blank=0, reduction="mean", zero_infinity=False, *extra,
    mask=None, weight=None, denominator=None, empty="zero", **unknown,
):  # fmt: skip
    """-log of the probability of a sequence's labels, a sum over all their alignments with its frames.

    `torch.nn.functional.ctc_loss` in fp32, under autocast too. As in torch, "mean" first divides each loss by its
    number of labels (at least 1). Graves et al., "Connectionist Temporal Classification", 2006.

    In torch, a sequence without an alignment (too few frames) or a log-probability of -inf makes the gradient NaN. Here
    a loss of inf has gradient 0, as with `zero_infinity`, and a class of -inf gets no gradient. Frames behind a
    sequence's last frame do not exist.

    As in torch, the gradient is that of the logits before the log_softmax, there is no second derivative, and the call
    is not compiled whole. On CUDA the gradient is not bitwise repeatable, and the host waits for the lengths.

    Args:
        log_probs: floating tensor (T, N, C), or (T, C) for one sequence: the outputs of log_softmax.
        targets: integers (N, S), padded; or all labels, one sequence after the other: (sum(target_lengths),).
        input_lengths: integers (N,), or () for one sequence: its number of frames, at most T. A tensor or ints.
        target_lengths: integers (N,), or () for one sequence: its number of labels. A tensor or ints.
        blank: the class that is no label.
        reduction: "mean" divides by the count of kept sequences (by the sum of weights, with weights), "sum", or
            "none".
        zero_infinity: if True, a loss of inf becomes 0.
        mask: bool tensor (N,), True = keep. A sequence that is masked out does not exist: NaN or garbage there changes
            neither the loss nor a gradient, and its own gradient is exactly 0.
        weight: floating tensor (N,); 0 means the same as masked out. Differentiable.
        denominator: number or 0-dim tensor that the mean divides by instead.
        empty: value of a mean or sum with nothing kept: "zero", "nan", or "raise".

    Returns:
        fp32 for fp16, bf16 and fp32 input, fp64 for fp64: 0-dim, or (N,) for "none".

    Raises:
        TypeError: `log_probs` is not floating, labels or lengths are not integers, an option is of another type.
        ValueError: shapes do not fit, unknown `reduction` or `empty`; on the CPU, a length out of range.
        IndexError: on the CPU, a label of a kept sequence is none of the C classes. On CUDA, such a sequence is masked
            out.

    Example:
        >>> log_probs = torch.zeros(3, 2, 2).log_softmax(-1).requires_grad_()
        >>> safeops.ctc_loss(log_probs, torch.tensor([[1], [1]]), (3, 0), (1, 1), reduction="none").detach()
        tensor([0.2877,    inf])
    """
    if extra or unknown:
        refuse(ctc_loss, extra, unknown)
    check.floating(NAME, "log_probs", log_probs)
    check.tensor(NAME, "targets", targets)
    if log_probs.dim() not in (2, 3):
        raise ValueError(f"{NAME}: log_probs must be (T, N, C) or (T, C), got {check.shown(log_probs)}")
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise TypeError(f"{NAME}: targets must be integers, got {targets.dtype}")
    validate_options(reduction, empty, blank, zero_infinity)
    batch, classes = log_probs.shape[1:-1], log_probs.shape[-1]
    if not 0 <= blank < classes:
        raise ValueError(f"{NAME}: blank must be one of the {classes} classes of log_probs, got {blank}")
    if targets.dim() not in (1, 2) or targets.dim() == 2 and (not batch or targets.shape[:1] != batch):
        kinds = f"(N, S) or (sum(target_lengths),), N = {batch[0]} of log_probs (T, N, C)" if batch else "(S,)"
        raise ValueError(f"{NAME}: targets {check.shown(targets)} must be {kinds}")
    validate(NAME, batch, mask, weight, reduction, denominator, empty, log_probs=log_probs)
    frames = _lengths("input_lengths", input_lengths, batch, len(log_probs), "the frames")
    labels = _lengths("target_lengths", target_lengths, batch, targets.shape[-1], "the labels")
    keep = kept(mask, weight)
    keep = keep if keep is None else keep.expand(batch)
    x = log_probs.to(compute_dtype(log_probs.dtype))
    if not x.numel() or not batch.numel():
        loss = torch.where(labels.to(x.device) > 0, torch.inf, x.sum((0, -1)))
    else:
        frames, each = frames.reshape(-1), labels.reshape(-1)
        table = targets if targets.dim() == 2 else padded(targets, each)
        used = listed(table, each)
        used = used if keep is None else used & keep.reshape(-1, 1).to(used.device)
        refuse_missing_class(NAME, table, used, None, classes, "log_probs", log_probs.shape, key="targets")
        inside = check.in_range(table, classes, used)  # else torch would read beyond the classes
        exists = (inside | ~used).all(-1).to(x.device).reshape(batch)
        keep = exists if keep is None else keep & exists
        loss = losses(
            x if batch else x.unsqueeze(1),
            torch.where(used & inside, table, 0).long(),
            frames,
            each,
            keep.reshape(-1),
            blank,
        ).reshape(batch)
    if zero_infinity:
        loss = torch.where(loss == torch.inf, 0, loss)
    if reduction == "mean":
        loss = loss / labels.to(loss.device).clamp(min=1)
    return finish(NAME, loss, keep, weight, reduction, denominator, empty)
