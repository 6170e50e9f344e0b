"""A Case is one op at one dtype and size: the bytes it must move, our function, and what users would run instead.

A family's file registers its cases with `@case(name)`; the runner, the tests and `--compare` read the registry.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
KEEP = 0.75  # share of True in the masks; random, so that no branch predictor learns the mask
ROW = 1024
FAMILIES = (
    "elementwise", "selection", "reductions", "classification", "divergences", "linear", "vectors", "losses", "images",
    "policies", "rankings", "routers", "lists",
)  # fmt: skip

_builders = {}  # name -> (n, dtype, device) -> Case


@dataclass
class Case:
    inputs: tuple  # tensors; the backward computes their gradients
    forward_bytes: float  # per element: each input read once, the output written once
    backward_bytes: float | None  # None: there is no backward
    ours: Callable  # (*inputs) -> Tensor
    eager: dict[str, Callable]  # {text of a pattern: its function}; the first is the pattern users write most
    compiled: Callable | None  # the pattern that torch.compile does best on: no boolean index
    counted: bool = True  # False: a kernel touches only a part of its operands, or tensors pass between kernels
    variant: bool = False  # True: on the CPU the factor over eager is not judged (a further shape of an op, say)
    aten: Callable | None = None  # torch's own op, (*inputs) -> Tensor: small calls are compared with it
    # True: the arithmetic may take longer than moving the bytes. The op may then reach its goal by its speed relative
    # to `aten` in fp32 (fp64 for fp64) on as many elements instead. Its factor over eager is not judged on the CPU.
    arithmetic: bool = False
    elements: int = 0  # 0: as many as the first input has
    op: str = ""  # the name in the registry

    def __post_init__(self):
        self.elements = self.elements or self.inputs[0].numel()


def case(name: str):
    """Returns a decorator of a function (n, dtype, device) -> Case, which registers the function as `name`."""

    def register(builder):
        _builders[name] = builder
        return builder

    return register


def build(name: str, n: int, dtype: torch.dtype, device: str) -> Case:
    result = _builders[name](n, dtype, device)
    result.op = name
    return result


def names() -> list[str]:
    """Returns the names of all cases, family by family."""
    for family in FAMILIES:
        importlib.import_module(f"benchmarks.{family}")
    return list(_builders)


def data(n: int, dtype: torch.dtype, device: str, seed: int, grad: bool = True, shape=(-1,)) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.empty(n, device=device, dtype=dtype).normal_(generator=generator)
    return x.view(shape).requires_grad_(grad)


def rival(module: str, name: str, options: dict) -> Callable | None:
    """Returns module.name(**options), a loss of another library; None if the library is not installed (`make bench`
    installs it)."""
    try:
        return getattr(importlib.import_module(module), name)(**options)
    except ImportError:
        return None


def keep_mask(n: int, device: str, share: float = KEEP) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(9)
    return torch.rand(n, device=device, generator=generator) < share
