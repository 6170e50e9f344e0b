"""masked_mean: sum of keep ? w * x : 0 over the kept count, or over the sum of kept weights."""

from ..engine.reduce import reduce
from .masked_sum import masked_sum_backward as masked_mean_backward  # noqa: F401  (given the forward's denominator)
from .masked_sum import term


def masked_mean(input, mask=None, weight=None, dim=None, keepdim=False, empty_nan=False, dtype=None):
    return reduce(
        "masked_mean",
        term,
        input,
        None,
        mask,
        weight,
        None,
        None,
        dim,
        keepdim,
        True,
        0.0,
        0.0,
        empty_nan,
        dtype,
    )
