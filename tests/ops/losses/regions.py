"""The region losses: a formula of sums over each region, and the record that all of them share."""

import torch

from safeops.core.op import registry
from safeops.testing import Bad, Sample
from tests.ops.bad_calls import NAN, BadIndex, must
from tests.ops.gpu import Case, indices, keep, numbers
from tests.ops.operands import HUGE, data, mask, plain, plain_mask, weights
from tests.ops.record import NOT_SAFE, Record

HERE = "tests/contract/losses/test_regions.py"
NO_ROUTE = f"what is made of its kernel's sums are a few aten operations more: {HERE} watches it"
BY_CLASS = {
    "weight_zero": f"a weight is a class's, not an element's: {HERE} has it",
    "sizes": f"operands of no dims have no classes: {HERE} has the other sizes",
    "accumulation": f"the loss of what is nearly equal is 1 - 1, without digits: {HERE} has it",
    "saved_bytes": f"what the N x C regions come to is saved: {HERE} counts",
    "peak_memory": f"the same sums are made: {HERE} counts, where pixels are many",
    "masked_upstream": "no result is an element's: what is masked out has no upstream gradient of its own",
}


def _definition(formula, of_images=False):
    """Returns a definition. formula: (sums of p t, of p, of t, **options) -> the loss of each region. With `of_images`,
    formula also gets exists (bool: the region has pixels) and weight, and returns the loss of each image."""

    def loss(input, target, **options):
        return regions(input, input, target, target, **options)

    def regions(
        input, own_input, target, own_target, *, mask=None, weight=None, reduction="mean", denominator=None,
        empty="zero", squared_pred=False, ignore_index=None, batch=False, **options,
    ):  # fmt: skip
        """Computes the loss. own_input, own_target: input and target again, for the sums of p and of t: `_terms` passes
        separate leaves, whose gradients tell the slopes through each sum."""
        keep = torch.ones(input.shape, dtype=torch.bool, device=input.device)
        if target.dim() < input.dim():
            if ignore_index is not None:
                keep = keep & (target != ignore_index).unsqueeze(1)
            # Class indices become one-hot: class c is channel c of dim 1.
            target = own_target = (target.unsqueeze(-1) == torch.arange(input.shape[1]).to(target)).movedim(-1, 1)
        if mask is not None:
            keep = keep & (mask.unsqueeze(1) if mask.dim() == input.dim() - 1 else mask)
        if weight is not None:
            keep = keep & (weight != 0).reshape(-1, *[1] * (input.dim() - 2))
        p, own_p = (torch.where(keep, x, 0) for x in (input, own_input))
        t, own_t = (torch.where(keep, x, 0).to(input.dtype) for x in (target, own_target))
        power = 2 if squared_pred else 1
        dims = [0] * batch + [*range(2, input.dim())]

        def total(x):
            return x.sum(dims) if dims else x

        exists = total(keep.to(torch.int64)) > 0
        sums = total(p * t), total(own_p**power), total(own_t**power)
        if of_images:
            value = formula(*sums, exists=exists, weight=weight, **options)
            exists, weight = exists.any(-1), None
        else:
            value = formula(*sums, **options)
        w = torch.where(exists, torch.ones((), dtype=p.dtype) if weight is None else weight, 0)
        value = torch.where(exists, torch.where(exists, value, 0) * w, 0)
        nothing = NAN if empty == "nan" else 0.0
        if reduction == "none":
            return torch.where(exists, value, nothing)
        divisor = 1
        if reduction == "mean":
            divisor = w.sum() if denominator is None else denominator
        any_exists = exists.any()
        return torch.where(any_exists, value.sum() / torch.where(any_exists, divisor, 1), nothing)

    loss.__module__, loss.regions = __name__, regions
    return loss


