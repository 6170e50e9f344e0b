"""A Contest has operands, a definition, our function and its rivals. The families register their contests by name."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from ..case import DTYPES, KEEP, data, keep_mask

FAMILIES = (
    "reductions", "elementwise", "vectors", "classification", "divergences", "linear", "losses", "images", "selection",
    "lists",
)  # fmt: skip
OURS, FLOOR = "safeops", "floor: "  # a contender whose name starts with FLOOR is a lower bound of the time, no rival
LEAST = {True: 4096, False: 32}  # largest size of a dim of small operands that have one dim (True), or several (False)


class Absent(Exception):
    """Raised for a rival that cannot run here; the message says why."""


class Rival(NamedTuple):
    load: Callable[[], Callable]  # imports the library; returns the function of all operands
    backward: bool = True  # False: the rival has no backward
    overwrites: bool = False  # True: it writes its operands
    cuda: bool = False  # True: it runs only on CUDA
    other: str = ""  # how its result differs by design, if it does; then its error is not judged
    compiled: bool = False  # True: torch.compile compiles the function


@dataclass
class Contest:
    inputs: tuple  # tensors; the backward computes their gradients
    rest: tuple  # the operands without gradients
    ours: Callable  # (*inputs, *rest) -> Tensor, like all functions of the contest
    rivals: dict[str, Rival | Callable]
    definition: Callable  # run in fp64, it is the reference for all errors
    bytes: tuple[float, float | None] | None = None  # (forward, total), to be moved; None: `flops` limit the time
    flops: tuple[float, float] | None = None  # arithmetic operations, (forward, total)
    overwrites: bool = False  # True: ours writes its operands
    backward: bool = True
    outcome: Callable = field(default=lambda out, *operands: out)  # (returned value, *operands) -> the compared value

    def contenders(self) -> dict[str, Rival]:
        ours = pattern(self.ours, backward=self.backward, overwrites=self.overwrites)
        plain = {name: it if isinstance(it, Rival) else pattern(it) for name, it in self.rivals.items()}
        return {OURS: ours} | plain

    def sizes(self) -> str:
        """Returns the shapes of the operands, as text."""
        shapes = [tuple(x.shape) for x in (*self.inputs, *self.rest) if isinstance(x, torch.Tensor)]
        return ", ".join("x".join(map(str, shape)) for shape in dict.fromkeys(shapes))


def _same(function):
    return function


def pattern(function, **flags) -> Rival:
    """Makes a Rival of a function that users write by hand."""
    return Rival(partial(_same, function), **flags)


def compiled(function) -> Rival:
    return pattern(function, compiled=True)


def library(module: str, name: str, call: Callable, *, options: dict | None = None, **flags) -> Rival:
    """Makes a Rival of an optional library: call(f, *operands), where f is `name` of `module`, or with `options` the
    object f(**options)."""

    def load():
        try:
            result = getattr(importlib.import_module(module), name)
        except ImportError as error:
            raise Absent(f"{module.split('.')[0]} cannot be imported: {error}") from error
        return partial(call, result if options is None else result(**options))

    return Rival(load, **flags)


class Operands:
    """Makes numbers, masks and indices of one dtype and device."""

    def __init__(self, dtype: str, device: str, small: bool):
        self.dtype, self.device, self.small = DTYPES[dtype], device, small
        self.itemsize = self.dtype.itemsize

    def size(self, *full: int):
        """Returns the sizes, at most LEAST for small operands: a tuple, or a number if there is one size."""
        result = tuple(min(n, LEAST[len(full) == 1]) for n in full) if self.small else full
        return result if len(result) > 1 else result[0]

    def normal(self, *shape: int, seed: int = 0) -> torch.Tensor:
        return data(math.prod(shape), self.dtype, self.device, seed, grad=False, shape=shape)

    def mask(self, *shape: int, share: float = KEEP) -> torch.Tensor:
        return keep_mask(math.prod(shape), self.device, share).view(shape)

    def index(self, size: int, *shape: int) -> torch.Tensor:
        return torch.randint(size, shape, device=self.device, generator=torch.Generator(self.device).manual_seed(3))


_contests: dict[str, tuple[Callable, str, tuple]] = {}


def contests(builder: Callable, table: dict[str, tuple[Any, ...]]):
    """Register contests {name: (dtype, *arguments)}. builder(operands, *arguments) makes the Contest."""
    for name, (dtype, *arguments) in table.items():
        _contests[name] = builder, dtype, tuple(arguments)


def names() -> list[str]:
    for family in FAMILIES:
        importlib.import_module(f"{__package__}.{family}")
    return list(_contests)


def dtype_of(name: str) -> str:
    return _contests[name][1]


def build(name: str, device: str, small: bool) -> Contest:
    builder, dtype, arguments = _contests[name]
    return builder(Operands(dtype, device, small), *arguments)


def wide(x):
    """Converts half precision to fp32, and leaves wider dtypes as they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
