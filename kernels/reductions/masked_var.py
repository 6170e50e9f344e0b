"""masked_var: sum w (x - mean)^2 / (sum w - correction), over the kept."""

from .fold import fold
from .statistic import VAR
from .statistic_backward import statistic_backward as masked_var_backward  # noqa: F401


def masked_var(
    input, mask=None, weight=None, dim=None, keepdim=False, empty_nan=False, dtype=None, parameter=0.0
):  # fmt: skip
    return fold(
        "masked_var", VAR, input, mask, weight, dim, keepdim, empty_nan, dtype, parameter
    )  # fmt: skip
