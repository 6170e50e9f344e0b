"""The functions along one dim: softmax, its logarithm, normalize, cosine similarity."""

import torch
import torch.nn.functional as F

import safeops
from safeops.testing import Bad, Sample
from tests.ops.bad_calls import KEEP, NAN, X, bad_floors, bad_masks, must
from tests.ops.gpu import Case, masked, numbers
from tests.ops.operands import data, mask, plain, plain_mask
from tests.ops.record import BY_COMPOSITE, NO_MASK, NO_SUM, NO_WEIGHT, NOT_SAFE, ONE_OPERAND, Record
from tests.ops.truth import floor

# ---- definitions


def _softmax(input, mask, dim):
    """(x - top, sum of exp(x - top), keep): top is a constant, and cancels."""
    keep = torch.ones_like(input, dtype=torch.bool) if mask is None else mask.expand(input.shape)
    if input.dim() and input.shape[dim] == 0:
        return input, input.sum(dim, keepdim=True), keep
    top = torch.where(keep, input.detach(), -torch.inf).amax(dim, keepdim=True)
    centred = torch.where(keep, input - top, 0)
    total = torch.where(keep, centred.exp(), 0).sum(dim, keepdim=True)
    return centred, torch.where(keep.any(dim, keepdim=True), total, 1), keep


def masked_softmax(input, mask=None, dim=-1):
    centred, total, keep = _softmax(input, mask, dim)
    return torch.where(keep, torch.where(keep, centred, 0).exp() / total, 0)


def masked_log_softmax(input, mask=None, dim=-1):
    centred, total, keep = _softmax(input, mask, dim)
    return torch.where(keep, centred - total.log(), -torch.inf)


def _unit(x, dim, eps):
    """(x / max(|x|, eps), |x|); the norm is taken of x over its largest element."""
    if x.dim() and x.shape[dim] == 0:
        return x, x.sum(dim, keepdim=True)
    most = x.detach().abs().amax(dim, keepdim=True)
    zero, plain = most == 0, ~most.isfinite()
    most = torch.where(zero | plain, 1, most)
    small = torch.where(zero, 1, x / most)  # the root has no derivative at 0
    norm = torch.where(zero, 0, small.square().sum(dim, keepdim=True).sqrt() * most)
    divisor = torch.where(norm <= eps, eps, norm)
    return torch.where(zero, 0, torch.where(zero, 0, x) / torch.where(zero, 1, divisor)), norm.detach()


def normalize(input, p=2.0, dim=1, eps=1e-12, *, out_dtype=torch.float64):
    eps = floor(eps, out_dtype)
    if p == 2:
        return _unit(input, dim, eps)[0]
    zero = (input == 0).all(dim, keepdim=True)
    norm = torch.linalg.vector_norm(torch.where(zero, 1, input), p, dim, keepdim=True)
    return torch.where(zero, 0, input / torch.where(norm <= eps, eps, norm))


def cosine_similarity(x1, x2, dim=1, eps=1e-8, *, out_dtype=torch.float64):
    x1, x2 = torch.broadcast_tensors(x1, x2)
    (y1, norm1), (y2, norm2) = (_unit(x, dim, floor(eps, out_dtype)) for x in (x1, x2))
    # A zero vector has no angle, unless there is a NaN or inf to show.
    none = ((norm1 == 0) & norm2.isfinite()) | ((norm2 == 0) & norm1.isfinite())
    return (torch.where(none, 0, y1) * torch.where(none, 0, y2)).sum(dim)


# ---- tolerances: the sizes of what a row's values and gradients are summed from


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
    eps = sample.kwargs.get("eps") or 0
    sizes = (2 * g / _norm(x, dim).clamp(min=eps) + torch.zeros_like(x1) for x in (x1, x2))
    return 1.0, {k: size.nan_to_num(0, 0, 0).sum_to_size(sample.args[k].shape) for k, size in enumerate(sizes)}


# ---- bad calls


def _bad_inputs(name, key="input", rest=()):
    yield Bad(([1.0], *rest), {}, TypeError, (name, key, "tensor", "list"))
    yield Bad((X.long(), *rest), {}, TypeError, (name, key, "floating", "torch.int64"))
    yield Bad((X.to(torch.complex64), *rest), {}, TypeError, (name, key, "floating", "torch.complex64"))


def _bad_dims(name, *operands):
    yield Bad(operands, {"dim": 2}, IndexError, (name, "dim", "2"))
    yield Bad(operands, {"dim": -3}, IndexError, (name, "dim", "-3"))
    yield Bad(operands, {"dim": None}, TypeError, (name, "dim", "None"))
    yield Bad(operands, {"dim": (0, 1)}, TypeError, (name, "dim", "(0, 1)"))
    yield Bad(operands, {"dim": 1.0}, TypeError, (name, "dim", "1.0"))
    yield must(name, "dim", operands, {"dim": True}, TypeError)


# ---- softmax


def _softmax_samples(log):
    # Finite differences of -inf mean nothing: what the mask does there is in tests/contract/rows/test_rows.py.
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


def _record_softmax(definition, twin, scale, skip=None, **fields):
    name = definition.__name__
    large = torch.ones(3, 2, 5, dtype=torch.bool)

    def pattern(input, mask=None, dim=-1):
        x = input if mask is None else input.masked_fill(~mask, float("-inf"))
        return twin(x, dim)

    Record(
        name,
        definition,
        _softmax_samples(log=twin is torch.log_softmax),
        bad_calls=[
            *bad_masks(name, lambda m: ((X, m), {})),
            Bad((X, large), {}, ValueError, (name, "mask", "(3, 2, 5)", "(2, 5)")),
            *_bad_inputs(name),
            *_bad_dims(name, X, KEEP),
        ],
        call={"input": plain(), "mask": plain_mask(), "dim": 1},
        gpu=masked(name, scale),
        dtype_rule="input",
        torch_equivalent=pattern,
        skip=NO_SUM | NOT_SAFE | ONE_OPERAND | NO_WEIGHT | (skip or {}),
        **fields,
    )


