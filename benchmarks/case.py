"""One op at one dtype and size: what it must move, ours, and what users would run instead.

A family's file registers its cases with `@case(name)`; the runner, the tests and `--compare` read the registry.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
KEEP = 0.75  # share of True in the masks, at random: no branch predictor learns it
ROW = 1024
FAMILIES = (
    "elementwise", "selection", "reductions", "classification", "divergences", "linear", "vectors", "losses", "images",
    "lists",
)  # fmt: skip

_builders = {}  # name -> (n, dtype, device) -> Case


@dataclass
class Case:
    inputs: tuple  # what the gradients are asked for
    forward_bytes: float  # per element: each input read once, the output written once
    backward_bytes: float | None  # None: there is no backward
    ours: Callable  # (*inputs) -> Tensor
    eager: dict[str, Callable]  # the pattern as written -> it; the first is the one users write most
    compiled: Callable | None  # the pattern that torch.compile does best on: no boolean index
    counted: bool = True  # False: a kernel touches a part of what it is given, or several kernels hand tensors on
    variant: bool = False  # a further shape of an op: its share of the floor is judged, its factor over eager is not
    aten: Callable | None = None  # torch's own op, (*inputs) -> Tensor: what a small call stands beside
    # The arithmetic costs more than the bytes: what is judged is the share of the speed of `aten` in fp32 (fp64 for
    # fp64) on as many elements, not the share of the floor, nor the factor over eager.
    arithmetic: bool = False
    elements: int = 0  # of the first input, unless it is said
    op: str = ""  # the name it is registered by

    def __post_init__(self):
        self.elements = self.elements or self.inputs[0].numel()


def case(name: str):
    """Decorator of the function (n, dtype, device) -> Case: registers it as `name`."""

    def register(builder):
        _builders[name] = builder
        return builder

    return register


def build(name: str, n: int, dtype: torch.dtype, device: str) -> Case:
    result = _builders[name](n, dtype, device)
    result.op = name
    return result


def names() -> list[str]:
    """Every case, family by family."""
    for family in FAMILIES:
        importlib.import_module(f"benchmarks.{family}")
    return list(_builders)


def data(n: int, dtype: torch.dtype, device: str, seed: int, grad: bool = True, shape=(-1,)) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.empty(n, device=device, dtype=dtype).normal_(generator=generator)
    return x.view(shape).requires_grad_(grad)


def rival(module: str, name: str, options: dict) -> Callable | None:
    """A loss of another library; None where that is not installed (`make bench` installs it)."""
    try:
        return getattr(importlib.import_module(module), name)(**options)
    except ImportError:
        return None


def keep_mask(n: int, device: str, share: float = KEEP) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(9)
    return torch.rand(n, device=device, generator=generator) < share
