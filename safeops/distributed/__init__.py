"""Losses that are exact across ranks. torch.distributed moves the data; nothing here does."""

from safeops.core.op import Op
from safeops.distributed.global_count import global_count


def _call_over_ranks(op, operands, takes):
    from safeops.distributed import _dtensor  # (a slow import, which whoever has a DTensor has paid for)

    return _dtensor.call(op, operands, takes)


Op.call_over_ranks = _call_over_ranks

__all__ = ["global_count"]
