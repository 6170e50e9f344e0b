"""head_loss: a loss of the logits that any module or function makes of hidden states, in chunks of the rows."""

from collections.abc import Callable, Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from safeops.core import check as checks
from safeops.core.private_torch import MODULE_HOOKS, has_global_hooks
from safeops.core.route import PLAIN
from safeops.head import _chunks, _depths
from safeops.head._colwise import is_colwise, over_ranks, refusing_parts
from safeops.head._depths import DepthLosses
from safeops.head._loss import NAME
from safeops.head._losses import LOSSES
from safeops.head._once import once
from safeops.head._rows import whole
from safeops.head._rows_apart import refuse_mixed_rows
from safeops.ops.classification.token_log_probs import TokenLogProbs
from safeops.ops.linear._layer import validate_layer

Head = torch.nn.Module | Callable[[Tensor], Tensor]
Option = Tensor | float | str | bool | torch.dtype | Head | None


@overload
def head_loss(
    head: Head,
    hidden: Tensor,
    target: Tensor | None = None,
    *,
    loss: Literal["cross_entropy", "kl_div", "reverse_kl_div", "js_div", "tv"] = "cross_entropy",
    check: bool = False,
    **options: Option,
) -> Tensor: ...


@overload
def head_loss(
    head: Head,
    hidden: Tensor,
    target: Tensor,
    *,
    loss: Literal["token_log_probs"],
    check: bool = False,
    **options: Option,
) -> TokenLogProbs: ...


@overload
def head_loss(
    head: Head,
    hidden: Sequence[Tensor],
    target: Sequence[Tensor | None] | None = None,
    *,
    loss: Literal["cross_entropy", "kl_div", "reverse_kl_div", "js_div", "tv"] = "cross_entropy",
    check: bool = False,
    depth_weight: Tensor | Sequence[float] | None = None,
    **options: Option | Sequence[Option],
) -> DepthLosses: ...


