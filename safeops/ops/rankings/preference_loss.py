"""preference_loss: the losses by which a language model learns from a chosen and a rejected answer."""

from typing import NamedTuple

import torch

from safeops.core import check, loss_reduction, sums
from safeops.core.composed_loss import ARGUMENTS, finish, same_shape, validate
from safeops.core.definitions import kept, selected, sigmoid
from safeops.core.dtypes import compute_dtype
from safeops.core.foreign import refuse
from safeops.core.op import Composed
from safeops.core.private_torch import saved_by_name
from safeops.core.symbolic import as_operand
from safeops.ops.elementwise.log1mexp import _log1mexp, log1mexp
from safeops.ops.losses.binary_cross_entropy_with_logits import _binary_cross_entropy_with_logits
from safeops.ops.rankings._pairs import logistic, margin_for, validate_margin

NAME = "preference_loss"
OBJECTIVES = ("dpo", "ipo", "kto", "orpo", "simpo", "cpo")
OF_REFERENCE = ("dpo", "ipo", "kto")
LOGISTIC = ("dpo", "orpo", "simpo", "cpo")


@saved_by_name
class PreferenceLossAndRewards(NamedTuple):
    loss: torch.Tensor
    chosen_rewards: torch.Tensor
    rejected_rewards: torch.Tensor
    accuracy: torch.Tensor


# ---- definition; chosen, rejected: log-probabilities, less those of the reference where the objective has one


def log_odds(log_p):
    """log(p / (1 - p))."""
    return log_p - log1mexp(log_p)


def of_pairs(objective, chosen, rejected, beta, label_smoothing, margin):
    """The loss of each pair."""
    if objective == "ipo":
        return (chosen - rejected - 0.5 / beta).square()
    if objective == "orpo":
        return beta * logistic(log_odds(chosen) - log_odds(rejected) - margin, label_smoothing)
    return logistic(beta * (chosen - rejected) - margin, label_smoothing)


def gains(chosen, rejected, keep, reference_point):
    """How far each answer of KTO is on its side of z0: (2, *rows), chosen first."""
    if reference_point is None:
        reference_point = sums.mean(torch.stack((chosen, rejected)).detach(), keep)
    z0 = reference_point.detach().to(chosen.dtype).clamp(min=0)
    return torch.stack((chosen - z0, z0 - rejected))


# ---- record


def validate_options(name, reduction, empty, objective, beta, label_smoothing, margin):
    loss_reduction.validate_options(name, reduction, empty)
    check.choice(name, "objective", objective, OBJECTIVES)
    check.number(name, "beta", beta, above=0)
    check.number(name, "label_smoothing", label_smoothing, minimum=0, maximum=1)
    validate_margin(name, margin)
    unused = {} if objective in LOGISTIC else {"label_smoothing": label_smoothing, "margin": margin}
    for key, value in unused.items():
        if isinstance(value, torch.Tensor) or value != 0:
            raise ValueError(f"{name}: {key} goes with {', '.join(LOGISTIC)}, not with {objective!r}")


_preference_loss = Composed(
    NAME,
    _log1mexp,
    _binary_cross_entropy_with_logits,
    *sums.ALL,
    module="PreferenceLoss",
    example="torch.tensor([-4.0]), torch.tensor([-6.0]), torch.tensor([-5.0]), torch.tensor([-5.0])",
    validate_options=validate_options,
)
_preference_loss.result, _preference_loss.objectives = ".loss", OBJECTIVES


def _validate_reference_point(objective, x):
    if x is None:
        return
    check.floating(NAME, "reference_point", x)
    check.real_scalar(NAME, "reference_point", x)
    if objective != "kto":
        raise ValueError(f"{NAME}: reference_point goes with kto, not with {objective!r}")


def _validate_references(objective, **references):
    for key, x in references.items():
        if (x is None) == (objective in OF_REFERENCE):
            needs = "needs" if x is None else "has no"
            raise ValueError(f"{NAME}: {key}: objective {objective!r} {needs} log-probabilities of a reference")


# ---- public function

_SCHEMA = (
    "(Tensor chosen, Tensor rejected, Tensor? reference_chosen=None, Tensor? reference_rejected=None, *, "
    'str objective="dpo", float beta=0.1, float label_smoothing=0.0, {margin}, Tensor? reference_point=None, '
    'Tensor? mask=None, Tensor? weight=None, str reduction="mean", Tensor? denominator=None, str empty="zero") '
    "-> (Tensor loss, Tensor chosen_rewards, Tensor rejected_rewards, Tensor accuracy)"
)
_ARGUMENTS = ARGUMENTS.partition("\n    Returns:")[0]


