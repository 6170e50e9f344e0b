"""reward_ranking_loss and preference_loss: two numbers a row."""

import functools

import torch
import torch.nn.functional as F

from safeops.testing import Bad, Sample, compare
from tests.ops.bad_calls import KEEP, NAN, X, bad_masks, bad_reductions, must
from tests.ops.operands import HUGE, data, mask, plain, plain_mask, weights
from tests.ops.record import NOT_SAFE, Record
from tests.ops.row_loss import DENOMINATOR, NO_GPU
from tests.ops.truth import kept, reduced

NO_ROUTE = "made of other ops: tests/contract/rankings/test_pairs.py watches which"
SKIP = NOT_SAFE | {
    "saved_bytes": "made of other ops, which save their own operands",
    "peak_memory": "made of other ops: what one gives another is a tensor",
    **dict.fromkeys(("accumulation", "repeatable", "threads"), "the sums are masked_mean's, which has it"),
}
TENSORS = {"mask": plain_mask(), "weight": plain(2), "denominator": torch.tensor(5.0)}


def bad_calls(name, names, more=(), numbers=(), margin=True):
    """Yields bad calls. names: of the operands, which have one shape. more: options of every call. numbers: {option:
    refused numbers}."""
    operands, more = (X,) * len(names), dict(more)
    for i, key in enumerate(names):

        def with_one(x, i=i):
            return (*operands[:i], x, *operands[i + 1 :])

        yield Bad(with_one(X.long()), more, TypeError, (name, key, "floating", "torch.int64"))
        yield Bad(with_one(1.0), more, TypeError, (name, key, "tensor", "float"))
        if i:
            yield Bad(with_one(X[:, :3]), more, ValueError, (name, key, names[0], "(2, 3)", "(2, 5)"))
            yield Bad(with_one(X.to("meta")), more, ValueError, (name, key, "meta"))
    for bad in (
        *bad_masks(name, lambda m: (operands, {"mask": m})),
        *bad_reductions(name, operands, ~KEEP),
        Bad(operands, {"weight": torch.ones(2)}, ValueError, (name, "weight", "(2,)", "(2, 5)")),
        Bad(operands, {"weight": X.long()}, TypeError, (name, "weight", "floating", "torch.int64")),
    ):
        yield Bad(bad.args, {**more, **bad.kwargs}, bad.error, bad.words)
    for key, refused in dict(numbers).items():
        yield must(name, key, operands, {**more, key: "1"}, TypeError)
        yield must(name, key, operands, {**more, key: HUGE}, ValueError)
        yield from (must(name, key, operands, {**more, key: value}, ValueError) for value in refused)
    if margin:
        yield must(name, "margin", operands, {**more, "margin": "1"}, TypeError)
        yield must(name, "margin", operands, {**more, "margin": X.long()}, TypeError)
        yield Bad(operands, {**more, "margin": X[:, :3]}, ValueError, (name, "margin", "(2, 3)", "(2, 5)"))
        yield Bad(operands, {**more, "margin": X.to("meta")}, ValueError, (name, "margin", "meta"))


def terms(sample, outcome):
    """Sizes of the terms that cancel: rounding a log-probability or reward changes the slopes in proportion."""
    values, grads = compare.cancellation(sample, outcome)
    operands = [x.detach().abs().nan_to_num(0, 0, 0) for x in sample.args]
    size = 2 + sum(operands)
    square = sample.kwargs.get("objective") == "ipo" or sample.kwargs.get("center")
    for key, grad in outcome.grads.items():
        grad = grad.abs().nan_to_num(0, 0, 0)
        largest = grad.max() if square and grad.numel() else 0
        grads[key] = grads[key] + (size * (grad + largest) if key in (0, 1, 2, 3) else largest)
    largest = size.max() if size.numel() else 0
    value = outcome.values[0].abs().nan_to_num(0, 0, 0)
    return values + largest * (value.max() if value.numel() else 0), {k: torch.as_tensor(g) for k, g in grads.items()}


def sample(name, operands, differentiable=None, **options):
    smooth, slow = options.pop("smooth", True), options.pop("slow", False)
    differentiable = tuple(range(len(operands))) if differentiable is None else differentiable
    masked = tuple(range(len(operands)))
    return Sample(operands, options, name=name, differentiable=differentiable, masked=masked, slow=slow,
                  smooth=smooth)  # fmt: skip


