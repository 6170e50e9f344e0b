"""masked_logsumexp: log sum w exp(x), over the kept."""

from .fold import fold
from .statistic import LOGSUMEXP
from .statistic_backward import statistic_backward as masked_logsumexp_backward  # noqa: F401


def masked_logsumexp(
    input, mask=None, weight=None, dim=None, keepdim=False, empty_nan=False, dtype=None, parameter=0.0
):  # fmt: skip
    return fold(
        "masked_logsumexp", LOGSUMEXP, input, mask, weight, dim, keepdim, empty_nan, dtype
    )  # fmt: skip
