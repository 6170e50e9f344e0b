"""normalize and cosine_similarity."""

import torch
import torch.nn.functional as F

import safeops
from safeops.testing import Bad, Sample
from tests.ops.bad_calls import NAN, X, bad_dims, bad_floors, bad_inputs
from tests.ops.gpu import Case, numbers
from tests.ops.operands import data, plain
from tests.ops.record import BY_COMPOSITE, NO_MASK, NO_SUM, NO_WEIGHT, NOT_SAFE, ONE_OPERAND, Record
from tests.ops.truth import floor

# ---- definitions


def _unit(x, dim, eps):
    """Returns (x / max(|x|, eps), |x|). |x| is max |x_i| times the norm of x / max |x_i|, which does not overflow."""
    if x.dim() and x.shape[dim] == 0:
        return x, x.sum(dim, keepdim=True)
    most = x.detach().abs().amax(dim, keepdim=True)
    zero, plain = most == 0, ~most.isfinite()
    most = torch.where(zero | plain, 1, most)
    small = torch.where(zero, 1, x / most)  # 1: a root has no derivative at 0
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
    # A zero vector gives cosine 0, but a NaN or inf in the other vector must make it NaN.
    none = ((norm1 == 0) & norm2.isfinite()) | ((norm2 == 0) & norm1.isfinite())
    return (torch.where(none, 0, y1) * torch.where(none, 0, y2)).sum(dim)


# ---- tolerances: the magnitudes ("sizes") of the terms that cancel in a row's values and gradients


def _norm(x, dim):
    return torch.linalg.vector_norm(x.detach(), dim=dim, keepdim=True)


def normalize_terms(sample, outcome):
    """Sizes of the terms of the gradient (g - y sum g y) / |x|."""
    x, dim = sample.args[0].detach(), sample.kwargs.get("dim", -1)
    if not outcome.grads or not x.numel():
        return 0.0, {0: torch.zeros_like(x)}
    divisor = _norm(x, dim).clamp(min=sample.kwargs.get("eps") or 0)
    return 0.0, {0: 2 * _norm(outcome.upstream[0].double(), dim) / divisor + torch.zeros_like(x)}


def cosine_terms(sample, outcome):
    """Sizes of the terms of the gradient to x1, g (x2 / |x2| - c x1 / |x1|) / |x1|, and of that to x2."""
    x1, x2 = (x.detach() for x in torch.broadcast_tensors(*sample.args))
    dim = sample.kwargs.get("dim", -1)
    if not outcome.grads or not x1.numel():
        return 1.0, {k: torch.zeros_like(x.detach()) for k, x in enumerate(sample.args)}
    g = outcome.upstream[0].double().abs()
    g = g.unsqueeze(dim) if x1.dim() else g
    eps = sample.kwargs.get("eps") or 0
    sizes = (2 * g / _norm(x, dim).clamp(min=eps) + torch.zeros_like(x1) for x in (x1, x2))
    return 1.0, {k: size.nan_to_num(0, 0, 0).sum_to_size(sample.args[k].shape) for k, size in enumerate(sizes)}


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
        *bad_inputs("normalize"),
        *(bad for bad in bad_dims("normalize", X) if bad.kwargs["dim"] not in ((0, 1), None)),
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
        *bad_inputs("cosine_similarity", "x1", (X,)),
        Bad((X, 1.0), {}, TypeError, ("cosine_similarity", "x2", "tensor", "float")),
        Bad((X, X.long()), {}, TypeError, ("cosine_similarity", "x2", "floating", "torch.int64")),
        Bad((X, X[:, :3]), {}, ValueError, ("cosine_similarity", "x1", "x2", "(2, 5)", "(2, 3)")),
        Bad((X, X.to("meta")), {}, ValueError, ("cosine_similarity", "x2", "meta")),
        *bad_dims("cosine_similarity", X, X),
        *bad_floors("cosine_similarity", X, X),
    ],
    call={"x1": plain(), "x2": plain(1), "dim": 1, "eps": 1e-3},
    gpu=_cosine_case,
    row_terms=cosine_terms,
    torch_equivalent=lambda a, b, dim=1, eps=1e-8: F.cosine_similarity(a, b, dim, eps or 1e-8),
    skip=NOT_SAFE | NO_MASK | NO_WEIGHT,
)
