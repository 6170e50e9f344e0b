"""poisson_nll_loss: f = e^x - y x for log rates x, x - y log(x + eps) for rates; full: + Stirling's log y! (y > 1)."""

import triton
import triton.language as tl

from ..engine.math import LOG_2, log_any, rough_log2
from .logistic import product, product_slope
from .pointwise_loss import pointwise_loss

LOG_2_PI = tl.constexpr(1.8378770664093453)


@triton.jit
def stirling(y):
    """Returns (y log y - y + log(2 pi y) / 2, its derivative); both are 0 for y <= 1."""
    applies = y > 1
    n = tl.maximum(y, 1.0)  # (it hides a NaN, which shows in the rest of the loss; a tl.where spills registers)
    e = rough_log2(n)  # its error times n is about that of rounding n in fp32
    # (n + 1/2) log n - n, not n (log n - 1): NaN where n is infinite, as the definition's
    value = (n * LOG_2 + LOG_2 / 2) * e + (LOG_2_PI / 2 - n)
    return tl.where(applies, value, 0.0), tl.where(applies, e * LOG_2 + 0.5 / n, 0.0)


@triton.jit
def of_logs(x, y, eps):
    return tl.exp(x) - product(y, x)


@triton.jit
def slopes_of_logs(x, y, eps):
    return tl.exp(x) - y, -product_slope(y, x)


@triton.jit
def of_rates(x, y, eps):
    return x - product(y, log_any(x + eps))


of_rates.max_registers = (96, 128)  # 80 would spill


@triton.jit
def slopes_of_rates(x, y, eps):
    return 1 - y / (x + eps), -product_slope(y, log_any(x + eps))


@triton.jit
def full_of_logs(x, y, eps):
    return of_logs(x, y, eps) + stirling(y)[0]


@triton.jit
def full_slopes_of_logs(x, y, eps):
    dx, dy = slopes_of_logs(x, y, eps)
    return dx, dy + stirling(y)[1]


@triton.jit
def full_of_rates(x, y, eps):
    return of_rates(x, y, eps) + stirling(y)[0]


full_of_rates.max_registers = (80, 112)


@triton.jit
def full_slopes_of_rates(x, y, eps):
    dx, dy = slopes_of_rates(x, y, eps)
    return dx, dy + stirling(y)[1]


FORMULAS = {  # by log_input, full
    (True, False): (of_logs, slopes_of_logs),
    (True, True): (full_of_logs, full_slopes_of_logs),
    (False, False): (of_rates, slopes_of_rates),
    (False, True): (full_of_rates, full_slopes_of_rates),
}

poisson_nll_loss, poisson_nll_loss_backward = pointwise_loss("poisson_nll_loss", FORMULAS)
