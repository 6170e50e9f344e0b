"""soft_margin_loss: f = log(1 + e^(-y x))."""

import triton
import triton.language as tl  # noqa: F401  (the interpreter looks for it beside every jit function)

from .logistic import at_least, logistic, product
from .pointwise_loss import pointwise_loss


@triton.jit
def value(x, y):
    _, _, tail = logistic(y * x)
    return at_least(-(y * x), 0.0) + tail


@triton.jit
def slopes(x, y):
    _, q, _ = logistic(y * x)
    return product(-q, y), product(-q, x)


soft_margin_loss, soft_margin_loss_backward = pointwise_loss("soft_margin_loss", value, slopes=slopes)
