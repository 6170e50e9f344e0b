"""masked_sum, masked_mean: sum of keep ? w * x : 0, and this sum over the kept count or the sum of kept weights.

Both have one backward, keep ? (g / denominator) * w : 0: the mean's denominator is the forward's second result.
"""

from ..engine.buffers import empty
from ..engine.elementwise import elementwise
from ..engine.sums import weighted_sum
from ..engine.tiling import reduced_dims, restore_dims


def launcher(name, mean):
    def launch(input, mask=None, weight=None, dim=None, keepdim=False, empty_nan=False, dtype=None):
        return weighted_sum(name, None, (input,), mask, weight, None, None, dim, keepdim, mean, (), empty_nan, dtype)

    launch.__name__ = launch.__qualname__ = name
    return launch


masked_sum = launcher("masked_sum", mean=False)
masked_mean = launcher("masked_mean", mean=True)


def masked_sum_backward(grad, size, dtype, denominator=None, mask=None, weight=None, dim=None, keepdim=False):
    """Returns the gradient of the input: contiguous, of shape `size`. grad and denominator: one number per output."""
    if not keepdim:
        reduced = reduced_dims(size, dim)
        grad = restore_dims(grad, reduced)
        denominator = None if denominator is None else restore_dims(denominator, reduced)
    out = empty(tuple(size), dtype, grad.device)
    elementwise("masked_sum_backward", None, (None, None, None, mask, weight, grad, denominator, out, None, None))
    return out