_record_softmax(
    masked_softmax,
    torch.softmax,
    8,  # of a GPU case: values from 1 to nearly 0, not all of them below what fp16 holds
    {"gradient_overflow": "no gradient is larger than what arrives"},
    row_terms=softmax_terms,
)
_record_softmax(masked_log_softmax, torch.log_softmax, 1, row_terms=log_softmax_terms)


# ---- normalize, cosine_similarity

SHORT, ZERO = data(3, 5) / 16, data(3, 5, seed=1)
ZERO[1] = 0
OF_SAFE_NORM = dict.fromkeys(("kept_nonfinite", "kept_upstream"), "the slopes of an infinite norm are safe_norm's")
OF_SAFE_NORM["gradient_overflow"] = "the op's main subject checks it"


def _cosine_case(n, dtype, seed):
    x, y = numbers(n, dtype, seed), numbers(n, dtype, seed + 1)
    return Case(lambda a, b: safeops.cosine_similarity(a, b, -1), (x, (x + y) / 2))


Record(
    "normalize",
    normalize,
    [
        Sample((data(3, 5),), {"dim": -1}, name="rows", slow=True),
        Sample((SHORT,), {"dim": -1}, name="short vectors"),
        Sample((ZERO,), {"dim": -1}, name="a zero vector", smooth=False, slow=True),
        Sample((data(4, 6),), {"dim": 0}, name="columns"),
        Sample((data(3, 5),), {"dim": -1, "eps": 3.0}, name="floor", smooth=False),
        Sample((SHORT,), {"dim": -1, "eps": 1.0}, name="all below the floor"),
        Sample((data(2, 3, 4, 5),), {"dim": 1}, name="channels of four"),
        Sample((data(2, 3, 4, 5),), {"dim": -2}, name="inner dim of four"),
        Sample((SHORT,), {"dim": -1, "eps": None}, name="no floor"),
    ],
    bad_calls=[
        *_bad_inputs("normalize"),
        *(bad for bad in _bad_dims("normalize", X) if bad.kwargs["dim"] not in ((0, 1), None)),
        Bad((X,), {"dim": (0, 2)}, IndexError, ("normalize", "dim", "2")),
        *bad_floors("normalize", X),
        Bad((X,), {"p": "2"}, TypeError, ("normalize", "p", "str")),
        Bad((X,), {"p": NAN}, ValueError, ("normalize", "p", "nan")),
    ],
    call={"input": plain(), "p": 2.0, "dim": 1, "eps": 1e-3},
    gpu=lambda n, dtype, seed: Case(lambda x: safeops.normalize(x, dim=-1), (numbers(n, dtype, seed),)),
    dtype_rule="input",
    row_terms=normalize_terms,
    torch_equivalent=lambda x, p=2.0, dim=1, eps=1e-12: F.normalize(x, p, dim, eps or 1e-12),
    skip=NO_SUM | NOT_SAFE | NO_MASK | NO_WEIGHT | ONE_OPERAND,
    variants={
        "other orders": (
            [Sample((data(3, 5),), {"p": p, "dim": -1}, name=f"order {p}") for p in (1.0, 3.0)],
            {
                "dtype_rule": "input",
                "row_terms": normalize_terms,
                "skip": NO_SUM | NOT_SAFE | NO_MASK | NO_WEIGHT | ONE_OPERAND | BY_COMPOSITE | OF_SAFE_NORM,
            },
        )
    },
)
Record(
    "cosine_similarity",
    cosine_similarity,
    [
        Sample((data(3, 5), data(3, 5, seed=2)), {"dim": -1}, name="rows", slow=True),
        Sample((ZERO, data(3, 5, seed=2)), {"dim": -1}, name="a zero vector", smooth=False, slow=True),
        Sample((data(4, 6), data(4, 6, seed=2)), {"dim": 0}, name="columns"),
        Sample((data(3, 5), data(5, seed=2)), {"dim": -1}, name="second broadcast"),
        Sample((data(3, 1, 5), data(4, 5, seed=2)), {"dim": -1}, name="both broadcast"),
        Sample((SHORT, data(3, 5, seed=2)), {"dim": -1, "eps": 1.0}, name="one below the floor"),
        Sample((data(2, 3, 4, 5), data(2, 3, 4, 5, seed=2)), {"dim": 1}, name="channels of four"),
    ],
    bad_calls=[
        *_bad_inputs("cosine_similarity", "x1", (X,)),
        Bad((X, 1.0), {}, TypeError, ("cosine_similarity", "x2", "tensor", "float")),
        Bad((X, X.long()), {}, TypeError, ("cosine_similarity", "x2", "floating", "torch.int64")),
        Bad((X, X[:, :3]), {}, ValueError, ("cosine_similarity", "x1", "x2", "(2, 5)", "(2, 3)")),
        Bad((X, X.to("meta")), {}, ValueError, ("cosine_similarity", "x2", "meta")),
        *_bad_dims("cosine_similarity", X, X),
        *bad_floors("cosine_similarity", X, X),
    ],
    call={"x1": plain(), "x2": plain(1), "dim": 1, "eps": 1e-3},
    gpu=_cosine_case,
    row_terms=cosine_terms,
    torch_equivalent=lambda a, b, dim=1, eps=1e-8: F.cosine_similarity(a, b, dim, eps or 1e-8),
    skip=NOT_SAFE | NO_MASK | NO_WEIGHT,
)
