"""The pointwise losses: `pointwise` makes a record from an element's loss and torch's function."""

import torch

import safeops
from safeops.core.op import registry
from safeops.testing import Bad, Sample, compare
from safeops.testing.subject import attach
from tests.ops.bad_calls import KEEP, X, bad_masks, bad_parameters, must
from tests.ops.gpu import Case, keep, numbers
from tests.ops.operands import HUGE, data, mask, plain, plain_mask, weights
from tests.ops.record import BY_COMPOSITE, NOT_SAFE, Record
from tests.ops.truth import kept, reduce, weighted


def pointwise(name, element, twin, *, sizes=None, **fields):
    """Makes the record of a pointwise loss. The library's record of the op gives domain, parameters and ranges.

    element     (x, y, **parameters) -> the loss of each element, in plain differentiable torch.
    twin        torch's function, as users call it: (x, y, reduction="none", **parameters).
    sizes       where terms may cancel: (x, y, **parameters) -> the size of the loss's terms, then that of each
                derivative's.
    """
    op = registry[name]
    domain, parameters = op.domain, op.sample
    tensors = {"mask": plain_mask(), "weight": plain(2), "denominator": torch.tensor(5.0)}
    operands = {key: to(plain(i)) for i, (key, to) in enumerate(zip(op.names, domain))}
    if op.optional:
        operands[op.names[-1]] = operands[op.names[-1]][0]
    make, definition = _maker(op, domain, parameters), _definition(op, element)
    differentiable = tuple(range(op.count - op.optional))
    fields.setdefault("skip", NOT_SAFE)
    counted = {"weight_zero": "as torch's, the mean counts it: tests/contract/losses"} if op.by_count else {}
    fields["skip"] = fields["skip"] | counted
    if sizes is not None:
        fields["terms"] = _terms(op, definition, sizes)
    every = differentiable if not op.optional else (*differentiable, op.names[-1])
    shared = {key: fields[key] for key in ("terms", "several_terms") if key in fields}
    by_weight = _weighted(make), {"data": every, "skip": NOT_SAFE | BY_COMPOSITE | counted, **shared}
    return Record(
        name,
        definition,
        _samples(make),
        bad_calls=[
            *_bad_calls(op, domain),
            *bad_parameters(op, tuple(to(X / 8) for to in domain[: op.count - op.optional])),
        ],
        call={**operands, **tensors, **parameters},
        gpu=_gpu(op, domain, parameters),
        variants={"gradient of the weight": by_weight},
        data=every,
        torch_equivalent=_twin(op, twin),
        domain=domain,
        sizes=sizes,
        **fields,
    )


def _tensors(op, operands, parameters):
    """Returns all tensors of the loss, with the optional tensor, a keyword, as the last (or None)."""
    return (*operands, parameters.pop(op.names[-1], None)) if op.optional else operands


def _definition(op, element):
    def loss(*operands, mask=None, weight=None, reduction="mean", denominator=None, empty="zero", **parameters):
        tensors = _tensors(op, operands, parameters)
        if op.name == "gaussian_nll_loss" and tensors[2].dim() and tensors[2].shape == tensors[0].shape[:-1]:
            tensors = (*tensors[:2], tensors[2].unsqueeze(-1))  # one variance per row
        broadcast = torch.broadcast_tensors(*(x for x in tensors if x is not None))
        keep = kept(broadcast[0].shape, mask, weight).to(broadcast[0].device)
        broadcast = iter([torch.where(keep, x, 0) for x in broadcast])
        terms = element(*(x if x is None else next(broadcast) for x in tensors), **parameters)
        terms = weighted(terms, keep, weight)
        if reduction == "none":
            return terms
        if op.by_count and reduction == "mean" and denominator is None:
            keep, weight = kept(terms.shape, mask, None).to(terms.device), None
        return reduce(reduction == "mean", terms, keep, weight, None, False, empty, denominator)

    loss.__module__ = __name__
    return loss


