"""The support of a head's rows, which is cut into chunks as they are: bool, or a sampler's logits with a threshold."""

import torch

from safeops.core import check
from safeops.head._loss import NAME
from safeops.ops.classification import _support


def validated(loss):
    """A call's support as a bool tensor (*rows, C); None if there is none."""
    x = loss.support
    if isinstance(x, (list, tuple)) and len(x) == 2:
        form = (
            "support in CSR form is for a plain nn.Linear with loss='token_log_probs' or a divergence: else it must be "
            "bool, or floating with support_threshold"
        )
        raise ValueError(f"{NAME}: {form}")
    classes = x.shape[-1] if isinstance(x, torch.Tensor) and x.dim() else 0
    return _support.validate(NAME, x, loss.support_threshold, (*loss.shape, classes), hidden=loss.hidden)


def validate_classes(loss, classes):
    """Check a validated support, when the number of classes is known."""
    if isinstance(loss.support, torch.Tensor) and loss.support.shape[-1] != classes:
        raise ValueError(
            f"{NAME}: support {check.shown(loss.support)} must have the {classes} classes of the head's logits "
            f"{(*loss.shape, classes)}"
        )


def restricted(loss, logits, part):
    """The logits of a chunk, with -inf at classes that do not exist."""
    return logits if loss.support is None else _support.restrict(logits, loss.support[part])
