"""safeops: loss building blocks for PyTorch that stay correct under mixed precision, at the speed of memory.

    import safeops

    loss = safeops.mse_loss(prediction, target, mask=valid)

Functions follow torch and torch.nn.functional in names, arguments and defaults; masks are boolean, True = keep.
"""

from safeops.losses.huber_loss import huber_loss
from safeops.losses.l1_loss import l1_loss
from safeops.losses.mse_loss import mse_loss
from safeops.losses.smooth_l1_loss import smooth_l1_loss
from safeops.ops.cosine_similarity import cosine_similarity
from safeops.ops.masked_fill import masked_fill
from safeops.ops.masked_log_softmax import masked_log_softmax
from safeops.ops.masked_mean import masked_mean
from safeops.ops.masked_softmax import masked_softmax
from safeops.ops.masked_sum import masked_sum
from safeops.ops.normalize import normalize
from safeops.ops.safe_div import safe_div

from safeops import nn  # isort: skip  (needs the functions above)

__version__ = "0.1.0"

__all__ = [
    "cosine_similarity",
    "huber_loss",
    "l1_loss",
    "masked_fill",
    "masked_log_softmax",
    "masked_mean",
    "masked_softmax",
    "masked_sum",
    "mse_loss",
    "nn",
    "normalize",
    "safe_div",
    "smooth_l1_loss",
]
