"""Which operation made a tensor, for the patterns that show only when its result is used.

`a / b` is unsafe where `torch.where` then selects from it, `x * mask` and `x[mask]` where they are then reduced. Such
results are remembered, each thread its own, until they die or others take their place. A tensor that was written in
place since, or whose operands were, has no origin any more.
"""

import contextlib
import threading
import weakref
from typing import Any, NamedTuple

import torch

from safeops.core.private_torch import version

RECENT = 8  # results whose operands are held, which costs memory: where they are used follows soon
MASKS = 256  # masks as numbers, which hold one byte an element


class Division(NamedTuple):
    input: Any
    other: Any


class Product(NamedTuple):
    """x * mask, of shape `shape`."""

    input: torch.Tensor
    mask: torch.Tensor
    shape: torch.Size


class Read(NamedTuple):
    """x[mask]"""

    input: torch.Tensor
    mask: torch.Tensor


class Cast(NamedTuple):
    """A mask as numbers."""

    mask: torch.Tensor


class _Memory(threading.local):
    def __init__(self):
        self.results, self.masks, self.off = {}, {}, False


_memory = _Memory()


def remember(result, origin):
    if _memory.off:
        return
    entries, most = (_memory.masks, MASKS) if isinstance(origin, Cast) else (_memory.results, RECENT)
    key = id(result)
    entries.pop(key, None)
    if len(entries) == most:
        del entries[next(iter(entries))]
    entries[key] = weakref.ref(result, lambda _: entries.pop(key, None)), origin, _versions(result, *origin)


def origin(x, kind):
    """The origin of a tensor if it is of this kind, else None."""
    entries = _memory.masks if kind is Cast else _memory.results
    if not entries or _memory.off:
        return None
    reference, result, versions = entries.get(id(x), (None, None, None))
    known = result.__class__ is kind and reference() is x and versions == _versions(x, *result)
    return result if known else None


def forget():
    _memory.results.clear()
    _memory.masks.clear()


@contextlib.contextmanager
def off():
    """Nothing has an origin: in what is computed twice, the second time from other tensors."""
    before, _memory.off = _memory.off, True
    try:
        yield
    finally:
        _memory.off = before


def _versions(*tensors):
    return [version(x) for x in tensors if isinstance(x, torch.Tensor)]


# ---- what is remembered: rules that call torch's function, and never another


def division(func, args, kwargs):
    result = func(*args, **kwargs)
    if len(args) == 2 and not kwargs and isinstance(result, torch.Tensor) and result.requires_grad:
        remember(result, Division(*args[::-1]) if func is torch.Tensor.__rdiv__ else Division(*args))
    return result


def product(func, args, kwargs):
    result = func(*args, **kwargs)
    if len(args) == 2 and isinstance(args[1], torch.Tensor):  # mostly it is not: most products cost no more than that
        for x, factor in (args, args[::-1]):
            mask = as_mask(factor)
            if mask is not None and isinstance(x, torch.Tensor) and x.is_floating_point():
                remember(result, Product(x, mask, result.shape))
                break
    return result


def as_mask(x):
    """The boolean mask that x is, as such or as numbers, or None."""
    if not isinstance(x, torch.Tensor):
        return None
    if x.dtype == torch.bool:
        return x
    cast = origin(x, Cast)
    return cast and cast.mask


def read(func, args, kwargs):
    result = func(*args, **kwargs)
    if len(args) == 2 and isinstance(args[1], torch.Tensor) and args[1].dtype == torch.bool:
        x, mask = args
        if x.is_floating_point() and mask.shape == x.shape[: mask.dim()] and mask.dim():
            remember(result, Read(*args))
        return result
    return _view_of_mask(func, args, kwargs, result)


def cast(func, args, kwargs):
    result = func(*args, **kwargs)
    x = args[0]
    if x.dtype == torch.bool and isinstance(result, torch.Tensor) and result.is_floating_point():
        if result.device == x.device:
            remember(result, Cast(x))
    elif _memory.masks and result is not x and result.is_floating_point():
        mask = origin(x, Cast)
        if mask is not None and result.device == x.device:
            remember(result, mask)
    return result


def view(func, args, kwargs):
    return _view_of_mask(func, args, kwargs, func(*args, **kwargs))


def _view_of_mask(func, args, kwargs, result):
    """A view of a mask as numbers is the view of the mask, as numbers."""
    if _memory.masks and isinstance(args[0], torch.Tensor):
        mask = origin(args[0], Cast)
        if mask is not None:
            remember(result, Cast(func(mask.mask, *args[1:], **kwargs)))
    return result
