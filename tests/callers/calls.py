"""One call of every public function of tensors, all arguments by name: what the tests of strange callers vary."""

import torch

import safeops
from tests.ops import RECORDS

CALLS = {name: RECORDS[name].call for name in sorted(RECORDS) if not isinstance(RECORDS[name].call, str)}
# what is no function of tensors, or of lists of them
OTHERS = {"combine_losses", "debug", "distributed", "fp32_region", "nn", "safe_mode", "to_device", "warmup"}
# or takes lengths, or a function, with them: tests/contract/rows
OTHERS = {*OTHERS, "ctc_loss", "triplet_margin_with_distance_loss", *RECORDS} - set(CALLS)


def tensors(name):
    return {key: x for key, x in CALLS[name].items() if isinstance(x, torch.Tensor)}


def call(name, **changes):
    return getattr(safeops, name)(**{**CALLS[name], **changes})


TENSORS = [(name, key) for name in CALLS for key in tensors(name)]


def _number(key, x):
    """Floats, and tensors that may be numbers as well: those of no dims, and second operands."""
    return type(x) is float or isinstance(x, torch.Tensor) and (x.dim() == 0 or key in ("exponent", "other"))


NUMBERS = sorted({key for arguments in CALLS.values() for key, x in arguments.items() if _number(key, x)})
TENSORS_TOO = sorted({key for name, key in TENSORS if key in NUMBERS} - {"fill_value"})
