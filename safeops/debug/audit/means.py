"""Collect the means that a backward pass goes through, with their divisors, and compare them between ranks."""

import torch

from safeops.core import NAME, private_torch
from safeops.core.sums import masked_mean
from safeops.debug.common.source import line, user_frames
from safeops.debug.common.twins import LOSSES, OF_CLASSES
from safeops.ops.elementwise.safe_div import _safe_div

_DIVISIONS = frozenset("div divide true_divide __truediv__".split())


class Means:
    """counts: {Line: [divisor of each of its means, in order]}, of the means that a backward pass reached."""

    def __init__(self):
        self.counts, self.seen = {}, []

    def note(self, func, name, args, kwargs, result):
        """Keep the result of a call if it is a mean."""
        values = result if isinstance(result, tuple) else (result,)
        if not values or not isinstance(values[0], torch.Tensor):
            return
        count = _divisor(func, name, args)
        if count is None and not values[0].dim():
            count = _count(func, name, args, kwargs, values)
        if count is not None:
            frames = user_frames(3)[0]
            self.seen.append((values[0], frames[0] if frames else None, float(count)))

    def reached(self, loss):
        """A backward pass starts from `loss`: add the means in its graph to `counts`."""
        nodes, queue = set(), [loss.grad_fn]
        while queue:
            node = queue.pop()
            if node is not None and node not in nodes:
                nodes.add(node)
                queue += [after for after, _ in node.next_functions]
        rest = []
        for mean, place, count in self.seen:
            if mean.grad_fn in nodes:
                self.counts.setdefault(place and line(place), []).append(count)
            elif mean.grad_fn is not None:
                rest.append((mean, place, count))
        self.seen = rest

    def clear(self):
        self.seen = []


def _divisor(func, name, args):
    """The number of elements that a division divides by: a count, or the sum of the counts of rows. None if the divisor
    is no count."""
    by = args[1] if len(args) > 1 else None
    divides = name in _DIVISIONS or func is _safe_div.forward
    if not divides or not isinstance(by, torch.Tensor) or by.requires_grad or not isinstance(args[0], torch.Tensor):
        return None
    return by.sum() if not by.dim() or ((by >= 0) & (by == by.round())).all() else None  # (else it is a scale)


def _count(func, name, args, kwargs, values):
    """The divisor of a mean; None if the call is no mean over this rank's own elements."""
    x = args[0] if args else None
    if str(func).startswith(f"{NAME}."):
        return _of_raw(func, args, kwargs, values)
    if not isinstance(x, torch.Tensor):
        return None
    if name == "mean":
        return x.numel()
    if name in LOSSES and "sum" not in (kwargs.get("reduction"), *(x for x in args if isinstance(x, str))):
        target = kwargs.get("target", args[1] if len(args) > 1 else None)
        if name in OF_CLASSES and isinstance(target, torch.Tensor) and not target.is_floating_point():
            return (target != kwargs.get("ignore_index", -100)).sum()
        return x.numel()
    return None


def _of_raw(func, args, kwargs, values):
    """The divisor that a raw safeops op returned after its mean; None if it took no mean or was given a divisor."""
    arguments = private_torch.schema(func).arguments
    by_name = {x.name: x.default_value for x in arguments} | dict(zip([x.name for x in arguments], args)) | kwargs
    mean = func is masked_mean.forward or by_name.get("reduction") == 1
    if not mean or len(values) < 2 or by_name.get("denominator") is not None or by_name.get("divisor") is not None:
        return None
    return values[1]


def unequal(of_ranks):
    """Yield (place, text) for each mean whose divisor differs between ranks. of_ranks: {rank: Means.counts}."""
    places = {place: None for counts in of_ranks.values() for place in counts}
    for place in places:
        for result in zip(*(counts.get(place, []) for counts in of_ranks.values())):
            ranks = dict(zip(of_ranks, result))
            most, least = max(ranks, key=ranks.get), min(ranks, key=ranks.get)
            if result and ranks[most] != ranks[least]:
                yield place, f"a mean of {ranks[most]:g} on rank {most}, of {ranks[least]:g} on rank {least}"
