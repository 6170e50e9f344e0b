"""Calls that the unary and binary functions must refuse."""

import torch

from safeops.testing import Bad
from tests.contract.bad_calls import X

UNARY = ["safe_reciprocal", "safe_log", "safe_sqrt", "safe_rsqrt", "safe_exp", "safe_acos", "safe_asin"]
BINARY = {"safe_pow": "exponent", "safe_atan2": "other", "xlogy": "other"}


def _input(name, *rest):
    yield Bad(([1.0], *rest), {}, TypeError, (name, "input", "tensor", "list"))
    yield Bad((2.0, *rest), {}, TypeError, (name, "input", "tensor", "float"))
    yield Bad((X.to(torch.complex64), *rest), {}, TypeError, (name, "input", "real", "torch.complex64"))


def _dtype(name, *rest):
    yield Bad((X, *rest), {"dtype": torch.int32}, TypeError, (name, "dtype", "torch.int32"))
    yield Bad((X, *rest), {"dtype": "half"}, TypeError, (name, "dtype", "half"))


def _eps(name, positive):
    yield Bad((X,), {"eps": -1.0}, ValueError, (name, "eps", "-1.0"))
    yield Bad((X,), {"eps": float("nan")}, ValueError, (name, "eps", "nan"))
    yield Bad((X,), {"eps": "tiny"}, TypeError, (name, "eps", "str"))
    yield Bad((X,), {"eps": True}, TypeError, (name, "eps", "bool"))
    if positive:
        yield Bad((X,), {"eps": 0.0}, ValueError, (name, "eps", "greater than 0", "0.0"))
        yield Bad((X,), {"eps": float("inf")}, ValueError, (name, "eps", "inf"))


def _unary(name):
    yield from _input(name)
    if name not in ("safe_acos", "safe_asin"):
        yield from _dtype(name)
    if name in ("safe_reciprocal", "safe_log", "safe_sqrt", "safe_rsqrt"):
        yield from _eps(name, name in ("safe_log", "safe_rsqrt"))


def _binary(name, other):
    yield from _input(name, X)
    if name == "safe_pow":
        yield from _dtype(name, X)
    yield Bad((X, X[:, :3]), {}, ValueError, (name, other, "(2, 5)", "(2, 3)", "broadcast"))
    yield Bad((X, "2"), {}, TypeError, (name, other, "tensor", "str"))
    yield Bad((X, None), {}, TypeError, (name, other, "tensor", "NoneType"))
    yield Bad((X, X.to("meta")), {}, ValueError, (name, other, "meta"))
    yield Bad((X, X.to(torch.complex64)), {}, TypeError, (name, other, "real", "torch.complex64"))
    if name == "safe_atan2":
        yield Bad((X, 2.0), {}, TypeError, (name, other, "tensor", "float"))


BAD_CALLS = {name: list(_unary(name)) for name in UNARY} | {n: list(_binary(n, o)) for n, o in BINARY.items()}
BAD_CALLS["safe_reciprocal"] += [
    Bad((X,), {"fill_value": None}, TypeError, ("safe_reciprocal", "fill_value", "NoneType"))
]

# apply_where is no op of the registry: it has functions for arguments.
KEEP = torch.ones(2, 5, dtype=torch.bool)


def _where(args, kwargs, error, *words):
    return Bad(args, kwargs, error, ("apply_where", *words))


APPLY_WHERE = [
    _where((X, X, torch.log), {"fill_value": 0}, TypeError, "condition", "bool", "torch.float32"),
    _where(([True], X, torch.log), {"fill_value": 0}, TypeError, "condition", "tensor", "list"),
    _where((KEEP, 1.0, torch.log), {"fill_value": 0}, TypeError, "args", "tensor", "float"),
    _where((KEEP, (X, "x"), torch.add), {"fill_value": 0}, TypeError, "args[1]", "tensor", "str"),
    _where((KEEP, (), torch.add), {"fill_value": 0}, ValueError, "args", "empty"),
    _where((KEEP[:, :3], X, torch.log), {"fill_value": 0}, ValueError, "condition", "args", "(2, 3)", "(2, 5)"),
    _where((KEEP, X.to("meta"), torch.log), {"fill_value": 0}, ValueError, "args", "meta"),
    _where((KEEP, X, torch.log), {}, ValueError, "f2", "fill_value", "neither"),
    _where((KEEP, X, torch.log, torch.log), {"fill_value": 0}, ValueError, "f2", "fill_value", "both"),
    _where((KEEP, X, 1.0), {"fill_value": 0}, TypeError, "f1", "function", "float"),
    _where((KEEP, X, torch.log, 1.0), {}, TypeError, "f2", "function", "float"),
    _where((KEEP, X, torch.log), {"fill_value": "0"}, TypeError, "fill_value", "str"),
    _where((KEEP, X, torch.log), {"fill_value": torch.ones(3)}, ValueError, "fill_value", "(3,)", "(2, 5)"),
    _where((KEEP, X, torch.sum), {"fill_value": 0}, ValueError, "f1", "()", "(2, 5)"),
    _where((KEEP, X, lambda x: 1.0), {"fill_value": 0}, TypeError, "f1", "tensor", "float"),
    _where((KEEP, X, torch.log, lambda x: x[0]), {}, ValueError, "f2", "(5,)", "(2, 5)"),
]
