"""group_advantages: each reward compared with those of its group, the answers to one prompt."""

import torch

from safeops.core import check
from safeops.core.definitions import selected
from safeops.core.dtypes import compute_dtype
from safeops.core.foreign import refuse
from safeops.core.group import all_gather, here, objects, ranks_of
from safeops.core.op import Composed
from safeops.core.symbolic import as_operand
from safeops.ops.elementwise.safe_div import _safe_div
from safeops.ops.elementwise.safe_sqrt import _safe_sqrt
from safeops.ops.policies import _tokens
from safeops.ops.reductions.segment_max import _segment_max
from safeops.ops.reductions.segment_mean import _segment_mean
from safeops.ops.reductions.segment_sum import _segment_sum
from safeops.ops.selection.safe_index_select import _safe_index_select

NAME = "group_advantages"

# ---- checks


def _validate(rewards, groups, mask, total, scale, leave_one_out, correction, eps):
    """total: the number of rewards on all ranks."""
    check.floating(NAME, "rewards", rewards, numbers=True)
    check.no_dtensor(NAME, "rewards", rewards)  # (process_group= is for groups across ranks)
    check.boolean_flag(NAME, "scale", scale)
    check.boolean_flag(NAME, "leave_one_out", leave_one_out)
    check.mask(NAME, mask, "rewards", rewards)
    check.number(NAME, "correction", correction, minimum=0)
    check.number(NAME, "eps", eps, minimum=0)
    if isinstance(groups, torch.Tensor):
        check.tensor(NAME, "groups", groups)
        if groups.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"{NAME}: groups must be int64 or int32, got {groups.dtype}")
        if groups.shape != rewards.shape:
            raise ValueError(
                f"{NAME}: groups {check.shown(groups)} must have one id for each of rewards {check.shown(rewards)}"
            )
        check.same_device(NAME, "rewards", rewards, groups=groups, mask=mask)
        return
    check.same_device(NAME, "rewards", rewards, mask=mask)
    if not isinstance(groups, (int, torch.SymInt)) or isinstance(groups, bool):
        raise TypeError(f"{NAME}: groups must be a tensor of ids or the size of a group, got {type(groups).__name__}")
    if groups < 2:
        raise ValueError(f"{NAME}: groups of {groups} have nothing to compare a reward with")
    if total % groups:
        raise ValueError(f"{NAME}: groups of {groups} do not divide the {total} rewards {check.shown(rewards)}")


# ---- definition


def dense(ids):
    """Ids from 0 on for any ids, without a wait for how many there are: the rank of each among the distinct ones."""
    values, order = ids.sort(stable=True)
    first = torch.cat([values.new_zeros(values[:1].shape), (values[1:] != values[:-1]).long()])
    return torch.zeros_like(ids, dtype=torch.int64).scatter(0, order, first.cumsum(0))


def define(x, ids, keep, scale, leave_one_out, correction, eps):
    """(N,) advantages of the rewards x (N,) in groups `ids`, from 0 to N - 1."""

    def reduced(op, values):
        of_groups = op.call(values, None, ids, ids.shape[0], keep, None, "zero")
        return _safe_index_select.call(of_groups, 0, ids, 0)

    # Relative to the group's largest reward: the mean of three times 0.1 is not 0.1, and the difference is no signal.
    x = selected(x - reduced(_segment_max, x.detach()), keep)
    ones = torch.ones_like(x)
    count = reduced(_segment_sum, ones)
    centered = x - reduced(_segment_mean, x)
    result = centered
    if leave_one_out:  # r - (sum - r) / (n - 1) = (r - mean) n / (n - 1)
        result = centered * torch.where(count > 1, count / (count - 1).clamp(min=1), 0)
    if scale:
        squares, freedom = reduced(_segment_sum, centered * centered), count - as_operand(correction, x)
        variance = torch.where(freedom > 0, squares / torch.where(freedom > 0, freedom, 1), 0)
        result = _safe_div.call(
            result, _safe_sqrt.call(variance, None, 0.0, None) + as_operand(eps, x), None, 0.0, None
        )
    return selected(result, keep)


# ---- groups across ranks


def _gathered(x, sizes, group):
    """The tensors x (N,) of all ranks, one behind the other. sizes: N of each rank; short ones travel padded."""
    padded = torch.cat([x, x.new_zeros(max(sizes) - x.shape[0])])
    result = x.new_empty(len(sizes) * max(sizes))
    all_gather(result, padded, group=group)
    return torch.cat([part[:n] for part, n in zip(result.chunk(len(sizes)), sizes)])


