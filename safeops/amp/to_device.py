"""to_device: copy a batch to the GPU without waiting for it, and without the races of `non_blocking=True`."""

from typing import TypeVar

import torch

from safeops.amp._nested import map_tensors
from safeops.core import check

Batch = TypeVar("Batch")


def to_device(
    batch: Batch, device: torch.device | str | int, *, stream: torch.cuda.Stream | None = None, host_reused: bool = True
) -> Batch:
    """Move the tensors of a batch to a device: asynchronously from the host to a GPU, and yet safely.

    `x.to("cuda", non_blocking=True)` of pinned memory returns before the copy has read `x`: code that then writes the
    next batch into `x` changes this one. Here each host tensor is first copied into pinned memory of its own, which
    torch's allocator reuses only when the copy to the device is done. The caller may write into the batch, or free it,
    as soon as the call returns. That costs one copy on the host, at the speed of its memory, and pinned memory of the
    batch's size, which is kept for the next one.

    Other directions: from GPU to GPU as `.to(non_blocking=True)`, which orders the streams of both; from GPU to host it
    waits, since the host could read values that have not arrived. Tensors that are on the device already are returned
    as they are, so on a machine without a GPU `to_device(batch, "cpu")` copies nothing: the result shares memory with
    the batch, also with a numpy array from which it was made.

    Args:
        batch: a tensor, or lists, tuples, dicts, namedtuples and dataclasses with tensors in them; everything else in
            them, numpy arrays too, is left as it is. Containers in which something moved are new ones.
        device: a `torch.device`, or its name or index.
        stream: a `torch.cuda.Stream` on which host tensors are copied while the current stream computes. The current
            stream waits for the copies, the host does not, and the new memory is not reused before the current stream
            is done with it. None: the current stream.
        host_reused: False promises that nothing writes the batch's host memory any more, no worker either: then
            tensors that are pinned already are not copied on the host.

    Returns:
        The batch with its tensors on `device`; their dtypes and strides are kept, and gradients flow back.

    Raises:
        TypeError: `device` names no device, `stream` is no stream of a GPU, `host_reused` is not True or False.
        ValueError: `device` is a GPU, and torch sees none; `stream` is given for a device that is no GPU, or is one of
            another GPU.

    Example:
        >>> batch = {"image": torch.zeros(2, 3), "name": ["left", "right"]}
        >>> safeops.to_device(batch, "cpu")["image"] is batch["image"]
        True
    """
    target = _device(device)
    check.boolean_flag("to_device", "host_reused", host_reused)
    if stream is not None:
        _check_stream(stream, target)
    sent = {}  # one tensor in two places stays one

    def send(x):
        if id(x) not in sent:
            sent[id(x)] = x, _send(x, target, stream, host_reused)  # x stays alive, so that its id is not reused
        return sent[id(x)][1]

    moved = map_tensors(send, batch)
    if stream is not None:
        torch.cuda.current_stream(target).wait_stream(stream)
    return moved


def _device(device):
    try:
        target = torch.device(device)
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"to_device: device must name a device, got {device!r}: {error}") from error
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"to_device: device is {target}, and torch sees no CUDA device here")
    if target.type == "cuda" and target.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return target


def _check_stream(stream, target):
    if not isinstance(stream, torch.cuda.Stream):
        raise TypeError(f"to_device: stream must be a torch.cuda.Stream, got {type(stream).__name__}")
    if stream.device != target:
        raise ValueError(f"to_device: stream is of {stream.device}, device is {target}")


def _send(x, target, stream, host_reused):
    if x.device == target:
        return x
    if target.type != "cuda" or x.layout != torch.strided:
        return x.to(target)  # returns when the copy is done
    if x.device.type != "cpu":
        return x.to(target, non_blocking=True)
    pinned = x if not host_reused and x.is_pinned() else _staged(x)
    if stream is None:
        return pinned.to(target, non_blocking=True)
    with torch.cuda.stream(stream):
        y = pinned.to(target, non_blocking=True)
    # y was allocated on `stream` and is read on the current stream
    y.record_stream(torch.cuda.current_stream(target))
    return y


def _staged(x):
    """A copy in pinned memory, which the allocator does not reuse before the copies from it are done."""
    return torch.empty_like(x, pin_memory=True).copy_(x)
