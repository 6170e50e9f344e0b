"""Buffers that a launch writes: outputs, and the partial results of blocks that share a result."""

from functools import lru_cache, partial

import torch

from .sized import Sized
from .start import current_stream, share
from .trace import active


def allocator(shape, dtype, device):
    """A function that makes an empty contiguous tensor. (torch.empty takes twice as long to parse its arguments.)"""
    return (_allocator if active.tape is None else _sized)(shape, dtype, device)


@lru_cache(4096)
def _allocator(shape, dtype, device):
    steps = Sized.contiguous(shape, dtype, device).steps
    return partial(torch.empty_strided, shape, steps, dtype=dtype, device=device)


def _sized(*arguments):
    return partial(Sized.contiguous, *arguments)


def empty(shape, dtype, device):
    return allocator(shape, dtype, device)()


COUNTERS = 1024  # the most output blocks that are split: more of them fill a GPU without splitting
PARTIALS = 1 << 17  # size in fp64 numbers (1 MiB); a launch that needs more allocates: it takes longer than that
_buffers = {}


def split_counters(device):
    """Zeroed counters, one per output block, of its finished splits. The last split sets its block's counter to 0."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def split_buffers(index, device):
    """Returns (partials, counters) of the current stream of a GPU, or None while that stream is captured.

    Zeroing counters for each call would be a second launch. One buffer per (device, stream) is enough: the kernels of a
    stream run one after another, and each leaves zeros behind, since its last block writes the 0 after every other
    block has counted. Two streams may run at once, so each has its own buffer. A captured graph may be replayed on
    another stream, beside eager work on the stream that captured it: it gets its own buffers from its own memory pool,
    and a node of the graph zeroes its counters in every replay."""
    if torch.cuda.is_current_stream_capturing():
        return None
    key = index, current_stream(index)
    result = _buffers.get(key)
    if result is None:
        partials = torch.empty(PARTIALS, dtype=torch.float64, device=device)
        result = _buffers[key] = partials, split_counters(device)
        share(*key, *result)
    return result
