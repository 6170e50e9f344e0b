"""log x - log y: the difference of two depths in silog_loss."""

import triton
import triton.language as tl

from .pointwise_loss import pointwise_loss


@triton.jit
def value(x, y):
    return tl.log(x) - tl.log(y)  # (not a rougher logarithm: the two may nearly cancel)


@triton.jit
def slopes(x, y):
    return 1 / x, -1 / y


log_ratio, log_ratio_backward = pointwise_loss("log_ratio", value, slopes=slopes)
