"""Where each CUDA kernel last passed the GPU tests: `verified.json`, written by `scripts/gpu_check.py --record`.

Format: {op: {"gpu": ..., "torch": ..., "triton": ..., "date": ..., "source": sha256 of the kernel's source files}}.
A kernel without a record is not the default route: CUDA tensors then take the composite.
"""

import functools
import json
import pathlib

PATH = pathlib.Path(__file__).with_name("verified.json")


@functools.cache
def load() -> dict:
    return json.loads(PATH.read_text()) if PATH.exists() else {}


def record(op: str) -> dict | None:
    """The record of a public op, or None where it never ran on a GPU."""
    return load().get(op)
