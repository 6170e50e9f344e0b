"""shift_labels: for each token of a sequence the label of the next one, also across ranks that share the sequence."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from safeops.core import check
from safeops.core.group import all_gather, here, ranks_of
from safeops.distributed._agreement import agree, is_asked
from safeops.ops.classification._classification import INDICES, validate_index

NAME = "shift_labels"


@torch.no_grad()
def shift_labels(
    labels: torch.Tensor,
    group: Any = None,
    *,
    mesh: Any = None,
    dims: str | int | Sequence[str | int] | None = None,
    ignore_index: int = -100,
) -> torch.Tensor:
    """For each token the label of the token after it, where sequences are cut over ranks (context parallel).

        result_t = labels_(t + 1);   the last token of a sequence: ignore_index

    The next token of a rank's last one is the first of the rank after it. A shift within each rank loses it: a label
    for each rank and sequence. One all-gather of 8 bytes a sequence, and 8 more, brings the ranks' first labels; the
    host does not wait. (It is no single send, so that a rank without tokens is passed over, and that ranks which
    disagree do not wait for each other in pairs.)

    The ranks hold consecutive parts, in the order of their ranks in the group. Torch's `context_parallel` with its load
    balancing gives a rank parts from both ends of the sequence: there shift the whole labels first,
    `shift_labels(labels)` without a group, and cut the result as a buffer beside the others. In a row of several
    sequences (packed), the first label of each must be `ignore_index`, as with any shift.

    Args:
        labels: (..., T) class indices, int64, int32 or uint8: this rank's part of each sequence. T may differ between
            ranks, and be 0; the other dims are alike on all.
        group: the process group over which the sequences are cut, or a DeviceMesh. None, and no `mesh`: the sequences
            are whole.
        mesh: a DeviceMesh in place of `group`. dims: its dim, by name or number, along which the sequences are cut
            (several: cut over the dims together). None: all dims.
        ignore_index: the label of a last token.

    Returns:
        (..., T) int64 tensor, which holds every `ignore_index`.

    Raises:
        TypeError: labels are no tensor of class indices, or a DTensor (pass `to_local()`); `ignore_index` is no int.
        ValueError: labels without a dim, both `group` and `mesh`, `dims` that the mesh does not have, a group without
            this rank.
        RuntimeError: the all-gather fails: a rank is gone, or the group was destroyed. Under TORCH_DISTRIBUTED_DEBUG
            the ranks compare their calls first, and the host waits for that: it also raises if their numbers of
            sequences differ.

    Example:
        >>> safeops.distributed.shift_labels(torch.tensor([[5, 6, 7], [8, 9, -100]]))
        tensor([[   6,    7, -100],
                [   9, -100, -100]])
    """
    name = here(NAME)
    check.tensor(name, "labels", labels)
    check.no_dtensor(name, "labels", labels)
    if labels.dtype not in INDICES:
        raise TypeError(f"{name}: labels must be class indices, int64, int32 or uint8, got {labels.dtype}")
    if labels.dim() == 0:
        raise ValueError(f"{name}: labels must be (..., T), got shape ()")
    validate_index(name, ignore_index)
    is_cut = group is not None or mesh is not None
    group, size = ranks_of(name, group, mesh, dims) if is_cut or dims is not None else (None, 1)
    labels = labels.long()
    if size == 1:
        return pad(labels, (0, 1), value=ignore_index)[..., 1:]
    if is_asked():
        agree(NAME, [group], {"labels": labels[..., :0], "ignore_index": ignore_index})
    after = _first_label_after(name, labels, group, size, ignore_index)
    return torch.cat([labels, after.unsqueeze(-1)], -1)[..., 1:] if labels.shape[-1] else labels


def _first_label_after(name, labels, group, size, ignore_index):
    """The first label of each sequence on the next rank that has tokens, (...); ignore_index if there is none."""
    tokens = labels.shape[-1]
    first = labels[..., 0] if tokens else labels.new_zeros(labels.shape[:-1])
    message = torch.cat([first.reshape(-1), labels.new_full((1,), min(tokens, 1))])
    gathered = message.new_empty(size * len(message))
    try:
        rank = dist.get_rank(group)
        all_gather(gathered, message, group=group)
    except (RuntimeError, ValueError) as error:
        raise RuntimeError(f"{name}: the all-gather among {size} ranks failed: {error}") from error
    later = gathered.view(size, -1)[rank + 1 :]  # (the ranks after this one, sequences + 1)
    if not len(later):
        return torch.full_like(first, ignore_index)
    has_tokens = later[:, -1] > 0
    row = later.index_select(0, has_tokens.int().argmax().reshape(1))[0, :-1]
    return torch.where(has_tokens.any(), row, ignore_index).view(first.shape)
