"""masked_sum_of_squares: sum of keep ? w * x^2 : 0."""

from .fold import fold
from .statistic import SQUARE_SUM
from .statistic_backward import statistic_backward as masked_sum_of_squares_backward  # noqa: F401


def masked_sum_of_squares(
    input, mask=None, weight=None, dim=None, keepdim=False, empty_nan=False, dtype=None, parameter=0.0
):  # fmt: skip
    return fold(
        "masked_sum_of_squares", SQUARE_SUM, input, mask, weight, dim, keepdim, empty_nan, dtype
    )  # fmt: skip
