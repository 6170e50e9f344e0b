"""The losses of rows: made of other ops, but for multi_margin_loss and triplet_margin_loss."""

import functools

import torch
import torch.nn.functional as F

from safeops.core.op import registry
from safeops.testing import Bad, Sample
from safeops.testing.subject import accepts
from tests.ops import gpu
from tests.ops.bad_calls import NAN, BadIndex, must
from tests.ops.operands import HUGE, data, mask, plain, weights
from tests.ops.record import NOT_SAFE, Record
from tests.ops.truth import kept, reduce, weighted

ROWS = {
    "saved_bytes": "made of other ops, which save their own operands",
    "peak_memory": "made of other ops: what one gives another is a tensor",
    "sizes": "a vector has one dim at least: tests/contract/rows/test_row_losses.py has the other sizes",
    "masked_upstream": "no result is an element's: tests/contract/rows/test_row_losses.py has it, of rows",
    "accumulation": "near a margin the digits cancel; the sums are masked_mean's and those of the norms, which have it",
}
NO_GPU = "made of other ops, whose kernels the GPU tests run"
NO_ROUTE = "made of other ops: tests/contract/rows/test_row_losses.py watches which"


def _of_rows(op):
    """The samples' target, mask and weight have the vectors' dim, of size 1, so that all broadcast; the op's do not."""

    def per_row(x):
        return x[..., 0] if isinstance(x, torch.Tensor) and x.dim() > 1 else x

    @functools.wraps(op)
    def call(*operands, mask=None, weight=None, **options):
        operands = [per_row(x) if isinstance(x, torch.Tensor) and x.shape[-1:] == (1,) else x for x in operands]
        return op(*operands, mask=per_row(mask), weight=per_row(weight), **options)

    return call


def _definition(element, by_class=False):
    """element: (*operands, **options) -> the loss of each row, of vectors that are 0 where the row is not kept. Rows
    that meet one another are told by `keep` which those are; `element.counted` says which of them have a loss.
    by_class: `weight` is one of its options, and not of rows.
    """

    def selected(operands, mask, weight, options):
        rows = operands[0].shape[:-1]
        keep = kept(rows, mask, weight).to(operands[0].device).expand(rows)
        if accepts(element, "keep"):
            options["keep"] = keep
        counted = getattr(element, "counted", lambda keep, *operands: keep)(keep, *operands)
        return counted, [torch.where(keep.unsqueeze(-1), x, 0) if x.dim() > len(rows) else x for x in operands]

    def reduced(terms, keep, weight, reduction, denominator, empty):
        terms = weighted(terms, keep, weight)
        if reduction == "none":
            return terms
        return reduce(reduction == "mean", terms, keep, weight, None, False, empty, denominator)

    def loss(*operands, mask=None, weight=None, reduction="mean", denominator=None, empty="zero", **options):
        if by_class:
            weight, options["weight"] = None, weight
        keep, operands = selected(operands, mask, weight, options)
        return reduced(element(*operands, **options), keep, weight, reduction, denominator, empty)

    def parts(*operands, mask=None, weight=None, reduction="mean", denominator=None, empty="zero", **options):
        """(operands, losses of the rows, what is made of them)"""
        if by_class:
            weight, options["weight"] = None, weight
        keep, operands = selected(operands, mask, weight, options)
        with torch.enable_grad():
            terms = element(*operands, **options).detach().requires_grad_()
            return operands, terms, reduced(terms, keep, weight, reduction, denominator, empty)

    loss.__module__, loss.parts, loss.by_class = __name__, parts, by_class
    loss.meet = hasattr(element, "counted")
    return loss


