"""masked_amin: the smallest of the kept, which is -masked_amax(-x)."""

from .fold import fold
from .statistic import LARGEST
from .statistic_backward import statistic_backward as masked_amin_backward  # noqa: F401


def masked_amin(
    input, mask=None, weight=None, dim=None, keepdim=False, empty_nan=False, dtype=None, parameter=0.0
):  # fmt: skip
    return fold(
        "masked_amin", LARGEST, input, mask, weight, dim, keepdim, empty_nan, dtype, negate=True
    )  # fmt: skip
