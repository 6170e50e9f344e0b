"""One op at one dtype and size: what it must move, ours, and what users would run instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
KEEP = 0.75  # share of True in the masks, at random: no branch predictor learns it
ROW = 1024


@dataclass
class Case:
    op: str
    inputs: tuple  # what the gradients are asked for
    forward_bytes: float  # per element: each input read once, the output written once
    backward_bytes: float
    ours: Callable  # (*inputs) -> Tensor
    eager: dict[str, Callable]  # the pattern as written -> it; the first is the one users write most
    compiled: Callable  # the pattern that torch.compile does best on: no boolean index
    variant: bool = False  # a further shape of an op: its share of the floor is judged, its factor over eager is not
    # torch's own op, of a function whose arithmetic costs more than its bytes: what is judged is the share of its time
    # in fp32 (fp64 for fp64) on as many elements, not the share of the floor, nor the factor over eager
    bare: Callable | None = None

    @property
    def elements(self) -> int:
        return self.inputs[0].numel()


def data(n: int, dtype: torch.dtype, device: str, seed: int, grad: bool = True) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.empty(n, device=device, dtype=dtype).normal_(generator=generator)
    return x.requires_grad_(grad)


def keep_mask(n: int, device: str) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(9)
    return torch.rand(n, device=device, generator=generator) < KEEP
