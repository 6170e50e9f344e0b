"""masked_amax: the largest of the kept; its gradient is shared by all that are equal to it."""

from .fold import fold
from .statistic import LARGEST
from .statistic_backward import statistic_backward as masked_amax_backward  # noqa: F401


def masked_amax(
    input, mask=None, weight=None, dim=None, keepdim=False, empty_nan=False, dtype=None, parameter=0.0
):  # fmt: skip
    return fold(
        "masked_amax", LARGEST, input, mask, weight, dim, keepdim, empty_nan, dtype
    )  # fmt: skip
