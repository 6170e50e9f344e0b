"""masked_logsumexp: log sum w exp(x), over the kept elements."""

import triton
import triton.language as tl

from ..engine.state import EXPONENTIALS
from .statistic import launcher


@triton.jit
def logarithm(state, by, parameter):
    count, weights, pivot, shift, maximum, total = state
    total = tl.where(total < 0, float("nan"), total)  # a negative sum has no logarithm, and no slope
    origin = tl.where(total == 0, 0.0, maximum)  # so that exp(x - origin) is 0 for x = -inf
    return (
        tl.where(total == 0, float("-inf"), maximum + tl.log(total)),
        origin,
        1 / tl.where(total == 0, 1.0, total),
        count > 0,
    )


masked_logsumexp = launcher("masked_logsumexp", EXPONENTIALS, logarithm)
