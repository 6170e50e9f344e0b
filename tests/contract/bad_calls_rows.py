"""Calls of the row functions that must be refused."""

import torch

from safeops.testing import Bad
from tests.contract.bad_calls import KEEP, X, _mask


def _input(name, argument="input", rest=()):
    yield Bad(([1.0], *rest), {}, TypeError, (name, argument, "tensor", "list"))
    yield Bad((X.long(), *rest), {}, TypeError, (name, argument, "floating", "torch.int64"))
    yield Bad((X.to(torch.complex64), *rest), {}, TypeError, (name, argument, "floating", "torch.complex64"))


def _dim(name, *operands):
    yield Bad(operands, {"dim": 2}, IndexError, (name, "dim", "2"))
    yield Bad(operands, {"dim": -3}, IndexError, (name, "dim", "-3"))
    yield Bad(operands, {"dim": None}, TypeError, (name, "dim", "None"))
    yield Bad(operands, {"dim": (0, 1)}, TypeError, (name, "dim", "(0, 1)"))
    yield Bad(operands, {"dim": 1.0}, TypeError, (name, "dim", "1.0"))


def _eps(name, *operands):
    yield Bad(operands, {"eps": -1.0}, ValueError, (name, "eps", "-1.0"))
    yield Bad(operands, {"eps": float("nan")}, ValueError, (name, "eps", "nan"))
    yield Bad(operands, {"eps": "tiny"}, TypeError, (name, "eps", "str"))


def _softmax(name):
    yield from _mask(name, place=lambda m: ((X, m), {}))
    yield Bad((X, torch.ones(3, 2, 5, dtype=torch.bool)), {}, ValueError, (name, "mask", "(3, 2, 5)", "(2, 5)"))
    yield from _input(name)
    yield from _dim(name, X, KEEP)


BAD_CALLS = {
    "masked_softmax": list(_softmax("masked_softmax")),
    "masked_log_softmax": list(_softmax("masked_log_softmax")),
    "normalize": [*_input("normalize"), *_dim("normalize", X), *_eps("normalize", X)],
    "cosine_similarity": [
        *_input("cosine_similarity", "x1", (X,)),
        Bad((X, 1.0), {}, TypeError, ("cosine_similarity", "x2", "tensor", "float")),
        Bad((X, X.long()), {}, TypeError, ("cosine_similarity", "x2", "floating", "torch.int64")),
        Bad((X, X[:, :3]), {}, ValueError, ("cosine_similarity", "x1", "x2", "(2, 5)", "(2, 3)")),
        Bad((X, X.to("meta")), {}, ValueError, ("cosine_similarity", "x2", "meta")),
        *_dim("cosine_similarity", X, X),
        *_eps("cosine_similarity", X, X),
    ],
}
