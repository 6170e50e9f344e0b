"""Calls that must be refused, with the words the error must contain: function, argument, what is wrong with it."""

import torch

from safeops.testing import Bad

X = torch.arange(10.0).reshape(2, 5)
KEEP = torch.ones(2, 5, dtype=torch.bool)


def _mask(name, argument="mask", place=None):
    """What every op with a mask refuses about it. `place(mask)` makes (args, kwargs)."""
    yield Bad(*place(torch.ones(2, 5)), TypeError, (name, argument, "bool", "torch.float32"))
    yield Bad(*place(torch.ones(2, 5, dtype=torch.uint8)), TypeError, (name, argument, "bool", "torch.uint8"))
    yield Bad(*place([True]), TypeError, (name, argument, "tensor", "list"))
    yield Bad(*place(torch.ones(3, 4, dtype=torch.bool)), ValueError, (name, argument, "(3, 4)", "(2, 5)", "broadcast"))
    yield Bad(*place(KEEP.to("meta")), ValueError, (name, argument, "meta"))


def _reduction(name):
    yield from _mask(name, place=lambda m: ((X, m), {}))
    yield Bad((X, torch.ones(3, 2, 5, dtype=torch.bool)), {}, ValueError, (name, "mask", "(3, 2, 5)", "(2, 5)"))
    yield Bad(([1.0],), {}, TypeError, (name, "input", "tensor", "list"))
    yield Bad((X.long(),), {}, TypeError, (name, "input", "floating", "torch.int64"))
    yield Bad((X.to(torch.complex64),), {}, TypeError, (name, "input", "floating", "torch.complex64"))
    yield Bad((X, KEEP, 2), {}, IndexError, (name, "dim", "2"))
    yield Bad((X, KEEP, -3), {}, IndexError, (name, "dim", "-3"))
    yield Bad((X, KEEP, (0, 0)), {}, ValueError, (name, "dim", "(0, 0)"))
    yield Bad((X, KEEP, (1, -1)), {}, ValueError, (name, "dim", "(1, -1)"))
    yield Bad((X, KEEP, "rows"), {}, TypeError, (name, "dim", "rows"))
    yield Bad((X, KEEP, 1.0), {}, TypeError, (name, "dim", "1.0"))
    yield Bad((X,), {"weight": torch.ones(3)}, ValueError, (name, "weight", "(3,)", "(2, 5)"))
    yield Bad((X,), {"weight": torch.ones(4, 2, 5)}, ValueError, (name, "weight", "(4, 2, 5)", "(2, 5)"))
    yield Bad((X,), {"weight": KEEP}, TypeError, (name, "weight", "floating", "torch.bool"))
    yield Bad((X,), {"weight": 2.0}, TypeError, (name, "weight", "tensor", "float"))
    yield Bad((X,), {"weight": X.to("meta")}, ValueError, (name, "weight", "meta"))
    yield Bad((X,), {"dtype": torch.int64}, TypeError, (name, "dtype", "torch.int64"))
    yield Bad((X,), {"empty": "ignore"}, ValueError, (name, "empty", "ignore", "zero"))
    yield Bad((X,), {"empty": None}, (ValueError, TypeError), (name, "empty", "None"))
    yield Bad((X, ~KEEP), {"empty": "raise"}, ValueError, (name, "empty", "raise"))


