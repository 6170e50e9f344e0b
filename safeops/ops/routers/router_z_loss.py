"""router_z_loss: keeps a router's logits small."""

from safeops.core import loss_reduction, sums
from safeops.core.composed_loss import ARGUMENTS, finish, validate
from safeops.core.definitions import kept
from safeops.core.foreign import refuse
from safeops.core.op import Composed
from safeops.ops.reductions.masked_logsumexp import _masked_logsumexp
from safeops.ops.routers import _experts

NAME = "router_z_loss"

_router_z_loss = Composed(
    NAME,
    _masked_logsumexp,
    *sums.ALL,
    module="RouterZLoss",
    example="torch.tensor([[2.0, 0.0], [0.0, 1.0]]),",
    validate_options=loss_reduction.validate_options,
)


@_router_z_loss.public(
    '(Tensor logits, *, Tensor? mask=None, Tensor? weight=None, str reduction="mean", Tensor? denominator=None, '
    'str empty="zero") -> Tensor',
    arguments=ARGUMENTS,
)
def router_z_loss(
    logits, *extra, mask=None, weight=None, reduction="mean", denominator=None, empty="zero", **unknown,
):  # fmt: skip
    """(log sum_i exp(x_i))^2 of the logits x of each token; the mean over the kept tokens.

    Zoph et al., "ST-MoE: Designing Stable and Transferable Sparse Expert Models", 2022, whose coefficient is 0.001. It
    keeps the logits small, where half has digits. (`cross_entropy(z_loss=)` is the same term of a vocabulary.)

    With `denominator`, the number of tokens of a step (`safeops.distributed.global_count`), the gradient is the same
    under any split into micro-batches and ranks.

    Args:
        logits: floating tensor (..., E): a number for each of E experts, of each token. The tokens are the rows.
        {arguments}

    Raises:
        TypeError: `logits` is not floating, `mask` is not bool, an option is of another type.
        ValueError: shapes do not fit, devices differ, unknown `reduction` or `empty`.

    Example:
        >>> logits = torch.tensor([[0.0, 0.0], [torch.nan, torch.inf]])
        >>> safeops.router_z_loss(logits, mask=torch.tensor([True, False]))
        tensor(0.4805)
    """
    if extra or unknown:
        refuse(router_z_loss, extra, unknown)
    rows = _experts.validate(NAME, logits)
    validate(NAME, rows, mask, weight, reduction, denominator, empty, logits=logits)
    keep = kept(mask, weight)
    z = _masked_logsumexp.call(logits, None if keep is None else keep.unsqueeze(-1), -1, False, None, None, "zero")
    return finish(NAME, z.square(), keep, weight, reduction, denominator, empty)
