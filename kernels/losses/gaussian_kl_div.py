"""gaussian_kl_div: f = (e^d - 1 - d + u^2) / 2, d = y - prior_log_var, u = (x - prior_mean) / e^(prior_log_var / 2)."""

import math

import triton
import triton.language as tl

from .pointwise_loss import pointwise_loss


@triton.jit
def excess(d):
    """e^d - 1 - d for |d| < 1/2 by its series, which does not cancel: d^2 / 2 (1 + d / 3 (1 + d / 4 (..."""
    p = d * 0 + 1
    for k in tl.static_range(15 if d.dtype == tl.float64 else 9, 2, -1):
        p = 1 + p * (d * (1 / k))
    return 0.5 * d * d * p


@triton.jit
def value(x, y, prior_mean, prior_log_var, scale):
    d, u = y - prior_log_var, (x - prior_mean) * scale
    e = tl.exp(d)
    far = e - 1 - tl.where(e == float("inf"), 0.0, d)  # inf for d = inf, too
    return 0.5 * (tl.where(tl.abs(d) < 0.5, excess(d), far) + u * u)


@triton.jit
def slopes(x, y, prior_mean, prior_log_var, scale):
    d = y - prior_log_var
    return (x - prior_mean) * scale * scale, 0.5 * tl.where(tl.abs(d) < 0.5, d + excess(d), tl.exp(d) - 1)


gaussian_kl_div, gaussian_kl_div_backward = pointwise_loss(
    "gaussian_kl_div",
    value,
    slopes=slopes,
    parameters_of=lambda mean, log_var: (mean, log_var, math.exp(-log_var / 2)),
)
