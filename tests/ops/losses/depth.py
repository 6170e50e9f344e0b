"""silog_loss: a statistic of the differences g = log(input) - log(target)."""

import torch

from safeops.testing import Bad, Sample
from tests.ops.bad_calls import KEEP, NAN, bad_masks, must
from tests.ops.operands import HUGE, data, mask, plain, plain_mask, weights
from tests.ops.record import NOT_SAFE, Record
from tests.ops.truth import kept

HERE = "tests/contract/losses/test_silog.py"
SKIP = NOT_SAFE | {
    "saved_bytes": "made of other ops, which save their own operands",
    "peak_memory": "made of other ops: what one gives another is a tensor",
    "sizes": f"images of no dims have no pixels: {HERE} has the other sizes",
    "masked_upstream": "no result is an element's",
    "kept_nonfinite": f"an infinite target is no measurement: {HERE} has what is none, and a NaN of the input",
    "accumulation": "of pixels that are all alike the variance is 0; the sums are masked_var's, which has it",
}


def _silog(input, target, *, mask=None, weight=None, reduction="mean", denominator=None, empty="zero",
           variance_focus=0.85, batch=True, eps=0.0):  # fmt: skip
    keep = kept(input.shape, mask, weight).to(input.device) & (target > 0) & target.isfinite()
    g = (torch.where(keep, input, 1) + eps).log() - (torch.where(keep, target, 1) + eps).log()
    w = torch.where(keep, torch.ones((), dtype=g.dtype) if weight is None else weight, 0).expand(g.shape)
    dims = list(range(0 if batch else 1, g.dim()))
    total = w.sum(dims, keepdim=True)
    by = torch.where(total > 0, total, 1)
    mean = (w * g).sum(dims, keepdim=True) / by
    square = ((w * (g - mean) ** 2).sum(dims, keepdim=True) / by + (1 - variance_focus) * mean**2).flatten()
    square = square[0] if batch else square
    exists = keep.any() if batch else keep.flatten(1).any(1)
    value = torch.where(square > 0, torch.where(square > 0, square, 1).sqrt(), square)
    value = torch.where(exists, value, NAN if empty == "nan" else 0.0)
    if reduction == "none":
        return value
    if reduction == "sum" or not exists.any():
        return value.sum() if reduction == "sum" else value.sum() * 0 + (NAN if empty == "nan" else 0.0)
    return torch.where(exists, value, 0).sum() / (exists.sum() if denominator is None else denominator)


def _terms(sample, outcome):
    """Sizes of the terms that cancel: the logarithms, their distances from the mean, the slopes of both terms."""
    x, y = (t.detach().double() for t in sample.args)
    options = {**sample.kwargs, "reduction": "none", "denominator": None}
    weight, batch = options.get("weight"), options.get("batch", True)
    keep = kept(x.shape, options.get("mask"), weight).to(x.device)
    w = torch.where(keep, 1.0 if weight is None else weight.detach().double(), 0)
    value = _silog(x, y, **options).detach().double()
    value, total = (value, w.sum()) if batch else (value.reshape(-1, 1, 1), w.sum((1, 2), keepdim=True))
    x, y = x + options.get("eps", 0.0), y + options.get("eps", 0.0)
    size = 1 + torch.where(keep, x, 1).log().abs() + torch.where(keep, y, 1).log().abs()
    upstream = outcome.upstream[0].abs().max() if outcome.upstream and x.numel() else 1.0
    by = upstream * size / (total * value).clamp(min=1e-30)
    sizes = {0: w * by / x.clamp(min=1e-30), 1: w * by / y.clamp(min=1e-30)}
    if weight is not None:
        sizes["weight"] = (by * size).sum_to_size(weight.shape)
    largest = size.max() if size.numel() else 0.0
    return largest * (x.shape[0] if x.dim() else 1), {key: torch.where(g.isfinite(), g, 0) for key, g in sizes.items()}


def _depths(*shape, seed):
    return data(*shape, seed=seed, low=0.5, high=9.0)


