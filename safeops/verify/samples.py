"""Sample calls of each op, by the arguments that it has: float64 operands on the CPU, for `safeops.testing` to vary."""

import dataclasses
import functools
import inspect
import itertools
from dataclasses import dataclass

import torch

from safeops.core.domain import any_number, box
from safeops.core.op import registry
from safeops.testing import DTYPES, Sample

LONG = (2, 40_000)  # rows that no tile holds
ALIGNED = (1, 3, 5, 7)  # turns (variations.py) with rows of whole vectors: they repeat each operand in each way


@dataclass(frozen=True)
class Call(Sample):
    """turns: indices of the variations to check; None: all. rare: the checks that run on this call, out of those that
    run on only one call of an op."""

    turns: tuple | None = None
    rare: tuple = ()


def numbers(*shape, seed=0, low=-3.0, high=3.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low


def flags(*shape, seed=0):
    keep = numbers(*shape, seed=1000 + seed, low=0, high=1) < 0.7
    keep.view(-1)[0], keep.view(-1)[-1] = True, False
    return keep


def places(*shape, end, seed=0):
    """Random indices from -1 to `end`: most occur several times, -1 and `end` are out of range."""
    return numbers(*shape, seed=2000 + seed, low=-1, high=end + 1).floor().long()


# ---- families


def losses(op):
    names = inspect.signature(op.public_function).parameters
    required = [name for name, x in names.items() if x.default is x.empty]
    toggled = [name for name, x in names.items() if isinstance(x.default, bool)]

    def operands(*shape, last):
        """The op's operands in this shape; the last operand in shape `last`, which may broadcast."""
        shapes = [*[shape] * (len(required) - 1), last]
        return tuple(to(numbers(*shape, seed=i)) for i, (to, shape) in enumerate(zip(op.domain, shapes)))

    weight, tensors = numbers(33, seed=9, low=0.25, high=2.0), operands(16, 33, last=(16, 33))
    positive = tuple(x.abs() for x in tensors) if toggled else tensors  # a flag's other formula may take logarithms
    options = {"mask": flags(16, 33)} | ({"pos_weight": weight} if "pos_weight" in names else {})
    for choice in itertools.product((False, True), repeat=len(toggled)):
        chosen, turns = options | dict(zip(toggled, choice)), () if any(choice) else None
        yield Call(positive, chosen, turns=turns, name=f"mean {choice or ''}")
        chosen = chosen | {"weight": weight, "reduction": "none"}
        yield Call(positive, chosen, turns=turns, name=f"none, weighted {choice or ''}")
    if place(op) % 2:
        four = operands(6, 4, 5, 6, last=(4, 1, 6))
        yield Sample(four, {"mask": flags(6, 1, 5, 6), "reduction": "sum"}, name="broadcast sum")
    else:
        count = torch.tensor(7.5, dtype=torch.float64) if place(op) % 8 else 7.5
        shape = ((33,), (16, 1), (1, 1))[place(op) // 2 % 3]
        weight = numbers(*shape, seed=9, low=0.25, high=2.0)
        yield Sample(tensors, {"weight": weight, "denominator": count}, name="denominator")


def regions(op):
    x, y = (numbers(4, 4, 16, 16, seed=i, low=0.05, high=0.95) for i in range(2))
    odd = tuple(t[..., :7, :5] for t in (x, y))
    weight, index = numbers(4, 1, 1, low=0.25, high=2.0), places(4, 1, 16, 16, end=4).clamp(0, 3)
    yield Call((x, y), {"mask": flags(4, 4, 16, 16)}, turns=(3, 7), name="mean")
    options = {"squared_pred": True, "reduction": "none"}
    yield Call(odd, {"mask": flags(4, 4, 7, 5), **options}, turns=(8,), name="none, squared")
    yield Call(odd, {"mask": flags(7, 5), **options}, turns=(), name="none, one mask")
    yield Call((x, index), {"weight": weight, "batch": True}, turns=(0, 3), name="class indices, weighted")
    yield Call((x, y), {"mask": flags(4, 1, 16, 16), "denominator": 7.0}, turns=(5,), name="masked pixels")
    yield Call((x, y), {"mask": flags(4, 4, 1, 1), "reduction": "sum"}, turns=(), name="masked regions")


def reductions(op):
    names = inspect.signature(op.public_function).parameters
    if "cu_seqlens" in names:
        yield from _sequences()
        return
    x, weight = numbers(16, 33), numbers(33, low=0.25, high=2.0)
    weighted = {"weight": weight} if "weight" in names else {}
    four = numbers(6, 4, 5, 6, seed=1)
    yield Sample((x,), {"mask": flags(16, 33), **weighted}, name="all")
    of_rows = {name: t[:16, None] for name, t in weighted.items()}
    half = {"dtype": (torch.float16, torch.bfloat16)[place(op) // 4 % 2]} if "dtype" in names else {}
    yield Sample((x,), {"mask": flags(33), "dim": 1, **of_rows}, name="rows")
    if place(op) % 2:
        yield Sample(
            (four,), {"mask": flags(6, 1, 5, 6), "dim": (0, 2), "keepdim": True} | half, name="columns of four"
        )
    else:
        yield Sample((x,), {"dim": 0, **of_rows, **half}, name="columns, no mask")
    for key, values in {"ord": (1, float("inf")), "correction": (0,)}.items():
        for value in values if key in names else ():
            yield Call((x,), {"mask": flags(16, 33), "dim": 1, key: value}, turns=(), name=f"{key} {value}")


def _sequences():
    """Few sequences, so that several blocks share one; some are empty."""
    ends, weight = (3, 3, 4, 10), numbers(16, 33, seed=9, low=0.25, high=2.0)
    yield Sample((numbers(16, 32),), {"ends": ends, "mask": flags(16, 32)}, name="columns")
    yield Sample((numbers(40, 1),), {"ends": ends, "weight": weight[:1, :1], "shuffled": True}, name="ids of rows")
    yield Sample((numbers(16, 33),), {"ends": (10,), "mask": flags(16, 1), "weight": weight}, name="one, weighted")
    yield Call((numbers(16, 33),), {"ends": ends}, turns=(3,), name="no mask")
    yield Call((numbers(1),), {"ends": (10,)}, turns=(), name="one number")


def rows(op):
    names = list(inspect.signature(op.public_function).parameters)
    if "target_values" in names:
        yield from _divergences()
        return
    if "kind" in names:
        yield from _boxes()
        return
    if "target" in names:
        yield from _log_probs() if "logits" in names else _classes(op, names)
        return
    if "anchor" in names:
        triple = tuple(numbers(16, 33, seed=i) for i in range(3))
        yield Sample(triple, {"mask": flags(16, 1), "margin": 4.0}, dtypes=DTYPES, name="mean")
        yield Sample(triple, {"reduction": "none"}, name="none")
        across = tuple(numbers(33, 16, seed=i).mT for i in range(3))
        options = {"mask": flags(16, 1), "swap": True, "reduction": "none"}
        yield Call(across, options, turns=ALIGNED, name="none, swap, across memory")
        return
    masked, operands = "mask" in names, 2 if names[1].startswith("x") else 1
    for shape, dim in (((16, 33), -1), ((16, 33), 0), ((6, 4, 5, 6), 1), (LONG, 1)):
        x = tuple(numbers(*shape, seed=i) for i in range(operands))
        options = {"mask": flags(*shape), "dim": dim} if masked else {"dim": dim}
        yield Call(x, options, turns=() if shape == LONG else None, name=f"dim {dim} of {shape}")
    if masked:
        yield Sample((numbers(16, 33),), {"mask": flags(33)}, name="mask broadcast")


def _classes(op, names):
    weight = numbers(33, low=0.25, high=2.0)
    options = {
        key: value for key, value in {"label_smoothing": 0.125, "z_loss": 0.0625, "p": 2}.items() if key in names
    }
    index = places(16, 1, end=33).clamp(0, 32)
    if "ignore_index" in names:
        index[3] = -100
    x, keep = numbers(16, 33), flags(16, 1)
    of = functools.partial(Sample, weight=None)  # the weights are of classes
    yield Call((x, index), {"mask": keep}, weight=None, turns=(4, 5), name="mean")
    weighted = {"weight": weight, "reduction": "none", **options}
    one_row = 0, 1
    yield Call((x, index), {"mask": keep, **weighted}, weight=None, dtypes=DTYPES, turns=one_row, name="none, weighted")
    yield of((numbers(33, 16).mT, index), weighted, name="none, across memory")
    if "ignore_index" in names:  # classes in the second dim
        images = numbers(5, 5, 4, 6), places(5, 1, 4, 6, end=5).clamp(0, 4)
        yield of(images, {"mask": flags(5, 1, 4, 6), "reduction": "sum"}, name="images")
    else:
        yield of((numbers(33, 16).mT, index), {"mask": keep}, name="mean, across memory")
    long = numbers(*LONG), places(2, 1, end=LONG[1] - 1).clamp(min=0)
    yield Call(long, {"reduction": "none"}, weight=None, turns=(), name="long rows")
    if "label_smoothing" in names:
        probabilities = numbers(16, 33, seed=5).softmax(1)
        yield Call((x, probabilities), weighted, weight=None, dtypes=DTYPES, turns=ALIGNED, name="probabilities")


def _log_probs():
    index = places(16, end=33).clamp(0, 32)
    index[3] = -100
    options = {"mask": flags(16), "temperature": 0.75, "softcap": 4.0}
    yield Sample((numbers(16, 33), index), options, weight=None, mask_keeps=False, name="rows")
    sequences = numbers(4, 4, 33), index.reshape(4, 4)
    yield Sample(sequences, {"mask": flags(4, 1), "temperature": 0.75}, weight=None, name="sequences")
    long = numbers(*LONG), places(2, end=LONG[1] - 1).clamp(min=0)
    for options in ({}, {"with_argmax": True}):
        yield Call(long, options, weight=None, turns=(), name="long rows" + ", argmax" * len(options))


def _divergences():
    def pair(*shape):
        return tuple(numbers(*shape, seed=i) for i in range(2))

    yield Sample(pair(16, 33), {"mask": flags(16, 1), "temperature": 0.75}, name="mean")
    across = tuple(t.mT for t in pair(33, 16))
    yield Call(across, {"mask": flags(16, 1), "reduction": "none"}, turns=(), name="none, across memory")
    yield Call(pair(*LONG), {"reduction": "none"}, turns=(), name="long rows")


def _boxes():
    pair = tuple(box(numbers(33, 4, seed=i)) for i in range(2))
    across, keep = tuple(x.mT.contiguous().mT for x in pair), {"mask": flags(33, 1)}
    yield Call(pair, {"kind": "iou", "reduction": "none", **keep}, turns=(5, 7), name="iou, none")
    yield Call(pair, {"kind": "giou", "reduction": "sum", **keep}, turns=(), name="giou, sum")
    yield Call(pair, {"kind": "diou", **keep}, turns=(0,), name="diou, mean")
    yield Call(pair, {"kind": "ciou", "reduction": "none"}, turns=(), dtypes=DTYPES, name="ciou, none")
    yield Call(across, {"kind": "ciou", "reduction": "none", **keep}, turns=(), name="ciou, none, across memory")


def elementwise(op):
    names = inspect.signature(op.public_function).parameters
    if "fill_mask" in names:
        for keep, value in ((flags(16, 33), 1.5), (flags(33), torch.tensor(-2.0, dtype=torch.float64))):
            yield Sample((numbers(16, 33),), {"fill_mask": keep, "value": value}, name=f"fill {tuple(keep.shape)}")
        yield Sample((numbers(6, 4, 5, 6),), {"fill_mask": flags(6, 1, 5, 6), "value": 0.0}, name="four dims")
        return
    count = len(op.differentiable)  # (magnitude takes one operand too, a complex one)
    domain = op.domain or (any_number,) * count
    for shapes in (((16, 33), (16, 33)), ((6, 4, 5, 6), (4, 1, 6)), ((16, 33), ())):
        x = tuple(to(numbers(*shape, seed=i)) for i, (to, shape) in enumerate(zip(domain, shapes[:count])))
        yield Sample(x, name=" and ".join(str(tuple(t.shape)) for t in x))


def images(op):
    names = inspect.signature(op.public_function).parameters
    x, y = (numbers(2, 2, 13, 17, seed=i, low=0.0, high=1.0) for i in range(2))
    volumes = tuple(numbers(1, 2, 7, 9, 11, seed=i, low=0.0, high=1.0) for i in range(2))
    keep = flags(2, 1, 13, 17)
    if "target" not in names:
        yield Sample((x,), {"mask": keep}, name="masked")
        yield Sample(volumes[:1], {"mask": flags(1, 1, 7, 9, 11)}, name="volumes")
        return
    scales = {"betas": (0.5, 0.5)} if "betas" in names else {}  # small images allow no more scales
    yield Sample((x, y), {"win_size": 5, "mask": keep, **scales}, name="masked")
    yield Sample((x, y), {"win_size": 7, "padding": "same", "reduction": "sum", **scales}, name="same")
    if not scales:
        yield Sample((x, y), {"mask": keep, "reduction": "none"}, name="map")
        yield Sample(volumes, {"win_size": 3, "mask": flags(1, 1, 7, 9, 11)}, name="volumes")


def selection(op):
    names = inspect.signature(op.public_function).parameters
    x, keep = numbers(16, 33), flags(16, 33)
    four, mask = numbers(6, 4, 5, 6), flags(6, 1, 5, 6)
    if "index" in names:
        for dim, size in enumerate(x.shape):
            index = places(*(x.shape if op.gathers else (33,)), end=size)
            yield Sample((x,), {"dim": dim, "index": index, "fill_value": 2.0}, name=f"dim {dim}")
    elif "capacity" in names:
        for a, m, slots in ((x, keep, 600), (x, keep, 100), (four, mask, 200)):
            yield Sample((a, m), {"capacity": slots}, mask=1, masked=(0,), name=f"{slots} slots")
    elif "source" in names:
        yield Sample((x, keep, numbers(16, 33, seed=1)), mask=1, mask_keeps=False, masked=(0,), name="plain")
        yield Sample((four, mask, numbers(6, 4, 5, 6, seed=1)), mask=1, mask_keeps=False, masked=(0,), name="four dims")
    else:
        yield Sample((x, keep), mask=1, name="plain")
        yield Sample((four, mask), mask=1, name="four dims")


def lists(op):
    """A list's tensors as the arguments of a call: they have several shapes, and the checks vary them one by one."""
    x = numbers(16, 33), numbers(33, seed=1), numbers(16, 1, seed=2)
    for ord in (1.0, 2.0, float("inf")) if "ord" in op.Operands._fields else (None,):
        yield Sample(x, {} if ord is None else {"ord": ord}, masked=(), name=f"list {ord or ''}")


OF_ROWS = "classification", "divergences", "linear", "vectors"
FAMILIES = {f.__name__: f for f in (losses, reductions, elementwise, images, selection, lists)}
FAMILIES |= dict.fromkeys(OF_ROWS, rows)


def samples(op, full=False):
    """Yield the calls of an op; none if its family is not known.

    A Triton kernel is compiled for each new dtype, layout and size. So, unless full, a call is checked in one dtype and
    in one variation, or two if an op has kernels of its own. Dtype and variation differ between the calls of an op, and
    between the ops of a family."""
    name = op.family
    make = FAMILIES.get(name)
    candidates = list((regions if name == "losses" and has_classes(op) else make)(op)) if make else []
    places = [differentiable(op, sample) for sample in candidates]
    few = name in OF_ROWS  # ops with kernels of their own
    richest = max(range(len(candidates)), key=lambda i: len(places[i]), default=0)
    for i, sample in enumerate(candidates):
        fields = {field.name: getattr(sample, field.name) for field in dataclasses.fields(sample)}
        fields["differentiable"] = places[i]
        if op.owner == "Triton" and not full:
            # (so that a dtype or a variation meets different calls in different ops)
            step = place(op) + place(op) // 2
            turn = i + 3 * (step // 2)
            fields["dtypes"] = sample.dtypes or (DTYPES[(i + step) % len(DTYPES)],)
            if fields.get("turns") is None:
                fields["turns"] = (2 * turn, 2 * turn + 1) if few else (turn,)
            rare = {"nothing_kept": 0, "mixed": richest, "alone": richest, "after_sum": 1 if few else None}
            fields["rare"] = tuple(check for check, at in rare.items() if at == i)
        else:
            fields["turns"] = None
        yield Call(**fields)


def place(op):
    """The op's index among the ops of its family."""
    return sum(
        FAMILIES.get(other.family) is FAMILIES.get(op.family) and other.name < op.name
        for other in registry.values()
        if other.raw
    )


def differentiable(op, sample):
    """The operands for which the kernels compute gradients. If another operand needs one, the composite runs."""
    floats = [i for i, x in enumerate(sample.args) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return tuple(floats) if op.differentiable else ()


def has_classes(op):
    """True if a dim of the input holds classes, so that the target may be class indices."""
    names = inspect.signature(op.public_function).parameters if op.family in (*OF_ROWS, "losses") else ()
    indices = op.family in OF_ROWS and "target" in names and not {"target_values", "kind"} & names.keys()
    return "ignore_index" in names or indices
