"""Calls of each op: operands of float64 on the CPU, as `safeops.testing` varies them, by the arguments the op has."""

import dataclasses
import functools
import inspect

import torch

import safeops
from safeops.testing import Sample

# Where an operand is no number of any size and sign.
PROBABILITIES = {"binary_cross_entropy", "js_div", "kl_div", "dice_loss", "tversky_loss"}
SIGNS = {"hinge_embedding_loss": 1, "margin_ranking_loss": 2, "soft_margin_loss": 1}  # which is 1 or -1


def numbers(*shape, seed=0, low=-3.0, high=3.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low


def flags(*shape, seed=0):
    keep = numbers(*shape, seed=1000 + seed, low=0, high=1) < 0.7
    keep.view(-1)[0], keep.view(-1)[-1] = True, False
    return keep


def places(*shape, below, seed=0):
    """Indices, most of them several times, some out of range."""
    return numbers(*shape, seed=2000 + seed, low=-1, high=below + 1).floor().long()


def function(op):
    return getattr(safeops, op.name)


# ---- families


def losses(op):
    names = inspect.signature(function(op)).parameters
    low, high = (0.05, 0.95) if op.name in PROBABILITIES else (-3.0, 3.0)
    required = [name for name, x in names.items() if x.default is x.empty]
    toggled = {name: not x.default for name, x in names.items() if isinstance(x.default, bool)}

    def operands(*shape, last):
        """The first of the full shape; the last one may be broadcast."""
        made = []
        for i, name in enumerate(required):
            x = numbers(*(last if i == len(required) - 1 else shape), seed=i, low=low, high=high)
            x = x.sign() if SIGNS.get(op.name) == i else x.abs() + 0.25 if name == "var" else x
            made.append(x)
        return tuple(made)

    weight, count = numbers(33, seed=9, low=0.25, high=2.0), torch.tensor(7.5, dtype=torch.float64)
    whole = operands(16, 33, last=(16, 33))
    options = {"mask": flags(16, 33)}
    yield Sample(whole, options, name="mean")
    positive = tuple(x.abs() for x in whole) if toggled else whole  # some of the other formulas have logarithms
    yield Sample(positive, {**options, **toggled, "weight": weight, "reduction": "none"}, name="none, weighted")
    if "pos_weight" in names:
        options["pos_weight"] = weight
    four = operands(3, 4, 5, 6, last=(4, 1, 6))
    yield Sample(four, {"mask": flags(3, 1, 5, 6), "reduction": "sum"}, name="broadcast sum")
    yield Sample(whole, {"weight": weight, "denominator": count}, name="denominator")


def regions(op):
    x, y = (numbers(3, 4, 5, 7, seed=i, low=0.05, high=0.95) for i in range(2))
    pixels, weight = flags(3, 1, 5, 7), numbers(4, 1, 1, low=0.25, high=2.0)
    yield Sample((x, y), {"mask": pixels}, name="mean")
    options = {"mask": flags(3, 4, 5, 7), "squared_pred": True, "reduction": "none"}
    yield Sample((x, y), options, name="none, squared")
    index = places(3, 1, 5, 7, below=4).clamp(0, 3)
    options = {"weight": weight, "batch": True}
    yield Sample((x, index), options, name="class indices, weighted")


def reductions(op):
    names = inspect.signature(function(op)).parameters
    x, weight = numbers(16, 33), numbers(33, low=0.25, high=2.0)
    weighted = {"weight": weight} if "weight" in names else {}
    four = numbers(3, 4, 5, 6, seed=1)
    yield Sample((x,), {"mask": flags(16, 33), **weighted}, name="all")
    yield Sample((x,), {"mask": flags(33), "dim": 1}, name="rows")
    yield Sample((four,), {"mask": flags(3, 1, 5, 6), "dim": (0, 2), "keepdim": True}, name="columns of four")
    yield Sample((x,), {"dim": 0}, name="columns, no mask")
    for key, values in {"ord": (1, float("inf")), "correction": (0,)}.items():
        for value in values if key in names else ():
            yield Sample((x,), {"mask": flags(16, 33), "dim": 1, key: value}, name=f"{key} {value}")


def rows(op):
    names = list(inspect.signature(function(op)).parameters)
    if "target" in names:
        yield from _classes(op, names)
        return
    if "anchor" in names:
        triple = tuple(numbers(16, 33, seed=i) for i in range(3))
        yield Sample(triple, {"mask": flags(16, 1), "margin": 4.0}, name="mean")
        yield Sample(triple, {"mask": flags(16, 1), "swap": True, "reduction": "none"}, name="none, swap")
        return
    masked, operands = "mask" in names, 2 if names[1].startswith("x") else 1
    for shape, dim in (((16, 33), -1), ((16, 33), 0), ((3, 4, 5, 6), 1)):
        x = tuple(numbers(*shape, seed=i) for i in range(operands))
        options = {"mask": flags(*shape), "dim": dim} if masked else {"dim": dim}
        yield Sample(x, options, name=f"dim {dim} of {len(shape)}")
    if masked:
        yield Sample((numbers(16, 33),), {"mask": flags(33)}, name="mask broadcast")


def _classes(op, names):
    weight = numbers(33, low=0.25, high=2.0)
    own = {key: value for key, value in {"label_smoothing": 0.125, "z_loss": 0.0625}.items() if key in names}
    index = places(16, 1, below=33).clamp(0, 32)
    if "ignore_index" in names:
        index[3] = -100
    x, keep = numbers(16, 33), flags(16, 1)
    of = functools.partial(Sample, weight=None)  # a weight is a class's
    yield of((x, index), {"mask": keep}, name="mean")
    yield of((x, index), {"mask": keep, "weight": weight, "reduction": "none", **own}, name="none, weighted")
    if "ignore_index" in names:  # classes in the second dim
        images = numbers(3, 5, 4, 6), places(3, 1, 4, 6, below=5).clamp(0, 4)
        yield of(images, {"mask": flags(3, 1, 4, 6), "reduction": "sum"}, name="images")
    if own:
        shares = numbers(16, 33, seed=5).softmax(1)
        yield of((x, shares), {"mask": keep, "reduction": "none", **own}, name="probabilities")


def elementwise(op):
    names = inspect.signature(function(op)).parameters
    if "fill_mask" in names:
        for keep, value in ((flags(16, 33), 1.5), (flags(33), torch.tensor(-2.0, dtype=torch.float64))):
            yield Sample((numbers(16, 33),), {"fill_mask": keep, "value": value}, name=f"fill {tuple(keep.shape)}")
        yield Sample((numbers(3, 4, 5, 6),), {"fill_mask": flags(3, 1, 5, 6), "value": 0.0}, name="four dims")
        return
    count = sum(x.default is x.empty for x in names.values())
    low = -1.0 if op.name in ("safe_acos", "safe_asin") else -3.0
    for shapes in (((16, 33), (16, 33)), ((3, 4, 5, 6), (4, 1, 6)), ((16, 33), ())):
        x = tuple(numbers(*shape, seed=i, low=low, high=-low) for i, shape in enumerate(shapes[:count]))
        x = (x[0], x[1].abs() + 0.25) if op.name == "xlogy" else x
        yield Sample(x, name=" and ".join(str(tuple(t.shape)) for t in x))


def images(op):
    names = inspect.signature(function(op)).parameters
    x, y = (numbers(2, 2, 13, 17, seed=i, low=0.0, high=1.0) for i in range(2))
    volumes = tuple(numbers(1, 2, 7, 9, 11, seed=i, low=0.0, high=1.0) for i in range(2))
    keep = flags(2, 1, 13, 17)
    if "target" not in names:
        yield Sample((x,), {"mask": keep}, name="masked")
        yield Sample(volumes[:1], {"mask": flags(1, 1, 7, 9, 11)}, name="volumes")
        return
    scales = {"betas": (0.5, 0.5)} if "betas" in names else {}  # as few as such images have
    yield Sample((x, y), {"win_size": 5, "mask": keep, **scales}, name="masked")
    yield Sample((x, y), {"win_size": 7, "padding": "same", "reduction": "sum", **scales}, name="same")
    if not scales:
        yield Sample((x, y), {"mask": keep, "reduction": "none"}, name="map")
        yield Sample(volumes, {"win_size": 3, "mask": flags(1, 1, 7, 9, 11)}, name="volumes")


def selection(op):
    names = inspect.signature(function(op)).parameters
    x, keep = numbers(16, 33), flags(16, 33)
    four, mask = numbers(3, 4, 5, 6), flags(3, 1, 5, 6)
    if "index" in names:
        for dim, size in enumerate(x.shape):
            index = places(16, 33, below=size) if op.name == "safe_gather" else places(33, below=size)
            yield Sample((x,), {"dim": dim, "index": index, "fill_value": 2.0}, name=f"dim {dim}")
    elif "capacity" in names:
        for a, m, slots in ((x, keep, 600), (x, keep, 100), (four, mask, 200)):
            yield Sample((a, m), {"capacity": slots}, mask=1, masked=(0,), name=f"{slots} slots")
    elif "source" in names:
        yield Sample((x, keep, numbers(16, 33, seed=1)), mask=1, mask_keeps=False, masked=(0,), name="plain")
        yield Sample((four, mask, numbers(3, 4, 5, 6, seed=1)), mask=1, mask_keeps=False, masked=(0,), name="four dims")
    else:
        yield Sample((x, keep), mask=1, name="plain")
        yield Sample((four, mask), mask=1, name="four dims")


def lists(op):
    """A list as the arguments of a call: tensors of several shapes, which the checks vary one by one."""
    x = numbers(16, 33), numbers(33, seed=1), numbers(16, 1, seed=2)
    for ord in (1.0, 2.0, float("inf")) if op.name == "grad_norm" else (None,):
        yield Sample(x, {} if ord is None else {"ord": ord}, masked=(), name=f"list {ord or ''}")


FAMILIES = {f.__name__: f for f in (losses, reductions, rows, elementwise, images, selection, lists)}


def family(op):
    """The name of the folder that its record is in."""
    return type(op).__module__.split(".")[-2]


def samples(op):
    """All calls of an op; none where its family is not known."""
    name = family(op)
    make = FAMILIES.get(name)
    made = (regions if name == "losses" and has_classes(op) else make)(op) if make else ()
    return tuple(dataclasses.replace(sample, differentiable=differentiable(op, sample)) for sample in made)


def differentiable(op, sample):
    """The operands that the kernels have a gradient for: with another one's the route is the composite."""
    floats = [i for i, x in enumerate(sample.args) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return tuple(floats) if op.differentiable else ()


def has_classes(op):
    """Whether a dim of the input are classes, of which the target may be indices."""
    names = inspect.signature(function(op)).parameters if family(op) in ("rows", "losses") else ()
    return "ignore_index" in names or ("target" in names and family(op) == "rows")
