"""reward_ranking_loss: the Bradley-Terry loss, by which a reward model learns which of two answers is better."""

from safeops.core import check, loss_reduction, sums
from safeops.core.composed_loss import ARGUMENTS, finish, same_shape, validate
from safeops.core.definitions import kept, selected
from safeops.core.dtypes import compute_dtype
from safeops.core.foreign import refuse
from safeops.core.op import Composed
from safeops.core.symbolic import as_operand, symbolic
from safeops.ops.losses.binary_cross_entropy_with_logits import _binary_cross_entropy_with_logits
from safeops.ops.rankings._pairs import logistic, margin_for, validate_margin

NAME = "reward_ranking_loss"


def validate_options(name, reduction, empty, margin, center):
    loss_reduction.validate_options(name, reduction, empty)
    if margin is not None:
        validate_margin(name, margin)
    check.number(name, "center", center, minimum=0)


_reward_ranking_loss = Composed(
    NAME,
    _binary_cross_entropy_with_logits,
    *sums.ALL,
    module="RewardRankingLoss",
    example="torch.tensor([1.0, 0.5]), torch.tensor([0.0, 2.0])",
    validate_options=validate_options,
)

_SCHEMA = (
    "(Tensor chosen, Tensor rejected, *, {margin}, float center=0.0, Tensor? mask=None, Tensor? weight=None, "
    'str reduction="mean", Tensor? denominator=None, str empty="zero") -> Tensor'
)


@_reward_ranking_loss.public(
    ".Tensor" + _SCHEMA.format(margin="Tensor margin"),  # (first: the float overload also accepts a tensor)
    _SCHEMA.format(margin="float? margin=None"),
    arguments=ARGUMENTS,
)
def reward_ranking_loss(
    chosen, rejected, *extra, margin=None, center=0.0, mask=None, weight=None, reduction="mean", denominator=None,
    empty="zero", **unknown,
):  # fmt: skip
    """-log sigmoid(chosen - rejected - margin) + center (chosen + rejected)^2 of rewards; the mean over the kept pairs.

    Bradley and Terry's model of pairs, 1952, as reward models are trained (Ouyang et al., "Training language models to
    follow instructions with human feedback", 2022). With margins of how much better an answer is, Touvron et al.,
    "Llama 2", 2023. The second term keeps the rewards' mean near 0, of which the first knows nothing: Eisenstein et
    al., "Helping or Herding?", 2023.

    Args:
        chosen: floating tensor of any shape, the rows: the reward of each chosen answer.
        rejected: floating tensor of `chosen`'s shape.
        margin: number, or floating tensor that broadcasts to the rows (differentiable). None: 0.
        center: coefficient of (chosen + rejected)^2, at least 0; 0.01 is usual.
        {arguments}

    Raises:
        TypeError: an operand is not floating, `mask` is not bool, an option is of another type.
        ValueError: shapes do not fit, devices differ, unknown `reduction` or `empty`, a number out of range.

    Example:
        >>> chosen, rejected = torch.tensor([2.0, torch.nan]), torch.tensor([1.0, 0.0])
        >>> safeops.reward_ranking_loss(chosen, rejected, mask=torch.tensor([True, False]))
        tensor(0.3133)
    """
    if extra or unknown:
        refuse(reward_ranking_loss, extra, unknown)
    rows = same_shape(NAME, chosen=chosen, rejected=rejected)
    check.number(NAME, "center", center, minimum=0)
    validate(NAME, rows, mask, weight, reduction, denominator, empty, chosen=chosen, rejected=rejected)
    keep = kept(mask, weight)
    keep = None if keep is None else keep.expand(rows)
    compute = compute_dtype(chosen.dtype, rejected.dtype)
    margin = 0 if margin is None else margin_for(NAME, margin, "chosen", chosen, keep, compute)
    c, r = (selected(x.to(compute), keep) for x in (chosen, rejected))
    loss = logistic(c - r - margin)
    if symbolic(center) or center != 0:
        loss = loss + as_operand(center, c) * (c + r).square()
    return finish(NAME, loss, keep, weight, reduction, denominator, empty)
