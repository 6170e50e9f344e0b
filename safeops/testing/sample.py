"""One call of the op under test, and the ways the checks vary it: dtypes, layouts, sizes, garbage under the mask."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Key = "int | str"  # an operand's place in the call: position, or keyword


class NotApplicable(Exception):
    """Raised by a check that has nothing to test on this sample (no mask, no weight, ...)."""


@dataclass(frozen=True)
class Sample:
    """Arguments of one call, given in the widest dtype (float64); every check casts and moves them as it needs.

    args, kwargs    what the op is called with.
    name            shown in failures.
    differentiable  operands that get a gradient; default: every floating tensor.
    mask            the boolean mask's place; default: the keyword `mask` or `fill_mask`, if there is one.
    mask_keeps      True: a True in the mask keeps; False: it drops (a fill mask). Default: by the keyword's name.
    masked          operands that must not matter where the mask drops; default: positional floats and `weight`.
    weight          the operand whose zeros mean "masked out"; default: the keyword `weight`.
    dtypes          the dtypes to check it in; default: each that can hold its values.
    smooth          False: a kink or a saturation is so near that finite differences are meaningless here.
    slow            run the slow checks (compilation) on this sample; with none marked, the first one is taken.
    """

    args: tuple = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    differentiable: tuple | None = None
    mask: Any = None
    mask_keeps: bool | None = None
    masked: tuple | None = None
    weight: Any = "weight"
    dtypes: tuple | None = None
    smooth: bool = True
    slow: bool = False

    def __post_init__(self):
        if self.mask is None:
            for key in ("mask", "fill_mask"):
                if isinstance(self.kwargs.get(key), Tensor):
                    object.__setattr__(self, "mask", key)
        if self.mask_keeps is None:
            object.__setattr__(self, "mask_keeps", self.mask != "fill_mask")

    # Reading ---------------------------------------------------------------------------------------------------------
    def operands(self) -> dict:
        """Every tensor of the call by its place."""
        places = {**dict(enumerate(self.args)), **self.kwargs}
        return {k: v for k, v in places.items() if isinstance(v, Tensor)}

    def get(self, key):
        return self.operands().get(key)

    def floats(self) -> dict:
        return {k: t for k, t in self.operands().items() if t.is_floating_point()}

    def leaves(self) -> dict:
        """The operands that get a gradient."""
        floats = self.floats()
        return floats if self.differentiable is None else {k: floats[k] for k in self.differentiable if k in floats}

    def shape(self) -> torch.Size:
        """The broadcast shape of the operands, which the mask broadcasts to."""
        try:
            return torch.broadcast_shapes(*(t.shape for t in self.operands().values()))
        except RuntimeError:
            raise NotApplicable("operands do not broadcast to one shape") from None

    def keep(self) -> Tensor | None:
        """The mask, True = keep, at the full shape; None without a mask."""
        mask = self.get(self.mask)
        if mask is None:
            return None
        return (mask if self.mask_keeps else ~mask).expand(self.shape())

    def masked_keys(self) -> tuple:
        if self.masked is not None:
            return tuple(k for k in self.masked if self.get(k) is not None)
        return tuple(k for k in self.floats() if isinstance(k, int) or k == self.weight)

    def dead(self, key, keep: Tensor | None = None) -> Tensor:
        """Bool: True for the elements of an operand that are used at dropped positions only."""
        keep = self.keep() if keep is None else keep
        operand = self.get(key)
        used = keep.to(torch.int64).sum_to_size(operand.shape) if operand.dim() else keep.sum()
        return used == 0

    # Varying ---------------------------------------------------------------------------------------------------------
    def replace(self, tensors: Mapping) -> Sample:
        args = tuple(tensors.get(i, a) for i, a in enumerate(self.args))
        kwargs = {k: tensors.get(k, v) for k, v in self.kwargs.items()}
        return dataclasses.replace(self, args=args, kwargs=kwargs)

    def with_kwargs(self, **kwargs) -> Sample:
        return dataclasses.replace(self, kwargs={**self.kwargs, **kwargs})

    def map(self, change: Callable[[Tensor], Tensor]) -> Sample:
        return self.replace({k: change(t) for k, t in self.operands().items()})

    def to(self, device) -> Sample:
        return self.map(lambda t: t.to(device))

    def cast(self, dtype) -> Sample:
        """Floating operands in `dtype`: one dtype, or {place: dtype}."""
        pick = dtype.get if isinstance(dtype, Mapping) else lambda key, default: dtype
        return self.replace({k: t.to(pick(k, t.dtype)) for k, t in self.floats().items()})

    def clone(self) -> Sample:
        return self.map(lambda t: t.detach().clone())

    def _full(self, t: Tensor, axis: int) -> bool:
        """True if `t` spans the broadcast shape's `axis` (counted from the right, so negative)."""
        return t.dim() >= -axis and t.shape[axis] == self.shape()[axis]

    def _resize(self, change: Callable[[Tensor, int], Tensor], axis: int) -> Sample:
        return self.map(lambda t: change(t, axis) if self._full(t, axis) else t)

    def tiled(self, times: int) -> Sample:
        """This sample's data repeated along the first axis: enough of it to reach vector loops and several threads."""
        shape = self.shape()
        if not shape or shape[0] < 2:
            raise NotApplicable("no leading axis to repeat")
        axis = -len(shape)
        return self._resize(lambda t, a: torch.cat([t] * times, dim=a), axis)

    def grown(self, numel: int) -> Sample:
        shape = self.shape()
        if not shape or not shape.numel():
            raise NotApplicable("nothing to repeat")
        return self.tiled(max(1, -(-numel // shape.numel())))

    def emptied(self, axis: int) -> Sample:
        """The sample without elements: `axis` (negative) shortened to 0."""
        return self._resize(lambda t, a: t.narrow(a, 0, 0), axis)

    def single(self) -> Sample:
        """Every operand 0-dimensional: its first element."""
        if self.kwargs.get("dim") not in (None, ()) or not self.shape().numel():
            raise NotApplicable("names a dim, or has no elements")
        return self.map(lambda t: t[(0,) * t.dim()].clone())

    def poisoned(self, value: float, keep: Tensor | None = None) -> Sample:
        """The sample with `value` wherever an operand is used at dropped positions only."""
        changed = {}
        for key in self.masked_keys():
            dead = self.dead(key, keep)
            changed[key] = torch.where(dead, torch.full_like(self.get(key), value), self.get(key))
        return self.replace(changed)
