"""Records of the losses of rows: one mask, weight and loss per row."""

import functools

import torch

from safeops.testing import Bad, Sample
from safeops.testing.subject import accepts
from tests.ops.bad_calls import bad_reductions, must
from tests.ops.operands import HUGE, data, mask, plain, weights
from tests.ops.record import NOT_SAFE, Record
from tests.ops.truth import kept, reduced

ROWS = {
    "saved_bytes": "made of other ops, which save their own operands",
    "peak_memory": "made of other ops: what one gives another is a tensor",
    "sizes": "a vector has one dim at least: tests/contract/vectors/test_row_losses.py has the other sizes",
    "masked_upstream": "no result is an element's: tests/contract/vectors/test_row_losses.py has it, of rows",
    "accumulation": "near a margin the digits cancel; the sums are masked_mean's and those of the norms, which have it",
}
NO_GPU = "made of other ops, whose kernels the GPU tests run"
NO_ROUTE = "made of other ops: tests/contract/vectors/test_row_losses.py watches which"


def per_row_operands(op, by_element=False):
    """Returns `op` for samples, in which target, mask and weight have a last dim of size 1 so that all operands
    broadcast: the op gets them without that dim. by_element: the mask keeps it.
    """

    def per_row(x):
        return x[..., 0] if isinstance(x, torch.Tensor) and x.dim() > 1 else x

    @functools.wraps(op)
    def call(*operands, mask=None, weight=None, **options):
        operands = [per_row(x) if isinstance(x, torch.Tensor) and x.shape[-1:] == (1,) else x for x in operands]
        return op(*operands, mask=mask if by_element else per_row(mask), weight=per_row(weight), **options)

    return call


def definition_of(element, by_class=False, by_element=False):
    """Returns a definition. element: (*operands, **options) -> the loss of each row; it gets vectors of 0 in rows that
    are not kept. If a row's loss depends on other rows, element takes `keep`, and `element.counted` returns which rows
    have a loss. by_class: `weight` is per class, an option of element. by_element: `mask`, and so `keep`, is per
    element.
    """

    def selected(operands, mask, weight, options):
        rows = operands[0].shape[:-1]
        if by_element:
            weight = None if weight is None else weight.unsqueeze(-1)
            options["keep"] = each = kept(operands[0].shape, mask, weight).to(operands[0].device)
            return each.any(-1), [torch.where(each, x, 0) for x in operands]
        keep = kept(rows, mask, weight).to(operands[0].device).expand(rows)
        if accepts(element, "keep"):
            options["keep"] = keep
        counted = getattr(element, "counted", lambda keep, *operands: keep)(keep, *operands)
        return counted, [torch.where(keep.unsqueeze(-1), x, 0) if x.dim() > len(rows) else x for x in operands]

    def loss(*operands, mask=None, weight=None, reduction="mean", denominator=None, empty="zero", **options):
        if by_class:
            weight, options["weight"] = None, weight
        keep, operands = selected(operands, mask, weight, options)
        return reduced(element(*operands, **options), keep, weight, reduction, denominator, empty)

    def parts(*operands, mask=None, weight=None, reduction="mean", denominator=None, empty="zero", **options):
        """Returns (operands, losses of the rows as an autograd leaf, the result computed from that leaf)."""
        if by_class:
            weight, options["weight"] = None, weight
        keep, operands = selected(operands, mask, weight, options)
        with torch.enable_grad():
            terms = element(*operands, **options).detach().requires_grad_()
            return operands, terms, reduced(terms, keep, weight, reduction, denominator, empty)

    loss.__module__, loss.parts, loss.by_class, loss.by_element = __name__, parts, by_class, by_element
    loss.meet = hasattr(element, "counted")
    return loss


def terms_of(definition, sizes):
    """Returns a record's `terms` function. sizes: (*vectors, **options) -> (size of a row loss's terms, [size of its
    slopes to each vector])."""

    def terms(sample, outcome):
        split = per_row_operands(lambda *operands, **options: (operands, options), definition.by_element)
        operands, options = split(*sample.args, **sample.kwargs)
        operands, terms, value = definition.parts(*operands, **options)
        upstream = outcome.upstream[0] if outcome.upstream else torch.ones_like(value)
        (slope,) = torch.autograd.grad(value, terms, upstream)  # d result / d row losses
        parameters = {
            key: options[key] for key in options if key not in SHARED or key == "weight" and definition.by_class
        }
        size, slopes = sizes(*operands, **parameters)
        if definition.meet:  # a row without a loss is part of other rows' losses
            slope = slope.abs().amax().expand_as(slope) if len(slope) else slope
        grads = {i: (slope.abs().unsqueeze(-1) * s).expand(operands[i].shape) for i, s in enumerate(slopes)}
        weight = options.get("weight")
        if definition.by_class:
            grads["weight"] = (slope.abs() * size).sum() / weight.abs().min() if weight is not None else None
        elif weight is not None:  # slope to a weight: a row's loss less the mean of all
            w = torch.where(weight == 0, 1, weight)
            grads["weight"] = ((slope / w).abs() * (size + size.max())).reshape(sample.kwargs["weight"].shape)
        per = slope.abs() / upstream.abs() if value.dim() == 0 else torch.ones_like(slope)
        total = (per * size).nan_to_num(0, 0, 0)
        return (total.sum() if value.dim() == 0 else total.max()), grads

    return terms


SHARED = ("mask", "weight", "reduction", "denominator", "empty")


