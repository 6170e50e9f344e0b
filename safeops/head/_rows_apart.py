"""check=True: a head whose rows see each other, as those of a BatchNorm in training do, cannot run in chunks."""

import torch
from torch.overrides import TorchFunctionMode

from safeops.core import check
from safeops.head._loss import NAME
from safeops.head._rows import select, validated
from safeops.head._surroundings import Surroundings

MIXES = "mixes rows, so that it cannot run in chunks"


class _NoDropout(TorchFunctionMode):
    """Dropout of any kind returns its input: its random numbers are not the same for a row apart."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if "dropout" in getattr(function, "__name__", ""):
            return args[0] if args else kwargs["input"]
        return function(*args, **(kwargs or {}))


def refuse_mixed_rows(head, call, hidden, keep):
    """Run the head on the first and last row, together and apart; raise ValueError if the logits differ. call: runs the
    head, without the work of wrappers."""
    if len(hidden) < 2:
        return
    rows = select(keep, hidden.detach())[[0, -1]]
    buffers = [(x, x.clone()) for x in getattr(head, "buffers", tuple)()]
    try:
        with torch.no_grad(), Surroundings(hidden.device).again(), _NoDropout():
            together = validated(call(rows), rows)
            apart = [_alone(call, row) for row in rows.split(1)]
    finally:
        for x, before in buffers:  # (counters, running means)
            x.copy_(before)
    for number, row, other in zip((0, len(hidden) - 1), together.double(), apart):
        narrow = min((hidden.dtype, together.dtype), key=lambda dtype: -torch.finfo(dtype).eps)
        bound = torch.finfo(narrow).eps ** 0.5 * together.double().abs().amax()
        difference = (row - other[0].double()).abs().amax()
        if difference > bound:
            raise ValueError(
                f"{NAME}: head {MIXES}: row {number} of hidden {check.shown(hidden)} has other logits alone than "
                f"beside another row, by {difference:.3g}"
            )


def _alone(call, row):
    try:
        return validated(call(row), row)
    except ValueError as error:  # (a BatchNorm in training refuses a single row)
        raise ValueError(f"{NAME}: head {MIXES}; of one row alone it says: {error}") from error