def head_loss(
    head: Head,
    hidden: Tensor | Sequence[Tensor],
    target: Tensor | Sequence[Tensor | None] | None = None,
    *,
    loss: str = "cross_entropy",
    check: bool = False,
    depth_weight: Tensor | Sequence[float] | None = None,
    **options: Option | Sequence[Option],
) -> Tensor | TokenLogProbs | DepthLosses:
    """A loss of the logits head(hidden), whose logits exist for some rows at a time.

    A plain `nn.Linear` is computed by `linear_cross_entropy`, `linear_token_log_probs`, `linear_kl_div` and their kin,
    tied or not, with a bias, frozen, of any dtype, or with a DTensor as weight. Any other head runs on chunks of rows,
    in its own forward and backward: with adapters, quantised weights, parametrizations, a scale or a cap of the logits,
    hooks, or compiled. It has values and gradients as head(hidden) and the loss of logits would have, to the rounding
    of the head's dtype.

    A chunk has a sixteenth of the rows, and at least 256 (1,024 on a GPU). Of the head's results two chunks exist,
    logits and slopes, beside what the head itself makes of a chunk. The gradients of a mean or sum are computed with
    the loss. Where each row has an upstream gradient of its own ("none", `token_log_probs`), where an option wants a
    gradient, and in fp16, backward runs the head again, under the same autocast and with the same random numbers.
    Gradients of what the chunks share, parameters and tensors in a function's closure, are summed in fp32, and rounded
    once: for half that is a buffer of twice their size. Hooks of parameters get the sum.

    Parameters of a head of `fully_shard` or DDP are gathered once a call, and their gradients are reduced once.

    An `nn.Linear` under torch's `ColwiseParallel` is computed by the functions of a linear layer, too, and its logits
    stay where they are, whatever `output_layouts` and `use_local_output` say. A plain `hidden` lies as its
    `input_layouts` say: all rows on each rank, or under sequence parallel (`Shard(1)`) a rank's tokens. The plain
    `target` and other operands are those of all rows, alike on all ranks, and so is the result. If `hidden` is a
    DTensor, so is the result. (Under `torch.compile` the head is called, and leaves the logits as it was told.)

    With a list or tuple of hidden states, one a depth (multi-token prediction), the loss is sum_d w_d loss_d. Each
    depth has its own target, and by default divides by its own count. The rows of all depths, in a copy, are cut into
    chunks together: also of a plain layer, which then has one fp32 sum of its gradients. The depths are computed one by
    one where all logits would exist at once (see below), where classes are sharded, where an option is not for chunks,
    or where its gradient is wanted.

    What is not as in head(hidden):

    The head is called with (rows, D), several times, and again if backward recomputes: a forward hook, a counter and an
    observer of values see each call.

    Random numbers are drawn chunk by chunk. A head with one dropout sees those of the whole on a CPU, but not where
    torch's CPU generator is MKL's (on Intel's), and not on a GPU. More than one dropout sees others.

    A row that is masked out reaches the head as a copy of one that is not.

    All logits exist at once under `torch.compile`, `torch.export`, torch.func's transforms, forward-mode AD and
    `parametrize.cached()`, for subclasses of Tensor, for second derivatives, and where a function's closure has both
    a parameter and a tensor that was computed from it.

    Args:
        head: a module or a function: hidden states (rows, D) -> logits (rows, C). It must not mix rows.
        hidden: (..., D) floating tensor, a vector for each row; or a list or tuple of them, of one dtype and width D.
        target: as the loss takes it, for rows (...): class indices (...), or probabilities (..., C), for
            "cross_entropy"; class indices (...) for "token_log_probs"; the teacher's logits (..., C) for divergences,
            or its hidden states (..., E) with `target_weight` and `target_bias`, or with `target_head`; None with
            `target_values` and `target_indices`.
        loss: "cross_entropy", "token_log_probs", "kl_div", "reverse_kl_div", "js_div" or "tv".
        check: if True, the first and the last row are run together and apart before all else, and a head that mixes
            rows is refused, such as one with a BatchNorm in training. (Dropout is left out; the host waits.)
        depth_weight: the weight of each depth's loss: numbers from 0, or a tensor (depths,), differentiable. None: 1
            each. A depth of weight 0 is masked out. A weight below 0 raises ValueError (of a tensor, on the CPU).
        options: those of `cross_entropy`, `token_log_probs`, `kl_div_with_logits` and its kin, by name, and of the
            function of a linear layer where the head is a plain `nn.Linear`: mask, reduction, denominator, empty,
            temperature, ... Divergences take `target_head`, a module or function that makes the teacher's logits,
            without gradients for the teacher. A head in chunks takes a `support` that is bool, or floating with
            `support_threshold`. For several depths, mask, weight, row_weight, denominator, target_values and
            target_indices may be lists or tuples of one a depth, as target is (denominator also a tensor of one a
            depth); all else is for all of them.

    Returns:
        What the loss returns: fp32, or fp64 for fp64 logits; 0-dim, or of the rows' shape for reduction="none". A
        named tuple (log_prob, entropy, logsumexp) for "token_log_probs", with `with_argmax` of five. With `support`,
        `outside` beside the loss, or last of the tuple. For several depths a named tuple (loss, depth_losses): the
        losses (depths,) before they are weighed, on the device and detached; 0 for a depth of weight 0, which is not
        computed.

    Raises:
        IndexError: on the CPU, a row that counts has a class that the head's logits do not have.
        RuntimeError: a second derivative is wanted where `hidden` was computed from the head's parameters.
        TypeError: an argument is of another type or dtype, an option does not exist, the head returns no tensor.
        ValueError: shapes do not fit, devices differ, `loss` or a choice is unknown, a number is out of range, the head
            returns other shapes than (rows, C), or mixes rows.

    Example:
        >>> weight, scale = torch.eye(3, 2), torch.tensor(0.5)
        >>> hidden, target = torch.tensor([[2.0, 0.0], [0.0, torch.nan]]), torch.tensor([0, -100])
        >>> safeops.head_loss(lambda hidden: torch.tanh(hidden @ weight.T) * scale, hidden, target)
        tensor(0.8043)
        >>> depths, targets = [hidden, hidden[:1]], [target, torch.tensor([1])]
        >>> safeops.head_loss(torch.nn.Identity(), depths, targets, depth_weight=[1.0, 0.3]).depth_losses
        tensor([0.1269, 2.1269])
    """
    if not callable(head):
        raise TypeError(f"{NAME}: head must be a module or a function hidden -> logits, got {type(head).__name__}")
    checks.choice(NAME, "loss", loss, LOSSES)
    checks.boolean_flag(NAME, "check", check)
    if isinstance(hidden, (list, tuple)):
        return _of_depths(head, hidden, target, loss, check, depth_weight, options)
    if depth_weight is not None:
        raise TypeError(f"{NAME}: depth_weight needs a list or tuple of hidden states, one a depth")
    checks.floating(NAME, "hidden", hidden)
    if hidden.dim() == 0:
        raise ValueError(f"{NAME}: hidden must be (..., D), got shape ()")
    if is_colwise(head):

        def of_layer(layer, hidden, target, options):
            return head_loss(layer, hidden, target, loss=loss, check=check, **options)

        return over_ranks(head, hidden, target, options, of_layer)
    record = LOSSES[loss](loss, hidden, target, options)
    if is_layer(head) and record.fits_layer():
        validate_layer(NAME, hidden, head.weight, head.bias, ("hidden", "head.weight", "head.bias"))
        record.validate_classes(len(head.weight))
        return record.on_layer(head.weight, head.bias)
    record.refuse_unread(head)
    record.flatten()
    x = hidden.reshape(record.shape.numel(), hidden.shape[-1])
    if not _chunks.takes(x):
        return record.shown(record.finish(*whole(refusing_parts(head, head), record, x, {})))
    return in_chunks(head, x, record, check)


