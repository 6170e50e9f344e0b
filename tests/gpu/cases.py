"""Cases of the GPU tests: a call of each op that has a record, on CUDA tensors of any size."""

import torch

from tests.ops import RECORDS
from tests.ops.gpu import Case, numbers

__all__ = ["ASYNCHRONOUS", "DTYPES", "OPS", "Case", "numbers", "same"]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
OPS = {name: record.gpu for name, record in RECORDS.items() if callable(record.gpu)}
# Ops that do not wait for the device. The record of an op that does has `no_sync` among its skipped checks.
ASYNCHRONOUS = [name for name in OPS if "no_sync" not in RECORDS[name].fields["skip"]]


def same(got, expected):
    """Assert that two values, or two tuples of gradients, have the same bits; any NaN equals any NaN."""
    if isinstance(got, torch.Tensor):
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
        assert got.dtype == expected.dtype and got.shape == expected.shape
        differs = (got.contiguous().view(bits) != expected.contiguous().view(bits)) & ~(got.isnan() & expected.isnan())
        assert not differs.any(), f"{differs.sum()} of {differs.numel()} elements differ"
        return
    assert len(got) == len(expected)
    for a, b in zip(got, expected):
        same(a, b)
