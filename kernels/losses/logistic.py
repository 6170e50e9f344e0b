"""Parts of the losses of logits. Neither half of the logistic function is computed as 1 minus the other half."""

import triton
import triton.language as tl

from ..engine.math import log1p_unit


@triton.jit
def product(a, b):
    """a b, and 0 where a is 0 and b infinite."""
    return tl.where((a == 0) & (tl.abs(b) == float("inf")), 0.0, a * b)


@triton.jit
def product_slope(a, b):
    """The derivative of product(a, b) by a."""
    return tl.where((a == 0) & (tl.abs(b) == float("inf")), 0.0, b)


@triton.jit
def linear_cost(x, hit, miss):
    """hit max(-x, 0) + miss max(x, 0), one of which is 0: the loss of a logit without its tail (logistic). A NaN of x,
    which this may hide, shows in the tail."""
    wrong = tl.where(x < 0, hit, miss)
    return wrong * tl.where(wrong == 0, 0.0, tl.abs(x))


@triton.jit
def at_least(x, low):
    """max(x, low), where NaN stays NaN."""
    return tl.where(x < low, low, x)


@triton.jit
def logistic(x):
    """Returns (1 / (1 + e^-x), 1 / (1 + e^x), the tail log(1 + e^-|x|))."""
    e = tl.exp(-tl.abs(x))
    near = 1 / (1 + e)
    far = e * near
    return tl.where(x < 0, far, near), tl.where(x < 0, near, far), log1p_unit(e)
