"""Shared by the family: the experts that each token chose, how many tokens chose each, and what the router gave it."""

import torch

from safeops.core import check, sums
from safeops.core.composed_loss import vectors
from safeops.core.definitions import softplus
from safeops.core.dtypes import compute_dtype
from safeops.core.group import here, ranks_of
from safeops.core.loss_reduction import wait_for
from safeops.core.private_torch import start_all_reduce
from safeops.ops.classification.masked_softmax import _masked_softmax, masked_softmax

SCORES = ("softmax", "sigmoid", "probabilities")
INDICES = (torch.int64, torch.int32)
PARTS = _masked_softmax, *sums.ALL


def validate(name, logits, scores="softmax"):
    """Check a router's logits (..., E). Returns the shape of the tokens."""
    check.choice(name, "scores", scores, SCORES)
    return vectors(name, logits=logits)


def validate_choice(name, logits, expert_index, top_k):
    """Check that one of expert_index (..., K) and top_k says which experts the tokens of `logits` chose."""
    if (expert_index is None) == (top_k is None):
        both = "" if top_k is None else ", not both"
        raise ValueError(f"{name}: give top_k or expert_index{both}")
    if expert_index is None:
        validate_top_k(name, top_k)
        if top_k > logits.shape[-1]:
            raise ValueError(f"{name}: top_k {top_k} is more than the experts of logits {check.shown(logits)}")
        return
    check.tensor(name, "expert_index", expert_index)
    if expert_index.dtype not in INDICES:
        raise TypeError(f"{name}: expert_index must be int64 or int32, got {expert_index.dtype}")
    if expert_index.dim() != logits.dim() or expert_index.shape[:-1] != logits.shape[:-1]:
        raise ValueError(
            f"{name}: expert_index {check.shown(expert_index)} must be (..., K) for the tokens of logits "
            f"{check.shown(logits)}"
        )


def validate_top_k(name, top_k):
    if not isinstance(top_k, int) or isinstance(top_k, bool):
        raise TypeError(f"{name}: top_k must be an integer, got {check.shown_value(name, top_k)}")
    check.number(name, "top_k", top_k, minimum=1)


def chosen(logits, expert_index, top_k):
    """Bool (..., E): True for the experts that a token chose. An index out of range is no expert.

    The largest are chosen among the logits, as routers do: two probabilities can be equal where the logits differ."""
    experts = logits.shape[-1]
    if expert_index is None:
        expert_index = logits.detach().topk(top_k, -1, sorted=False).indices
    index = torch.where((expert_index >= 0) & (expert_index < experts), expert_index, experts).long()
    # (a column for indices out of range; bools are set, not added up, so that no order matters)
    none = torch.zeros_like(logits[..., :1], dtype=torch.bool).expand(*logits.shape[:-1], experts + 1)
    return none.scatter(-1, index, True)[..., :experts]


def probabilities(logits, keep, scores):
    """(..., E), fp32 or fp64: the share that the router gives each expert; 0 for masked-out tokens."""
    x = logits.to(compute_dtype(logits.dtype))
    each = None if keep is None else keep.unsqueeze(-1)
    if scores == "probabilities":
        return x if each is None else torch.where(each, x, 0)
    if scores == "sigmoid":
        if each is not None:
            x = torch.where(each, x, 0)
        x = -softplus(-x)  # s / sum(s) = softmax(log s): right where all s underflow
    return masked_softmax(x, each)


def over_ranks(name, x, logits, group):
    """The sum of x over the ranks of a group (None: all). The counts of DTensors are those of their mesh already."""
    if group is not None:
        check.no_dtensor(name, "logits", logits)  # (a group and a mesh may differ)
    elif check.mesh(logits) is not None:
        return x
    group, size = ranks_of(name, group, None, None)
    if size == 1:
        return x
    try:
        return wait_for(start_all_reduce(x, group))
    except (RuntimeError, ValueError) as error:
        raise RuntimeError(f"{here(name)}: the all-reduce among {size} ranks failed: {error}") from error


# The lines on the choice of experts in docstrings of the family.
CHOICE = """\
        logits: floating tensor (..., E): a number for each of E experts, of each token.
        expert_index: int64 or int32 tensor (..., K), the experts that each token chose: of a router that chooses with
            a bias (DeepSeek-V3's), among groups, or with noise. An index out of range, such as -1 of a choice that was
            dropped, counts for no expert.
        top_k: in place of `expert_index`: the K experts with the largest logits, from 1 to E.
        scores: how a token's shares p of the experts follow from its logits x. "softmax"; "sigmoid":
            sigmoid(x) / sum_j sigmoid(x_j), as DeepSeek-V3's; "probabilities": `logits` are shares already, p = x.
"""
