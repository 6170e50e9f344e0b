"""policy_loss: the clipped objectives of policy gradients, from PPO to GSPO and CISPO."""

from typing import NamedTuple

import torch

from safeops.core import check, loss_reduction, sums
from safeops.core.composed_loss import finish
from safeops.core.definitions import kept, selected
from safeops.core.dtypes import compute_dtype
from safeops.core.foreign import refuse
from safeops.core.op import Composed
from safeops.core.private_torch import saved_by_name
from safeops.core.symbolic import as_operand, symbolic
from safeops.ops.elementwise.safe_exp import _safe_exp
from safeops.ops.policies import _tokens
from safeops.ops.policies.kl_to_reference import KINDS, estimate

NAME = "policy_loss"
LEVELS = ("token", "sequence", "sequence_token")
OBJECTIVES = ("clip", "cispo")
REDUCTIONS = ("none", "mean", "sum", "sequence_mean")


@saved_by_name
class PolicyLossAndStatistics(NamedTuple):
    loss: torch.Tensor
    clip_fraction: torch.Tensor
    mean_ratio: torch.Tensor
    old_kl: torch.Tensor
    reference_kl: torch.Tensor


# ---- checks


def _bounds(name, clip):
    """(low, high) of `clip`, a number or two."""
    pair = (clip, clip) if check.is_number(clip) else clip
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(f"{name}: clip must be a number or (low, high), got {check.shown_value(name, clip)}")
    for key, bound in zip(("clip[0]", "clip[1]"), pair):
        check.number(name, key, bound, minimum=0)
    return pair


def validate_options(name, reduction, empty, level, clip, dual_clip, objective, kl, beta):
    loss_reduction.validate_options(name, reduction, empty, REDUCTIONS)
    check.choice(name, "level", level, LEVELS)
    check.choice(name, "objective", objective, OBJECTIVES)
    check.choice(name, "kl", kl, KINDS)
    _bounds(name, clip)
    check.number(name, "beta", beta, minimum=0)
    if dual_clip is not None:
        check.number(name, "dual_clip", dual_clip, above=1)
        if objective != "clip":
            raise ValueError(f'{name}: dual_clip is of objective="clip", got {objective!r}')


def _validate(log_prob, old_log_prob, advantage, mask, weight, cu_seqlens, reference_log_prob, beta, reduction,
              denominator):  # fmt: skip
    first = "log_prob", log_prob
    _tokens.validate(NAME, first, cu_seqlens, mask=mask, old_log_prob=old_log_prob,
                     reference_log_prob=reference_log_prob)  # fmt: skip
    check.floating(NAME, "advantage", advantage, numbers=True)
    each = _tokens.sequences(log_prob, cu_seqlens)
    if advantage.shape not in (log_prob.shape, each):
        raise ValueError(
            f"{NAME}: advantage {check.shown(advantage)} must have a number for each token {check.shown(log_prob)} or "
            f"each sequence {check.shown(log_prob, each)}"
        )
    check.weight(NAME, weight, "log_prob", log_prob)
    check.same_device(NAME, *first, advantage=advantage, weight=weight, denominator=denominator)
    loss_reduction.validate_denominator(NAME, "mean" if reduction == "sequence_mean" else reduction, denominator)
    if reference_log_prob is None and (not check.is_number(beta) or beta != 0):
        raise ValueError(f"{NAME}: beta {beta} needs reference_log_prob")


# ---- definition


def surrogate(log_ratio, advantage, log_prob, clip, dual_clip, objective):
    """Returns (the loss of each token, its ratio r, True where the ratio is clipped).

    (1) clip:  max(-A r, -A clamp(r, 1 - low, 1 + high)) = -A q, q = min(r, 1 + high) if A >= 0, max(r, 1 - low) if not
    (2) dual_clip: q is at most dual_clip where A < 0
    (3) cispo: -A clamp(r, 1 - low, 1 + high) log p, with the clamped ratio a constant
    """
    low, high = (as_operand(x, log_ratio) for x in clip)
    ratio = _safe_exp.call(log_ratio, None, 0.0, None)
    gains = advantage >= 0
    over, under = ratio > 1 + high, ratio < 1 - low
    if objective == "clip":
        over, under = over & gains, under & (advantage < 0)
    q = torch.where(over, 1 + high, torch.where(under, 1 - low, ratio))
    clipped = over | under
    if dual_clip is not None:
        bound = as_operand(dual_clip, ratio)
        far = (advantage < 0) & (ratio > bound)
        q, clipped = torch.where(far, bound, q), clipped | far
    if objective == "cispo":
        return -(q.detach() * advantage) * log_prob, ratio, clipped
    return finite_product(-advantage, q), ratio, clipped


