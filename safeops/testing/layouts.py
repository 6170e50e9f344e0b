"""Layouts: strides, offsets, broadcasting and sizes of operands and of upstream gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from .compare import assert_right
from .registry import check
from .sample import NotApplicable, Sample
from .subject import Subject, make_upstream, outputs, run
from .values import each_dtype


def _transposed(t: Tensor) -> Tensor | None:
    """Strides in reverse order."""
    order = tuple(reversed(range(t.dim())))
    return t.permute(order).contiguous().permute(order) if t.dim() > 1 else None


def _sliced(t: Tensor) -> Tensor | None:
    """Every second element of a longer tensor, starting at 1; the elements between are poison."""
    if not t.dim():
        return None
    inexact = t.is_floating_point() or t.is_complex()
    poison = True if t.dtype == torch.bool else float("nan") if inexact else torch.iinfo(t.dtype).max
    wide = t.new_full((*t.shape[:-1], 2 * t.shape[-1] + 1), poison)
    wide[..., 1::2] = t
    return wide[..., 1::2]


def _offset(t: Tensor) -> Tensor:
    """Contiguous, but starting 3 elements into its storage: no vector load is aligned."""
    room = t.new_zeros(t.numel() + 3)
    return room[3:].view(t.shape).copy_(t)


def _gapped(t: Tensor) -> Tensor | None:
    """Rows of a wider matrix: each row is contiguous, with a gap after it."""
    if t.dim() < 2:
        return None
    wide = t.new_zeros((*t.shape[:-1], t.shape[-1] + 5))
    wide[..., : t.shape[-1]] = t
    return wide[..., : t.shape[-1]]


def _channels_last(t: Tensor) -> Tensor | None:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return t.clone(memory_format=formats[t.dim()]) if t.dim() in formats else None


def _row_expanded(t: Tensor) -> Tensor | None:
    """Stride 0 in the first axis."""
    return t[:1].expand(t.shape) if t.dim() and t.shape[0] > 1 else None


def _column_expanded(t: Tensor) -> Tensor | None:
    """Stride 0 in the last axis."""
    return t[..., :1].expand(t.shape) if t.dim() and t.shape[-1] > 1 else None


def _expanded(t: Tensor) -> Tensor | None:
    """One element everywhere: stride 0 in every axis."""
    return t.flatten()[0].expand(t.shape) if t.numel() > 1 else None


LAYOUTS = {
    f.__name__.strip("_"): f
    for f in (
        _transposed,
        _sliced,
        _offset,
        _gapped,
        _channels_last,
        _row_expanded,
        _column_expanded,
        _expanded,
    )
}


REPEATS = ("row_expanded", "column_expanded", "expanded")  # these change the values, and so the truth


def _relaid(sample: Sample, layout, keys) -> Sample | None:
    changed = {k: layout(sample.get(k)) for k in keys}
    changed = {k: t for k, t in changed.items() if t is not None}
    return sample.replace(changed) if changed else None


@check("any strides of any operand, alone or together: transposed, sliced, offset, gapped, channels_last, stride 0")
def check_layouts(subject: Subject, sample: Sample) -> None:
    if not sample.shape().numel() or not sample.shape():
        raise NotApplicable("no layout to vary")
    keys = list(sample.operands())
    sizes = (sample, sample.grown(300)) if sample.shape()[0] > 1 else (sample,)
    for sized in sizes:
        # A single operand in another layout: in the first dtype at the smaller size, in the second at the larger.
        casts = each_dtype(sized, (torch.float32, torch.float16))
        for cast, alone in zip(casts, (sized is sample, sized is sizes[-1])):
            truth = None
            for name, layout in LAYOUTS.items():
                for chosen in [keys] + ([[k] for k in keys] if len(keys) > 1 and alone else []):
                    laid, because = _relaid(cast, layout, chosen), f"with {name} operands {chosen}"
                    if laid is not None and name in REPEATS:
                        _right(subject, laid, because)
                    elif laid is not None:
                        truth = _right(subject, laid, because, truth=truth)


def _right(subject, sample, because, upstream=None, truth=None):
    """Run the sample and compare with `truth`, by default the sample's own. Returns the truth."""
    got = run(subject.op, sample, upstream)
    truth = truth or subject.truth(sample, got.upstream or None)
    assert_right(sample, got, truth, because)
    return truth


@check("upstream gradients of any strides: stride 0 (what .sum() sends), transposed, sliced, offset")
def check_upstream_layouts(subject: Subject, sample: Sample) -> None:
    if not sample.leaves():
        raise NotApplicable("nothing is differentiable")
    sizes = (sample, sample.grown(300)) if sample.shape() and sample.shape()[0] > 1 else (sample,)
    for sized, dtype in zip(sizes, (torch.float32, torch.float16)):
        cast, truth = each_dtype(sized, (dtype, torch.float64))[0], None
        for name, layout in LAYOUTS.items():

            def upstream(out, layout=layout):
                grad = make_upstream(out)
                laid = layout(grad)
                return grad if laid is None else laid

            because = f"with a {name} upstream gradient"
            if name in REPEATS:
                _right(subject, cast, because, upstream)
            else:
                truth = _right(subject, cast, because, upstream, truth)
        _after_sum(subject, cast)


def _after_sum(subject, sample):
    """Check .sum() of the result, which users call: it sends a stride-0 gradient."""

    def summed(*args, **kwargs):
        return sum(out.sum() for out in outputs(subject.op(*args, **kwargs)) if out.requires_grad)

    got = run(summed, sample, torch.ones_like)
    truth = subject.truth(sample, torch.ones_like)
    assert_right(sample, [(w, t) for w, t in got if w.startswith("gradient")], truth, "after .sum()")


@check("no elements along any axis, 0-dimensional operands, and axes of length 1")
def check_sizes(subject: Subject, sample: Sample) -> None:
    for cast in each_dtype(sample, (torch.float32, torch.float16)):
        for axis in range(-len(cast.shape()), 0):
            _right(subject, cast.emptied(axis), f"with axis {axis} empty")
            if cast.shape()[axis] > 1:
                short = cast._resize(lambda t, a: t.narrow(a, 0, 1), axis)
                _right(subject, short, f"with axis {axis} of length 1")
        try:
            single = cast.single()
        except NotApplicable:
            continue
        _right(subject, single, "with 0-dimensional operands")
