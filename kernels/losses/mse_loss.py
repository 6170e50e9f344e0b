"""mse_loss: f = (x - y)^2."""

import triton
import triton.language as tl  # noqa: F401  (the interpreter looks for it beside every jit function)

from .pointwise_loss import pointwise_loss


@triton.jit
def value(x, y):
    return (x - y) * (x - y)


@triton.jit
def slope(x, y):
    return (x - y) + (x - y)


mse_loss, mse_loss_backward = pointwise_loss("mse_loss", value, slope)
