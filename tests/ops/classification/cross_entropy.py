"""The losses of rows with a class each: cross entropy, negative log likelihood."""

import functools

import torch
import torch.nn.functional as F

import safeops
from safeops.testing import Bad, Sample
from tests.ops import gpu
from tests.ops.bad_calls import NAN, BadIndex, X, must
from tests.ops.operands import HUGE, data, mask, plain, weights
from tests.ops.record import BY_COMPOSITE, DEVICE, NOT_SAFE, ONE_OPERAND, Record
from tests.ops.truth import reduce

# ---- definitions: operands have the classes last, and a class index is a one-hot row


def _last(t):
    """Moves the classes last: (N, C, d1, ...) -> (N, d1, ..., C)."""
    return t.movedim(1, -1) if t.dim() > 1 else t


def _targets(target, classes, mask, weight, ignore_index):
    """Returns (is_target (..., C) bool, keep (...) bool, weights of the rows or None)."""
    keep = (target >= 0) & (target < classes) & (target != ignore_index)
    keep = keep if mask is None else keep & mask
    is_target = (torch.arange(classes, device=target.device) == target.unsqueeze(-1)) & keep.unsqueeze(-1)
    if weight is None:
        return is_target, keep, None
    row_weights = torch.where(is_target, weight, 0).sum(-1)
    keep = keep & (row_weights != 0)
    return is_target & keep.unsqueeze(-1), keep, row_weights


def shaped(x, temperature, softcap):
    capped = x if softcap is None else torch.where(x == -torch.inf, -torch.inf, softcap * (x / softcap).tanh())
    return capped / temperature


def restricted(x, target, keep, support, support_threshold, outside, dim=-1):
    """Returns (logits of -inf outside of a support, rows to compute, the count of kept rows whose class is outside)."""
    if support_threshold is not None:
        support = support >= support_threshold.unsqueeze(dim)
    keep = keep & (target >= 0) & (target < x.shape[dim])
    inside = keep
    if x.shape[dim]:
        inside = support.gather(dim, torch.where(keep, target, 0).long().unsqueeze(dim)).squeeze(dim)
    computed = keep & inside if outside == "mask" else keep
    return torch.where(support, x, -torch.inf), computed, (keep & ~inside).sum()


def cross_entropy(
    input, target, *, weight=None, mask=None, reduction="mean", ignore_index=-100, label_smoothing=0.0, z_loss=0.0,
    row_weight=None, temperature=1.0, softcap=None, denominator=None, empty="zero", support=None,
    support_threshold=None, outside="-inf",
):  # fmt: skip
    if row_weight is not None:
        mask = row_weight != 0 if mask is None else mask & (row_weight != 0)
    if support is not None:
        keep = target != ignore_index if mask is None else mask & (target != ignore_index)
        dim = 1 if input.dim() > 1 else 0
        input, mask, count = restricted(input, target, keep, support, support_threshold, outside, dim)
    x, row_weights = _last(input), None
    classes = x.shape[-1]
    per_class = torch.ones(classes, dtype=x.dtype, device=x.device) if weight is None else weight
    if target.is_floating_point():
        keep = torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)
        keep = keep if mask is None else keep & mask
        target_weight = torch.where(keep.unsqueeze(-1), _last(target), 0) * per_class
    else:
        is_target, keep, row_weights = _targets(target, classes, mask, weight, ignore_index)
        target_weight = torch.where(is_target, per_class, 0)
    x = shaped(torch.where(keep.unsqueeze(-1), x, 0), temperature, softcap)
    if not target.is_floating_point() and label_smoothing == 0 and z_loss == 0:
        # True for rows in which only the target's logit is +inf
        certain = (
            ((x == torch.inf) == is_target).all(-1, keepdim=True)
            & is_target.any(-1, keepdim=True)
            & ~x.isnan().any(-1, True)
        )
        x = torch.where(certain, torch.where(is_target, 1e9, -1e9).to(x.dtype), x)
    minus_log = -x.log_softmax(-1) if classes else x
    exists = x != -torch.inf
    loss = (target_weight * torch.where(exists | (target_weight != 0), minus_log, 0)).sum(-1)
    if label_smoothing:
        even = (per_class * torch.where(exists, minus_log, 0)).sum(-1) / exists.sum(-1).clamp(min=1)
        loss = (1 - label_smoothing) * loss + label_smoothing * even
    z_losses = torch.where(keep, z_loss * x.logsumexp(-1) ** 2, 0) if z_loss and classes else torch.zeros_like(loss)
    loss, only_rows = torch.where(keep, loss, 0), None
    if row_weight is not None:
        loss, z_losses = (t * torch.where(keep, row_weight, 0) for t in (loss, z_losses))
        only_rows = row_weight.expand(loss.shape)
        row_weights = only_rows * (1 if row_weights is None else row_weights)

    def reduced(loss, row_weights):
        return reduce(reduction == "mean", loss, keep, row_weights, None, False, empty, denominator)

    if reduction == "none":
        result = loss + z_losses
    else:
        result = reduced(loss, row_weights) + (reduced(z_losses, only_rows) if z_loss else 0)
    return result if support is None else (result, count)


