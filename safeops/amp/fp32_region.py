"""fp32_region: the code inside computes in fp32, whatever autocast is on outside."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch

from safeops.amp._nested import map_tensors
from safeops.amp._products import Products
from safeops.core import check
from safeops.core.dtypes import HALF
from safeops.core.private_torch import function_mode_stack, is_exporting

Function = TypeVar("Function", bound=Callable)
_ACCELERATOR = torch.accelerator.current_accelerator(check_available=False)
DEVICE_TYPES = tuple(dict.fromkeys(("cpu", "cuda", *([_ACCELERATOR.type] if _ACCELERATOR else []))))


@overload
def fp32_region(function: None = None) -> "_Region": ...
@overload
def fp32_region(function: Function) -> Function: ...
def fp32_region(function: Callable | None = None) -> Any:
    """Run a loss, or a part of one, in fp32: autocast is off inside, and half inputs of a function arrive as fp32.

    As a decorator (`@fp32_region` or `@fp32_region()`), autocast is off for every device type while the function runs,
    and fp16 and bf16 tensors among its arguments are passed as fp32, also those inside lists, tuples, dicts,
    namedtuples, dataclasses and `torch.distributions`. Their gradients come back in their own dtype, and the backward
    computes in fp32 too, also where it is compiled. A container that holds half tensors is passed as a copy, any other
    as it is. fp64, integers and everything else are left alone. A module is wrapped in a module, `.module` of the
    result, and keeps its parameters as they are: their dtype is not changed.

    As a context (`with fp32_region():`), autocast is off inside: what is half already stays half until you upcast it,
    with `.float()`.

    Autocast is as before afterwards, also after an exception, and what it has cached stays valid. Regions may be
    nested, and used in several threads at once. Works under torch.compile(fullgraph=True).

    Args:
        function: a function, method, callable object or `torch.nn.Module` instance. None: a context, or a decorator.

    Returns:
        The function, with the same signature, or a module; without an argument, a context that is also a decorator.

    Raises:
        TypeError: `function` is not callable, is a class, or is a generator or coroutine function, whose body would
            run after the region has ended.
        RuntimeError: a context object is entered a second time.

    Example:
        >>> @safeops.fp32_region
        ... def loss(prediction, target):
        ...     return (prediction - target).pow(2).sum()
        >>> loss(torch.full((3,), 300.0, dtype=torch.float16), torch.zeros(3))  # 270000 is inf in fp16
        tensor(270000.)
    """
    return _Region() if function is None else _wrapped(function)


def _without_autocast():
    if torch.compiler.is_compiling():  # an exported program may run under another autocast
        return _without(DEVICE_TYPES) if is_exporting() else _compiled()
    return _without(tuple(filter(torch.is_autocast_enabled, DEVICE_TYPES)))


@contextlib.contextmanager
def _without(types):
    if not types:
        yield
        return
    with torch.autocast(types[0], enabled=False), _without(types[1:]):
        yield


@contextlib.contextmanager
def _compiled():
    # (one mode only: the mode of an outer region would wrap the product inside a `_Product` once more)
    is_inside = any(isinstance(mode, Products) for mode in function_mode_stack())
    with contextlib.nullcontext() if is_inside else Products(), _without(DEVICE_TYPES):
        yield


class _Region:
    _context = None

    def __enter__(self):
        if self._context is not None:
            # Autocast is per thread: the state that one thread saved must not be restored in another.
            raise RuntimeError("fp32_region: this context was entered before; make one for each `with`")
        self._context = _without_autocast()
        self._context.__enter__()

    def __exit__(self, *error) -> None:
        self._context.__exit__(*error)

    def __call__(self, function: Function) -> Function:
        return _wrapped(function)


def _upcast(x):
    return x.float() if x.dtype in HALF else x


def _run(function, args, kwargs):
    args = [map_tensors(_upcast, x) for x in args]
    kwargs = {name: map_tensors(_upcast, x) for name, x in kwargs.items()}
    with _without_autocast():
        return function(*args, **kwargs)


class _Fp32Module(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return _run(self.module, args, kwargs)


def _wrapped(function):
    if isinstance(function, torch.nn.Module):
        return _Fp32Module(function)
    if isinstance(function, type) or not callable(function):
        kind = f"the class {function.__name__}" if isinstance(function, type) else type(function).__name__
        raise TypeError(f"fp32_region: function must be a function, a method or a module, got {kind}")
    check.runs_when_called("fp32_region", "region", function)

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return _run(function, args, kwargs)

    return wrapper
