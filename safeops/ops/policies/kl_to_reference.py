"""kl_to_reference: Schulman's estimators of the KL divergence of a policy from a reference, a number for each token."""

import math

import torch

from safeops.core import check
from safeops.core.definitions import selected
from safeops.core.dtypes import compute_dtype
from safeops.core.foreign import refuse
from safeops.core.op import Composed
from safeops.ops.policies import _tokens

NAME = "kl_to_reference"
KINDS = ("k1", "k2", "k3")
TERMS = 12  # of the series: for |d| < 1/4 the next one is below fp64's eps

# ---- definition


def excess(d):
    """e^d - 1 - d. Near 0, where these terms cancel, d^2 / 2 + d^3 / 6 + ... + d^13 / 13!."""
    small = d.abs() < 0.25
    near, far = torch.where(small, d, 0), torch.where(small, 0, d)
    series = torch.ones_like(d)
    for n in range(TERMS + 1, 2, -1):  # Horner's scheme
        series = 1 + series * near / n
    return torch.where(small, near * near / 2 * series, torch.expm1(far) - far)


def estimate(d, kind):
    """The estimator of kind `kind`, with d = reference_log_prob - log_prob. A finite d has a finite value: the largest,
    with gradient 0, where the true one does not fit."""
    if kind == "k1":
        return -d
    largest = torch.finfo(d.dtype).max
    over = d.abs() > math.sqrt(largest) if kind == "k2" else (d > math.log(largest)) & (d != float("inf"))
    over = over & d.isfinite()
    fits = torch.where(over, 0, d)
    value = fits * fits / 2 if kind == "k2" else excess(fits)
    return torch.where(over, largest, value)


# ---- record


class Estimator(Composed):
    kinds = KINDS  # the values of `kind`, for the types


_kl_to_reference = Estimator(NAME, *_tokens.PARTS)

# ---- public function


@_kl_to_reference.public('(Tensor log_prob, Tensor reference_log_prob, *, str kind="k3", Tensor? mask=None) -> Tensor')
def kl_to_reference(log_prob, reference_log_prob, *extra, kind="k3", mask=None, **unknown):
    """An estimate of KL(policy | reference) at each token, from d, the reference's log-probability less the policy's.

    k1 is -d, k2 is d^2 / 2, k3 is exp(d) - 1 - d (Schulman, "Approximating KL Divergence", 2020), for tokens that the
    policy sampled. k1 and k3 have the divergence as their mean; k3 is never negative, and varies less. As a term of a
    loss, k2 has the divergence's own gradient in the mean, and k1 has none: its gradients average to 0. k3 is GRPO's.

    exp(95) does not exist in fp32: k3 and k2 saturate at the largest number, with gradient 0 there. Near d = 0 k3 is
    computed as a series, as exp(d) - 1 - d would lose its digits. Half is computed in fp32.

    Args:
        log_prob: floating tensor of any shape with a dim: log-probabilities of the policy's own tokens.
        reference_log_prob: floating tensor of `log_prob`'s shape: those of the reference. Differentiable.
        kind: "k1", "k2" or "k3".
        mask: bool tensor, broadcastable to `log_prob`; True = keep. Masked-out tokens have value 0 and gradient 0,
            whatever lies there.

    Returns:
        A tensor of `log_prob`'s shape: fp32 for fp16, bf16 and fp32 operands, fp64 if one is fp64.

    Raises:
        TypeError: an operand is not floating, `mask` is not bool.
        ValueError: shapes do not fit, devices differ, unknown `kind`.

    Example:
        >>> log_prob, reference = torch.tensor([-1.0, -2.0, -100.0]), torch.tensor([-1.0, -1.5, -0.5])
        >>> safeops.kl_to_reference(log_prob, reference)
        tensor([0.0000e+00, 1.4872e-01, 3.4028e+38])
    """
    if extra or unknown:
        refuse(kl_to_reference, extra, unknown)
    _tokens.validate(NAME, ("log_prob", log_prob), mask=mask, reference_log_prob=reference_log_prob)
    check.choice(NAME, "kind", kind, KINDS)
    compute = compute_dtype(log_prob.dtype, reference_log_prob.dtype)
    x, reference = (selected(x, mask).to(compute) for x in (log_prob, reference_log_prob))
    return estimate(reference - x, kind)