def a_kind(definition):
    """Decorator of a definition: the losses of this folder are one kind, so that slow tests run on the first."""
    definition.__module__ = "tests.ops.rankings"
    return definition


# ---- reward_ranking_loss


@a_kind
def reward_ranking_loss(
    chosen, rejected, *, margin=None, center=0.0, mask=None, weight=None, reduction="mean", denominator=None,
    empty="zero",
):  # fmt: skip
    keep = kept(chosen.shape, mask, weight).to(chosen.device).expand(chosen.shape)
    c, r = (torch.where(keep, x, 0) for x in (chosen, rejected))
    margin = 0 if margin is None else torch.where(keep, torch.as_tensor(margin, device=c.device), 0)
    terms = F.softplus(margin - c + r) + (center * (c + r) ** 2 if center else 0)
    return reduced(terms, keep, weight, reduction, denominator, empty)


def _of_rewards():
    x = 3, 5
    two, keep, weight = tuple(data(*x, seed=i) for i in range(2)), mask(*x), weights(*x)
    yield sample("mean", two, mask=keep, slow=True)
    yield sample("none, weighted", two, mask=keep, weight=weight, reduction="none", center=0.25, slow=True)
    yield sample("weighted", two, (0, 1, "weight"), weight=weight, mask=mask(5), margin=0.5)
    yield sample("margins, sum", two, (0, 1, "margin"), mask=keep, reduction="sum", margin=data(3, 1, seed=7))
    yield sample("denominator", two, mask=keep, denominator=DENOMINATOR, center=0.125)


NAME = "reward_ranking_loss"
Record(
    NAME,
    reward_ranking_loss,
    _of_rewards(),
    bad_calls=[*bad_calls(NAME, ("chosen", "rejected"), (), {"center": [-1.0, NAN]})],
    call={"chosen": plain(), "rejected": plain(1), **TENSORS, "margin": 0.75, "center": 0.25},
    gpu=NO_GPU,
    no_route=NO_ROUTE,
    terms=terms,
    skip=SKIP,
)

# ---- preference_loss


@a_kind
def preference_loss(
    chosen, rejected, reference_chosen=None, reference_rejected=None, *, objective="dpo", beta=0.1,
    label_smoothing=0.0, margin=0.0, reference_point=None, mask=None, weight=None, reduction="mean", denominator=None,
    empty="zero",
):  # fmt: skip
    """Returns the papers' losses and, with "none", the rewards and the accuracy too."""
    shape = (2, *chosen.shape) if objective == "kto" else chosen.shape
    keep = kept(shape, mask, weight).to(chosen.device).expand(shape)
    keeps = keep if objective == "kto" else (keep, keep)
    c, r = (torch.where(k, x, -1) for k, x in zip(keeps, (chosen, rejected)))
    if reference_chosen is not None:
        c, r = (x - torch.where(k, y, -1) for k, x, y in zip(keeps, (c, r), (reference_chosen, reference_rejected)))
    margin = torch.where(keep, margin, 0) if isinstance(margin, torch.Tensor) else margin
    rewards = [torch.where(k, beta * x, 0).detach() for k, x in zip(keeps, (c, r))]
    right = rewards[0] > rewards[1]
    if objective == "kto":
        both = torch.stack((c, r)).detach()
        if reference_point is None:
            reference_point = torch.where(keep, both, 0).sum() / keep.sum().clamp(min=1)
        z0 = reference_point.detach().clamp(min=0)
        terms = torch.stack((1 - torch.sigmoid(beta * (c - z0)), 1 - torch.sigmoid(beta * (z0 - r))))
        right = torch.stack((c > z0, r < z0))
    elif objective == "ipo":
        terms = (c - r - 1 / (2 * beta)) ** 2
    else:
        z, times = beta * (c - r) - margin, 1
        if objective == "orpo":
            c, r = (torch.where(x < 0, x - torch.log(1 - torch.where(x < 0, x, -1).exp()), x) for x in (c, r))
            z, times = c - r - margin, beta
        terms = -times * (1 - label_smoothing) * F.logsigmoid(z)
        if label_smoothing:
            terms = terms - times * label_smoothing * F.logsigmoid(-z)
    loss = reduced(terms, keep, weight, reduction, denominator, empty)
    return loss, *rewards, (right & keep).sum() / keep.sum().clamp(min=1)