def _terms(definition):
    """Sizes of the terms that cancel: those of 1 - quotient, and an element's two slopes (through the sum of p t, and
    through the sum of p or t)."""

    def terms(sample, outcome):
        x, y = sample.args
        leaves = [x.clone(), x.clone(), y.clone(), y.clone()]
        live = [z.requires_grad_() for z in leaves if z.is_floating_point()]
        value = definition.regions(*leaves, **sample.kwargs)
        upstream = outcome.upstream[0] if outcome.upstream else torch.ones_like(value)
        slopes = dict(enumerate(torch.autograd.grad(value, live, upstream, allow_unused=True)))
        w, n = sample.kwargs.get("weight"), value.numel()
        largest = 1.0 if w is None else w.double().nan_to_num(0, 0, 0).abs().max()
        count = x.shape[0] * x.shape[1] if sample.kwargs.get("reduction") == "sum" else 1
        sizes = {i: slopes[2 * i].abs() + slopes[2 * i + 1].abs() for i in range(len(live) // 2)}
        if w is not None:  # the gradient to a weight is a class's losses less the mean
            sizes["weight"] = 4 * upstream.abs().max() * (x.shape[0] if n > 1 else 1) / (largest if n == 1 else 1)
        return 2.0 * count * largest, sizes

    return terms


def _dice(both, input, target, smooth_nr=1e-5, smooth_dr=1e-5):
    return 1 - (2 * both + smooth_nr) / (input + target + smooth_dr)


def _tversky(both, input, target, smooth_nr=1e-5, smooth_dr=1e-5, alpha=0.5, beta=0.5, gamma=1.0):
    return (1 - (both + smooth_nr) / (both + alpha * (input - both) + beta * (target - both) + smooth_dr)) ** gamma


def _generalized(both, input, target, smooth_nr=1e-5, smooth_dr=1e-5, exists=None, weight=None):
    """Returns the generalized dice loss. A class has weight 1 / (sum of t)^2, or the largest weight if the sum is 0."""
    exists = torch.ones_like(both, dtype=torch.bool) if exists is None else exists
    w = torch.where(exists & (target != 0), torch.where(target != 0, target, 1) ** -2, 0)
    w = torch.where(exists & (target == 0), w.amax(-1, keepdim=True), w)
    w = w if weight is None else w * torch.where(exists, weight, 0)
    return 1 - (2 * (w * both).sum(-1) + smooth_nr) / ((w * (input + target)).sum(-1) + smooth_dr)


def _monai(formula):
    """Returns a region loss with MONAI's arithmetic, in the dtype of its operands."""

    def loss(input, target, *, mask=None, weight=None, reduction="mean", denominator=None, empty="zero",
             squared_pred=False, ignore_index=None, batch=False, **options):  # fmt: skip
        if ignore_index is not None or weight is not None:
            raise TypeError("it has no such argument")
        if target.dim() < input.dim():
            zeros = torch.zeros_like(input)
            target = zeros.scatter_(1, target.unsqueeze(1), 1)
        if mask is not None:
            mask = mask.unsqueeze(1) if mask.dim() < input.dim() else mask
            input, target = input * mask, target * mask
        dims = [0] * batch + [*range(2, input.dim())]
        both = torch.sum(target * input, dim=dims)
        ground, prediction = (torch.sum(x * x if squared_pred else x, dim=dims) for x in (target, input))
        value = formula(both, prediction, ground, **options)
        if reduction == "none":
            return value
        divisor = value.numel() if denominator is None else denominator
        return value.sum() / divisor if reduction == "mean" else value.sum()

    return loss


def _probabilities(*shape, seed):
    return data(*shape, seed=seed, low=0.05, high=0.95)


def _indices(*shape, classes, seed=0):
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(seed))


def powers(parameters):
    """Returns the names of the parameters that select other kernels; most samples leave these out."""
    return ["gamma"] if "alpha" in parameters else []


def _samples(parameters):
    def sample(x, y, name, differentiable=(0, 1), slow=False, **options):
        return Sample((x, y), {**options, **parameters}, name=name, differentiable=differentiable, slow=slow)

    x, y = _probabilities(2, 3, 4, 5, seed=1), _probabilities(2, 3, 4, 5, seed=2)
    pixels = mask(2, 1, 4, 5)
    index = _indices(2, 4, 5, classes=3, seed=3)
    ignored = torch.where(mask(2, 4, 5, seed=1, keep=0.8), index, 255)
    only = {"differentiable": (0,)}
    yield sample(x, y, "mean", mask=pixels, slow=True)
    yield sample(
        x, y, "none, squared, a mask for each class", mask=mask(2, 3, 4, 5), squared_pred=True, reduction="none"
    )
    yield sample(x, y, "sum, no mask", reduction="sum")
    yield sample(x, y, "no smoothing", mask=pixels, smooth_nr=0.0, smooth_dr=0.0)
    yield sample(x, y, "all images together", mask=pixels, batch=True, squared_pred=True)
    yield sample(x[0], y[0], "one pixel dim", mask=mask(3, 1, 5), denominator=torch.tensor(4.5, dtype=torch.float64))
    yield sample(x, y, "weighted", (0, 1, "weight"), weight=weights(3), mask=pixels)
    yield sample(x, y, "weighted, none", (0, 1, "weight"), weight=weights(3), reduction="none", squared_pred=True)
    yield sample(x, index, "class indices", slow=True, **only)
    yield sample(x, index.to(torch.uint8), "class indices in bytes, squared", squared_pred=True, **only)
    yield sample(x, ignored, "ignored, and masked", ignore_index=255, mask=mask(2, 4, 5, seed=2), **only)
    yield sample(x, ignored, "ignored, weighted, all images", ignore_index=255, weight=weights(3), batch=True, **only)
    yield sample(x, y > 0.5, "several classes a pixel", mask=pixels, **only)
    for power in powers(parameters):
        yield sample(x, y, "focal", mask=pixels, **{power: 0.75})


def _bad_calls(name, parameters):
    x = torch.full((2, 3, 4), 0.5)
    index, keep, one = torch.zeros(2, 4, dtype=torch.int64), torch.ones(2, 3, 4, dtype=torch.bool), torch.ones(3)
    yield Bad((None, x), {}, TypeError, (name, "input", "tensor", "NoneType"))
    yield Bad((x, 1.0), {}, TypeError, (name, "target", "tensor", "float"))
    yield Bad((x.long(), x), {}, TypeError, (name, "input", "floating", "torch.int64"))
    yield Bad((one, one), {}, ValueError, (name, "input", "(N, C, d1, ...)", "(3,)"))
    yield Bad((x, x.to(torch.complex64)), {}, TypeError, (name, "target", "real", "complex64"))
    yield Bad((x, index.float()), {}, TypeError, (name, "target", "class indices", "torch.float32", "(2, 4)"))
    yield Bad((x, index.bool()), {}, TypeError, (name, "target", "class indices", "torch.bool"))
    yield Bad((x[:, :1], index), {}, ValueError, (name, "(2, 4)", "(2, 1, 4)", "target.unsqueeze(1)"))
    yield Bad((x, x[:, :2]), {}, ValueError, (name, "target", "(2, 2, 4)", "(2, 3, 4)"))
    yield Bad((x, x[:, :1]), {}, ValueError, (name, "target", "(2, 1, 4)", "(2, 3, 4)"))
    yield Bad((x, index[:, :2]), {}, ValueError, (name, "target", "(2, 2)", "(2, 4)", "(2, 3, 4)"))
    yield Bad((x, index[0]), {}, ValueError, (name, "target", "(4,)", "(2, 4)", "(2, 3, 4)"))
    yield Bad((x, x.to("meta")), {}, ValueError, (name, "target", "meta"))
    for value in (3, -1, 2**40):
        bad = index.clone()
        bad[1, 2] = value
        yield BadIndex((x, bad), {}, IndexError, (name, "target", f"index {value}", "3 classes", "(2, 3, 4)"))
        yield BadIndex((x, bad), {"ignore_index": 7, "mask": keep}, IndexError, (name, "target", f"index {value}"))
    yield Bad((x, x), {"mask": torch.ones(2, 3, 4)}, TypeError, (name, "mask", "bool", "torch.float32"))
    yield Bad((x, x), {"mask": [True]}, TypeError, (name, "mask", "tensor", "list"))
    yield Bad((x, x), {"mask": keep[:, :2]}, ValueError, (name, "mask", "(2, 2, 4)", "(2, 3, 4)", "broadcast"))
    yield Bad((x, index), {"mask": keep[:, 0, :3]}, ValueError, (name, "mask", "(2, 3)", "(2, 4)", "broadcast"))
    yield Bad((x, index), {"mask": keep[None]}, ValueError, (name, "mask", "(1, 2, 3, 4)", "(2, 3, 4)"))
    yield Bad((x, x), {"mask": keep.to("meta")}, ValueError, (name, "mask", "meta"))
    yield Bad((x, x), {"weight": torch.ones(4)}, ValueError, (name, "weight", "(4,)", "(3,)"))
    yield Bad((x, x), {"weight": torch.ones(2, 3)}, ValueError, (name, "weight", "(2, 3)", "(3,)"))
    yield Bad((x, x), {"weight": one.long()}, TypeError, (name, "weight", "floating", "torch.int64"))
    yield Bad((x, x), {"weight": [1.0, 1.0, 1.0]}, TypeError, (name, "weight", "tensor", "list"))
    yield Bad((x, x), {"weight": one.to("meta")}, ValueError, (name, "weight", "meta"))
    yield Bad((x, x), {"reduction": "average"}, ValueError, (name, "reduction", "average", "mean"))
    yield Bad((x, x), {"reduction": None}, (ValueError, TypeError), (name, "reduction", "None"))
    yield Bad((x, x), {"empty": "skip"}, ValueError, (name, "empty", "skip", "zero"))
    yield Bad((x, x), {"denominator": torch.ones(2)}, ValueError, (name, "denominator", "(2,)"))
    yield Bad((x, x), {"denominator": "count"}, TypeError, (name, "denominator", "str"))
    yield Bad((x, x), {"denominator": True}, TypeError, (name, "denominator", "denominator must be a number"))
    yield must(name, "denominator", (x, x), {"denominator": HUGE}, ValueError)
    yield Bad((x, x), {"denominator": 4.0, "reduction": "sum"}, ValueError, (name, "denominator", "sum"))
    yield Bad((x, x), {"squared_pred": 1}, TypeError, (name, "squared_pred", "True or False", "1"))
    yield Bad((x, x), {"batch": None}, TypeError, (name, "batch", "True or False", "None"))
    yield Bad((x, x), {"ignore_index": 1}, ValueError, (name, "ignore_index", "class indices", "(2, 4)", "(2, 3, 4)"))
    yield Bad((x, index), {"ignore_index": 1.0}, TypeError, (name, "ignore_index", "int", "float"))
    yield Bad((x, index), {"ignore_index": True}, TypeError, (name, "ignore_index", "int", "bool"))
    yield Bad((x, index), {"ignore_index": 2**31}, ValueError, (name, "ignore_index", "32 bits", str(2**31)))
    for key in ("smooth_nr", "smooth_dr", *parameters, *powers(parameters)):
        yield Bad((x, x), {key: NAN}, ValueError, (name, key, "nan"))
        yield Bad((x, x), {key: -1.0}, ValueError, (name, key, "-1.0"))
        yield Bad((x, x), {key: "1"}, TypeError, (name, key, "str"))
        yield Bad((x, x), {key: None}, TypeError, (name, key, "NoneType"))
        yield must(name, key, (x, x), {key: HUGE}, ValueError)
    yield Bad((x, x), {"mask": ~keep, "empty": "raise"}, ValueError, (name, "empty", "raise"))


def _gpu(name):
    """Returns a maker of GPU calls of the sums' kernel: the loss's other ops are torch's, on one number a region."""

    def make(n, dtype, seed):
        classes, pixels = 4, n // 8
        shape = (2, classes, pixels)
        x = numbers(2 * classes * pixels, dtype, seed).sigmoid().reshape(shape)
        target = indices(2 * pixels, classes, seed).reshape(2, pixels)  # some are out of range
        mask = keep(2 * pixels, seed).reshape(2, 1, pixels)
        sums = registry[name].call
        options = {"squared_pred": True, "smooth_nr": 0.0, "smooth_dr": 0.0, "ignore_index": 1, "batch": False}
        return Case(lambda x: sums(x, target, mask, None, "mean", None, "zero", tuple(options.values())), (x,))

    return make


def region(name, formula, parameters=None, of_images=False):
    parameters, definition = parameters or {}, _definition(formula, of_images)
    options = {"squared_pred": True, "smooth_nr": 0.5, "smooth_dr": 0.25, "ignore_index": None, "batch": False}
    tensors = {"mask": plain_mask(), "weight": plain(2)[0].clone(), "denominator": torch.tensor(5.0)}
    return Record(
        name,
        definition,
        _samples(parameters),
        bad_calls=_bad_calls(name, parameters),
        call={
            "input": plain(),
            "target": plain(1),
            **tensors,
            **options,
            **parameters,
            **dict.fromkeys(powers(parameters), 1.5),
        },
        gpu=_gpu(name),
        no_route=NO_ROUTE,
        data=(0, 1),
        torch_equivalent=_monai(formula),
        terms=_terms(definition),
        skip=NOT_SAFE | BY_CLASS,
    )


region("dice_loss", _dice)
region("tversky_loss", _tversky, {"alpha": 0.3, "beta": 0.7})
region("generalized_dice_loss", _generalized, of_images=True)