def _terms(op, definition, sizes):
    """Returns a record's `terms` function: the definition's reduction, applied to the sizes of each element's terms in
    place of its loss, gives the sizes for the value and the gradients."""

    def terms(sample, outcome):
        def of_values(*tensors, **parameters):
            return sizes(*tensors, **parameters)[0].detach().abs()

        def of_slopes(*tensors, **parameters):
            _, *slopes = sizes(*(x if x is None else x.detach() for x in tensors), **parameters)
            return sum(slope.detach().abs() * x for slope, x in zip(slopes, tensors) if x is not None)

        weight = sample.kwargs.get("weight")
        sample = sample if weight is None else sample.replace({"weight": weight.abs()})
        values, grads = compare.cancellation(sample, outcome)
        size = _definition(op, of_values)(*sample.args, **sample.kwargs).detach()
        if outcome.grads:
            live, leaves = attach(sample, list(outcome.grads))
            loss = _definition(op, of_slopes)(*live.args, **live.kwargs)
            upstream = [u.abs() for u in outcome.upstream]
            result = torch.autograd.grad(loss, list(leaves.values()), upstream, allow_unused=True)
            grads = {key: grads[key] + (0 if g is None else g.abs()) for key, g in zip(leaves, result)}
            grads = {key: torch.as_tensor(g) for key, g in grads.items()}
        return values + size, grads

    return terms


def _twin(op, function):
    def loss(*operands, mask=None, weight=None, reduction="mean", denominator=None, empty="zero", **parameters):
        terms = function(*torch.broadcast_tensors(*operands), reduction="none", **parameters)
        keep = torch.ones_like(terms, dtype=torch.bool) if mask is None else mask.expand_as(terms)
        terms = torch.where(keep, terms, 0)
        w = torch.ones_like(terms) if weight is None else weight.expand_as(terms)
        terms = terms * w
        if reduction == "none":
            return terms
        total = terms.sum()
        if reduction == "sum":
            return total
        weights = keep if op.by_count else torch.where(keep, w, 0)
        return total / (weights.sum() if denominator is None else denominator)

    return loss


# A tensor, as the raw op takes it; fp32 holds the number exactly.
DENOMINATOR = torch.tensor(4.5, dtype=torch.float64)


def _maker(op, domain, parameters):
    """Returns a function make(shapes, options, seed) -> Sample. The last shape is repeated for all further operands."""

    def make(shapes, options, seed, differentiable=True, **rest):
        shapes = [*shapes, *[shapes[-1]] * (op.count - len(shapes))]
        tensors = [to(data(*shape, seed=seed + i)) for i, (shape, to) in enumerate(zip(shapes, domain))]
        keys = list(range(op.count))
        if op.optional:
            keys[-1] = op.names[-1]
            options = {**options, keys[-1]: tensors.pop()}
        rest |= {"differentiable": tuple(keys)} if differentiable else {}
        return Sample(tuple(tensors), {**options, **parameters}, **rest)

    return make


def _samples(make):
    x, four = (3, 5), (2, 3, 4, 5)
    full = {"mask": mask(3, 5), "weight": weights(3, 5)}
    yield make([x], {"mask": mask(3, 5)}, 1, name="mean", slow=True)
    yield make([x], {**full, "reduction": "none"}, 1, name="none, weighted", slow=True)
    broadcast = {"mask": mask(3, 1), "weight": weights(5)}
    yield make([x], {**broadcast, "reduction": "sum"}, 1, name="sum, mask and weight broadcast")
    weighted = {"mask": mask(2, 1, 4, 5), "weight": weights(2, 3, 4, 5)}
    yield make([four], weighted, 3, name="mean of four dims, weighted")
    yield make([four], {"mask": mask(5), "reduction": "none"}, 3, name="none of four dims")
    yield make([x, (3, 1)], {"mask": mask(3, 5)}, 1, name="target broadcast")
    yield make([(5,), x], {"mask": mask(3, 5), "reduction": "none"}, 1, name="input broadcast")
    yield make([x], {"mask": mask(3, 5), "denominator": DENOMINATOR}, 1, name="denominator")
    yield make([x], {}, 1, name="neither mask nor weight")


