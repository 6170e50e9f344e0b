"""masked_norm: (sum w |x|^p)^(1/p) over the kept, for p of 1, 2, inf and -inf."""

from .fold import fold
from .statistic import ABSOLUTE_SUM, LARGEST, NORM
from .statistic_backward import statistic_backward as masked_norm_backward  # noqa: F401

# parameter -> (RESULT, negate)
ORDERS = {
    1.0: (ABSOLUTE_SUM, False),
    2.0: (NORM, False),
    float("inf"): (LARGEST, False),
    float("-inf"): (LARGEST, True),
}


def masked_norm(
    input, mask=None, weight=None, dim=None, keepdim=False, empty_nan=False, dtype=None, parameter=0.0, *,
    name="masked_norm", saturate=False,
):  # fmt: skip
    if parameter not in ORDERS:
        # any other runs as plain torch: the public functions never send it here
        raise ValueError(f"{name}: the kernel knows the orders {', '.join(map(str, ORDERS))}, got {parameter}")
    result, negate = ORDERS[parameter]
    return fold(
        name, result, input, mask, weight, dim, keepdim, empty_nan, dtype,
        absolute=True, negate=negate, saturate=saturate,
    )  # fmt: skip
