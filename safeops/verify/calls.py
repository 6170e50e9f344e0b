"""Wrap ops for the checks, so that operands broadcast with each other and results are tensors."""

import functools
import inspect

import torch

from safeops.ops.lists.clip_grad_norm_ import SCALE, scale_
from safeops.ops.lists.grad_norm import NORM, norm
from safeops.ops.lists.health import COLUMNS, HEALTH, health_, pick_
from safeops.verify.samples import has_classes


def by_class(function):
    """Remove the class dim (size 1) from class indices and mask; flatten the class weights to one dim."""

    @functools.wraps(function)
    def call(input, target, **options):
        tensors = {"target": target, **{key: options.pop(key) for key in ("mask",) if key in options}}
        for key, t in tensors.items():
            if not t.is_floating_point() and t.dim() == input.dim() and t.shape[1] == 1:
                tensors[key] = t.squeeze(1)
        if options.get("weight") is not None:
            options["weight"] = options["weight"].flatten()
        return function(input, tensors.pop("target"), **tensors, **options)

    return call


def by_row(function):
    """Remove the vectors' dim (size 1) from the mask."""

    @functools.wraps(function)
    def call(*vectors, mask=None, **options):
        if mask is not None and mask.dim() == vectors[0].dim():
            mask = mask.squeeze(-1)
        return function(*vectors, mask=mask, **options)

    return call


def by_box(function):
    """Take numbers of any shape: every four neighbors are a box. Of fewer than four, the first is all edges of one."""

    def boxes(x):
        n = x.shape[-1] // 4 * 4
        return x[..., :n].unflatten(-1, (-1, 4)) if n else x[..., :1, None].expand(*x.shape[:-1], 1, 4)

    @functools.wraps(function)
    def call(input, target, **options):
        return function(boxes(input), boxes(target), **options)

    return call


def by_sequence(function):
    """Take any number of rows. ends: where the sequences end, in tenths of the rows. shuffled: give the sequences as
    segment ids in mixed order, not as cu_seqlens."""

    @functools.wraps(function)
    def call(input, *, ends=None, shuffled=False, **options):
        if ends is not None:
            input = input.reshape(1) if input.dim() == 0 else input
            rows = input.shape[0]
            bounds = torch.tensor([0, *(rows * end // 10 for end in ends)], device=input.device)
            if shuffled:
                place = torch.arange(rows, device=input.device)
                ids = torch.searchsorted(bounds[1:], (place * 7 + 3) % max(rows, 1), right=True)
                options |= {"segment_ids": ids, "num_segments": len(ends)}
            else:
                options["cu_seqlens"] = bounds
        return function(input, **options)

    return call


def norms(*tensors, ord):
    return norm(list(tensors), ord).float()  # the digits beyond fp32 are not compared


def scaled(*tensors):
    tensors = [x.contiguous().clone() for x in tensors]
    scale_(tensors, torch.full((), 0.7, device=tensors[0].device))
    return tensors


def healths(*tensors):
    device = tensors[0].device
    rows = torch.zeros(len(tensors), len(COLUMNS), dtype=torch.int64, device=device)
    health_(rows, 0, list(tensors))
    picked = torch.zeros(1, 4, dtype=torch.float64, device=device)
    pick_(picked, 0, rows, 0, list(tensors), list(tensors[0].shape))
    return rows, picked


OF_LISTS = {NORM: norms, SCALE: scaled, HEALTH: healths}


def callable_of(op):
    if op in OF_LISTS:
        return OF_LISTS[op]
    names = inspect.signature(op.public_function).parameters.keys()
    if {"anchor", "target_values"} & names:
        return by_row(op.public_function)
    if "kind" in names:
        return by_box(op.public_function)
    if "cu_seqlens" in names:
        return by_sequence(op.public_function)
    return by_class(op.public_function) if has_classes(op) else op.public_function
