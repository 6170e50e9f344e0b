"""masked_var, masked_std: sum w (x - mean)^2 / (sum w - correction) over the kept elements, and its square root.

silog_loss: root = sqrt(variance + (1 - focus) mean^2), with the derivative w (x - focus mean) / (root sum w)."""

import triton
import triton.language as tl

from ..engine.scaling import inverse_beyond, power_below
from ..engine.state import MOMENTS, square
from .statistic import launcher


@triton.jit
def deviations(state, by, correction):
    """Returns (mean, sum w (x - mean)^2 in units of maximum^2, its divisor, whether there is a variance)."""
    count, weights, pivot, shift, maximum, total = state
    # sum w (x - mean)^2 = sum w (x - p)^2 - (sum w (x - p))^2 / sum w, p the pivot, in the unit maximum^2
    squares = total - square(shift) / by
    squares = tl.where(squares < 0, 0.0, squares)
    degrees = by - correction
    exists = (count > 0) & ~((degrees <= 0) & (squares == squares))  # a NaN shows in any case
    return pivot + shift / by * maximum, squares, degrees, exists


@triton.jit
def variance(state, by, correction):
    mean, squares, degrees, exists = deviations(state, by, correction)
    maximum = state[4]
    value = squares / degrees * maximum * maximum
    # a NaN variance, such as that of a kept inf, makes the whole gradient NaN
    return value, mean, tl.where(value != value, value, 2 / degrees), exists


@triton.jit
def deviation(state, by, correction):
    mean, squares, degrees, exists = deviations(state, by, correction)
    root, maximum = tl.sqrt(squares / degrees), state[4]
    return root * maximum, mean, inverse_beyond(root * degrees, maximum), exists


@triton.jit
def silog(state, by, focus):
    mean, squares, degrees, exists = deviations(state, by, 0.0)
    maximum = state[4]
    unit = tl.maximum(maximum, power_below(tl.abs(mean)))  # the deviations' maximum may be far below the mean
    root = tl.sqrt(squares / degrees * square(maximum / unit) + (1 - focus) * square(mean / unit))
    return root * unit, focus * mean, inverse_beyond(root * degrees, unit), exists


masked_var = launcher("masked_var", MOMENTS, variance)
masked_std = launcher("masked_std", MOMENTS, deviation)
silog_loss = launcher("silog_loss", MOMENTS, silog)