@torch.no_grad()
def _across_ranks(rewards, groups, mask, group, options):
    """This rank's part of the advantages of all ranks' rewards."""
    group, size = ranks_of(NAME, group, None, None)
    by_ids = isinstance(groups, torch.Tensor)
    _validate(rewards, groups, mask, 0, *options)
    mine = rewards.numel(), rewards.dtype, "ids" if by_ids else groups, options
    calls = objects(NAME, "a rank did not answer", mine, group)
    for rank, (_, *call) in enumerate(calls):
        if call != [*mine[1:]]:
            raise ValueError(
                f"{here(NAME)}: its dtype, groups and options {mine[1:]} are not rank {rank}'s {tuple(call)}"
            )
    sizes = [n for n, *_ in calls]
    _validate(rewards, groups, mask, sum(sizes), *options)
    keep = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask.expand(rewards.shape)
    x = selected(rewards, keep).reshape(-1).to(compute_dtype(rewards.dtype))
    x, keep = _gathered(x, sizes, group), _gathered(keep.reshape(-1).byte(), sizes, group).bool()
    ids = dense(_gathered(groups.reshape(-1), sizes, group)) if by_ids else _ids(groups, x)
    start = sum(sizes[: torch.distributed.get_rank(group)])
    return define(x, ids, keep, *options)[start : start + rewards.numel()].reshape(rewards.shape)


# ---- record

_group_advantages = Composed(NAME, _safe_div, _safe_sqrt, _segment_max, *_tokens.PARTS)

# ---- public function

_OPTIONS = (
    "*, bool scale=True, bool leave_one_out=False, Tensor? mask=None, float correction=1.0, float eps=1e-4) -> Tensor"
)


@_group_advantages.public(
    f"(Tensor rewards, SymInt groups, {_OPTIONS}", f".ids(Tensor rewards, Tensor groups, {_OPTIONS}"
)
def group_advantages(
    rewards, groups, *extra, scale=True, leave_one_out=False, mask=None, correction=1.0, eps=1e-4, process_group=None,
    **unknown,
):  # fmt: skip
    """(r - mean) / (std + eps) of each reward, with the mean and standard deviation of its group: GRPO's advantages.

    Shao et al., "DeepSeekMath", 2024. Dr. GRPO (Liu et al., 2025) leaves out the division: scale=False. With
    leave_one_out=True the baseline is the mean of the others, r - (sum - r) / (n - 1), that of RLOO (Ahmadian et al.,
    2024), for which scale=False is usual.

    A group of equal rewards has advantages of exactly 0, in half too: 0.1 three times has a mean in fp32 that is not
    0.1, and a standard deviation of this rounding would make 1 of it. A group of which one reward is kept has nothing
    to compare it with: its advantage is 0.

    Args:
        rewards: floating tensor of any shape, N rewards.
        groups: integer tensor of `rewards`' shape: the group of each reward, any ids in any order, such as a number of
            the prompt. Or the size of all groups, at least 2, if each group's rewards follow each other.
        scale: False: not divided by the standard deviation.
        leave_one_out: the mean is that of the group's other rewards.
        mask: bool tensor, broadcastable to `rewards`; True = keep. Masked-out rewards do not exist, as those of answers
            that were cut off: NaN there changes nothing, and their own advantage and gradient are 0.
        correction: the variance divides by n - correction. 1, as torch's and TRL's; 0 for the group's own.
        eps: at least 0, added to the standard deviation, as TRL does. It keeps differences far below it, which are
            noise, from becoming advantages of 1.
        process_group: a process group over whose ranks the rewards are spread: the rank's rewards are part of those of
            all, in the order of the ranks, and so may groups be. The ranks may differ in N. The host waits for the
            others, and gradients do not cross ranks. None: every group lies on one rank.

    Returns:
        A tensor of `rewards`' shape: fp32 for fp16, bf16 and fp32, fp64 for fp64.

    Raises:
        TypeError: `rewards` is not floating, `mask` is not bool, `groups` is neither ids nor a size.
        ValueError: shapes do not fit, devices differ, a size below 2 or one that does not divide N, an option that is
            out of range.

    Example:
        >>> safeops.group_advantages(torch.tensor([0.0, 1.0, 0.1, 0.1]), 2, scale=False)
        tensor([-0.5000,  0.5000,  0.0000,  0.0000])
    """
    if extra or unknown:
        refuse(group_advantages, extra, unknown)
    options = scale, leave_one_out, correction, eps
    if process_group is not None:
        return _across_ranks(rewards, groups, mask, process_group, options)
    _validate(rewards, groups, mask, rewards.numel() if isinstance(rewards, torch.Tensor) else 0, *options)
    keep = None if mask is None else mask.expand(rewards.shape).reshape(-1)
    x = selected(rewards.reshape(-1), keep).to(compute_dtype(rewards.dtype))
    return define(x, _ids(groups, x), keep, *options).reshape(rewards.shape)


def _ids(groups, x):
    if isinstance(groups, torch.Tensor):
        return dense(groups.reshape(-1))
    return torch.arange(x.shape[0], device=x.device) // groups
