"""discounted_sum: generalized advantage estimates (GAE), or returns to go, in a logarithmic number of steps."""

import torch

from safeops.core import check
from safeops.core.definitions import selected
from safeops.core.dtypes import compute_dtype
from safeops.core.foreign import REQUIRED, refuse, require
from safeops.core.op import Composed
from safeops.core.symbolic import as_operand
from safeops.ops.policies import _tokens
from safeops.ops.reductions._segment import sequence_of_rows

NAME = "discounted_sum"

# ---- definition


def shifted(x, count):
    """x one or more places earlier along the last dim, with 0 at its end."""
    return torch.cat([x[..., count:], torch.zeros_like(x[..., :count])], -1)


def scan(a, b, linked):
    """y with y_t = b_t + a_t y_(t+1) where `linked` (bool) is True, else b_t. a, b, linked: (..., T).

    After the step of `count`, (a, b) maps y_(t + count) to y_t: log2(T) steps, and no power of a is divided by.
    """
    count, linked = 1, linked & shifted(torch.ones_like(linked), 1)
    while count < b.shape[-1]:
        b = b + a * torch.where(linked, shifted(b, count), 0)  # a NaN of another sequence does not exist
        a, linked = a * shifted(a, count), linked & shifted(linked, count)
        count *= 2
    return b


def ends(x, cu_seqlens):
    """Bool: True for the last token of each packed sequence."""
    place = sequence_of_rows(cu_seqlens, None, x.shape[-1])
    return torch.cat([place[1:] != place[:-1], place.new_ones(place[:1].shape, dtype=torch.bool)])


def define(rewards, values, mask, gamma, lam, cu_seqlens):
    """A_t = delta_t + gamma lam A_(t+1), delta_t = r_t + gamma v_(t+1) - v_t, where t + 1 is the next kept token."""
    keep = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask.expand(rewards.shape)
    last = torch.zeros_like(keep) if cu_seqlens is None else ends(rewards, cu_seqlens)
    factor, one = gamma, torch.ones_like(rewards)
    if values is not None:  # a token that is left out passes on what is behind it
        next_value = torch.where(last, 0, shifted(scan(one, values, ~(keep | last)), 1))
        rewards = torch.where(keep, rewards + gamma * next_value - values, 0)
        factor = gamma * lam
    return torch.where(keep, scan(torch.where(keep, one * factor, one), rewards, ~last), 0)


# ---- record

_discounted_sum = Composed(NAME, *_tokens.PARTS)

# ---- public function


@_discounted_sum.public(
    "(Tensor rewards, Tensor? values=None, Tensor? mask=None, *, float gamma, float lam=1.0, "
    "Tensor? cu_seqlens=None) -> Tensor",
    arguments=_tokens.SEQUENCES,
)
def discounted_sum(rewards, values=None, mask=None, *extra, gamma=REQUIRED, lam=1.0, cu_seqlens=None, **unknown):
    """Advantages by GAE, A_t = delta_t + gamma lam A_(t+1), delta_t = r_t + gamma v_(t+1) - v_t, from the end.

    Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation", 2016. Without
    `values`, the discounted returns to go: A_t = r_t + gamma A_(t+1). Beyond the end of a sequence rewards and values
    are 0: where a trajectory is cut off, add gamma times its last state's value to its last reward. The targets of the
    value function are the advantages plus the values.

    An associative scan of log2(T) steps on all sequences at once, where a loop over time has T steps and T nodes of
    the graph. It never divides by gamma^t, which is 0 in fp32 from t = 10,000 on at 0.99.

    Args:
        rewards: floating tensor (..., T), along the last dim in order of time.
        values: floating tensor of `rewards`' shape, or None. Differentiable.
        mask: bool tensor, broadcastable to `rewards`; True = keep. Masked-out tokens (padding, a tool's answer) do not
            exist: the token before them is followed by the next kept one, and their own result and gradient are 0.
        gamma: discount of a step, from 0 to 1.
        lam: from 0 (delta alone) to 1 (the return to go minus the value). Without `values` it has no effect.
        {arguments}

    Returns:
        A tensor of `rewards`' shape: fp32 for fp16, bf16 and fp32 operands, fp64 if one is fp64.

    Raises:
        TypeError: an operand is not floating, `mask` is not bool.
        ValueError: shapes do not fit, devices differ, `gamma` or `lam` out of range, `cu_seqlens` that are no bounds of
            the tokens (on the CPU).

    Example:
        >>> rewards, mask = torch.tensor([0.0, torch.nan, 1.0]), torch.tensor([True, False, True])
        >>> safeops.discounted_sum(rewards, mask=mask, gamma=0.5)
        tensor([0.5000, 0.0000, 1.0000])
    """
    if extra or unknown:
        refuse(discounted_sum, extra, unknown)
    require(NAME, gamma=gamma)
    _tokens.validate(NAME, ("rewards", rewards), cu_seqlens, mask=mask, values=values)
    for key, x in (("gamma", gamma), ("lam", lam)):
        check.number(NAME, key, x, minimum=0, maximum=1)
    operands = [rewards] if values is None else [rewards, values]
    compute = compute_dtype(*(x.dtype for x in operands))
    operands = [selected(x, mask).to(compute) for x in operands]
    values = None if values is None else operands[1]
    return define(operands[0], values, mask, as_operand(gamma, rewards), as_operand(lam, rewards), cu_seqlens)
