"""masked_rms: sqrt(sum w x^2 / sum w), over the kept."""

from .fold import fold
from .statistic import RMS
from .statistic_backward import statistic_backward as masked_rms_backward  # noqa: F401


def masked_rms(
    input, mask=None, weight=None, dim=None, keepdim=False, empty_nan=False, dtype=None, parameter=0.0
):  # fmt: skip
    return fold(
        "masked_rms", RMS, input, mask, weight, dim, keepdim, empty_nan, dtype
    )  # fmt: skip
