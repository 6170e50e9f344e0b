"""si_sdr_loss: how far an estimated signal is from a multiple of its target, in dB."""

import math

import torch

from safeops.core import check, loss_reduction, sums
from safeops.core.composed_loss import ARGUMENTS, finish, validate, vectors
from safeops.core.definitions import kept
from safeops.core.dtypes import compute_dtype
from safeops.core.foreign import refuse
from safeops.core.op import Composed
from safeops.ops.vectors.normalize import _normalize

NAME = "si_sdr_loss"

# ---- definition


def selected(x, keep):
    """x where `keep` is True, 0 elsewhere; x if keep is None."""
    return x if keep is None else torch.where(keep, x, 0)


def losses(x, s):
    """The losses (...) of the rows of signals x, s (..., D), in the compute dtype.

    (1) loss = -10 log10(|a s|^2 / |a s - x|^2) = 10 log10((1 - c^2) / c^2), with c the cosine of x and s
    (2) 1 - |c| = |u - sign(c) v|^2 / 2 with the unit vectors u of x and v of s: this form loses no digits near |c| = 1
    (3) 1 - c^2 = (1 - |c|) (2 - (1 - |c|))
    """
    least = 4 * torch.finfo(x.dtype).eps
    u, v = _normalize.call(x, -1, None), _normalize.call(s, -1, None)
    c = sums.total(u * v, dim=-1)
    sign = torch.where(c < 0, -1.0, 1.0).to(c.dtype)
    near = sums.total((u - sign.unsqueeze(-1) * v).square(), dim=-1) / 2  # 1 - |c|
    error, signal = near * (2 - near), c * sign
    # Up to rounding, an estimate is orthogonal if |c| = 0, perfect if 1 - c^2 = 0. (NaN is neither, and shows.)
    orthogonal, perfect = signal <= least, error <= least * least
    error, signal = (torch.where(orthogonal | perfect, 1, y) for y in (error, signal))
    loss = 10 * error.log10() - 20 * signal.log10()
    most = -20 * math.log10(least)
    return torch.where(orthogonal, most, torch.where(perfect, -most, loss))


# ---- record


def validate_options(name, reduction, empty, zero_mean):
    """Check the options of a module's constructor."""
    loss_reduction.validate_options(name, reduction, empty)
    check.boolean_flag(name, "zero_mean", zero_mean)


_si_sdr_loss = Composed(
    NAME,
    _normalize,
    *sums.ALL,
    module="SISDRLoss",
    example="torch.tensor([[1.0, 0.5, -1.0]]), torch.tensor([[2.0, 0.0, -2.0]])",
    validate_options=validate_options,
)

# ---- public function


@_si_sdr_loss.public(
    "(Tensor input, Tensor target, *, bool zero_mean=False, Tensor? mask=None, Tensor? weight=None, "
    'str reduction="mean", Tensor? denominator=None, str empty="zero") -> Tensor',
    arguments=ARGUMENTS[ARGUMENTS.index("        reduction:") :],
)
def si_sdr_loss(
    input, target, *extra, zero_mean=False, mask=None, weight=None, reduction="mean", denominator=None, empty="zero",
    **unknown,
):  # fmt: skip
    """-10 log10(|a s|^2 / |a s - x|^2) with a = <x, s> / |s|^2, the negative SI-SDR in dB; the mean over the kept rows.

    The scale-invariant ratio of signal to distortion of an estimate x of a signal s: Le Roux et al., "SDR - half-baked
    or well done?", 2019.

    Signals are scaled by their own size and computed in fp32 (fp64 for fp64). The error of a good estimate does not
    cancel: in fp32 a loss of -60 dB is right to 0.001 dB, one of -120 dB to 0.5 dB. No eps is added.

    The loss is from -126.43 to 126.43 dB in fp32 (301.03 in fp64), 20 log10 of 4 eps of the dtype. A multiple of the
    target has the least loss. An orthogonal estimate, a silent estimate and a silent target have the largest. Each has
    gradient 0.

    Args:
        input: floating tensor (..., D), a signal x along the last dim for each row.
        target: floating tensor of `input`'s shape, the signals s. Differentiable.
        zero_mean: True: the mean of each signal's kept samples is subtracted first.
        mask: bool tensor, broadcastable to `input`; True = keep. Masked-out samples do not exist: NaN, inf or garbage
            there changes neither the loss nor a gradient, and their own gradient is exactly 0. A row without a kept
            sample does not exist either. A mask of rows alone is (..., 1).
        weight: floating tensor, broadcastable to the rows; 0 means the same as a masked-out row. Differentiable.
        {arguments}

    Raises:
        TypeError: an operand is not floating, `mask` is not bool, an option is of another type.
        ValueError: shapes do not fit, devices differ, unknown `reduction` or `empty`.

    Example:
        >>> target = torch.tensor([[1.0, 0.0, -1.0, 0.0]])
        >>> safeops.si_sdr_loss(target + torch.tensor([[0.0, 0.1, 0.0, 0.1]]), target)
        tensor(-20.)
    """
    if extra or unknown:
        refuse(si_sdr_loss, extra, unknown)
    rows = vectors(NAME, input=input, target=target)
    check.mask(NAME, mask, "input", input)
    check.same_device(NAME, "input", input, mask=mask)
    validate(NAME, rows, None, weight, reduction, denominator, empty, input=input, target=target)
    check.boolean_flag(NAME, "zero_mean", zero_mean)
    samples = kept(mask, None if weight is None else weight.unsqueeze(-1))
    compute = compute_dtype(input.dtype, target.dtype)
    signals = [selected(x.to(compute), samples) for x in (input, target)]
    if zero_mean:
        signals = [selected(x - sums.mean(x, samples, dim=-1, keepdim=True), samples) for x in signals]
    keep = None if samples is None else samples.expand(input.shape).any(-1)
    if input.shape[-1] == 0:
        keep = input.new_zeros(rows, dtype=torch.bool)
    return finish(NAME, losses(*signals), keep, weight, reduction, denominator, empty)