def _loss(name):
    yield from _mask(name, place=lambda m: ((X, X), {"mask": m}))
    yield Bad((X, X[:, :3]), {}, ValueError, (name, "input", "target", "(2, 5)", "(2, 3)"))
    yield Bad((X, 1.0), {}, TypeError, (name, "target", "tensor", "float"))
    yield Bad((None, X), {}, TypeError, (name, "input", "tensor", "NoneType"))
    yield Bad((X, X.long()), {}, TypeError, (name, "target", "floating", "torch.int64"))
    yield Bad((X.bool(), X), {}, TypeError, (name, "input", "floating", "torch.bool"))
    yield Bad((X, X.to("meta")), {}, ValueError, (name, "target", "meta"))
    yield Bad(
        (X, X), {"mask": torch.ones(3, 2, 5, dtype=torch.bool)}, ValueError, (name, "mask", "(3, 2, 5)", "(2, 5)")
    )
    yield Bad((X, X), {"weight": torch.ones(2)}, ValueError, (name, "weight", "(2,)", "(2, 5)"))
    yield Bad((X, X), {"weight": X.long()}, TypeError, (name, "weight", "floating", "torch.int64"))
    yield Bad((X, X), {"reduction": "average"}, ValueError, (name, "reduction", "average", "mean"))
    yield Bad((X, X), {"reduction": None}, (ValueError, TypeError), (name, "reduction", "None"))
    yield Bad((X, X), {"empty": "skip"}, ValueError, (name, "empty", "skip", "zero"))
    yield Bad((X, X), {"denominator": torch.ones(2)}, ValueError, (name, "denominator", "(2,)"))
    yield Bad((X, X), {"denominator": "count"}, TypeError, (name, "denominator", "str"))
    yield Bad((X, X), {"denominator": 4.0, "reduction": "sum"}, ValueError, (name, "denominator", "sum"))
    yield Bad((X, X), {"mask": ~KEEP, "empty": "raise"}, ValueError, (name, "empty", "raise"))


BAD_CALLS = {
    "masked_fill": [
        *_mask("masked_fill", "fill_mask", lambda m: ((X, m, 0.0), {})),
        Bad(([1.0], KEEP, 0.0), {}, TypeError, ("masked_fill", "input", "tensor", "list")),
        Bad((X, KEEP, "0"), {}, TypeError, ("masked_fill", "value", "str")),
        Bad((X, KEEP, None), {}, TypeError, ("masked_fill", "value", "NoneType")),
        Bad((X, KEEP, torch.zeros(1)), {}, ValueError, ("masked_fill", "value", "(1,)")),
        Bad((X, KEEP, torch.zeros((), device="meta")), {}, ValueError, ("masked_fill", "value", "meta")),
    ],
    "safe_div": [
        Bad((X, X[:, :3]), {}, ValueError, ("safe_div", "other", "(2, 5)", "(2, 3)")),
        Bad(([1.0], X), {}, TypeError, ("safe_div", "input", "tensor", "list")),
        Bad((X, "2"), {}, TypeError, ("safe_div", "other", "str")),
        Bad((X, X.to("meta")), {}, ValueError, ("safe_div", "other", "meta")),
        Bad((X, X.to(torch.complex64)), {}, TypeError, ("safe_div", "other", "torch.complex64")),
        Bad((X, X), {"eps": -1.0}, ValueError, ("safe_div", "eps", "-1.0")),
        Bad((X, X), {"eps": float("nan")}, ValueError, ("safe_div", "eps", "nan")),
        Bad((X, X), {"eps": "tiny"}, TypeError, ("safe_div", "eps", "str")),
        Bad((X, X), {"fill_value": None}, TypeError, ("safe_div", "fill_value", "NoneType")),
        Bad((X, X), {"dtype": torch.int32}, TypeError, ("safe_div", "dtype", "torch.int32")),
    ],
    "masked_sum": list(_reduction("masked_sum")),
    "masked_mean": list(_reduction("masked_mean")),
    **{name: list(_loss(name)) for name in ("mse_loss", "l1_loss")},
    "smooth_l1_loss": [
        *_loss("smooth_l1_loss"),
        Bad((X, X), {"beta": -1.0}, ValueError, ("smooth_l1_loss", "beta", "-1.0")),
        Bad((X, X), {"beta": float("nan")}, ValueError, ("smooth_l1_loss", "beta", "nan")),
        Bad((X, X), {"beta": "1"}, TypeError, ("smooth_l1_loss", "beta", "str")),
    ],
    "huber_loss": [
        *_loss("huber_loss"),
        Bad((X, X), {"delta": 0.0}, ValueError, ("huber_loss", "delta", "0.0")),
        Bad((X, X), {"delta": float("nan")}, ValueError, ("huber_loss", "delta", "nan")),
        Bad((X, X), {"delta": None}, TypeError, ("huber_loss", "delta", "NoneType")),
    ],
}