def nll_loss(
    input, target, *, weight=None, mask=None, reduction="mean", ignore_index=-100, denominator=None, empty="zero"
):
    x = _last(input)
    is_target, keep, row_weights = _targets(target, x.shape[-1], mask, weight, ignore_index)
    loss = -torch.where(is_target, x, 0).sum(-1)
    loss = loss if weight is None else torch.where(keep, loss * row_weights, 0)
    if reduction == "none":
        return loss
    return reduce(reduction == "mean", loss, keep, row_weights, None, False, empty, denominator)


# ---- the op as the contract's checks call it: all operands broadcast to one shape


def adapted(op):
    """Returns `op` for operands that broadcast: class indices and mask have a dim of size 1 for the classes, and class
    weights may have further dims of size 1.

    dim: the classes' dim, read only by the checks. classes: the number of classes in the samples. If a check removes
    classes from the input, rows whose target is missing get ignore_index.
    """

    @functools.wraps(op)
    def call(input, target, *args, dim=1, classes=0, **kwargs):
        def squeezed(t):
            fits = isinstance(t, torch.Tensor) and isinstance(input, torch.Tensor) and t.dim() == input.dim() > 1
            return t.squeeze(1) if fits and t.shape[1] == 1 else t

        weight = kwargs.get("weight")
        if isinstance(weight, torch.Tensor) and weight.dim() > 1:
            kwargs["weight"] = weight.flatten()
        for key in ("mask", "row_weight", "support_threshold"):
            if isinstance(kwargs.get(key), torch.Tensor):
                kwargs[key] = squeezed(kwargs[key])
        if isinstance(target, torch.Tensor) and not target.is_floating_point():
            target = squeezed(target)
            if classes and input.shape[1] < classes:
                target = torch.where(target < input.shape[1], target, kwargs.get("ignore_index", -100))
        return op(input, target, *args, **kwargs)

    return call


def indices(*shape, classes, seed=0):
    g = torch.Generator().manual_seed(300 + seed)
    return torch.randint(0, classes, shape, generator=g)


def probabilities(*shape, seed=0):
    return data(*shape, seed=seed).softmax(1)


def _twin(function):
    """Returns torch's `function` with `mask`, `denominator` and `z_loss` added."""

    def call(input, target, *, mask=None, reduction="mean", denominator=None, empty="zero", z_loss=0.0, **options):
        of_probabilities = target.is_floating_point()
        weight = options.get("weight")
        if weight is not None:
            options["weight"] = weight.to(input.dtype)
        loss = function(input, target, reduction="none", **options)
        if z_loss:
            loss = loss + z_loss * input.logsumexp(1) ** 2
        keep = torch.ones_like(loss, dtype=torch.bool) if mask is None else mask
        if not of_probabilities:
            keep = keep & (target != options.get("ignore_index", -100))
        loss = torch.where(keep, loss, 0)
        if reduction != "mean":
            return loss if reduction == "none" else loss.sum()
        if denominator is None:
            counted = of_probabilities or weight is None
            denominator = keep.sum() if counted else torch.where(keep, weight[target.clamp(min=0)], 0).sum()
        return loss.sum() / denominator

    return adapted(call)


# ---- tolerances: the magnitudes ("sizes") of the terms that cancel in a row's loss and gradient


