"""The op under test (`Subject`), one run of it (`run` -> `Outcome`), and the rules for output dtypes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from safeops.core.private_torch import tree_leaves

from .sample import NotApplicable, Sample

HALVES = (torch.float16, torch.bfloat16)
DTYPES = (*HALVES, torch.float32, torch.float64)


@dataclass(frozen=True)
class Bad:
    """A call that must be refused: before any work, with an error that names what is wrong."""

    args: tuple
    kwargs: Mapping[str, Any]
    error: type | tuple
    words: tuple[str, ...]


@dataclass(frozen=True)
class Subject:
    """An op and everything the contract needs to know about it.

    op                the public function.
    reference         its definition in plain differentiable torch, called with float64 operands. It may take
                      `out_dtype`, the dtype the result will be rounded to, where saturation depends on it; it never
                      sees a `dtype=` argument.
    samples           the calls to check; a check that applies to none of them fails, unless it is in `skip`.
    torch_equivalent  what a user writes today, in the same dtype: ours must not be further from the truth.
    direct            the dispatcher's op of the same signature (`torch.ops.safeops.<op>`).
    routes            other implementations that must agree: {"composite": function of the same signature}.
    raw_ops           (op, args, kwargs) triples for opcheck, beside the ops seen while the samples run.
    namespace         dispatcher namespace of the ops that opcheck picks up from a run.
    dtype_rule        "reduction" (fp32 for halves), "elementwise" (promoted), "safe" (promoted, fp32 under autocast),
                      "input" (the first operand's), or a function (sample, autocast) -> dtype.
    data              operands whose dtype decides the result's; default: positional floating tensors.
    dtype_argument    True if the op has `dtype=`.
    terms             a function (float64 sample, outcome) -> (size of the terms that the value is summed from,
                      {operand: such a size for its gradient}), if `compare.cancellation` cannot guess them. A size has
                      the shape of the result or broadcasts to it.
    row_terms         `terms` of an op along one dim (softmax, cosine), which may save some numbers a row for backward.
    several_terms     True if a derivative sums terms, and their order decides if infinite ones give NaN or inf.
    finite            True for a `safe_*` function: finite in, finite out.
    workspace         bytes for each element that a GPU needs beside the results.
    errors            calls that must be refused.
    device            where everything runs.
    skip              {check name: reason}.
    """

    op: Callable
    reference: Callable
    samples: Sequence[Sample]
    torch_equivalent: Callable | None = None
    direct: Callable | None = None
    routes: Mapping[str, Callable] = field(default_factory=dict)
    raw_ops: Sequence[tuple] = ()
    namespace: str = "safeops"
    dtype_rule: str | Callable = "reduction"
    data: tuple | None = None
    dtype_argument: bool = False
    terms: Callable | None = None
    row_terms: Callable | None = None
    several_terms: bool = False
    finite: bool = False
    workspace: int = 0
    errors: Sequence[Bad] = ()
    device: str = "cpu"
    skip: Mapping[str, str] = field(default_factory=dict)
    name: str = ""

    def __post_init__(self):
        if not self.name:
            object.__setattr__(self, "name", getattr(self.op, "__name__", repr(self.op)))

    def out_dtype(self, sample: Sample, autocast: bool = False) -> torch.dtype:
        """The dtype that the contract promises for the result of this call."""
        if sample.kwargs.get("dtype") is not None:
            return sample.kwargs["dtype"]
        if callable(self.dtype_rule):
            return self.dtype_rule(sample, autocast)
        floats = sample.floats()
        data = [
            floats[k]
            for k in (self.data if self.data is not None else [k for k in floats if isinstance(k, int)])
            if k in floats
        ]
        if self.dtype_rule == "input":
            return data[0].dtype
        if self.dtype_rule == "reduction":
            return torch.float64 if any(t.dtype == torch.float64 for t in data) else torch.float32
        promoted = reduce(torch.promote_types, (t.dtype for t in data)) if len(data) != 2 else torch.result_type(*data)
        return torch.float32 if self.dtype_rule == "safe" and autocast and promoted in HALVES else promoted

    def row_bytes(self, sample: Sample) -> int:
        """The bytes that an op along one dim may keep for its rows: four float64 numbers each."""
        shape = sample.shape()
        if self.row_terms is None or not shape.numel():
            return 0
        length = shape[sample.kwargs.get("dim", -1)] if shape else 1
        return 32 * shape.numel() // length

    def truth(self, sample: Sample, upstream=None, autocast: bool = False) -> Outcome:
        """The reference in float64 on exactly the values the op is given."""
        wide = sample.cast(torch.float64)
        kwargs = {k: v for k, v in wide.kwargs.items() if k != "dtype"}
        if accepts(self.reference, "out_dtype"):
            kwargs["out_dtype"] = self.out_dtype(sample, autocast)
        wide = Sample(wide.args, kwargs, differentiable=tuple(sample.leaves()), mask=sample.mask)
        outcome = run(self.reference, wide, upstream, unused_ok=True)
        outcome.several_terms = self.several_terms
        outcome.elementwise = self.dtype_rule in ("elementwise", "safe", "input")
        terms = self.terms or self.row_terms
        if terms is not None:
            value, grads = terms(wide, outcome)
            outcome.terms = value, {key: grads[key].nan_to_num(0, 0, 0) for key in outcome.grads}
        return outcome


@dataclass
class Outcome:
    """Values and gradients of one call. `grads` is {place: gradient}, empty when none was asked for."""

    values: list[Tensor]
    grads: dict
    upstream: list[Tensor]
    elementwise: bool = False  # True: no sum over elements, so nothing can cancel
    several_terms: bool = False  # True: a derivative may add infinities, in any order
    terms: tuple | None = None  # sizes of the terms that may have cancelled, if the subject gives them

    def __iter__(self):
        """Yield (name, tensor) for each value and gradient."""
        for i, v in enumerate(self.values):
            yield ("value" if len(self.values) == 1 else f"value {i}"), v
        for k, g in self.grads.items():
            yield f"gradient of operand {k!r}", g


def accepts(function, name: str) -> bool:
    """True if a function takes an argument of this name."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # builtins have no signature
        return False


def outputs(result) -> list[Tensor]:
    return [t for t in tree_leaves(result) if isinstance(t, Tensor)]


def make_upstream(out: Tensor, seed: int = 0) -> Tensor:
    """A gradient for `out` without structure: signs mixed, magnitudes in [0.5, 1.5), the same on every device."""
    g = torch.Generator().manual_seed(1234 + seed)
    values = (torch.rand(out.shape, generator=g, dtype=torch.float64) + 0.5) * (
        torch.randint(0, 2, out.shape, generator=g) * 2 - 1
    )
    return values.to(out.dtype).to(out.device)


def attach(sample: Sample, keys=None) -> tuple[Sample, dict]:
    """The sample with fresh leaves that require a gradient. They share the data and the strides of the operands."""
    keys = list(sample.leaves()) if keys is None else keys
    leaves = {k: sample.get(k).detach().requires_grad_() for k in keys}
    return sample.replace(leaves), leaves


def run(op, sample: Sample, upstream=None, *, keys=None, unused_ok: bool = False, grad: bool = True) -> Outcome:
    """Call `op`, then differentiate with `upstream`: None (`make_upstream`), a list of tensors, or a function out ->
    tensor."""
    live, leaves = attach(sample, keys)
    values = outputs(op(*live.args, **live.kwargs))
    if not grad or not leaves:
        return Outcome([v.detach() for v in values], {}, [])
    tracked = [v for v in values if v.requires_grad]
    if not tracked:
        floats = [v for v in values if v.is_floating_point()]
        if not (unused_ok and floats):
            raise AssertionError("the result is detached: operands require gradients, the output does not")
        zeros = {k: torch.zeros_like(t) for k, t in leaves.items()}
        return Outcome([v.detach() for v in values], zeros, [make_upstream(v, i) for i, v in enumerate(floats)])
    make = upstream if callable(upstream) else None
    if upstream is None or make:
        upstream = [make(v.detach()) if make else make_upstream(v, i) for i, v in enumerate(tracked)]
    upstream = [u.to(v.dtype) if u.dtype != v.dtype else u for u, v in zip(upstream, tracked)]
    grads = torch.autograd.grad(tracked, list(leaves.values()), upstream, allow_unused=True)
    for key, g in zip(leaves, grads):
        if g is None and not unused_ok:
            raise AssertionError(f"no gradient reaches operand {key!r}: it is cut off from the graph")
    grads = {k: torch.zeros_like(t) if g is None else g for (k, t), g in zip(leaves.items(), grads)}
    return Outcome([v.detach() for v in values], grads, upstream)


__all__ = [
    "Bad",
    "DTYPES",
    "HALVES",
    "NotApplicable",
    "Outcome",
    "Sample",
    "Subject",
    "attach",
    "make_upstream",
    "outputs",
    "run",
]
