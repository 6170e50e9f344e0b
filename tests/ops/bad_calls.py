"""Calls that several families refuse, with the words the error must contain: function, argument, what is wrong."""

import math

import torch

from safeops.testing import Bad
from tests.ops.operands import HUGE

X = torch.arange(10.0).reshape(2, 5)
KEEP = torch.ones(2, 5, dtype=torch.bool)
NAN = float("nan")


class BadIndex(Bad):
    """A call with a class index out of range. The CPU refuses it. A GPU leaves out the index's row or pixel, as a check
    would wait for the device. All other bad calls of the records are refused on every device."""


def must(name, key, args, kwargs, error):
    """Returns a bad call; its error must begin "name: key ", so that it blames this argument and no other."""
    return Bad(args, kwargs, error, (name, key, f"{name}: {key} "))


def bad_masks(name, place, key="mask"):
    """Yields calls with masks that every op with a mask refuses. place: (mask) -> (args, kwargs) of the call."""
    yield Bad(*place(torch.ones(2, 5)), TypeError, (name, key, "bool", "torch.float32"))
    yield Bad(*place(torch.ones(2, 5, dtype=torch.uint8)), TypeError, (name, key, "bool", "torch.uint8"))
    yield Bad(*place([True]), TypeError, (name, key, "tensor", "list"))
    yield Bad(*place(torch.ones(3, 4, dtype=torch.bool)), ValueError, (name, key, "(3, 4)", "(2, 5)", "broadcast"))
    yield Bad(*place(KEEP.to("meta")), ValueError, (name, key, "meta"))


def bad_floors(name, *operands, positive=False):
    """Yields calls with refused values of `eps`. positive: 0 is refused, too."""
    yield Bad(operands, {"eps": -1.0}, ValueError, (name, "eps", "-1.0"))
    yield Bad(operands, {"eps": NAN}, ValueError, (name, "eps", "nan"))
    yield Bad(operands, {"eps": "tiny"}, TypeError, (name, "eps", "str"))
    yield Bad(operands, {"eps": True}, TypeError, (name, "eps", "bool"))
    yield must(name, "eps", operands, {"eps": HUGE}, ValueError)
    if positive:
        yield Bad(operands, {"eps": 0.0}, ValueError, (name, "eps", "greater than 0", "0.0"))
        yield Bad(operands, {"eps": float("inf")}, ValueError, (name, "eps", "inf"))


def bad_dtypes(name, *operands):
    yield Bad(operands, {"dtype": torch.int32}, TypeError, (name, "dtype", "torch.int32"))
    yield Bad(operands, {"dtype": "half"}, TypeError, (name, "dtype", "half"))


def bad_fill_values(name, *args, none=True, **kwargs):
    """Yields calls with refused fill values. none: True if None is refused; else None means that eps is a floor, and
    eps=0 is refused with it."""
    if none:
        yield Bad(args, {**kwargs, "fill_value": None}, TypeError, (name, "fill_value", "NoneType"))
    else:
        yield Bad(args, {"fill_value": None, "eps": 0.0}, ValueError, (name, "eps", "greater than 0", "0.0"))
    yield Bad(args, {**kwargs, "fill_value": "0"}, TypeError, (name, "fill_value", "str"))
    for value in (HUGE, -HUGE):
        yield must(name, "fill_value", args, {**kwargs, "fill_value": value}, ValueError)


def bad_reductions(name, operands, nothing):
    """Yields calls with refused values of `reduction`, `empty` and `denominator`. nothing: a mask without a True."""
    yield Bad(operands, {"reduction": "average"}, ValueError, (name, "reduction", "average", "mean"))
    yield Bad(operands, {"reduction": None}, (ValueError, TypeError), (name, "reduction", "None"))
    yield Bad(operands, {"empty": "skip"}, ValueError, (name, "empty", "skip", "zero"))
    yield Bad(operands, {"denominator": torch.ones(2)}, ValueError, (name, "denominator", "(2,)"))
    yield Bad(operands, {"denominator": "count"}, TypeError, (name, "denominator", "str"))
    yield Bad(operands, {"denominator": True}, TypeError, (name, "denominator", "denominator must be a number"))
    yield must(name, "denominator", operands, {"denominator": HUGE}, ValueError)
    yield from (Bad(operands, {"denominator": x}, ValueError, (name, "denominator", str(x))) for x in (-1.0, NAN))
    yield Bad(operands, {"denominator": 4.0, "reduction": "sum"}, ValueError, (name, "denominator", "sum"))
    yield Bad(operands, {"mask": nothing, "empty": "raise"}, ValueError, (name, "empty", "raise"))


def bad_inputs(name, key="input", rest=()):
    yield Bad(([1.0], *rest), {}, TypeError, (name, key, "tensor", "list"))
    yield Bad((X.long(), *rest), {}, TypeError, (name, key, "floating", "torch.int64"))
    yield Bad((X.to(torch.complex64), *rest), {}, TypeError, (name, key, "floating", "torch.complex64"))


def bad_dims(name, *operands):
    yield Bad(operands, {"dim": 2}, IndexError, (name, "dim", "2"))
    yield Bad(operands, {"dim": -3}, IndexError, (name, "dim", "-3"))
    yield Bad(operands, {"dim": None}, TypeError, (name, "dim", "None"))
    yield Bad(operands, {"dim": (0, 1)}, TypeError, (name, "dim", "(0, 1)"))
    yield Bad(operands, {"dim": 1.0}, TypeError, (name, "dim", "1.0"))
    yield must(name, "dim", operands, {"dim": True}, TypeError)


def bad_parameters(op, operands):
    """Yields calls with parameters whose value or type the op's record in the library excludes."""
    name = op.name
    for parameter in op.parameters:
        key = parameter.name
        if parameter.kind is bool:
            yield must(name, key, operands, {key: 1}, TypeError)
            yield must(name, key, operands, {key: None}, TypeError)
            continue
        yield Bad(operands, {key: NAN}, ValueError, (name, key, "nan"))
        yield Bad(operands, {key: "1"}, TypeError, (name, key, "str"))
        yield Bad(operands, {key: None}, TypeError, (name, key, "NoneType"))
        yield must(name, key, operands, {key: HUGE}, ValueError)
        low, high = parameter.range()
        for value in (math.nextafter(low, -math.inf), math.nextafter(high, math.inf)):
            yield Bad(operands, {key: value}, ValueError, (name, key, str(value)))