@_preference_loss.public(
    ".Tensor" + _SCHEMA.format(margin="Tensor margin"),  # (first: the float overload also accepts a tensor)
    _SCHEMA.format(margin="float margin=0.0"),
    arguments=_ARGUMENTS,
)
def preference_loss(
    chosen, rejected, reference_chosen=None, reference_rejected=None, *extra, objective="dpo", beta=0.1,
    label_smoothing=0.0, margin=0.0, reference_point=None, mask=None, weight=None, reduction="mean",
    denominator=None, empty="zero", **unknown,
):  # fmt: skip
    """The loss of pairs of answers, of which people chose one and rejected the other, from their log-probabilities.

        dpo          -log sigmoid(beta h - margin),   h = (c - c_ref) - (r - r_ref)
        ipo          (h - 1 / (2 beta))^2
        kto          1 - sigmoid(beta (c - c_ref - z0)) and 1 - sigmoid(beta (z0 - (r - r_ref))), z0 >= 0
        cpo, simpo   -log sigmoid(beta (c - r) - margin)
        orpo         -beta log sigmoid(log odds(c) - log odds(r) - margin),   odds = p / (1 - p), p = e^c

    c and r are log-probabilities of whole answers: sums over their tokens for dpo, kto and cpo, means per token for
    ipo, simpo and orpo. (`safeops.linear_token_log_probs` has those of tokens, `masked_sum` and `masked_mean` add them
    up.) orpo and cpo are added to the cross entropy of the chosen answers, which is not part of this function.

    dpo: Rafailov et al., "Direct Preference Optimization", 2023, with a margin Amini et al., "Direct Preference
    Optimization with an Offset", 2024. ipo: Azar et al., "A General Theoretical Paradigm to Understand Learning from
    Human Preferences", 2023; means per token are what its authors ran. kto: Ethayarajh et al., 2024. orpo: Hong et al.,
    2024; beta is its lambda. simpo: Meng et al., 2024; the margin is its gamma, and beta is 2 to 2.5. cpo: Xu et al.,
    2024.

    For kto each answer is a row: mask, weight and losses have the shape (2, ...), chosen first. Answers without a pair,
    x with a bool label, are `chosen=x, rejected=x, mask=torch.stack((label, ~label))`; the paper's weights of the two
    kinds are `weight=torch.tensor([[1.0], [1.33]])`.

    Log-probabilities of -inf and NaN behind the mask change nothing. 1 - p is `safeops.log1mexp` of log p: right near
    p = 1, where 1 - e^c has no digits.

    Args:
        chosen: floating tensor of any shape, the rows: the policy's log-probability c of each chosen answer.
        rejected: floating tensor of `chosen`'s shape: r.
        reference_chosen: floating tensor of `chosen`'s shape, c_ref, the log-probability that the reference gives each
            chosen answer, for dpo, ipo and kto, which need it; the others take none. Compute it with no_grad.
        reference_rejected: the same of the rejected answers, r_ref.
        objective: "dpo", "ipo", "kto", "orpo", "simpo" or "cpo".
        beta: greater than 0.
        label_smoothing: from 0 to 1, the share s of labels that are wrong: (1 - s) loss(z) + s loss(-z). Not for ipo
            and kto.
        margin: number, or floating tensor that broadcasts to the rows (differentiable). Not for ipo and kto.
        reference_point: 0-dim floating tensor for kto: z0 before it is clamped at 0, the mean log-ratio of answers to
            other prompts, by which the paper estimates KL(policy || reference). None: the mean log-ratio of the kept
            answers themselves, which depends on how a batch is cut. No gradient passes through z0.
        {arguments}

    Returns:
        A named tuple (loss, chosen_rewards, rejected_rewards, accuracy): fp32 for fp16, bf16 and fp32 operands, fp64 if
        one is fp64. loss: 0-dim, or with "none" of the rows' shape, (2, ...) for kto. The rest is detached, on the
        device. The rewards, of the rows' shape, are beta (c - c_ref), or beta c without a reference, and 0 where masked
        out. accuracy: the share of kept pairs whose chosen reward is the larger; for kto, of kept answers on their side
        of z0.

    Raises:
        TypeError: an operand is not floating, `mask` is not bool, an option is of another type.
        ValueError: an unknown `objective`, `reduction` or `empty`; shapes do not fit, devices differ, a number is out
            of range, an argument does not go with the objective.

    Example:
        >>> chosen, rejected = torch.tensor([-4.0, -torch.inf]), torch.tensor([-6.0, torch.nan])
        >>> reference = torch.tensor([-5.0, -5.0])
        >>> keep = torch.tensor([True, False])
        >>> result = safeops.preference_loss(chosen, rejected, reference, reference, beta=0.5, mask=keep)
        >>> result.loss, result.accuracy
        (tensor(0.3133), tensor(1.))
        >>> result.chosen_rewards
        tensor([0.5000, 0.0000])
    """
    if extra or unknown:
        refuse(preference_loss, extra, unknown)
    validate_options(NAME, reduction, empty, objective, beta, label_smoothing, margin)
    _validate_reference_point(objective, reference_point)
    operands = {"chosen": chosen, "rejected": rejected}
    references = {"reference_chosen": reference_chosen, "reference_rejected": reference_rejected}
    _validate_references(objective, **references)
    operands |= references if objective in OF_REFERENCE else {}
    rows = same_shape(NAME, **operands)
    unpaired = objective == "kto"
    shape, tensors = (2, *rows) if unpaired else rows, operands | {"reference_point": reference_point}
    validate(NAME, shape, mask, weight, reduction, denominator, empty, **tensors)
    keep = kept(mask, weight)
    keep = None if keep is None else keep.expand(shape)
    keeps = (None, None) if keep is None else keep if unpaired else (keep, keep)
    compute = compute_dtype(*(x.dtype for x in operands.values()))
    margin = 0 if unpaired else margin_for(NAME, margin, "chosen", chosen, keep, compute)
    c, r, *refs = (selected(x.to(compute), keeps[i % 2]) for i, x in enumerate(operands.values()))
    if refs:
        c, r = c - refs[0], r - refs[1]
    beta = as_operand(beta, chosen)
    rewards = [beta * x.detach() for x in (c, r)]
    if unpaired:
        ahead = gains(c, r, keep, reference_point)
        loss = sigmoid(-beta * ahead)
    else:
        loss, ahead = of_pairs(objective, c, r, beta, label_smoothing, margin), rewards[0] - rewards[1]
    accuracy = sums.mean((ahead.detach() > 0).to(compute), keep)
    loss = finish(NAME, loss, keep, weight, reduction, denominator, empty)
    return PreferenceLossAndRewards(loss, *rewards, accuracy)
