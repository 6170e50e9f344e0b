"""Remember which tensors are products with a boolean mask, so that `sum` and `mean` know what the mask hid.

Each thread remembers its latest products, and its latest masks that were cast to numbers, until they are freed. An
in-place write to the tensor or its mask ends that. Such a write may be missed (by `.data`, by numpy, in inference
mode); an origin only decides which NaN are left out (values.py).
"""

import contextlib
import threading
import weakref

import torch

from safeops.core.private_torch import is_tracing, version

PRODUCTS = 8  # most products to remember: they are reduced soon after
NUMBERS = 256  # most cast masks to remember: one has many uses


class _Memory(threading.local):
    def __init__(self):
        self.products, self.numbers, self.off = {}, {}, False


_memory = _Memory()


def _remember(entries, most, result, mask):
    if _memory.off:
        return
    key = id(result)
    entries.pop(key, None)
    if len(entries) == most:
        del entries[next(iter(entries))]
    entries[key] = weakref.ref(result, lambda _: entries.pop(key, None)), mask, version(result), version(mask)


def _mask_of(entries, x):
    """The mask that is remembered for x, or None."""
    if not entries or _memory.off:
        return None
    reference, mask, *versions = entries.get(id(x), (None, None))
    known = reference is not None and reference() is x and versions == [version(x), version(mask)]
    return mask if known else None


def mask_of_product(x):
    """The boolean mask that x is a product with, or None."""
    return _mask_of(_memory.products, x)


def forget():
    _memory.products.clear()
    _memory.numbers.clear()


def are_off():
    return _memory.off


@contextlib.contextmanager
def off():
    """Inside, no tensor has an origin: for a function that is computed twice, the second time with other tensors."""
    before, _memory.off = _memory.off, True
    try:
        yield
    finally:
        _memory.off = before


# ---- rules that call torch's own function and remember its result


def _watched(remember):
    def rule(func, args, kwargs):
        result = func(*args, **kwargs)
        if not torch.compiler.is_compiling() and not is_tracing():
            remember(result, func, args, kwargs)
        return result

    return rule


@_watched
def product(result, func, args, kwargs):
    if len(args) == 2 and isinstance(args[1], torch.Tensor):  # most products are with a number, and cost only this
        for x, factor in (args, args[::-1]):
            mask = _as_mask(factor)
            if mask is not None and isinstance(x, torch.Tensor) and x.is_floating_point():
                _remember(_memory.products, PRODUCTS, result, mask)
                break


def _as_mask(x):
    """x if it is a boolean mask, the mask that x was cast from, or None."""
    if not isinstance(x, torch.Tensor):
        return None
    return x if x.dtype == torch.bool else _mask_of(_memory.numbers, x)


@_watched
def cast(result, func, args, kwargs):
    x = args[0]
    if result is x or not isinstance(result, torch.Tensor) or not result.is_floating_point():
        return
    mask = _as_mask(x)
    if mask is not None and result.device == x.device:
        _remember(_memory.numbers, NUMBERS, result, mask)


@_watched
def view(result, func, args, kwargs):
    """A view of a cast mask: remember it with the same view of the boolean mask."""
    if _memory.numbers and isinstance(args[0], torch.Tensor):
        mask = _mask_of(_memory.numbers, args[0])
        if mask is not None:
            _remember(_memory.numbers, NUMBERS, result, func(mask, *args[1:], **kwargs))


def read(func, args, kwargs):
    """x[index]. A boolean index waits for a GPU: do not repeat it on the mask."""
    waits = isinstance(args[1], torch.Tensor) and args[1].dtype == torch.bool
    return func(*args) if waits else view(func, args, kwargs)
