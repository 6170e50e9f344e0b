"""router_entropy: how undecided a router is."""

import torch

from safeops.core import loss_reduction, sums
from safeops.core.composed_loss import ARGUMENTS, finish, validate
from safeops.core.definitions import kept
from safeops.core.dtypes import compute_dtype
from safeops.core.foreign import refuse
from safeops.core.op import Composed
from safeops.ops.classification.masked_log_softmax import _masked_log_softmax, masked_log_softmax
from safeops.ops.routers import _experts

NAME = "router_entropy"

_router_entropy = Composed(
    NAME,
    _masked_log_softmax,
    *sums.ALL,
    module="RouterEntropy",
    example="torch.tensor([[2.0, 0.0], [0.0, 1.0]]),",
    validate_options=loss_reduction.validate_options,
)


@_router_entropy.public(
    '(Tensor logits, *, Tensor? mask=None, Tensor? weight=None, str reduction="mean", Tensor? denominator=None, '
    'str empty="zero") -> Tensor',
    arguments=ARGUMENTS,
)
def router_entropy(
    logits, *extra, mask=None, weight=None, reduction="mean", denominator=None, empty="zero", **unknown,
):  # fmt: skip
    """-sum_i p_i log p_i, p = softmax(logits), of each token; the mean over the kept tokens.

    From 0, where a token has one expert, to log E, where the router does not tell the experts apart. A number to log
    (`.detach()`; nothing waits for the device), or a term of a loss.

    Args:
        logits: floating tensor (..., E): a number for each of E experts, of each token. The tokens are the rows.
        {arguments}

    Raises:
        TypeError: `logits` is not floating, `mask` is not bool, an option is of another type.
        ValueError: shapes do not fit, devices differ, unknown `reduction` or `empty`.

    Example:
        >>> logits = torch.tensor([[0.0, 0.0], [torch.nan, torch.inf]])
        >>> safeops.router_entropy(logits, mask=torch.tensor([True, False]))
        tensor(0.6931)
    """
    if extra or unknown:
        refuse(router_entropy, extra, unknown)
    rows = _experts.validate(NAME, logits)
    validate(NAME, rows, mask, weight, reduction, denominator, empty, logits=logits)
    keep = kept(mask, weight)
    each = None if keep is None else keep.unsqueeze(-1)
    log_p = masked_log_softmax(logits.to(compute_dtype(logits.dtype)), each)
    terms = log_p.exp() * torch.where(log_p == -torch.inf, 0, log_p)  # 0 log 0 = 0
    return finish(NAME, -sums.total(terms, dim=-1), keep, weight, reduction, denominator, empty)
