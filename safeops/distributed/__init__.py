"""Losses that are exact across ranks. torch.distributed moves the data; nothing here does."""

from safeops.distributed.global_count import global_count

__all__ = ["global_count"]
