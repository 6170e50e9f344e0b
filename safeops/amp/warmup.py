"""warmup: compile the Triton kernels of a training step in parallel, before it begins."""

import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch

from safeops.core import availability, check
from safeops.core.op import registry


def warmup(
    *ops: Callable | str,
    like: torch.Tensor | Sequence[torch.Tensor],
    dtypes: Iterable[torch.dtype] | None = None,
    **options: Any,
) -> dict[str, str]:
    """Compile and load the kernels that calls of these ops need on a GPU, forward and backward, several at a time.

    A Triton kernel is compiled at its first call, which takes a second or so, and is refused while a CUDA graph is
    captured. Here each op is called once for each dtype, in a thread of its own, with the gradients of its result.
    Calls that differ from these only in sizes find their kernels loaded; other strides, alignment, dtypes or options
    may need other kernels. (Compiled kernels stay in Triton's cache on disk: the next process only loads them.)

    On a device without Triton kernels, and for an op that runs as plain torch, nothing is done, and the result says so.

    Args:
        ops: public functions of safeops that take tensors, or their names.
        like: examples of the calls' operands: the first arguments, as a tuple, or one tensor for every argument that
            the op requires. Their shapes, strides, dtypes and device matter, not their values, and they are not
            written. Gradients are computed for the operands that require one; if none does, for the first.
        dtypes: floating dtypes to call with, one after another, in place of the operands' own; such operands are new
            tensors of zeros. None: the operands as they are.
        options: keyword arguments of the calls, the same for every op.

    Returns:
        A dict: for each op "ready", or why there is nothing to compile.

    Raises:
        TypeError: an op is neither a function nor a name, `like` no tensor or tuple of tensors, `dtypes` no floating
            dtypes.
        ValueError: safeops has no op of such a name; `like` is empty.
        RuntimeError: a CUDA graph is being captured. Any error of a call that an op refuses.

    Example:
        >>> x, keep = torch.zeros(8, 128), torch.ones(8, 128, dtype=torch.bool)
        >>> safeops.warmup("mse_loss", safeops.masked_mean, like=x, dtypes=[torch.bfloat16], mask=keep)
        {'mse_loss': 'cpu has no Triton kernels', 'masked_mean': 'cpu has no Triton kernels'}
    """
    operands, records, dtypes = _operands(like), [_record(op) for op in ops], _dtypes(dtypes)
    device = operands[0].device
    results = {op.name: idle(op, device) or "ready" for op in records}
    jobs = [(op, dtype) for op in records if results[op.name] == "ready" for dtype in dtypes]
    if not jobs:
        return results
    here = current(device)  # a new thread starts with the default stream of the first GPU

    def run(job):
        op, dtype = job
        _call(op, operands * (_required(op) if like is operands[0] else 1), dtype, options, here)

    # Triton holds Python's lock a third of the time that it compiles: threads are three times as fast.
    with ThreadPoolExecutor(min(len(jobs), os.cpu_count() or 1)) as pool:
        list(pool.map(run, jobs))
    return results


def idle(op, device):
    """Why an op needs no compiled kernel for tensors on this device, or None."""
    if device.type != "cuda":
        return f"{device.type} has no Triton kernels"
    if op.runs_on(device):
        return None
    unsupported = next((part for part in (*op.parts, op) if not part.runs_on(device)), op)
    index = torch.cuda.current_device() if device.index is None else device.index
    return f"plain torch: {availability.availability(unsupported, index).reason}"


def current(device):
    """Returns a function that another thread calls for a context. Inside, `device` is that thread's GPU, and the
    current stream is the one that is current in this thread now."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("warmup: kernels cannot be compiled while a CUDA graph is captured: call it before")
    stream = torch.cuda.current_stream(device)
    return lambda: torch.cuda.stream(stream)


def _operands(like):
    operands = tuple(like) if isinstance(like, (tuple, list)) else (like,)
    if not operands:
        raise ValueError("warmup: like is empty: it must be a tensor or a tuple of tensors")
    for x in operands:
        check.tensor("warmup", "like", x)
    return operands


def _dtypes(dtypes):
    if dtypes is None:
        return (None,)
    several = isinstance(dtypes, (tuple, list)) and dtypes
    if not several or not all(isinstance(x, torch.dtype) and x.is_floating_point for x in dtypes):
        raise TypeError(f"warmup: dtypes must be floating dtypes, in a list or tuple, got {dtypes!r}")
    return tuple(dtypes)


def _record(op):
    name = op if isinstance(op, str) else getattr(op, "__name__", None)
    function = registry[name].public_function if name in registry else None
    if op is not name and op is not function:
        raise TypeError(f"warmup: ops must be ops of safeops or their names, got {op!r}")
    if function is None:
        raise ValueError(f"warmup: safeops has no op {name!r}")
    return registry[name]


def _required(op):
    parameters = inspect.signature(op.public_function).parameters.values()
    return sum(x.default is x.empty and x.kind is x.POSITIONAL_OR_KEYWORD for x in parameters)


def _call(op, operands, dtype, options, here):
    """Call the op and its backward in this thread: else one autograd thread for the GPU would compile all backwards."""
    with ExitStack() as stack:
        for context in (here(), torch.enable_grad(), torch.autograd.set_multithreading_enabled(False)):
            stack.enter_context(context)
        inputs = [_stand_in(x, dtype) for x in operands]
        wanted = [x for x, original in zip(inputs, operands) if original.requires_grad] or inputs[:1]
        wanted = [x.requires_grad_() for x in wanted if x.is_floating_point()]
        results = op.public_function(*inputs, **options)
        for result in results if isinstance(results, tuple) else (results,):
            if result.requires_grad:
                torch.autograd.grad(result, wanted, torch.ones_like(result), allow_unused=True)


def _stand_in(x, dtype):
    """Zeros in `dtype` with x's shape and strides, as far from a 16-byte boundary as x, rounded up to an element."""
    if dtype is None or not x.is_floating_point():
        return x.detach()
    extent = 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride())) if x.numel() else 0
    start = -(-(x.storage_offset() * x.element_size() % 16) // dtype.itemsize)
    return torch.zeros(start + extent, dtype=dtype, device=x.device).as_strided(x.shape, x.stride(), start)
