"""masked_amax, masked_amin: the largest and the smallest kept element. All elements equal to it share its gradient."""

import triton
import triton.language as tl  # noqa: F401  (the interpreter looks for it beside every jit function)

from ..engine.state import EXTREME
from .statistic import launcher


@triton.jit
def largest(state, by, parameter):
    count, weights, pivot, shift, maximum, ties = state
    return maximum, maximum, 1 / ties, count > 0


@triton.jit
def smallest(state, by, parameter):
    """The state holds negated elements."""
    count, weights, pivot, shift, maximum, ties = state
    return -maximum, -maximum, 1 / ties, count > 0


masked_amax = launcher("masked_amax", EXTREME, largest)
masked_amin = launcher("masked_amin", EXTREME, smallest, negate=True)