def _samples():
    def sample(shape, name, differentiable=(0, 1), slow=False, **options):
        operands = _depths(*shape, seed=1), _depths(*shape, seed=2)
        return Sample(operands, options, name=name, differentiable=differentiable, slow=slow)

    x = 3, 4, 5
    yield sample(x, "mean", mask=mask(*x), slow=True)
    yield sample(x, "neither mask nor weight, all of the variance", variance_focus=1.0)
    yield sample(x, "weighted", (0, 1, "weight"), mask=mask(3, 1, 5), weight=weights(*x), variance_focus=0.5)
    yield sample(x, "of images", mask=mask(*x), batch=False)
    yield sample(x, "of images, weighted, none", (0, 1, "weight"), weight=weights(4, 5), batch=False, reduction="none")
    yield sample(x, "sum", batch=False, reduction="sum", variance_focus=0.0)
    yield sample(x, "eps", mask=mask(*x), eps=0.25)
    yield sample(x, "denominator", batch=False, denominator=torch.tensor(4.5, dtype=torch.float64))


def _bad_calls():
    name, x = "silog_loss", torch.full((2, 5), 2.0)
    yield from bad_masks(name, lambda m: ((x, x), {"mask": m}))
    yield Bad((x, x[:, :3]), {}, ValueError, (name, "target", "(2, 3)", "(2, 5)"))
    yield Bad((x, x[None]), {}, ValueError, (name, "target", "(1, 2, 5)", "(2, 5)"))
    yield Bad((x[0], x[0]), {"batch": False}, ValueError, (name, "input", "(N, d1, ...)", "(5,)"))
    yield Bad((x, 1.0), {}, TypeError, (name, "target", "tensor", "float"))
    yield Bad((None, x), {}, TypeError, (name, "input", "tensor", "NoneType"))
    yield Bad((x, x.long()), {}, TypeError, (name, "target", "floating", "torch.int64"))
    yield Bad((x.long(), x), {}, TypeError, (name, "input", "floating", "torch.int64"))
    yield Bad((x, x.to("meta")), {}, ValueError, (name, "target", "meta"))
    yield Bad((x, x), {"weight": torch.ones(2)}, ValueError, (name, "weight", "(2,)", "(2, 5)"))
    yield Bad((x, x), {"weight": x.long()}, TypeError, (name, "weight", "floating", "torch.int64"))
    yield Bad((x, x), {"reduction": "average"}, ValueError, (name, "reduction", "average", "mean"))
    yield Bad((x, x), {"empty": "skip"}, ValueError, (name, "empty", "skip", "zero"))
    yield Bad((x, x), {"denominator": torch.ones(2)}, ValueError, (name, "denominator", "(2,)"))
    yield Bad((x, x), {"denominator": "count"}, TypeError, (name, "denominator", "str"))
    yield must(name, "denominator", (x, x), {"denominator": HUGE}, ValueError)
    yield Bad((x, x), {"denominator": 4.0, "reduction": "sum"}, ValueError, (name, "denominator", "sum"))
    for value in (-0.5, 1.5, NAN):
        yield Bad((x, x), {"variance_focus": value}, ValueError, (name, "variance_focus", str(value)))
    yield Bad((x, x), {"variance_focus": "1"}, TypeError, (name, "variance_focus", "str"))
    for value in (-1.0, NAN):
        yield Bad((x, x), {"eps": value}, ValueError, (name, "eps", str(value)))
    yield Bad((x, x), {"eps": None}, TypeError, (name, "eps", "NoneType"))
    yield must(name, "eps", (x, x), {"eps": HUGE}, ValueError)
    yield Bad((x, x), {"batch": 1}, TypeError, (name, "batch", "True or False", "1"))
    yield Bad((x, x), {"mask": ~KEEP, "empty": "raise"}, ValueError, (name, "empty", "raise"))


def _usual(input, target, *, mask=None, weight=None, reduction="mean", variance_focus=0.85, batch=True, **options):
    """Computes the loss as the depth network BTS does."""
    if weight is not None or not batch or options:
        raise TypeError("it has no such argument")
    keep = target > 0 if mask is None else mask.expand(input.shape) & (target > 0)
    g = input[keep].log() - target[keep].log()
    return ((g**2).mean() - variance_focus * g.mean() ** 2).sqrt()


Record(
    "silog_loss",
    _silog,
    _samples(),
    bad_calls=_bad_calls(),
    call={
        "input": plain().abs() + 1,
        "target": plain(1).abs() + 1,
        "mask": plain_mask(),
        "weight": plain(2).abs() + 0.5,
        "denominator": torch.tensor(5.0),
        "variance_focus": 0.5,
        "eps": 0.25,
        "batch": False,
    },
    gpu="made of other ops, whose kernels the GPU tests run",
    no_route=f"made of other ops: {HERE} watches which",
    data=(0, 1),
    torch_equivalent=_usual,
    terms=_terms,
    several_terms=True,
    skip=SKIP,
)
