"""Parts of the losses of logits: neither half of the logistic function is one less the other."""

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
    """hit max(-x, 0) + miss max(x, 0), of which one is 0: what a logit costs beside its tail, in which a
    NaN of x shows."""
    wrong = tl.where(x < 0, hit, miss)
    return wrong * tl.where(wrong == 0, 0.0, tl.abs(x))


@triton.jit
def at_least(x, low):
    """NaN stays NaN."""
    return tl.where(x < low, low, x)


@triton.jit
def logistic(x):
    """1 / (1 + e^-x), 1 / (1 + e^x), log(1 + e^-|x|)"""
    e = tl.exp(-tl.abs(x))
    near = 1 / (1 + e)
    far = e * near
    return tl.where(x < 0, far, near), tl.where(x < 0, near, far), log1p_unit(e)