def finite_product(a, b):
    """a b; for finite a and b it saturates, with gradient 0."""
    over = (a * b).detach().isinf() & a.isfinite() & b.isfinite()
    largest = torch.full_like(a, torch.finfo(a.dtype).max).copysign(a * b.detach().sign())
    return torch.where(over, largest.detach(), torch.where(over, 0, a) * torch.where(over, 0, b))


# ---- record

_policy_loss = Composed(
    NAME,
    _safe_exp,
    *_tokens.PARTS,
    module="PolicyLoss",
    example="torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.0]]), torch.tensor([1.0])",
    validate_options=validate_options,
)
_policy_loss.result = ".loss"
_policy_loss.reductions, _policy_loss.levels, _policy_loss.objectives = REDUCTIONS, LEVELS, OBJECTIVES
_policy_loss.kls = KINDS  # (what type_stubs.py writes as the types of these arguments)

# ---- public function


@_policy_loss.public(
    "(Tensor log_prob, Tensor? old_log_prob, Tensor advantage, *, Tensor? mask=None, Tensor? weight=None, "
    'Tensor? cu_seqlens=None, str level="token", float[] clip=[0.2, 0.28], float? dual_clip=None, '
    'str objective="clip", Tensor? reference_log_prob=None, str kl="k3", float beta=0.0, str reduction="mean", '
    'Tensor? denominator=None, str empty="zero") -> (Tensor loss, Tensor clip_fraction, Tensor mean_ratio, '
    "Tensor old_kl, Tensor reference_kl)",
    arguments=_tokens.SEQUENCES,
)
def policy_loss(
    log_prob, old_log_prob, advantage, *extra, mask=None, weight=None, cu_seqlens=None, level="token",
    clip=(0.2, 0.28), dual_clip=None, objective="clip", reference_log_prob=None, kl="k3", beta=0.0, reduction="mean",
    denominator=None, empty="zero", **unknown,
):  # fmt: skip
    """The clipped policy gradient of sampled tokens, -min(r A, clamp(r, 1 - low, 1 + high) A) + beta KL(reference).

    r is exp(log_prob - old_log_prob), A the advantage. A difference of 95 at one token would make exp inf, and inf
    times a masked 0 NaN: the ratio saturates, with gradient 0. Half is computed in fp32. Gradients flow to `log_prob`
    (and `weight`) alone: all other operands are constants of the objective, whatever graph they come from.

    PPO (Schulman et al., 2017) is clip=0.2; dual_clip=3.0 adds the lower bound of Ye et al., 2020. GRPO (Shao et al.,
    2024) is clip=0.2, reduction="sequence_mean" and a reference with kl="k3", beta=0.04. DAPO (Yu et al., 2025) is the
    defaults: clip=(0.2, 0.28) and the mean over all tokens. Dr. GRPO (Liu et al., 2025) divides the sum of all tokens
    by a constant: denominator=sequences * longest_length. GSPO (Zheng et al., 2025) is level="sequence", clip=(3e-4,
    4e-4) and reduction="sequence_mean": r is exp of the mean difference over the sequence's kept tokens. CISPO
    (MiniMax, 2025) is objective="cispo", -A clamp(r) log_prob with the clamped ratio as a constant, so that no token
    loses its gradient; clip=(1, high) leaves the ratio without a lower bound.

    With `denominator`, parts add up to the whole for any split into micro-batches and ranks: the count of kept tokens
    for "mean" (`safeops.distributed.global_count`), the number of sequences for "sequence_mean" (of whole sequences).

    Args:
        log_prob: floating tensor (..., T): the policy's log-probabilities of the tokens, as `token_log_probs` gives.
        old_log_prob: floating tensor of `log_prob`'s shape: those of the policy that sampled. None: `log_prob` itself,
            for one update per batch: ratios are 1.
        advantage: floating tensor of `log_prob`'s shape, or with one number for each sequence: (...) where tokens are
            (..., T), (S,) where they are packed. A shape that is both is of tokens. To correct for a sampler that
            differs from the trainer's old policy, multiply it by the truncated ratio of the two.
        mask: bool tensor, broadcastable to `log_prob`; True = keep. Masked-out tokens do not exist: NaN, inf or garbage
            there changes neither the loss nor a gradient, and their own gradient is exactly 0.
        weight: floating tensor, broadcastable to `log_prob`; 0 means the same as masked out. Differentiable.
        {arguments}
        level: "token": a ratio for each token; "sequence": one for each sequence; "sequence_token": the value of
            "sequence" with each token's own gradient (GSPO-token), for advantages that differ along a sequence.
        clip: (low, high), or a number for both, at least 0: the ratio is clipped to [1 - low, 1 + high].
        dual_clip: above 1, or None: where A < 0, the ratio is at most this.
        objective: "clip" or "cispo".
        reference_log_prob: floating tensor of `log_prob`'s shape, or None.
        kl: the estimator of the divergence from the reference: "k1", "k2" or "k3", as in `kl_to_reference`.
        beta: at least 0, the divergence's weight. With 0 it is only reported.
        reduction: "mean": over all kept tokens (with weights, by their sum); "sequence_mean": of each sequence, then
            over the sequences that keep a token; "sum"; or "none": `log_prob`'s shape.
        denominator: number or 0-dim tensor that "mean" and "sequence_mean" divide by instead.
        empty: value where nothing is kept: "zero" (attached to the graph, zero gradients), "nan", or "raise"
            (ValueError; the host waits for the device, so the call cannot be compiled whole).

    Returns:
        (loss, clip_fraction, mean_ratio, old_kl, reference_kl), fp32 for fp16, bf16 and fp32 operands, fp64 if one is
        fp64. All but the loss are means over the call's kept tokens, detached, on the device: the share of tokens that
        are clipped, the ratio, k3 of the update so far (r - 1 - log r), and the divergence from the reference by `kl`
        (0 without a reference).

    Raises:
        TypeError: an operand is not floating, `mask` is not bool, an option is of another type.
        ValueError: shapes do not fit, devices differ, an unknown option or one out of range, `beta` without a
            reference, `cu_seqlens` that are no bounds of the tokens (on the CPU).

    Example:
        >>> log_prob, old = torch.tensor([[-1.0, -2.0, torch.nan]]), torch.tensor([[-1.5, -2.0, 0.0]])
        >>> result = safeops.policy_loss(log_prob, old, torch.tensor([1.0]), mask=log_prob.isfinite())
        >>> result.loss, result.clip_fraction
        (tensor(-1.1400), tensor(0.5000))
    """
    if extra or unknown:
        refuse(policy_loss, extra, unknown)
    validate_options(NAME, reduction, empty, level, clip, dual_clip, objective, kl, beta)
    _validate(log_prob, old_log_prob, advantage, mask, weight, cu_seqlens, reference_log_prob, beta, reduction,
              denominator)  # fmt: skip
    operands = log_prob, old_log_prob, advantage, reference_log_prob
    compute = compute_dtype(*(x.dtype for x in operands if x is not None))
    keep = kept(mask, weight)
    if advantage.shape != log_prob.shape:
        advantage = _tokens.spread(advantage, log_prob, cu_seqlens)

    def constant(x):
        return selected(x.detach(), keep).to(compute)

    x, advantage = selected(log_prob, keep).to(compute), constant(advantage)
    log_ratio = x - (x.detach() if old_log_prob is None else constant(old_log_prob))
    if level != "token":
        log_ratio = _tokens.spread(_tokens.mean(log_ratio, keep, cu_seqlens), log_ratio, cu_seqlens)
    if level == "sequence_token":
        log_ratio = log_ratio.detach() + (x - x.detach())
    loss, ratio, clipped = surrogate(log_ratio, advantage, x, _bounds(NAME, clip), dual_clip, objective)
    divergence = torch.zeros_like(x)
    if reference_log_prob is not None:
        divergence = estimate(constant(reference_log_prob) - x, kl)
        if symbolic(beta) or beta != 0:
            loss = loss + as_operand(beta, x) * divergence
    loss = _reduced(loss, keep, weight, cu_seqlens, reduction, denominator, empty)
    numbers = clipped.to(compute), ratio, estimate(log_ratio.detach(), "k3"), divergence
    nothing = "nan" if empty == "nan" and denominator is None else "zero"
    return PolicyLossAndStatistics(loss, *(sums.mean(number.detach(), keep, empty=nothing) for number in numbers))


def _reduced(loss, keep, weight, cu_seqlens, reduction, denominator, empty):
    if reduction != "sequence_mean":
        return finish(NAME, loss, keep, weight, reduction, denominator, empty)
    exists = _tokens.exists(loss, keep, cu_seqlens)
    each = _tokens.mean(loss, keep, cu_seqlens, weight)
    return loss_reduction.reduce(NAME, each, exists, None, "mean", denominator, empty)