def _terms(definition, sizes):
    """sizes: (*vectors, **options) -> (that of what a row's loss is summed from, those of each vector's slopes)."""

    def terms(sample, outcome):
        split = _of_rows(lambda *operands, **options: (operands, options))
        operands, options = split(*sample.args, **sample.kwargs)
        operands, terms, value = definition.parts(*operands, **options)
        upstream = outcome.upstream[0] if outcome.upstream else torch.ones_like(value)
        (slope,) = torch.autograd.grad(value, terms, upstream)  # of the result, by each row's loss
        parameters = {
            key: options[key] for key in options if key not in SHARED or key == "weight" and definition.by_class
        }
        size, slopes = sizes(*operands, **parameters)
        if definition.meet:  # a row without a loss is in those of others
            slope = slope.abs().amax().expand_as(slope) if len(slope) else slope
        grads = {i: (slope.abs().unsqueeze(-1) * s).expand(operands[i].shape) for i, s in enumerate(slopes)}
        weight = options.get("weight")
        if definition.by_class:
            grads["weight"] = (slope.abs() * size).sum() / weight.abs().min() if weight is not None else None
        elif weight is not None:  # a row's loss, less that of all
            w = torch.where(weight == 0, 1, weight)
            grads["weight"] = ((slope / w).abs() * (size + size.max())).reshape(sample.kwargs["weight"].shape)
        per = slope.abs() / upstream.abs() if value.dim() == 0 else torch.ones_like(slope)
        total = (per * size).nan_to_num(0, 0, 0)
        return (total.sum() if value.dim() == 0 else total.max()), grads

    return terms


SHARED = ("mask", "weight", "reduction", "denominator", "empty")


def _twin(function, by_class=False):
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


def _samples(operands, differentiable, options, by_class):
    """operands: seed -> those of five rows."""

    def sample(name, seed, slow=False, leaves=differentiable, **arguments):
        return Sample(operands(seed), {**arguments, **options}, name=name, differentiable=leaves, masked=differentiable,
                      slow=slow)  # fmt: skip

    weight = weights(5, 1) if by_class is None else by_class
    yield sample("mean", 1, mask=mask(5, 1), slow=True)
    yield sample("none, weighted", 2, mask=mask(5, 1), weight=weight, reduction="none")
    yield sample("mean, weighted", 3, (*differentiable, "weight"), mask=mask(5, 1), weight=weight)
    yield sample("sum, neither mask nor weight", 4, reduction="sum")
    yield sample("denominator", 5, mask=mask(5, 1), denominator=DENOMINATOR)


def bad_calls(name, names, rest, numbers, flags=(), of_rows=True, width=5):
    """names: of the vectors. rest: the further operands of two rows. numbers: {option: numbers out of range}."""
    x = torch.arange(2.0 * width).reshape(2, width)
    keep, count = torch.ones(2, dtype=torch.bool), len(names)
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
    yield Bad(good, {"mask": torch.ones(5, dtype=torch.bool)}, ValueError, (name, "mask", "(5,)", "rows (2,)"))
    yield Bad(good, {"mask": keep.to("meta")}, ValueError, (name, "mask", "meta"))
    if of_rows:
        yield Bad(good, {"weight": torch.ones(5)}, ValueError, (name, "weight", "(5,)", "(2,)"))
    yield Bad(good, {"weight": keep.long()}, TypeError, (name, "weight", "floating", "torch.int64"))
    yield Bad(good, {"reduction": "average"}, ValueError, (name, "reduction", "average", "mean"))
    yield Bad(good, {"reduction": None}, (ValueError, TypeError), (name, "reduction", "None"))
    yield Bad(good, {"empty": "skip"}, ValueError, (name, "empty", "skip", "zero"))
    yield Bad(good, {"denominator": torch.ones(2)}, ValueError, (name, "denominator", "(2,)"))
    yield Bad(good, {"denominator": "count"}, TypeError, (name, "denominator", "str"))
    yield Bad(good, {"denominator": True}, TypeError, (name, "denominator", "denominator must be a number"))
    yield must(name, "denominator", good, {"denominator": HUGE}, ValueError)
    yield from (Bad(good, {"denominator": x}, ValueError, (name, "denominator", str(x))) for x in (-1.0, NAN))
    yield Bad(good, {"denominator": 4.0, "reduction": "sum"}, ValueError, (name, "denominator", "sum"))
    yield Bad(good, {"mask": ~keep, "empty": "raise"}, ValueError, (name, "empty", "raise"))
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
    name, element, sizes, twin, operands, call, options, bad_calls, by_class=None, skip=(), gpu=NO_GPU, **fields
):
    """by_class: a weight for each class, where `weight` is that."""
    vectors = tuple(i for i, x in enumerate(operands(0)) if x.shape[-1] > 1 and x.is_floating_point())
    definition = _definition(element, by_class is not None)
    Record(
        name,
        definition,
        _samples(operands, vectors, options, by_class),
        bad_calls=bad_calls,
        call={**PLAIN, **options, **call},
        gpu=gpu,
        no_route=NO_ROUTE,
        adapt=_of_rows,
        data=vectors,
        torch_equivalent=_of_rows(_twin(twin, by_class is not None)),
        terms=_terms(definition, sizes),
        skip=NOT_SAFE | ROWS | dict(skip),
        family="row_losses",
        **fields,
    )


