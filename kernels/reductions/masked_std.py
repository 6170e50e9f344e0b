"""masked_std: the square root of masked_var."""

from .fold import fold
from .statistic import STD
from .statistic_backward import statistic_backward as masked_std_backward  # noqa: F401


def masked_std(
    input, mask=None, weight=None, dim=None, keepdim=False, empty_nan=False, dtype=None, parameter=0.0
):  # fmt: skip
    return fold(
        "masked_std", STD, input, mask, weight, dim, keepdim, empty_nan, dtype, parameter
    )  # fmt: skip
