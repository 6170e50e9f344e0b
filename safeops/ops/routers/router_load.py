"""router_load: how many tokens each expert has, as numbers on the device."""

from typing import NamedTuple

import torch

from safeops.core import check, sums
from safeops.core.foreign import refuse
from safeops.core.op import Composed
from safeops.core.private_torch import saved_by_name
from safeops.ops.routers import _experts

NAME = "router_load"


@saved_by_name
class RouterLoad(NamedTuple):
    load: torch.Tensor
    importance: torch.Tensor
    max_violation: torch.Tensor


_router_load = Composed(NAME, *_experts.PARTS)


@_router_load.public(
    '(Tensor logits, Tensor? expert_index=None, *, int? top_k=None, str scores="softmax", Tensor? mask=None) '
    "-> (Tensor load, Tensor importance, Tensor max_violation)",
    arguments=_experts.CHOICE,
)
def router_load(
    logits, expert_index=None, *extra, top_k=None, scores="softmax", group=None, mask=None, **unknown,
):  # fmt: skip
    """How many tokens chose each expert, and how much of them the router gave it, without a wait for the device.

    Load and importance are those of Shazeer et al., "Outrageously Large Neural Networks", 2017; the violation is MaxVio
    of Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024. Loads of micro-batches
    add up to that of the step, which `load_balancing_loss(load=)` takes.

    Args:
        {arguments}
        group: a process group: the numbers are those of all its ranks, by one all-reduce. None: of this process.
        mask: bool tensor, broadcastable to the tokens; True = keep. A masked-out token chooses no expert, whatever its
            logits hold.

    Returns:
        A named tuple (load, importance, max_violation), detached, on the device. load: (E,), int64, the number of kept
        tokens that chose each expert. importance: (E,), the sum of their shares p: fp32 for fp16, bf16 and fp32 logits,
        fp64 for fp64. max_violation: 0-dim, max(load) / mean(load) - 1, 0 at perfect balance.

    Raises:
        TypeError: an operand is of another dtype, `mask` is not bool, an option is of another type.
        ValueError: shapes do not fit, devices differ, unknown `scores`, both or neither of `top_k` and `expert_index`.
        RuntimeError: the all-reduce fails.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0], [1.0, 0.0], [torch.nan, 0.0]])
        >>> result = safeops.router_load(logits, top_k=1, mask=torch.tensor([True, True, False]))
        >>> result.load, result.max_violation
        (tensor([2, 0]), tensor(1.))
        >>> result.importance
        tensor([1.6119, 0.3881])
    """
    if extra or unknown:
        refuse(router_load, extra, unknown)
    rows = _experts.validate(NAME, logits, scores)
    _experts.validate_choice(NAME, logits, expert_index, top_k)
    check.mask(NAME, mask, "the tokens", logits, rows)
    check.same_device(NAME, "logits", logits, expert_index=expert_index, mask=mask)
    logits = logits.detach()
    chosen, shares = _experts.chosen(logits, expert_index, top_k), _experts.probabilities(logits, mask, scores)
    each = None if mask is None else mask.unsqueeze(-1)
    tokens = tuple(range(len(rows)))
    load, importance = sums.count(chosen, each, tokens), sums.total(shares, each, tokens)
    if group is not None:
        both = _experts.over_ranks(NAME, torch.cat([load.double(), importance.double()]), logits, group)
        load, importance = both[: len(load)].long(), both[len(load) :].to(shares.dtype)
    mean = load.double().mean()
    violation = torch.where(mean > 0, load.amax() / torch.where(mean > 0, mean, 1) - 1, 0)
    return RouterLoad(load, importance, violation.to(shares.dtype))