# ---- cosine_embedding_loss


def _cosine_embedding(x, y, target, margin=0.0):
    norms = x.norm(dim=-1) * y.norm(dim=-1)
    alive = norms != 0
    cos = torch.where(alive, (x * y).sum(-1) / torch.where(alive, norms, 1), 0)
    apart = torch.where(cos - margin <= 0, 0, cos - margin)
    return torch.where(target == 1, 1 - cos, torch.where(target == -1, apart, 0))


def _cosine_sizes(x, y, target, margin=0.0):
    """A cosine is a sum of products of unit vectors; its slope (u2 - cos u1) / |x1|."""

    def slope(x):
        norm = x.norm(dim=-1, keepdim=True)
        return 2 / torch.where(norm == 0, 1, norm)

    return x.new_full(x.shape[:-1], 2.0 + abs(margin)), (slope(x), slope(y))


SIGNS = torch.tensor([1, -1, -1, 1, -1])

# ---- triplet_margin_loss


def _distance(x, y, p, eps):
    d = x - y
    same = (d == 0).all(-1, keepdim=True)
    d = torch.where(same, 1, d + eps).abs()
    if p == float("inf"):
        return torch.where(same[..., 0], 0, d.amax(-1))
    return torch.where(same[..., 0], 0, (d**p).sum(-1) ** (1 / p))


def _triplet(a, b, c, margin=1.0, p=2.0, eps=1e-6, swap=False):
    near, far = _distance(a, b, p, eps), _distance(a, c, p, eps)
    if swap:
        far = torch.minimum(far, _distance(b, c, p, eps))
    d = near - far + margin
    return torch.where(d <= 0, 0, d)


def _triplet_sizes(a, b, c, margin=1.0, p=2.0, eps=1e-6, swap=False):
    """Distances have slopes of at most 1 each: two meet in every vector (with `swap` in the positive one)."""
    size = sum(_distance(x, y, p, eps) for x, y in ((a, b), (a, c), (b, c))) + margin
    return size, (2.0, 2.0, 2.0)


def vectors(count, *rest):
    return lambda seed: (*(data(5, 4, seed=10 * seed + i) for i in range(count)), *rest)


row_loss(
    "cosine_embedding_loss",
    _cosine_embedding,
    _cosine_sizes,
    F.cosine_embedding_loss,
    vectors(2, SIGNS[:, None]),
    {"input1": plain(), "input2": plain(1), "target": SIGNS},
    {"margin": 0.25},
    [
        *bad_calls("cosine_embedding_loss", ("input1", "input2"), (SIGNS[:2],), {"margin": []}),
        Bad((torch.ones(2, 5), torch.ones(2, 5), 1.0), {}, TypeError, ("cosine_embedding_loss", "target", "float")),
        Bad((torch.ones(2, 5), torch.ones(2, 5), torch.ones(3)), {}, ValueError,
            ("cosine_embedding_loss", "target", "(3,)", "rows (2,)")),
        Bad((torch.ones(2, 5), torch.ones(2, 5), torch.ones(2, 5)), {}, ValueError,
            ("cosine_embedding_loss", "target", "(2, 5)", "rows (2,)")),
        Bad((torch.ones(2, 5), torch.ones(2, 5), SIGNS[:2].to("meta")), {}, ValueError,
            ("cosine_embedding_loss", "target", "meta")),
    ],
)  # fmt: skip


def _triplet_case(n, dtype, seed):
    """The kernel alone: rows of about a thousand numbers, or one row."""
    length = next((k for k in (1000, 1024, 8) if n % k == 0), n)
    x, y, z = (gpu.numbers(n, dtype, seed + i) for i in range(3))
    op = registry["triplet_margin_loss"]
    rows = lambda *xs: op.call(*(x.view(-1, length) for x in xs), None, 0.75, 2.0, 1e-6, True)  # noqa: E731
    return gpu.Case(rows, (x, y, z))