def row_terms(sample, outcome):
    """Sizes of the terms. The loss -log p is logsumexp - x, both rounded; d/dx has the terms w p and w; d/dq has those
    of the loss."""
    x, kwargs = sample.args[0].detach(), sample.kwargs
    temperature = kwargs.get("temperature", 1)
    finite = shaped(x.nan_to_num(0, 0, 0), temperature, kwargs.get("softcap"))
    kwargs, rows = sample.kwargs, max(1, x.numel() // max(1, x.shape[1]))
    log = finite.logsumexp(1, keepdim=True) if x.shape[1] else finite.sum(1, keepdim=True)
    size = 1 + float((log - finite).abs().max()) if x.numel() else 1.0
    if outcome.values[0].dim() == 0 and sample.args[1].is_floating_point():
        size *= max(1.0, float(sample.args[1].detach().nan_to_num(0, 0, 0).abs().max())) if x.numel() else 1.0
    largest = float(kwargs["weight"].detach().nan_to_num(0, 0, 0).abs().max()) if _some(kwargs.get("weight")) else 1.0
    z = kwargs.get("z_loss", 0.0)
    squares = z * float(log.square().max()) if x.numel() else 0.0
    value = size * max(1.0, largest) + squares
    divisor = 1.0
    if kwargs.get("reduction", "mean") == "mean":
        kept = 1.0 if kwargs.get("mask") is None else max(1.0, float(kwargs["mask"].sum()))
        divisor = float(kwargs["denominator"]) if kwargs.get("denominator") is not None else kept / 4
    if outcome.values[0].dim() == 0:
        value = value * rows / max(divisor, 1e-3)
    if not outcome.grads:
        return value, {}
    g = float(outcome.upstream[0].double().nan_to_num(0, 0, 0).abs().max()) if outcome.upstream[0].numel() else 0.0
    g = g / divisor if outcome.values[0].dim() == 0 else g
    of_x = g / temperature * max(1.0, largest) * (2 + 2 * z * float(log.abs().max() if x.numel() else 0))
    sizes = {0: of_x, 1: g * max(1.0, largest) * size, "weight": g * rows * size, "row_weight": g * rows * size}
    return value, {key: torch.full_like(t.detach(), sizes[key]) for key, t in sample.leaves().items()}


def _some(t):
    return t is not None and t.numel() > 0


# ---- samples


def sample(x, target, options=None, **rest):
    options = {"dim": 1, "classes": x.shape[1], **(options or {})}
    differentiable = (0, 1) if target.is_floating_point() else (0,)
    return Sample((x, target), options, **{"differentiable": differentiable, "weight": None, **rest})


# A tensor, as the raw op takes it; fp32 holds the number exactly.
DENOMINATOR = torch.tensor(4.5, dtype=torch.float64)


def samples_of_indices():
    t, m = indices(4, 1, classes=5), mask(4, 1)
    yield sample(data(4, 5), t, {"mask": m}, name="mean", slow=True)
    options = {"mask": m, "weight": weights(5), "reduction": "none", "ignore_index": int(t[1])}
    yield sample(data(4, 5, seed=1), t, options, name="none, weighted, one class ignored", slow=True)
    four = data(2, 5, 3, 4, seed=2), indices(2, 1, 3, 4, classes=5, seed=1)
    yield sample(*four, {"mask": mask(2, 1, 3, 4), "weight": weights(5, 1, 1)}, name="images, weighted mean")
    yield sample(*four, {"reduction": "sum"}, name="images, sum")
    yield sample(data(3, 40), indices(3, 1, classes=40, seed=2), {"mask": mask(1, 1)}, name="long rows, mask broadcast")
    yield sample(data(4, 5), t, {"mask": m, "denominator": DENOMINATOR}, name="denominator")


def _of_logits():
    """Yields samples with options that cross_entropy has and nll_loss lacks."""
    t, m = indices(4, 1, classes=5), mask(4, 1)
    x = data(4, 5, seed=3)
    smooth = {"mask": m, "label_smoothing": 0.25}
    yield sample(x, t, smooth, name="smoothing")
    options = {**smooth, "weight": weights(20), "reduction": "none"}
    yield sample(data(4, 20, seed=3), indices(4, 1, classes=20), options, name="smoothing, weighted")
    yield sample(x, t, {"mask": m, "z_loss": 0.125, "reduction": "none"}, name="z-loss")
    yield sample(x, t, {"mask": m, "z_loss": 0.125, "weight": weights(5) / 64}, name="z-loss, weighted")
    long = data(3, 40, seed=4), indices(3, 1, classes=40, seed=3)
    options = {"weight": weights(40), "label_smoothing": 0.25, "z_loss": 0.125, "reduction": "none"}
    yield sample(*long, {**options, "mask": mask(3, 1)}, name="long rows, all options")
    q = probabilities(4, 5, seed=5)
    yield sample(x, q, {"mask": m}, name="probabilities", slow=True)
    options = {"weight": weights(5), "label_smoothing": 0.25, "reduction": "none"}
    yield sample(x, q, {**options, "mask": m}, name="probabilities, weighted, smoothing")
    four = data(2, 5, 3, 4, seed=6), probabilities(2, 5, 3, 4, seed=7)
    yield sample(*four, {"reduction": "sum", "z_loss": 0.125}, name="probabilities of images")
    yield sample(data(3, 40), probabilities(3, 40, seed=8), {"weight": weights(40)}, name="probabilities of long rows")


def _of_shaped_logits():
    t, m = indices(4, 1, classes=5), mask(4, 1)
    options = {"mask": m, "temperature": 0.5, "softcap": 2.0}
    yield sample(data(4, 5, seed=8), t, options, name="temperature and softcap")
    options |= {"label_smoothing": 0.25, "z_loss": 0.125, "weight": weights(20), "reduction": "none"}
    yield sample(data(4, 20, seed=9), indices(4, 1, classes=20), options, name="softcap, all options")
    four = data(2, 5, 3, 4, seed=9), probabilities(2, 5, 3, 4, seed=9)
    yield sample(*four, {"reduction": "sum", "temperature": 1.5}, name="temperature of images, probabilities")


def supports(rows, classes, dim, seed=0):
    """Yields {option: value} of a support: bool, and the sampler's logits with the least that it kept. Each row has its
    first class at least."""
    shape = (*rows[:dim], classes, *rows[dim:])
    sampler = data(*shape, seed=30 + seed)
    least = sampler.median(dim, keepdim=True).values
    yield {"support": sampler >= torch.minimum(least, sampler.narrow(dim, 0, 1))}
    yield {"support": sampler, "support_threshold": torch.minimum(least, sampler.narrow(dim, 0, 1))}


SUPPORT = dict.fromkeys(("saved_bytes", "peak_memory"), "it copies the logits: test_cross_entropy_support.py") | {
    "direct": "torch.ops takes a list there: test_cross_entropy_support.py and its siblings call it",
    "layouts": "an expanded threshold leaves rows without a class, which are refused",
    "nothing_kept": "the count of targets outside is 0, not NaN: test_cross_entropy_support.py",
}


def _of_supports():
    (form, other), t, m = supports((4,), 20, 1), indices(4, 1, classes=20), mask(4, 1)
    x = data(4, 20, seed=12)
    yield sample(x, t, {"mask": m, "outside": "mask", **form}, name="support")
    options = {"mask": m, "label_smoothing": 0.25, "z_loss": 0.125, "reduction": "sum", "outside": "mask"}
    yield sample(x, t, {**options, **other}, name="threshold, smoothing and z-loss")


def samples_of_row_weights():
    x, t, m = data(4, 5, seed=5), indices(4, 1, classes=5), mask(4, 1)
    w = weights(4).reshape(4, 1)
    for name, options in {"row weight": {}, "both weights, none": {"weight": weights(5), "reduction": "none"}}.items():
        options = {"mask": m, "row_weight": w, **options}
        yield sample(x, t, options, differentiable=(0, "row_weight"), name=name)


def _by_weight():
    x, t, m = data(4, 5, seed=5), indices(4, 1, classes=5), mask(4, 1)
    for name, options in {"weight": {}, "weight, none": {"reduction": "none"}}.items():
        options = {"mask": m, "weight": weights(5), **options}
        yield sample(x, t, options, differentiable=(0, "weight"), name=name)


# ---- bad calls

T = torch.tensor([0, 4])


def bad_calls(name):
    rows = torch.ones(2, dtype=torch.bool)

    def call(*args, **kwargs):
        return args, kwargs

    yield Bad(*call([1.0], T), TypeError, (name, "input", "tensor", "list"))
    yield Bad(*call(X.long(), T), TypeError, (name, "input", "floating", "torch.int64"))
    yield Bad(*call(X[0, 0], T[0]), ValueError, (name, "input", "classes", "()"))
    yield Bad(*call(X, 3), TypeError, (name, "target", "tensor", "int"))
    yield Bad(*call(X, T.float()), TypeError, (name, "target", "int64", "torch.float32"))
    for dtype in (torch.bool, torch.int16):
        yield Bad(*call(X, T.to(dtype)), TypeError, (name, "target", "int64", str(dtype)))
    yield Bad(*call(X, T.repeat(2)), ValueError, (name, "target", "(4,)", "(2, 5)", "(2,)"))
    yield Bad(*call(X, T[0]), ValueError, (name, "target", "()", "(2, 5)", "(2,)"))
    yield Bad(*call(X[None], T[None]), ValueError, (name, "target", "(1, 2)", "(1, 2, 5)", "(1, 5)"))
    yield Bad(*call(X, T.to("meta")), ValueError, (name, "target", "meta"))
    for wrong in (5, -1, -101):
        yield BadIndex(*call(X, torch.tensor([0, wrong])), IndexError, (name, f"target {wrong}", "5 classes", "-100"))
    yield BadIndex(*call(X, torch.tensor([0, -100]), ignore_index=3), IndexError, (name, "target -100", "(3)"))
    yield BadIndex(*call(X[:, :0], T), IndexError, (name, "target 0", "0 classes", "(2, 0)"))
    yield Bad(*call(X, T, mask=rows.float()), TypeError, (name, "mask", "bool", "torch.float32"))
    yield Bad(*call(X, T, mask=[True]), TypeError, (name, "mask", "tensor", "list"))
    yield Bad(*call(X, T, mask=torch.ones(2, 5, dtype=torch.bool)), ValueError, (name, "mask", "(2, 5)", "(2,)"))
    yield Bad(*call(X, T, mask=rows.to("meta")), ValueError, (name, "mask", "meta"))
    yield Bad(*call(X, T, weight=torch.ones(2)), ValueError, (name, "weight", "(2,)", "5 classes", "(2, 5)"))
    yield Bad(*call(X, T, weight=torch.ones(5).long()), TypeError, (name, "weight", "floating", "torch.int64"))
    yield Bad(*call(X, T, weight=2.0), TypeError, (name, "weight", "tensor", "float"))
    yield Bad(*call(X, T, weight=torch.ones(5, device="meta")), ValueError, (name, "weight", "meta"))
    yield Bad(*call(X, T, reduction="average"), ValueError, (name, "reduction", "average", "mean"))
    yield Bad(*call(X, T, reduction=None), (ValueError, TypeError), (name, "reduction", "None"))
    yield Bad(*call(X, T, empty="skip"), ValueError, (name, "empty", "skip", "zero"))
    yield Bad(*call(X, T, ignore_index=1.0), TypeError, (name, "ignore_index", "float"))
    yield Bad(*call(X, T, ignore_index=True), TypeError, (name, "ignore_index", "bool"))
    yield Bad(*call(X, T, ignore_index=None), TypeError, (name, "ignore_index", "NoneType"))
    yield Bad(*call(X, T, denominator=torch.ones(2)), ValueError, (name, "denominator", "(2,)"))
    yield Bad(*call(X, T, denominator="count"), TypeError, (name, "denominator", "str"))
    yield must(name, "denominator", (X, T), {"denominator": HUGE}, ValueError)
    yield Bad(*call(X, T, denominator=4.0, reduction="sum"), ValueError, (name, "denominator", "sum"))
    yield Bad(*call(X, T, mask=~rows, empty="raise"), ValueError, (name, "empty", "raise"))


def _bad_numbers(name):
    q = X.softmax(1)
    yield Bad((X, q[:, :3]), {}, ValueError, (name, "target", "(2, 3)", "probabilities", "(2, 5)"))
    yield Bad((X, q), {"ignore_index": 2}, ValueError, (name, "ignore_index", "2", "torch.float32"))
    for key, wrong in {"label_smoothing": (-0.1, 1.5, NAN), "z_loss": (-1.0, NAN, float("inf"))}.items():
        for value in wrong:
            yield Bad((X, T), {key: value}, ValueError, (name, key, str(value)))
        yield Bad((X, T), {key: "1"}, TypeError, (name, key, "str"))
        yield Bad((X, T), {key: True}, TypeError, (name, key, "bool"))
        yield Bad((X, T), {key: None}, TypeError, (name, key, "NoneType"))
        yield must(name, key, (X, T), {key: HUGE}, ValueError)


# ---- records


SKIP = NOT_SAFE | {
    "weight_zero": "a class weight of 0 drops rows, not elements: tests/contract/classification/test_classification.py",
    "masked_upstream": "a mask drops rows: tests/contract/classification/test_classification.py",
}
CALL = {
    "input": plain(),
    "target": torch.tensor([0, 5, 2, -100, 3]),
    "weight": plain(2)[0],
    "mask": torch.tensor([True, True, False, True, True]),
    "ignore_index": -100,
    "denominator": torch.tensor(5.0),
}


def _direct(name, **options):
    """Returns (raw op, args, kwargs) for opcheck, which needs an op: the samples call an adapted Python function."""
    x = data(4, 5).float().to(DEVICE).requires_grad_()
    return getattr(torch.ops.safeops, name).default, (x, indices(4, classes=5).to(DEVICE)), options


def _gpu_case(name, options, n, dtype, seed):
    """Returns a GPU call on n logits: rows of about a thousand classes, or one row that several blocks share."""
    classes = next((c for c in (1000, 1024, 8) if n % c == 0), n)
    target, keep = gpu.indices(n // classes, classes, seed), gpu.keep(n // classes, seed)
    keep[0] = True
    function = getattr(safeops, name)

    def call(x):
        return function(x.view(-1, classes), target, mask=keep, reduction="none", **options)

    return gpu.Case(call, (gpu.numbers(n, dtype, seed),))


def record(definition, twin, samples, bad_calls, call, skip, variants=None, terms=row_terms, **fields):
    name = definition.__name__
    numbers = {key: value for key, value in call.items() if type(value) is float}
    Record(
        name,
        definition,
        samples,
        bad_calls=bad_calls,
        call=call,
        # The kernel alone: other ops compute the mean and the product with a row weight.
        kernel_call={"reduction": "none"} | dict.fromkeys(call.keys() & {"denominator", "row_weight"}),
        variants={
            "gradient of the weight": (_by_weight(), {"skip": SKIP | BY_COMPOSITE, "row_terms": terms}),
            **(variants or {}),
        },
        torch_equivalent=_twin(twin),
        skip=SKIP | skip,
        adapt=adapted,
        row_terms=terms,
        raw_ops=[_direct(name), _direct(name, reduction="none", **numbers)],
        **{"gpu": functools.partial(_gpu_case, name, numbers), **fields},
    )


record(
    cross_entropy,
    F.cross_entropy,
    [*samples_of_indices(), *_of_logits()],
    [*bad_calls("cross_entropy"), *_bad_numbers("cross_entropy")],
    {
        **CALL,
        "label_smoothing": 0.125,
        "z_loss": 0.0625,
        "row_weight": torch.tensor([0.5, 1.0, 0.0, 1.0, 2.0]),
        "temperature": 0.75,
        "softcap": 8.0,
        "support": None,
        "support_threshold": None,
        "outside": "-inf",
    },
    {},
    {
        "of shaped logits": (_of_shaped_logits(), {"skip": SKIP | ONE_OPERAND, "row_terms": row_terms}),
        "row weights": (samples_of_row_weights(), {"skip": SKIP, "row_terms": row_terms}),
        "support": (_of_supports(), {"skip": SKIP | ONE_OPERAND | SUPPORT, "row_terms": row_terms}),
    },
)
record(
    nll_loss,
    F.nll_loss,
    samples_of_indices(),
    bad_calls("nll_loss"),
    CALL,
    ONE_OPERAND,
)