def _weighted(make):
    for name, options in {
        "weight": {"weight": weights(3, 5)},
        "weight broadcast, none": {"weight": weights(5), "reduction": "none"},
        "denominator with a gradient": {"denominator": DENOMINATOR},
    }.items():
        yield make([(3, 5)], {"mask": mask(3, 5), **options}, 5, differentiable=False, name=name)


def _bad_calls(op, domain):
    name, (first, second, *_) = op.name, op.names
    x, y, *z = (to(X / 8) for to in domain[: op.count - op.optional])
    z, shape = tuple(z), torch.ones(3, 2, 5, dtype=torch.bool)
    yield from bad_masks(name, lambda m: ((x, y, *z), {"mask": m}))
    yield Bad((x, y[:, :3], *z), {}, ValueError, (name, first, second, "(2, 5)", "(2, 3)"))
    yield Bad((x, 1.0, *z), {}, TypeError, (name, second, "tensor", "float"))
    yield Bad((None, y, *z), {}, TypeError, (name, first, "tensor", "NoneType"))
    yield Bad((x, X.long(), *z), {}, TypeError, (name, second, "floating", "torch.int64"))
    yield Bad((X.bool(), y, *z), {}, TypeError, (name, first, "floating", "torch.bool"))
    yield Bad((x, y.to("meta"), *z), {}, ValueError, (name, second, "meta"))
    if op.count > 2:
        third = op.names[2]

        def bad(value, *rest):
            return Bad(*(((x, y), {third: value}) if op.optional else ((x, y, value), {})), *rest)

        yield bad(X.long(), TypeError, (name, third, "floating", "torch.int64"))
        yield bad("1", TypeError, (name, third, "tensor", "str"))
        yield bad(X[:, :3], ValueError, (name, first, third, "(2, 5)", "(2, 3)"))
        yield bad(X.to("meta"), ValueError, (name, third, "meta"))
    yield Bad((x, y, *z), {"mask": shape}, ValueError, (name, "mask", "(3, 2, 5)", "(2, 5)"))
    yield Bad((x, y, *z), {"weight": torch.ones(2)}, ValueError, (name, "weight", "(2,)", "(2, 5)"))
    yield Bad((x, y, *z), {"weight": X.long()}, TypeError, (name, "weight", "floating", "torch.int64"))
    yield Bad((x, y, *z), {"reduction": "average"}, ValueError, (name, "reduction", "average", "mean"))
    yield Bad((x, y, *z), {"reduction": None}, (ValueError, TypeError), (name, "reduction", "None"))
    yield Bad((x, y, *z), {"empty": "skip"}, ValueError, (name, "empty", "skip", "zero"))
    yield Bad((x, y, *z), {"denominator": torch.ones(2)}, ValueError, (name, "denominator", "(2,)"))
    yield from (
        Bad((x, y, *z), {"denominator": n}, ValueError, (name, "denominator", str(n))) for n in (-1, float("nan"))
    )
    yield Bad((x, y, *z), {"denominator": "count"}, TypeError, (name, "denominator", "str"))
    yield Bad((x, y, *z), {"denominator": True}, TypeError, (name, "denominator", "denominator must be a number"))
    yield Bad((x, y, *z), {"denominator": KEEP[0, 0]}, TypeError, (name, "denominator", "denominator must be a real"))
    yield must(name, "denominator", (x, y, *z), {"denominator": HUGE}, ValueError)
    for reduction in op.reductions:
        if reduction != "mean":
            wrong = {"denominator": 4.0, "reduction": reduction}
            yield Bad((x, y, *z), wrong, ValueError, (name, "denominator", reduction))
    yield Bad((x, y, *z), {"mask": ~KEEP, "empty": "raise"}, ValueError, (name, "empty", "raise"))


def _gpu(op, domain, parameters):
    def make(n, dtype, seed):
        mask, function = keep(n, seed), getattr(safeops, op.name)
        tensors = tuple(to(numbers(n, dtype, seed + i)) for i, to in enumerate(domain))
        options = (op.names[-1],) if op.optional else ()

        def call(*tensors):
            last = dict(zip(options, tensors[2:]))
            return function(*tensors[: op.count - len(last)], mask=mask, **last, **parameters)

        return Case(call, tensors)

    return make