def twin_of(function, by_class=False):
    def loss(*operands, mask=None, weight=None, reduction="mean", denominator=None, empty="zero", **options):
        if by_class:
            weight, options["weight"] = None, weight
        terms = function(*operands, reduction="none", **options)
        keep = torch.ones_like(terms, dtype=torch.bool) if mask is None else mask.expand_as(terms)
        w = torch.ones_like(terms) if weight is None else weight.expand_as(terms)
        terms = torch.where(keep, terms, 0) * w
        if reduction == "none":
            return terms
        divisor = torch.where(keep, w, 0).sum() if denominator is None else denominator
        return terms.sum() / divisor if reduction == "mean" else terms.sum()

    return loss


DENOMINATOR = torch.tensor(4.5, dtype=torch.float64)


def samples_of(operands, differentiable, options, by_class):
    """Yields samples. operands: seed -> the operands, with five rows."""

    def sample(name, seed, slow=False, leaves=differentiable, **arguments):
        return Sample(operands(seed), {**arguments, **options}, name=name, differentiable=leaves, masked=differentiable,
                      slow=slow)  # fmt: skip

    weight = weights(5, 1) if by_class is None else by_class
    yield sample("mean", 1, mask=mask(5, 1), slow=True)
    yield sample("none, weighted", 2, mask=mask(5, 1), weight=weight, reduction="none")
    yield sample("mean, weighted", 3, (*differentiable, "weight"), mask=mask(5, 1), weight=weight)
    yield sample("sum, neither mask nor weight", 4, reduction="sum")
    yield sample("denominator", 5, mask=mask(5, 1), denominator=DENOMINATOR)


def bad_calls(name, names, rest, numbers, flags=(), of_rows=True, width=5, by_element=False):
    """Yields bad calls. names: of the vectors. rest: the further operands, with two rows. numbers: {option: refused
    numbers}."""
    x = torch.arange(2.0 * width).reshape(2, width)
    keep, count = torch.ones((2, 1) if by_element else 2, dtype=torch.bool), len(names)
    mask_of = f"{names[0]} (2, {width})" if by_element else "rows (2,)"
    good = (*[x] * count, *rest)

    def with_one(i, y):
        return (*good[:i], y, *good[i + 1 :])

    for i, key in enumerate(names):
        yield Bad(with_one(i, None), {}, TypeError, (name, key, "tensor", "NoneType"))
        yield Bad(with_one(i, x.long()), {}, TypeError, (name, key, "floating", "torch.int64"))
        if i:
            yield Bad(with_one(i, x[:, :3]), {}, ValueError, (name, key, names[0], "(2, 3)", str(tuple(x.shape))))
            yield Bad(with_one(i, x[0]), {}, ValueError, (name, key, names[0], f"({width},)", str(tuple(x.shape))))
            yield Bad(with_one(i, x.to("meta")), {}, ValueError, (name, key, "meta"))
    yield Bad((*[x[0, 0]] * count, *rest), {}, ValueError, (name, names[0], "last dim", "()"))
    yield Bad(good, {"mask": torch.ones(2)}, TypeError, (name, "mask", "bool", "torch.float32"))
    yield Bad(good, {"mask": [True]}, TypeError, (name, "mask", "tensor", "list"))
    yield Bad(good, {"mask": torch.ones(5, dtype=torch.bool)}, ValueError, (name, "mask", "(5,)", mask_of))
    yield Bad(good, {"mask": keep.to("meta")}, ValueError, (name, "mask", "meta"))
    if of_rows:
        yield Bad(good, {"weight": torch.ones(5)}, ValueError, (name, "weight", "(5,)", "(2,)"))
    yield Bad(good, {"weight": torch.ones(2).long()}, TypeError, (name, "weight", "floating", "torch.int64"))
    yield from bad_reductions(name, good, ~keep)
    for key, refused in numbers.items():
        yield Bad(good, {key: "1"}, TypeError, (name, key, "str"))
        yield Bad(good, {key: None}, TypeError, (name, key, "NoneType"))
        yield must(name, key, good, {key: HUGE}, ValueError)
        for value in refused:
            yield Bad(good, {key: value}, ValueError, (name, key, str(value)))
    for key in flags:
        yield Bad(good, {key: 1}, TypeError, (name, key, "True or False", "1"))


PLAIN = {"mask": torch.arange(5) != 2, "weight": plain(2)[:, 0].clone(), "denominator": torch.tensor(5.0)}


def row_loss(
    name, element, sizes, twin, operands, call, options, bad_calls, by_class=None, by_element=False, skip=(),
    gpu=NO_GPU, **fields,
):  # fmt: skip
    """Makes the record of a row loss. by_class: the samples' weight if `weight` is per class, else None. by_element:
    `mask` is per element."""
    vectors = tuple(i for i, x in enumerate(operands(0)) if x.shape[-1] > 1 and x.is_floating_point())
    definition = definition_of(element, by_class is not None, by_element)
    Record(
        name,
        definition,
        samples_of(operands, vectors, options, by_class),
        bad_calls=bad_calls,
        call={**PLAIN, **options, **call},
        gpu=gpu,
        no_route=NO_ROUTE,
        adapt=functools.partial(per_row_operands, by_element=by_element),
        data=vectors,
        torch_equivalent=per_row_operands(twin_of(twin, by_class is not None)),
        terms=terms_of(definition, sizes),
        skip=NOT_SAFE | ROWS | dict(skip),
        **fields,
    )


def vectors(count, *rest):
    return lambda seed: (*(data(5, 4, seed=10 * seed + i) for i in range(count)), *rest)
