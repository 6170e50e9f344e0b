"""Calls of the statistics that must be refused."""

import torch

from safeops.testing import Bad
from tests.contract.bad_calls import KEEP, X, _mask, _reduction

STATISTICS = [
    *("masked_var", "masked_std", "masked_amax", "masked_amin", "masked_norm"),
    *("masked_sum_of_squares", "masked_rms", "masked_logsumexp"),
]


def _parameter(name, keyword):
    yield Bad((X,), {keyword: "1"}, TypeError, (name, keyword, "str"))
    yield Bad((X,), {keyword: None}, TypeError, (name, keyword, "NoneType"))
    yield Bad((X,), {keyword: torch.ones(())}, TypeError, (name, keyword, "Tensor"))
    yield Bad((X,), {keyword: True}, TypeError, (name, keyword, "bool"))
    if keyword == "ord":
        yield Bad((X,), {keyword: float("nan")}, ValueError, (name, keyword, "nan"))


BAD_CALLS = {name: list(_reduction(name)) for name in STATISTICS}
BAD_CALLS["masked_var"] += _parameter("masked_var", "correction")
BAD_CALLS["masked_std"] += _parameter("masked_std", "correction")
BAD_CALLS["masked_norm"] += _parameter("masked_norm", "ord")
for _name in ("masked_var", "masked_std"):
    _one = torch.zeros(2, 5, dtype=torch.bool)
    _one[:, 0] = True
    BAD_CALLS[_name].append(Bad((X, _one, 1), {"empty": "raise"}, ValueError, (_name, "empty", "raise", "2 of 2")))
BAD_CALLS["masked_count"] = [
    bad
    for bad in _reduction("masked_count")
    # it counts integers, too, and reads no more of its input than the shape
    if bad.kwargs.get("dtype") is None and "floating" not in bad.words[:3] or "weight" in bad.words
]
BAD_CALLS["masked_count"] += [
    Bad((X, KEEP), {"dtype": torch.int8}, TypeError, ("masked_count", "dtype", "torch.int8")),
    Bad((X, KEEP), {"empty": "nan"}, ValueError, ("masked_count", "nan", "torch.int64")),
    Bad((X, KEEP), {"empty": "nan", "dtype": torch.int32}, ValueError, ("masked_count", "nan", "torch.int32")),
]
BAD_CALLS["safe_norm"] = [
    *_mask("safe_norm", place=lambda m: ((X,), {"mask": m})),
    Bad(([1.0],), {}, TypeError, ("safe_norm", "input", "tensor", "list")),
    Bad((X.long(),), {}, TypeError, ("safe_norm", "input", "floating", "torch.int64")),
    Bad((X, 2), {}, IndexError, ("safe_norm", "dim", "2")),
    Bad((X, (1, -1)), {}, ValueError, ("safe_norm", "dim", "(1, -1)")),
    Bad((X,), {"mask": KEEP, "dtype": torch.int64}, TypeError, ("safe_norm", "dtype", "torch.int64")),
    *_parameter("safe_norm", "ord"),
]
