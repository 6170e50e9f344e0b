"""The pointwise losses: `pointwise` makes a record of one element's loss and torch's function."""

import math

import torch
import torch.nn.functional as F

import safeops
from safeops.testing import Bad, Sample
from tests.ops.bad_calls import KEEP, NAN, X, bad_masks, must
from tests.ops.gpu import Case, keep, numbers
from tests.ops.operands import HUGE, data, mask, plain, plain_mask, weights
from tests.ops.record import BY_COMPOSITE, NOT_SAFE, Record
from tests.ops.truth import absolute, kept, reduce, weighted


def pointwise(name, element, twin, parameters=None, refused=None, **fields):
    """The record of a pointwise loss.

    element     (x, y, **parameters) -> the loss of each element, in plain differentiable torch.
    twin        torch's function, as users call it: (x, y, reduction="none", **parameters).
    parameters  {name: value}: those of all calls.
    refused     {name: [numbers that are out of its range]}.
    """
    parameters = parameters or {}
    tensors = {"mask": plain_mask(), "weight": plain(2), "denominator": torch.tensor(5.0)}
    fields.setdefault("skip", NOT_SAFE)
    return Record(
        name,
        _definition(element),
        _samples(parameters),
        bad_calls=[*_bad_calls(name), *_bad_parameters(name, parameters, refused or {})],
        call={"input": plain(), "target": plain(1), **tensors, **parameters},
        gpu=_gpu(name, parameters),
        variants={"gradient of the weight": (_weighted(parameters), {"data": (0, 1), "skip": NOT_SAFE | BY_COMPOSITE})},
        data=(0, 1),
        torch_equivalent=_twin(twin),
        **fields,
    )


def _definition(element):
    def loss(input, target, *, mask=None, weight=None, reduction="mean", denominator=None, empty="zero", **parameters):
        x, y = torch.broadcast_tensors(input, target)
        keep = kept(x.shape, mask, weight).to(x.device)
        x, y = torch.where(keep, x, 0), torch.where(keep, y, 0)
        terms = weighted(element(x, y, **parameters), keep, weight)
        if reduction == "none":
            return terms
        return reduce(reduction == "mean", terms, keep, weight, None, False, empty, denominator)

    loss.__module__ = __name__
    return loss


def _twin(function):
    def loss(input, target, *, mask=None, weight=None, reduction="mean", denominator=None, empty="zero", **parameters):
        terms = function(input, target, reduction="none", **parameters)
        keep = torch.ones_like(terms, dtype=torch.bool) if mask is None else mask.expand_as(terms)
        terms = torch.where(keep, terms, 0)
        w = torch.ones_like(terms) if weight is None else weight.expand_as(terms)
        terms = terms * w
        if reduction == "none":
            return terms
        total = terms.sum()
        if reduction == "sum":
            return total
        return total / (torch.where(keep, w, 0).sum() if denominator is None else denominator)

    return loss


# Not a denominator that rounds: the direct op takes it as a tensor.
DENOMINATOR = torch.tensor(4.5, dtype=torch.float64)


def _samples(parameters):
    def sample(x, y, options, **rest):
        return Sample((x, y), {**options, **parameters}, differentiable=(0, 1), **rest)

    x, y = data(3, 5, seed=1), data(3, 5, seed=2)
    four = data(2, 3, 4, 5, seed=3), data(2, 3, 4, 5, seed=4)
    full = {"mask": mask(3, 5), "weight": weights(3, 5)}
    yield sample(x, y, {"mask": mask(3, 5)}, name="mean", slow=True)
    yield sample(x, y, {**full, "reduction": "none"}, name="none, weighted", slow=True)
    broadcast = {"mask": mask(3, 1), "weight": weights(5)}
    yield sample(x, y, {**broadcast, "reduction": "sum"}, name="sum, mask and weight broadcast")
    yield sample(*four, {"mask": mask(2, 1, 4, 5), "weight": weights(2, 3, 4, 5)}, name="mean of four dims, weighted")
    yield sample(*four, {"mask": mask(5), "reduction": "none"}, name="none of four dims")
    yield sample(x, y[:, :1], {"mask": mask(3, 5)}, name="target broadcast")
    yield sample(x[0], y, {"mask": mask(3, 5), "reduction": "none"}, name="input broadcast")
    yield sample(x, y, {"mask": mask(3, 5), "denominator": DENOMINATOR}, name="denominator")
    yield sample(x, y, {}, name="neither mask nor weight")


def _weighted(parameters):
    for name, options in {
        "weight": {"weight": weights(3, 5)},
        "weight broadcast, none": {"weight": weights(5), "reduction": "none"},
        "denominator with a gradient": {"denominator": DENOMINATOR},
    }.items():
        operands = data(3, 5, seed=5), data(3, 5, seed=6)
        yield Sample(operands, {"mask": mask(3, 5), **options, **parameters}, name=name)


