"""gaussian_kl_div: KL divergence of normal distributions from a prior, the latent term of a variational autoencoder."""

import torch

from safeops.core.dtypes import LARGEST
from safeops.core.foreign import refuse
from safeops.core.loss_reduction import REDUCTION
from safeops.ops.losses._pointwise import Parameter, PointwiseLoss, by_batch


def value(x, y, prior_mean, prior_log_var):
    u = (x - prior_mean) * torch.exp(-prior_log_var / 2 * torch.ones_like(x))  # scaled before u * u, which may overflow
    return (_excess(y - prior_log_var) + u * u) / 2


def _excess(d):
    """e^d - 1 - d; for |d| < 0.5, where the difference loses digits, by its series. inf for an infinite d."""
    near = d.abs() < 0.5
    small, large = torch.where(near, d, 0), torch.where(near, 1, d)
    series = 1.0
    for k in range(17, 2, -1):  # d^2 / 2 (1 + d / 3 (1 + d / 4 (...
        series = 1 + series * (small / k)
    e = torch.exp(large)
    return torch.where(near, small * small / 2 * series, e - 1 - torch.where(e.isinf(), 0, large))


_gaussian_kl_div = PointwiseLoss(
    "gaussian_kl_div",
    "GaussianKLDivLoss",
    value,
    Parameter("prior_mean", 0.0, minimum=-LARGEST, sample=0.25),
    Parameter("prior_log_var", 0.0, minimum=-80, maximum=80, sample=-0.5),  # both variances are normal numbers of fp32
    names=("mean", "log_var"),
    reductions=(*REDUCTION, "batchmean"),
    example="torch.tensor([[0.5, -1.0]]), torch.tensor([[0.0, -2.0]])",
)


@_gaussian_kl_div.public(operands="")
def gaussian_kl_div(
    mean, log_var, *extra, mask=None, weight=None, reduction="mean", denominator=None, empty="zero", prior_mean=0.0,
    prior_log_var=0.0, **unknown,
):  # fmt: skip
    """Divergence of N(mean, e^log_var) from a prior: (e^d - 1 - d + (mean - prior_mean)^2 / e^prior_log_var) / 2.

    d = log_var - prior_log_var; the mean over the kept elements. Kingma and Welling, "Auto-Encoding Variational Bayes",
    2014, appendix B. reduction="batchmean" is the sum divided by the size of the first dim: a sum over the latents and
    a mean over the batch, the term of the evidence lower bound.

    Value and gradient are exact to fp32 near the prior, where 1 + log_var - e^log_var written out keeps no digit. A
    variance that overflows gives inf.

    Args:
        mean: floating tensor, the expected values.
        log_var: floating tensor of `mean`'s shape, logarithms of variances; broadcast with a warning. Differentiable.
        prior_mean: number, the prior's expected value.
        prior_log_var: number from -80 to 80, the logarithm of the prior's variance. For a prior whose mean m and
            log-variance v are tensors, pass (mean - m) * (-v / 2).exp() and log_var - v, in fp32.
        {arguments}

    Example:
        >>> mean, log_var = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.0, 0.0]])
        >>> safeops.gaussian_kl_div(mean, log_var, reduction="batchmean")
        tensor(0.5000)
    """
    if extra or unknown:
        refuse(gaussian_kl_div, extra, unknown)
    reduction, denominator = by_batch("gaussian_kl_div", mean, reduction, denominator)
    return _gaussian_kl_div.call(mean, log_var, mask, weight, reduction, denominator, empty, prior_mean, prior_log_var)
