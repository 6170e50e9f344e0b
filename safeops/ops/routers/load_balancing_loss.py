"""load_balancing_loss: keeps a router from sending all tokens to a few experts."""

import torch

from safeops.core import check, loss_reduction, sums
from safeops.core.composed_loss import ARGUMENTS, finish, validate
from safeops.core.foreign import refuse
from safeops.core.op import Composed
from safeops.ops.routers import _experts

NAME = "load_balancing_loss"
LEVELS = ("batch", "sequence", "global")

# ---- definition


def define(shares, load, keep, by_sequence):
    """E sum_i f_i p_i of each token, f_i = load_i / sum(load); with `by_sequence` the mean of each sequence.

    shares: (..., E), p. load: (E,), or (..., 1, E) by sequence: how many tokens chose each expert. No gradient passes
    through it."""
    total = load.sum(-1, keepdim=True)
    f = torch.where(total > 0, load / torch.where(total > 0, total, 1).double(), 0)
    # (E f = 1 at perfect balance, where the loss is 1 and its gradient 0)
    tokens = sums.total(shares * (shares.shape[-1] * f).to(shares.dtype), dim=-1)
    return sums.mean(tokens, keep, -1) if by_sequence else tokens


# ---- record


def _validate_options(name, reduction, empty, top_k, scores, level, group):
    loss_reduction.validate_options(name, reduction, empty)
    if top_k is not None:
        _experts.validate_top_k(name, top_k)
    check.choice(name, "scores", scores, _experts.SCORES)
    check.choice(name, "level", level, LEVELS)
    if group is not None and level != "global":
        raise ValueError(f'{name}: group goes with level="global", got {level!r}')


_load_balancing_loss = Composed(
    NAME,
    *_experts.PARTS,
    module="LoadBalancingLoss",
    example="torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([[0], [1]])",
    validate_options=_validate_options,
)
_load_balancing_loss.levels = LEVELS  # (what type_stubs.py writes as the type of `level`)


def _validate_load(load, logits, level):
    if load is None:
        return
    check.real(NAME, "load", load)
    if load.shape != logits.shape[-1:]:
        raise ValueError(
            f"{NAME}: load {check.shown(load)} must have a number for each expert of logits {check.shown(logits)}"
        )
    if level != "batch":
        raise ValueError(f'{NAME}: load goes with level="batch", got {level!r}')


# ---- public function

_ARGUMENTS = _experts.CHOICE + ARGUMENTS[ARGUMENTS.index("        denominator:") :]  # (it has no `weight`)


@_load_balancing_loss.public(
    '(Tensor logits, Tensor? expert_index=None, *, int? top_k=None, str scores="softmax", str level="batch", '
    'Tensor? load=None, Tensor? mask=None, str reduction="mean", Tensor? denominator=None, str empty="zero") -> Tensor',
    arguments=_ARGUMENTS,
)
def load_balancing_loss(
    logits, expert_index=None, *extra, top_k=None, scores="softmax", level="batch", load=None, group=None, mask=None,
    reduction="mean", denominator=None, empty="zero", **unknown,
):  # fmt: skip
    """E sum_i f_i P_i, f_i expert i's part of all choices, P_i the mean of the shares p_i that the router gives it.

    1 at perfect balance. Fedus et al., "Switch Transformers", 2021, for top_k=1. GShard's (Lepikhin et al., 2020) is
    that of the first choice, top_k=1, divided by E^2. For more choices it is DeepSeek's balance loss: with
    scores="sigmoid" and level="sequence" that of DeepSeek-V3, 2024. Mixtral's in transformers divides f_i by the
    tokens, not by their choices: it is top_k times this loss, and of all layers' tokens together.

    No gradient passes through f_i, a count. The gradient is the same however a step is cut if f_i is that of the step,
    or of the sequence, and `denominator` is the step's number of kept tokens, or of sequences, as
    `safeops.distributed.global_count` has it. Each cut needs something else. Whole sequences, to ranks or
    micro-batches: level="sequence" has their f_i. A batch, to ranks: level="global" adds up the ranks' counts, in one
    all-reduce of E integers. A batch, to micro-batches: `load`, the sum of what `router_load` counts in a pass over the
    step before (without gradients, as f_i must be known before the first backward), or the last step's load, an
    approximation. Parts of sequences: the levels of a batch; level="sequence" needs them whole.

    Nothing is kept between calls: a call that activation checkpointing repeats has the same value. (The repeated call
    of level="global" has its all-reduce again, on all ranks.)

    transformers' models return the logits of each layer: take the sum or mean of the layers' losses.

    Args:
        level: whose choices f_i counts, and whose shares P_i averages. "batch": all kept tokens of the call, the rows.
            "global": the same, with the f_i of all ranks' calls. "sequence": the kept tokens along the last dim but
            one, (..., S, E); the rows are the sequences.
        load: real tensor (E,), for level="batch": how many tokens chose each expert, in place of this call's counts.
        group: the process group of level="global". None: all ranks; this process alone if there is no process group.
        mask: bool tensor, broadcastable to the tokens; True = keep. Masked-out tokens do not exist: NaN, inf or garbage
            there changes neither the loss nor a gradient, and their own gradient is exactly 0.
        reduction: "mean" divides the sum by the count of kept rows, "sum", or "none". A sequence is kept if one of its
            tokens is.
        {arguments}

    Raises:
        TypeError: an operand is of another dtype, `mask` is not bool, an option is of another type.
        ValueError: shapes do not fit, devices differ, an unknown `scores`, `level`, `reduction` or `empty`, both or
            neither of `top_k` and `expert_index`, an argument that does not go with the level.
        RuntimeError: the all-reduce fails.

    Example:
        >>> logits = torch.tensor([[0.0, 2.0], [0.0, 1.0], [torch.nan, 0.0]])
        >>> safeops.load_balancing_loss(logits, top_k=1, mask=torch.tensor([True, True, False]))
        tensor(1.6119)
    """
    if extra or unknown:
        refuse(load_balancing_loss, extra, unknown)
    _validate_options(NAME, reduction, empty, None, scores, level, group)
    rows = tokens = _experts.validate(NAME, logits, scores)
    by_sequence = level == "sequence"
    if by_sequence:
        if not tokens:
            raise ValueError(f'{NAME}: level="sequence" needs logits (..., S, E), got {check.shown(logits)}')
        rows = tokens[:-1]
    _experts.validate_choice(NAME, logits, expert_index, top_k)
    _validate_load(load, logits, level)
    check.mask(NAME, mask, "the tokens", logits, tokens)
    operands = {"logits": logits, "expert_index": expert_index, "load": load}
    validate(NAME, rows, None, None, reduction, denominator, empty, **operands)
    check.same_device(NAME, "logits", logits, mask=mask)
    keep = None if mask is None else mask.expand(tokens)
    if load is None:
        each = None if keep is None else keep.unsqueeze(-1)
        over = len(tokens) - 1 if by_sequence else tuple(range(len(tokens)))
        load = sums.count(_experts.chosen(logits, expert_index, top_k), each, over, keepdim=by_sequence)
        if level == "global":
            load = _experts.over_ranks(NAME, load, logits, group)
    loss = define(_experts.probabilities(logits, keep, scores), load, keep, by_sequence)
    if by_sequence and keep is not None:
        keep = keep.any(-1)
    return finish(NAME, loss, keep, None, reduction, denominator, empty)