def _of_depths(head, hidden, target, loss, check, depth_weight, options):
    calls, weights = _depths.split(loss, hidden, target, depth_weight, options)
    if not is_colwise(head):  # (else hidden may be a rank's own tokens, and the targets those of all)
        records = _depths.each(lambda *call: LOSSES[loss](loss, *call), calls)
        if in_one_pass(head, hidden, records):
            record = _depths.Depths(records, weights)
            return in_chunks(head, torch.cat([x.reshape(-1, x.shape[-1]) for x in hidden]), record, check)
    losses = _depths.each(lambda x, y, own: head_loss(head, x, y, loss=loss, check=check, **own), calls)
    return _depths.shown(losses, _depths.total(losses, weights))


def in_one_pass(head, hidden, records):
    """True if the rows of all depths can be cut into chunks together. Else the depths are computed one by one."""
    if not all(map(_chunks.takes, hidden)):
        return False
    if is_layer(head):  # (it runs as any other head, but where only the function of a linear layer takes the call)
        of_chunks = all(record.given.keys() <= {*record.in_chunks} for record in records)
        if checks.mesh(head.weight) is not None or not of_chunks:
            return False
    return not any(record.tensors() for record in records)  # (gradients of operands that are cut with the rows)


def in_chunks(head, x, record, check):
    is_reduced = False

    def run(call, x):
        nonlocal is_reduced
        call = refusing_parts(head, call)
        if check:
            refuse_mixed_rows(head, call, x, record.keep)
        results, is_reduced = _chunks.Chunks(call, record, x).run(x)
        return results

    results = once(head, x, run)
    return record.shown(results[0] if is_reduced else record.finish(*results))


def is_layer(head):
    """True for an nn.Linear that is nothing else: without hooks, parametrizations or a weight of another kind."""
    if type(head) is not torch.nn.Linear or "forward" in head.__dict__:
        return False
    weights = [x for x in (head.weight, head.bias) if x is not None]
    plain = all(type(x) in PLAIN or checks.mesh(x) is not None for x in weights)
    return plain and not any(getattr(head, name) for name in MODULE_HOOKS) and not has_global_hooks()
