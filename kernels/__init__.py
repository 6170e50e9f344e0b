"""Triton kernels for CUDA tensors and the plain functions that launch them, one file per op.

Importing this package imports neither torch nor triton: a launcher's module does so when it is first asked for,
by `from safeops.kernels import mse_loss` or as an attribute, `safeops.kernels.mse_loss`.
"""

import importlib

OPS = (
    "masked_sum", "masked_mean", "masked_var", "masked_std", "masked_amax", "masked_amin", "masked_norm",
    "masked_sum_of_squares", "masked_rms", "masked_logsumexp", "masked_count", "safe_norm", "statistic_backward",
    "masked_softmax", "masked_log_softmax", "normalize", "cosine_similarity",
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
)  # fmt: skip


def __getattr__(name):
    if name in OPS:
        return importlib.import_module("." + name, __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
