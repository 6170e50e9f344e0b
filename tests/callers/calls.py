"""One call of every public function of tensors, with all arguments by name, which the tests in this folder vary."""

import torch

import safeops
from tests.ops import RECORDS

CALLS = {name: RECORDS[name].call for name in sorted(RECORDS) if not isinstance(RECORDS[name].call, str)}
# Public names without a call here: those that are not functions of tensors or of lists of tensors,
OTHERS = {"combine_losses", "debug", "distributed", "fp32_region", "nn", "safe_mode", "to_device", "warmup"}
# and the functions that also take lengths or a function, which tests/contract/classification and tests/head test.
OTHERS = {*OTHERS, "ctc_loss", "head_loss", "triplet_margin_with_distance_loss", *RECORDS} - set(CALLS)


def tensors(name):
    return {key: x for key, x in CALLS[name].items() if isinstance(x, torch.Tensor)}


def call(name, **changes):
    return getattr(safeops, name)(**{**CALLS[name], **changes})


TENSORS = [(name, key) for name in CALLS for key in tensors(name)]


def _number(key, x):
    """Returns True for floats, and for tensors that a caller may replace by a number: 0-dim ones, second operands."""
    return type(x) is float or isinstance(x, torch.Tensor) and (x.dim() == 0 or key in ("exponent", "other"))


NUMBERS = sorted({key for arguments in CALLS.values() for key, x in arguments.items() if _number(key, x)})
TENSORS_TOO = sorted({key for name, key in TENSORS if key in NUMBERS} - {"fill_value"})
