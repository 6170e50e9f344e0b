"""Calls of the selection ops that must be refused, with the words the error must contain."""

import torch

from safeops.testing import Bad
from tests.contract.bad_calls import KEEP, X

AT = torch.zeros(2, 5, dtype=torch.int64)
PICK = torch.zeros(3, dtype=torch.int64)


def _flags(name, place):
    yield Bad(*place(torch.ones(2, 5)), TypeError, (name, "mask", "bool", "torch.float32"))
    yield Bad(*place(torch.ones(2, 5, dtype=torch.uint8)), TypeError, (name, "mask", "bool", "torch.uint8"))
    yield Bad(*place([True]), TypeError, (name, "mask", "tensor", "list"))
    yield Bad(*place(torch.ones(3, 4, dtype=torch.bool)), ValueError, (name, "mask", "(3, 4)", "(2, 5)", "broadcast"))
    yield Bad(*place(KEEP.to("meta")), ValueError, (name, "mask", "meta"))


def _picks(name, index, bad_shape):
    """What both indexed ops refuse."""
    yield Bad(([1.0], 0, index), {}, TypeError, (name, "input", "tensor", "list"))
    yield Bad((X.to(torch.float8_e4m3fn), 0, index), {}, TypeError, (name, "input", "float8"))
    yield Bad((X, 0, [0]), {}, TypeError, (name, "index", "tensor", "list"))
    for dtype in (torch.float32, torch.bool, torch.int16, torch.uint8):
        yield Bad((X, 0, index.to(dtype)), {}, TypeError, (name, "index", "int64", str(dtype)))
    yield Bad((X, 2, index), {}, IndexError, (name, "dim", "2"))
    yield Bad((X, -3, index), {}, IndexError, (name, "dim", "-3"))
    yield Bad((X, "rows", index), {}, TypeError, (name, "dim", "rows"))
    yield Bad((X, None, index), {}, TypeError, (name, "dim", "None"))
    yield Bad((X, 0, bad_shape), {}, ValueError, (name, "index", str(tuple(bad_shape.shape)), "(2, 5)"))
    yield Bad((X, 0, index.to("meta")), {}, ValueError, (name, "index", "meta"))
    yield Bad((X, 0, index), {"fill_value": None}, TypeError, (name, "fill_value", "NoneType"))
    yield Bad((X, 0, index), {"fill_value": "0"}, TypeError, (name, "fill_value", "str"))
    yield Bad((X.long(), 0, index), {"fill_value": float("nan")}, ValueError, (name, "fill_value", "torch.int64"))


def _compact(*args, capacity=4, **kwargs):
    return args, {"capacity": capacity, **kwargs}


COMPACT = "masked_compact"

BAD_CALLS = {
    "masked_compact": [
        *_flags(COMPACT, lambda m: _compact(X, m)),
        Bad(*_compact([1.0], KEEP), TypeError, (COMPACT, "input", "tensor", "list")),
        Bad(*_compact(X.to(torch.float8_e4m3fn), KEEP), TypeError, (COMPACT, "input", "float8")),
        Bad(*_compact(X, KEEP[None]), ValueError, (COMPACT, "mask", "(1, 2, 5)", "(2, 5)")),
        Bad(*_compact(X, KEEP[0]), ValueError, (COMPACT, "mask", "(5,)", "first 1", "(2, 5)")),
        Bad(*_compact(X[:1], KEEP), ValueError, (COMPACT, "mask", "(2, 5)", "(1, 5)")),
        Bad(*_compact(X, KEEP, capacity=-1), ValueError, (COMPACT, "capacity", "-1")),
        Bad(*_compact(X, KEEP, capacity=4.0), TypeError, (COMPACT, "capacity", "float")),
        Bad(*_compact(X, KEEP, capacity=True), TypeError, (COMPACT, "capacity", "bool")),
        Bad(*_compact(X, KEEP, capacity=None), TypeError, (COMPACT, "capacity", "NoneType")),
        Bad(*_compact(X, KEEP, capacity=torch.tensor(4)), TypeError, (COMPACT, "capacity", "Tensor")),
        Bad(*_compact(X, KEEP, fill_value="0"), TypeError, (COMPACT, "fill_value", "str")),
        Bad(*_compact(X.int(), KEEP, fill_value=float("nan")), ValueError, (COMPACT, "fill_value", "torch.int32")),
    ],
    "masked_select": [
        *_flags("masked_select", lambda m: ((X, m), {})),
        Bad(([1.0], KEEP), {}, TypeError, ("masked_select", "input", "tensor", "list")),
    ],
    "masked_scatter": [
        *_flags("masked_scatter", lambda m: ((X, m, X), {})),
        Bad(([1.0], KEEP, X), {}, TypeError, ("masked_scatter", "input", "tensor", "list")),
        Bad((X, KEEP, 1.0), {}, TypeError, ("masked_scatter", "source", "tensor", "float")),
        Bad((X, KEEP, X.double()), {}, TypeError, ("masked_scatter", "source", "torch.float64", "torch.float32")),
        Bad((X, KEEP, X.to("meta")), {}, ValueError, ("masked_scatter", "source", "meta")),
    ],
    "safe_gather": [
        *_picks("safe_gather", AT, PICK),
        Bad((X, 0, AT.repeat(1, 2)), {}, ValueError, ("safe_gather", "index", "(2, 10)", "(2, 5)", "dim 0")),
        Bad((X, 1, AT.repeat(2, 1)), {}, ValueError, ("safe_gather", "index", "(4, 5)", "(2, 5)", "dim 1")),
    ],
    "safe_index_select": [
        *_picks("safe_index_select", PICK, AT),
        Bad((X[0, 0], 0, PICK), {}, ValueError, ("safe_index_select", "index", "(3,)", "one index", "()")),
    ],
}
