"""Layouts and sizes of a call: one of each that takes different code, not all combinations."""

import torch

from safeops.testing.layouts import LAYOUTS, REPEATS, _relaid
from safeops.testing.sample import NotApplicable
from safeops.testing.values import fitting

# Approximate numbers of elements: below a vector, beyond a block, a wave of blocks, and what one block sums alone.
SIZES = (1, 1000, 5000, 70_000, 1_050_000)
ANYHOW = [name for name in LAYOUTS if name not in REPEATS]


def variations(sample):
    """Yield (description, sample) for every layout and size; only for the sample's turns, if it has some."""
    if not sample.shape():
        raise NotApplicable("no layout and no size to vary")
    if sample.turns is not None:
        for turn in sample.turns:
            yield (_aligned if turn % 2 else _anyhow)(sample, turn // 2)
        return
    if sample.shape()[0] > 1:
        casts, keys = list(fitting(sample.grown(2000)).values()), list(sample.operands())
        cases = [(name, keys) for name in ANYHOW] + [("offset", [key]) for key in keys]
        cases += [(name, [key]) for key in keys for name in ("row_expanded", "expanded")] + [("column_expanded", keys)]
        for i, (name, chosen) in enumerate(cases):
            laid = _relaid(casts[i % len(casts)], LAYOUTS[name], chosen)
            if laid is not None:
                yield f"with {name} operands {chosen}", laid
    dtypes = list(fitting(sample))
    for i in range(len(SIZES)):
        odd = _odd(sample, i)
        yield f"of {tuple(odd.shape())}", odd.cast(dtypes[i % len(dtypes)])


def _odd(sample, turn):
    """The sample in a size below or above a limit of the plans. In turn it gets many rows or long rows. No size is a
    round number."""
    size, axis, length = _size(sample, turn)
    odd = _cut(_repeated(sample, size, axis), axis, length)
    # A single element is not possible for images, which have windows, nor for classes: an index would be out of range.
    indexed = any(not t.is_floating_point() and t.dtype != torch.bool for t in sample.operands().values())
    return odd if size > 1 or indexed or sample.turns is None else _cut(odd, -1, 1)


def _cut(sample, axis, length):
    return sample._resize(lambda t, a: t.narrow(a, 0, min(length, t.shape[a])), axis)


def _size(sample, turn):
    """Returns (number of elements, the axis to repeat to reach it, the largest length of that axis)."""
    size, shape = SIZES[turn % len(SIZES)], sample.shape()
    if size < shape.numel():
        return size, -len(shape), 1
    axis = (-len(shape), -1)[turn // len(SIZES) % 2]
    return size, axis, -(-size // shape.numel()) * shape[axis] - 1


def _repeated(sample, size, axis):
    times = -(-size // sample.shape().numel())
    return sample._resize(lambda t, a: torch.cat([t] * times, dim=a), axis)


def _anyhow(sample, turn):
    """Returns (description, sample) with rows that start at any alignment, in one of the layouts."""
    odd = _odd(sample, turn)
    (cast, *_), name = fitting(odd).values(), ANYHOW[turn % len(ANYHOW)]
    return f"of {tuple(odd.shape())}, {name}", _relaid(cast, LAYOUTS[name], list(sample.operands())) or cast


def _aligned(sample, turn):
    """Returns (description, sample) with rows of whole vectors; some operands are repeated along one axis, or both."""
    rows = _repeated(sample, 16 * sample.shape().numel(), -1)
    size, axis, _ = _size(rows, turn)
    (cast, *_), repeats = fitting(_repeated(rows, size, axis)).values(), (None, *REPEATS)
    names = {key: repeats[(turn + i) % len(repeats)] for i, key in enumerate(rows.operands())}
    laid = {key: LAYOUTS[name](cast.get(key)) for key, name in names.items() if name}
    laid = {key: t for key, t in laid.items() if t is not None}
    return f"of {tuple(cast.shape())}, with repeated {names}", cast.replace(laid)