def adapted(op):
    """Returns `op` with the loss alone. (The other results are detached: tests/contract/rankings/test_pairs.py.)"""

    @functools.wraps(op)
    def call(*operands, **options):
        return op(*operands, **options)[0]

    return call


def log_probs(count, *shape, seed):
    return tuple(data(*shape, seed=10 * seed + i, low=-3.0, high=-0.5) for i in range(count))


def _of_preferences():
    x = 3, 5
    four, two = (log_probs(count, *x, seed=count) for count in (4, 2))
    keep, weight = mask(*x), weights(*x)
    yield sample("dpo, mean", four, mask=keep, slow=True)
    options = {"beta": 0.5, "label_smoothing": 0.25, "margin": 0.5, "reduction": "none"}
    yield sample("dpo, none, weighted", four, mask=keep, weight=weight, slow=True, **options)
    yield sample("ipo, weighted", four, (0, 1, 2, 3, "weight"), objective="ipo", weight=weight, mask=mask(5), beta=0.5)
    yield sample("kto", four, objective="kto", mask=keep, beta=0.5, smooth=False)  # z0 is a constant
    yield sample(
        "kto, its point, none", four, objective="kto", reference_point=data(low=0.25), weight=weight, reduction="none"
    )
    margin = {"margin": data(5, seed=7), "label_smoothing": 0.125}
    yield sample("orpo, sum", two, (0, 1, "margin"), objective="orpo", mask=keep, reduction="sum", **margin)
    yield sample("simpo, denominator", two, objective="simpo", beta=2.0, margin=0.5, mask=keep, denominator=DENOMINATOR)


NAME = "preference_loss"
_names = "chosen", "rejected", "reference_chosen", "reference_rejected"
_four, _two = (X,) * 4, (X,) * 2
Record(
    NAME,
    preference_loss,
    _of_preferences(),
    bad_calls=[
        *bad_calls(NAME, _names, (), {"beta": [0.0, -1.0, NAN], "label_smoothing": [-0.5, 1.5, NAN]}),
        Bad(_four, {"objective": "dop"}, ValueError, (NAME, "objective", "'dpo'", "'simpo'", "'dop'")),
        Bad(_four, {"objective": None}, ValueError, (NAME, "objective", "None")),
        Bad(_two, {}, ValueError, (NAME, "reference_chosen", "'dpo'", "needs")),
        Bad((*_two, X), {"objective": "ipo"}, ValueError, (NAME, "reference_rejected", "'ipo'", "needs")),
        Bad(_four, {"objective": "cpo"}, ValueError, (NAME, "reference_chosen", "'cpo'", "has no")),
        Bad(_four, {"objective": "ipo", "margin": 1.0}, ValueError, (NAME, "margin", "'ipo'", "dpo")),
        Bad(_four, {"objective": "kto", "margin": X}, ValueError, (NAME, "margin", "'kto'", "dpo")),
        Bad(_four, {"objective": "kto", "label_smoothing": 0.1}, ValueError, (NAME, "label_smoothing", "'kto'")),
        Bad(_four, {"reference_point": X[0, 0]}, ValueError, (NAME, "reference_point", "'dpo'")),
        Bad(_four, {"objective": "kto", "reference_point": X[0]}, ValueError, (NAME, "reference_point", "(5,)")),
        Bad(
            _four, {"objective": "kto", "reference_point": 1.0}, TypeError, (NAME, "reference_point", "tensor", "float")
        ),
        Bad(_four, {"objective": "kto", "mask": torch.ones(3, 2, 5).bool()}, ValueError, (NAME, "mask", "(2, 2, 5)")),
    ],
    call={
        **{key: -plain(i) for i, key in enumerate(_names)},
        **TENSORS,
        **{"objective": "dpo", "beta": 0.5, "label_smoothing": 0.25, "margin": 0.75, "reference_point": None},
    },
    gpu=NO_GPU,
    no_route=NO_ROUTE,
    adapt=adapted,
    terms=terms,
    skip=SKIP,
)
