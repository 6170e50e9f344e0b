"""The functions of rows as subjects."""

import torch
import torch.nn.functional as F

from safeops.testing import Sample
from tests.contract import definitions_rows as definitions
from tests.contract.bad_calls_rows import BAD_CALLS
from tests.contract.subjects import NO_SUM, data, mask, subject

NO_MASK = {
    c: "has no mask"
    for c in ("masked_garbage", "masked_upstream", "masked_garbage_transforms", "nothing_kept", "weight_zero")
}
ONE_OPERAND = {c: "one operand" for c in ("mixed_dtypes", "partial_gradients")}
NOT_SAFE = {"finite": "not a safe_ function: a kept inf shows"}


def _size(t, dim):
    """The largest finite magnitude of each row."""
    t = t.double().nan_to_num(0, 0, 0).abs()
    return t if not t.numel() else t.amax(dim, keepdim=True)


def softmax_terms(sample, outcome):
    """exp(x - top) loses |x - top| roundings; y (g - sum g y) is of terms of y g."""
    dim = sample.kwargs.get("dim", -1)
    y = outcome.values[0]
    value = (y - torch.xlogy(y, y)).nan_to_num(0, 0, 0)
    if not outcome.grads:
        return value, {}
    return value, {0: value * 2 * _size(outcome.upstream[0], dim)}


def log_softmax_terms(sample, outcome):
    """x - top - log(sum); g - y sum g."""
    dim = sample.kwargs.get("dim", -1)
    value = 1 + _size(outcome.values[0], dim)
    if not outcome.grads:
        return value, {}
    length = sample.shape()[dim] if sample.shape() else 1
    return value, {0: (1 + outcome.values[0].exp() * length) * _size(outcome.upstream[0], dim)}


def _norm(x, dim):
    return torch.linalg.vector_norm(x.detach(), dim=dim, keepdim=True)


def normalize_terms(sample, outcome):
    """(g - y sum g y) / |x|."""
    x, dim = sample.args[0].detach(), sample.kwargs.get("dim", -1)
    if not outcome.grads or not x.numel():
        return 0.0, {0: torch.zeros_like(x)}
    divisor = _norm(x, dim).clamp(min=sample.kwargs.get("eps") or 0)
    return 0.0, {0: 2 * _norm(outcome.upstream[0].double(), dim) / divisor + torch.zeros_like(x)}


def cosine_terms(sample, outcome):
    """g (x2 / |x2| - c x1 / |x1|) / |x1|."""
    x1, x2 = (x.detach() for x in torch.broadcast_tensors(*sample.args))
    dim = sample.kwargs.get("dim", -1)
    if not outcome.grads or not x1.numel():
        return 1.0, {k: torch.zeros_like(x.detach()) for k, x in enumerate(sample.args)}
    g = outcome.upstream[0].double().abs()
    g = g.unsqueeze(dim) if x1.dim() else g
    floor = sample.kwargs.get("eps") or 0
    sizes = (2 * g / _norm(x, dim).clamp(min=floor) + torch.zeros_like(x1) for x in (x1, x2))
    return 1.0, {k: size.nan_to_num(0, 0, 0).sum_to_size(sample.args[k].shape) for k, size in enumerate(sizes)}


def softmax_samples(log):
    # Finite differences of -inf mean nothing: what the mask does there is in test_rows.
    smooth = not log
    yield Sample((data(3, 5), mask(3, 5)), mask=1, smooth=smooth, name="rows", slow=True)
    yield Sample((data(4, 5),), name="no mask", slow=log)
    yield Sample((data(4, 6), mask(4, 6, seed=1)), {"dim": 0}, mask=1, smooth=smooth, name="columns")
    yield Sample((data(3, 5), mask(5)), {"dim": 1}, mask=1, smooth=smooth, name="mask broadcast")
    four = data(2, 3, 4, 5)
    yield Sample((four, mask(2, 1, 4, 5)), {"dim": 1}, mask=1, smooth=smooth, name="channels of four")
    yield Sample((four, mask(3, 1, 1)), {"dim": -2}, mask=1, smooth=smooth, name="inner dim of four")
    empty = mask(3, 5)
    empty[1] = False
    yield Sample((data(3, 5), empty), mask=1, smooth=smooth, name="a row without anything")
    yield Sample((data(7) * 10, mask(7)), {"dim": 0}, mask=1, smooth=smooth, name="one row, far apart")


def _torch_softmax(function):
    def pattern(input, mask=None, dim=-1):
        x = input if mask is None else input.masked_fill(~mask, float("-inf"))
        return function(x, dim)

    return pattern


def rows():
    skip = NO_SUM | NOT_SAFE | ONE_OPERAND | {"weight_zero": "has no weight"}
    none_larger = {"gradient_overflow": "no gradient is larger than what arrives"}
    yield subject(
        "masked_softmax",
        list(softmax_samples(log=False)),
        definitions=definitions,
        bad_calls=BAD_CALLS,
        dtype_rule="input",
        row_terms=softmax_terms,
        torch_equivalent=_torch_softmax(torch.softmax),
        skip=skip | none_larger,
    )
    yield subject(
        "masked_log_softmax",
        list(softmax_samples(log=True)),
        definitions=definitions,
        bad_calls=BAD_CALLS,
        dtype_rule="input",
        row_terms=log_softmax_terms,
        torch_equivalent=_torch_softmax(torch.log_softmax),
        skip=skip,
    )
    short = data(3, 5) / 16
    zero = data(3, 5, seed=1)
    zero[1] = 0
    yield subject(
        "normalize",
        [
            Sample((data(3, 5),), name="rows", slow=True),
            Sample((short,), name="short vectors"),
            Sample((zero,), name="a zero vector", smooth=False, slow=True),
            Sample((data(4, 6),), {"dim": 0}, name="columns"),
            Sample((data(3, 5),), {"eps": 3.0}, name="floor", smooth=False),
            Sample((short,), {"eps": 1.0}, name="all below the floor"),
            Sample((data(2, 3, 4, 5),), {"dim": 1}, name="channels of four"),
            Sample((data(2, 3, 4, 5),), {"dim": -2}, name="inner dim of four"),
        ],
        definitions=definitions,
        bad_calls=BAD_CALLS,
        dtype_rule="input",
        row_terms=normalize_terms,
        torch_equivalent=lambda x, dim=-1, eps=None: F.normalize(x, dim=dim, eps=eps or 1e-12),
        skip=NO_SUM | NOT_SAFE | NO_MASK | ONE_OPERAND,
    )
    yield subject(
        "cosine_similarity",
        [
            Sample((data(3, 5), data(3, 5, seed=2)), name="rows", slow=True),
            Sample((zero, data(3, 5, seed=2)), name="a zero vector", smooth=False, slow=True),
            Sample((data(4, 6), data(4, 6, seed=2)), {"dim": 0}, name="columns"),
            Sample((data(3, 5), data(5, seed=2)), name="second broadcast"),
            Sample((data(3, 1, 5), data(4, 5, seed=2)), name="both broadcast"),
            Sample((short, data(3, 5, seed=2)), {"eps": 1.0}, name="one below the floor"),
            Sample((data(2, 3, 4, 5), data(2, 3, 4, 5, seed=2)), {"dim": 1}, name="channels of four"),
        ],
        definitions=definitions,
        bad_calls=BAD_CALLS,
        dtype_rule="reduction",
        row_terms=cosine_terms,
        torch_equivalent=lambda a, b, dim=-1, eps=None: F.cosine_similarity(a, b, dim=dim, eps=eps or 1e-8),
        skip=NOT_SAFE | NO_MASK,
    )
