"""global_count: how many elements are kept on all ranks and in all micro-batches together."""

from collections.abc import Sequence
from typing import Any

import torch

from safeops.core import check, sums
from safeops.core.group import here, ranks_of
from safeops.core.private_torch import start_all_reduce
from safeops.distributed._agreement import agree, is_asked


@torch.no_grad()
def global_count(
    masks: torch.Tensor | Sequence[torch.Tensor],
    *,
    weight: torch.Tensor | Sequence[torch.Tensor] | None = None,
    group: Any = None,
    mesh: Any = None,
    dims: str | int | Sequence[str | int] | None = None,
    averaged: bool = True,
) -> torch.Tensor:
    """The number of kept elements on all ranks and in all micro-batches of a step: the `denominator` of their losses.

    A mean over a rank's own elements, averaged over the ranks by DDP or FSDP, gives an element more weight on a rank
    that keeps fewer. With this denominator the gradients are those of one process with the whole batch, whatever each
    rank and micro-batch keeps. One all-reduce of 8 bytes starts here and is waited for at the first use of the result:
    called before the forward pass, it overlaps with it. The host does not wait (with gloo, it waits at that first use).

    Args:
        masks: bool tensor, True = keep, in the shape of the losses (expand one that only broadcasts to them), or a list
            of them, one a micro-batch. A rank that keeps nothing calls too, and adds 0.
        weight: floating tensor, or a list of them, as `masks`: the sum of the kept weights in place of the count, for
            losses that take this weight and divide by its sum (not `binary_cross_entropy` and `huber_loss`, whose
            means divide by the count: leave it out). It must broadcast with its mask, and gets no gradient.
        group: the process group whose ranks hold different data. None: all ranks; this process alone if there is no
            process group.
        mesh: a DeviceMesh in place of `group`. dims: its dims, by name or number, along which the data differ: data
            parallel, and context parallel, where each rank holds a part of a sample. Along the other dims (tensor
            parallel) ranks hold copies, which count once. None: all dims.
        averaged: divide by the number of these ranks, because DDP and FSDP divide the gradients by it. False if the
            gradients are summed over the ranks, or for the plain count.

    Returns:
        A 0-dim fp64 tensor on the masks' device; with several ranks, one that is waited for at its first use (print its
        `.item()`). Counts are exact up to 2^53; divided by a number of ranks that is a power of two, they stay exact.

    Raises:
        TypeError: a mask is no bool tensor, a weight not floating, or one of them a DTensor (pass `to_local()`).
        ValueError: no mask, more or fewer weights than masks, shapes or devices that differ, both `group` and `mesh`,
            `dims` that the mesh does not have, a group without this rank.
        RuntimeError: the all-reduce fails: a rank is gone, or the group was destroyed. If a rank does not call, the
            others wait until the group's timeout. Under TORCH_DISTRIBUTED_DEBUG the ranks compare their calls, and the
            host waits for that: it also raises if a rank calls something else.

    Example:
        >>> micro_batches = [torch.tensor([True, True, False]), torch.tensor([True, False, False])]
        >>> safeops.distributed.global_count(micro_batches)  # here of one process
        tensor(3., dtype=torch.float64)
    """
    name = here("global_count")
    masks, weights = _pairs(name, masks, weight)
    group, size = ranks_of(name, group, mesh, dims)
    check.boolean_flag(name, "averaged", averaged)
    if size > 1 and is_asked():
        agree("global_count", [group], {"averaged": averaged, "weight": weight is not None})
    total = torch.stack([_count(mask, w) for mask, w in zip(masks, weights)]).sum()
    if averaged:
        total = total / size  # (before the all-reduce: a division after it would wait for it)
    if size == 1:
        return total
    try:
        return start_all_reduce(total, group)
    except (RuntimeError, ValueError) as error:
        raise RuntimeError(f"{name}: the all-reduce among {size} ranks failed: {error}") from error


def _pairs(name, masks, weight):
    """Returns (list of masks, list of weights or Nones), one of each for a micro-batch."""
    masks = list(masks) if isinstance(masks, (tuple, list)) else [masks]
    weights = list(weight) if isinstance(weight, (tuple, list)) else [weight]
    if weight is None:
        weights *= len(masks)
    if len(weights) != len(masks):
        raise ValueError(f"{name}: weight has {len(weights)} tensors for {len(masks)} masks")
    if not masks:
        raise ValueError(f"{name}: masks is empty: pass torch.zeros(0, dtype=torch.bool) on the device of the others")
    for i, (mask, w) in enumerate(zip(masks, weights)):
        of, weight_of = (f"masks[{i}]", f"weight[{i}]") if len(masks) > 1 else ("masks", "weight")
        check.boolean(name, of, mask, "True = keep")
        check.no_dtensor(name, of, mask)
        check.same_device(name, "masks[0]", masks[0], **{of: mask, weight_of: w})
        if w is not None:
            check.floating(name, weight_of, w)
            check.no_dtensor(name, weight_of, w)
            check.broadcast(name, **{of: mask, weight_of: w})
    return masks, weights


def _count(mask, weight):
    if weight is None:
        return mask.sum().double()
    mask, weight = torch.broadcast_tensors(mask, weight.detach())
    return sums.total(weight, mask, dtype=torch.float64)