row_loss(
    "triplet_margin_loss",
    _triplet,
    _triplet_sizes,
    F.triplet_margin_loss,
    vectors(3),
    {"anchor": plain(), "positive": plain(1), "negative": plain(3)},
    {"margin": 1.5, "p": 2.0, "eps": 1e-6, "swap": True},
    bad_calls(
        "triplet_margin_loss",
        ("anchor", "positive", "negative"),
        (),
        {"margin": [0.0, -1.0, NAN], "p": [0.0, -1.0, NAN], "eps": [-1.0, NAN]},
        ("swap",),
    ),
    gpu=_triplet_case,
)


# ---- multi_margin_loss


def _multi_margin(x, target, p=1, margin=1.0, weight=None):
    is_target = target.long().unsqueeze(-1) == torch.arange(x.shape[-1], device=x.device)
    d = margin - torch.where(is_target, x, 0).sum(-1, keepdim=True) + x
    terms = torch.where(is_target | (d <= 0), 0, d) ** p
    loss = terms.sum(-1) / max(x.shape[-1], 1)
    return loss if weight is None else loss * torch.where(is_target, weight, 0).sum(-1)


def _multi_margin_sizes(x, target, p=1, margin=1.0, weight=None):
    """Differences of scores: each slope is a mean of so many, for the class itself a sum of them."""
    widest = abs(margin) + 2 * x.abs().amax(-1)
    largest = 1.0 if weight is None else weight.abs().max()
    return widest**p * largest, (p * widest.unsqueeze(-1) ** (p - 1) * largest,)


def _margin_case(n, dtype, seed):
    """Rows of about a thousand classes, or one row."""
    classes = next((c for c in (1000, 1024, 8) if n % c == 0), n)
    index = gpu.indices(n // classes, classes, seed)
    numbers, op = gpu.numbers(n, dtype, seed), registry["multi_margin_loss"]
    return gpu.Case(lambda x: op.call(x.view(-1, classes), index, None, None, 0.75, 2)[0], (numbers,))


CLASSES = torch.tensor([1, 0, 3, 2, 1])
CLASS_WEIGHT = weights(4, seed=7)
_scores, _two = torch.arange(10.0).reshape(2, 5), torch.tensor([1, 4])
_bad_class = torch.tensor([1, 5])
row_loss(
    "multi_margin_loss",
    _multi_margin,
    _multi_margin_sizes,
    F.multi_margin_loss,
    vectors(1, CLASSES[:, None]),
    {"input": plain(), "target": CLASSES, "weight": plain(2)[0].clone()},
    {"p": 2, "margin": 0.75},
    [
        *bad_calls("multi_margin_loss", ("input",), (_two,), {"margin": []}, of_rows=False),
        Bad((_scores, 1), {}, TypeError, ("multi_margin_loss", "target", "tensor", "int")),
        Bad((_scores, _two.float()), {}, TypeError, ("multi_margin_loss", "target", "class indices", "torch.float32")),
        Bad((_scores, _two[:1]), {}, ValueError, ("multi_margin_loss", "target", "(1,)", "rows (2,)")),
        Bad((_scores, _two.to("meta")), {}, ValueError, ("multi_margin_loss", "target", "meta")),
        BadIndex((_scores, _bad_class), {}, IndexError, ("multi_margin_loss", "target 5", "5 classes")),
        BadIndex((_scores, -_two), {}, IndexError, ("multi_margin_loss", "target -1", "5 classes")),
        Bad((_scores, _two), {"weight": torch.ones(2)}, ValueError, ("multi_margin_loss", "weight", "(2,)", "(5,)")),
        Bad((_scores, _two), {"p": 3}, ValueError, ("multi_margin_loss", "p", "1 or 2", "3")),
        Bad((_scores, _two), {"p": True}, ValueError, ("multi_margin_loss", "p", "1 or 2", "True")),
    ],
    gpu=_margin_case,
    by_class=CLASS_WEIGHT,
    skip={
        "partial_gradients": "one operand, where there is no weight",
        "weight_zero": "a weight is a class's: tests/contract/rows/test_row_losses.py has it",
    },
)