def _bad_calls(name):
    shape = torch.ones(3, 2, 5, dtype=torch.bool)
    yield from bad_masks(name, lambda m: ((X, X), {"mask": m}))
    yield Bad((X, X[:, :3]), {}, ValueError, (name, "input", "target", "(2, 5)", "(2, 3)"))
    yield Bad((X, 1.0), {}, TypeError, (name, "target", "tensor", "float"))
    yield Bad((None, X), {}, TypeError, (name, "input", "tensor", "NoneType"))
    yield Bad((X, X.long()), {}, TypeError, (name, "target", "floating", "torch.int64"))
    yield Bad((X.bool(), X), {}, TypeError, (name, "input", "floating", "torch.bool"))
    yield Bad((X, X.to("meta")), {}, ValueError, (name, "target", "meta"))
    yield Bad((X, X), {"mask": shape}, ValueError, (name, "mask", "(3, 2, 5)", "(2, 5)"))
    yield Bad((X, X), {"weight": torch.ones(2)}, ValueError, (name, "weight", "(2,)", "(2, 5)"))
    yield Bad((X, X), {"weight": X.long()}, TypeError, (name, "weight", "floating", "torch.int64"))
    yield Bad((X, X), {"reduction": "average"}, ValueError, (name, "reduction", "average", "mean"))
    yield Bad((X, X), {"reduction": None}, (ValueError, TypeError), (name, "reduction", "None"))
    yield Bad((X, X), {"empty": "skip"}, ValueError, (name, "empty", "skip", "zero"))
    yield Bad((X, X), {"denominator": torch.ones(2)}, ValueError, (name, "denominator", "(2,)"))
    yield Bad((X, X), {"denominator": "count"}, TypeError, (name, "denominator", "str"))
    yield Bad((X, X), {"denominator": True}, TypeError, (name, "denominator", "denominator must be a number"))
    yield Bad((X, X), {"denominator": X[0, 1] > 0}, TypeError, (name, "denominator", "denominator must be a real"))
    yield must(name, "denominator", (X, X), {"denominator": HUGE}, ValueError)
    yield Bad((X, X), {"denominator": 4.0, "reduction": "sum"}, ValueError, (name, "denominator", "sum"))
    yield Bad((X, X), {"mask": ~KEEP, "empty": "raise"}, ValueError, (name, "empty", "raise"))


def _bad_parameters(name, parameters, refused):
    for key in parameters:
        yield Bad((X, X), {key: NAN}, ValueError, (name, key, "nan"))
        yield Bad((X, X), {key: "1"}, TypeError, (name, key, "str"))
        yield Bad((X, X), {key: None}, TypeError, (name, key, "NoneType"))
        yield must(name, key, (X, X), {key: HUGE}, ValueError)
        for value in refused.get(key, ()):
            yield Bad((X, X), {key: value}, ValueError, (name, key, str(value)))


def _gpu(name, parameters):
    def make(n, dtype, seed):
        mask, function = keep(n, seed), getattr(safeops, name)
        x, y = numbers(n, dtype, seed), numbers(n, dtype, seed + 1)
        return Case(lambda x, y: function(x, y, mask=mask, **parameters), (x, y))

    return make


# ---- the losses


def _knee(d, at):
    """d^2 / 2 below `at`, at (|d| - at / 2) above: each side sees only what is its own, so nothing cancels."""
    a = absolute(d)
    inner = a < at
    quadratic = torch.where(inner, a, 0).square() / 2
    return torch.where(inner, quadratic, at * (torch.where(inner, 0, a) - at / 2))


def _smooth_l1(x, y, beta=1.0):
    return absolute(x - y) if beta == 0 else _knee(x - y, beta) / beta


def _charbonnier(x, y, eps=1e-3):
    d = x - y
    near = torch.where(d.isinf(), 0, d)
    return torch.where(d.isinf(), absolute(d), (near * near + eps * eps).sqrt())


def _log_cosh(x, y):
    d = x - y
    near = d.abs() < 20
    s = torch.where(near, d, 0).sinh()
    return torch.where(near, torch.log1p(s * s) / 2, absolute(d) - math.log(2))


pointwise("mse_loss", lambda x, y: (x - y) * (x - y), F.mse_loss)
pointwise("l1_loss", lambda x, y: absolute(x - y), F.l1_loss)
pointwise("smooth_l1_loss", _smooth_l1, F.smooth_l1_loss, {"beta": 0.75}, refused={"beta": [-1.0, 1e39]})
pointwise("huber_loss", lambda x, y, delta=1.0: _knee(x - y, delta), F.huber_loss, {"delta": 1.25},
          refused={"delta": [0.0, 1e39]})  # fmt: skip
pointwise("charbonnier_loss", _charbonnier, lambda x, y, reduction, eps=1e-3: ((x - y) ** 2 + eps**2).sqrt(),
          {"eps": 0.5}, refused={"eps": [0.0, 1e39]})  # fmt: skip
pointwise("log_cosh_loss", _log_cosh, lambda x, y, reduction: (x - y).cosh().log())
