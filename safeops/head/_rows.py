"""Rows of hidden states as a head gets them, and what it may return for them."""

import torch

from safeops.core import check
from safeops.head._loss import NAME


def validated(logits, x):
    """Check what a head returned for the rows x."""
    if not isinstance(logits, torch.Tensor):
        remedy = ": say lambda hidden: head(hidden).logits" if hasattr(logits, "logits") else ""
        raise TypeError(f"{NAME}: head must return a tensor of logits, got {type(logits).__name__}{remedy}")
    if logits.dim() != 2 or len(logits) != len(x):
        raise ValueError(
            f"{NAME}: head must return logits (rows, classes) for hidden's rows {check.shown(x)}, got "
            f"{check.shown(logits)}"
        )
    check.floating(NAME, "the head's result", logits)
    if check.mesh(logits) is not None and check.mesh(x) is None:
        raise TypeError(
            f"{NAME}: head returns a DTensor of logits {check.shown(logits)} for plain hidden states: make hidden and "
            "the other operands DTensors, or gather the logits by ColwiseParallel(output_layouts=Replicate())"
        )
    if check.mesh(x) is not None and check.mesh(logits) is None:
        raise TypeError(
            f"{NAME}: head returns plain logits {check.shown(logits)} for a DTensor of hidden states {check.shown(x)}: "
            "say use_local_output=False of its last layer"
        )
    return logits


def select(keep, hidden, part=slice(None)):
    """Rows of hidden. One that is not kept becomes a copy of one that is: no NaN reaches a gradient of the head, and a
    head that divides by the norm of a row meets no row of zeros."""
    if keep is None or not len(keep):
        return hidden[part]
    first = hidden.detach().index_select(0, keep.int().argmax().reshape(1))
    if hidden.shape[1]:
        if check.mesh(hidden) is None:
            ordinary = torch.linspace(0.5, 1.5, hidden.shape[1], dtype=hidden.dtype, device=hidden.device)
        else:  # (made from a DTensor, it is one)
            ordinary = torch.ones_like(first).cumsum(1) / hidden.shape[1] + 0.5
        first = torch.where(keep.any(), first, ordinary)  # (nothing is kept: no row is known to be fit)
    return torch.where(keep[part].unsqueeze(1), hidden[part], first)


def whole(call, loss, hidden, operands):
    """The results of all rows at once, in the head's own graph."""
    x = select(loss.keep, hidden)
    logits = validated(call(x), x)
    loss.begin(logits)
    return loss.rows(logits, slice(None), operands)
