"""The ops of the slice as subjects: adversarial samples, what users write today, and why a check is left out."""

import dataclasses
import functools
import os
import shutil

import torch
import torch.nn.functional as F

import safeops
from safeops._op import registry
from safeops.testing import CHECKS, Sample, Subject
from tests.contract import definitions
from tests.contract.bad_calls import BAD_CALLS

DEVICE = os.environ.get("SAFEOPS_TEST_DEVICE", "cpu")
COMPOSITE = "runs as the composite, which may save and copy"


def data(*shape, seed=0, low=-3.0, high=3.0):
    g = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=g, dtype=torch.float64) * (high - low) + low


def mask(*shape, seed=0, keep=0.6):
    g = torch.Generator().manual_seed(100 + seed)
    m = torch.rand(shape, generator=g) < keep
    if m.numel() > 1:  # at least one of each, in every case
        m.view(-1)[0], m.view(-1)[-1] = True, False
    return m


def weights(*shape, seed=0):
    w = data(*shape, seed=seed, low=0.25, high=2.0)
    return w


def composite(op, name):
    """The op with its kernels switched off."""

    @functools.wraps(op)
    def call(*args, **kwargs):
        entry = registry[name]
        was = entry.cpu, entry.cuda
        entry.cpu = entry.cuda = False
        try:
            return op(*args, **kwargs)
        finally:
            entry.cpu, entry.cuda = was

    return call


COMPILER = any(map(shutil.which, ("c++", "g++", "clang++", "cc", "gcc", "clang")))  # for Inductor


def subject(name, samples, *, definitions=definitions, bad_calls=BAD_CALLS, skip=None, suffix="", **describe):
    op = getattr(safeops, name)
    kernel = registry[name].cpu if DEVICE == "cpu" else registry[name].cuda
    skip = dict(skip or {})
    if not kernel:
        skip.update(saved_bytes=COMPOSITE, peak_memory=COMPOSITE)
    if not COMPILER:
        skip["inductor"] = "there is no compiler here, and Inductor needs one"
    describe.setdefault("direct", getattr(torch.ops.safeops, name))
    return Subject(
        op,
        getattr(definitions, name),
        tuple(samples),
        routes={"composite": composite(op, name)},
        errors=bad_calls[name],
        device=DEVICE,
        skip=skip,
        name=name + suffix,
        **describe,
    )


# Elementwise ---------------------------------------------------------------------------------------------------------
NO_SUM = {"accumulation": "nothing is summed"}


def fill(x, m, value, **options):
    masked = options.pop("masked", (0,))
    return Sample((x, m, value), mask=1, mask_keeps=False, masked=masked, **options)


def elementwise():
    value = torch.tensor(-2.5, dtype=torch.float64)
    yield subject(
        "masked_fill",
        [
            fill(data(3, 5), mask(3, 5), 1.5, name="number", slow=True),
            fill(data(3, 5), mask(3, 5), value, name="differentiable value", slow=True),
            fill(data(3, 5), mask(5), -1e9, name="mask broadcast, value beyond half"),
            fill(data(5), mask(3, 5), float("-inf"), name="input broadcast, -inf", smooth=False),
            fill(data(2, 3, 4, 5), mask(2, 1, 4, 5), 7.0, name="four dimensions"),
            fill(data(2, 3, 4, 5), mask(3, 1, 1), value, name="mask of few dimensions"),
        ],
        dtype_rule="input",
        torch_equivalent=torch.Tensor.masked_fill,
        skip=NO_SUM | {"finite": "not a safe_ function: it writes what it is given", "weight_zero": "has no weight"},
    )
    # Divisors away from eps and quotients away from the largest number, so that finite differences mean something.
    holes = torch.where(mask(3, 5, seed=3), data(3, 5, seed=1, low=0.5), 0.0)
    extreme = torch.tensor([1e-7, -2e-7, 6e-5, 0.0, 3e4], dtype=torch.float64)
    no_mask = {
        c: "has no mask: what a vanishing divisor hides is in test_elementwise"
        for c in ("masked_garbage", "masked_upstream", "masked_garbage_transforms", "nothing_kept", "weight_zero")
    }
    yield subject(
        "safe_div",
        [
            Sample((data(3, 5), data(3, 5, seed=1, low=0.5)), name="plain", slow=True),
            Sample((data(3, 5), holes), name="zero divisors", smooth=False, slow=True),
            Sample((data(3, 5), data(3, 5, seed=2)), {"eps": 1.0, "fill_value": -7.0}, name="floor", smooth=False),
            Sample((data(3, 5), data(3, 1, seed=2, low=0.5)), name="divisor broadcast"),
            Sample((data(5), data(3, 5, seed=2, low=0.5)), name="numerator broadcast"),
            Sample((data(3, 5) * 1e4, extreme), {"fill_value": 1e9}, name="saturating", smooth=False),
            Sample((data(2, 3, 4, 5), data(2, 3, 4, 5, seed=4, low=0.5)), name="four dimensions"),
        ],
        dtype_rule="safe",
        dtype_argument=True,
        finite=True,
        torch_equivalent=lambda a, b, **_: a / b,
        skip=NO_SUM | no_mask,
    )


# Reductions ----------------------------------------------------------------------------------------------------------
def _torch_sum(input, mask=None, dim=None, *, keepdim=False, weight=None, dtype=None, empty="zero"):
    x = input if mask is None else torch.where(mask, input, 0)
    x = x if weight is None else x * weight
    return x.sum(dim if dim != () else None, keepdim=keepdim)


def _torch_mean(input, mask=None, dim=None, *, keepdim=False, weight=None, dtype=None, empty="zero"):
    top = _torch_sum(input, mask, dim, keepdim=keepdim, weight=weight)
    w = torch.ones_like(input) if weight is None else weight.expand_as(input)
    return top / _torch_sum(w.to(input.dtype), mask, dim, keepdim=keepdim)


def reduction_samples():
    yield Sample((data(3, 5), mask(3, 5)), mask=1, name="all dims", slow=True)
    yield Sample(
        (data(3, 5), mask(3, 5)),
        {"dim": 1, "weight": weights(3, 5)},
        mask=1,
        differentiable=(0,),
        name="weighted rows",
        slow=True,
    )
    yield Sample((data(4, 3, 5), mask(4, 1, 5)), {"dim": 0, "keepdim": True}, mask=1, name="mask broadcast, keepdim")
    yield Sample((data(2, 3, 4, 5), mask(2, 3, 1, 5)), {"dim": (1, -1)}, mask=1, name="inner dims of four")
    yield Sample(
        (data(2, 3, 4, 5), mask(2, 3, 4, 5)),
        {"dim": (0, 2), "weight": weights(5)},
        mask=1,
        differentiable=(0,),
        name="outer dims, weight broadcast",
    )
    yield Sample((data(7),), {"dim": (), "weight": weights(7)}, differentiable=(0,), name="no mask, dim ()")
    yield Sample((data(3, 5),), name="neither mask nor weight")


def reductions():
    skip = {
        "masked_upstream": "the result is reduced",
        "finite": "not a safe_ function",
        "partial_gradients": "one operand; the weight's gradient has a subject of its own",
    }
    for name, equivalent in (("masked_sum", _torch_sum), ("masked_mean", _torch_mean)):
        yield subject(
            name, list(reduction_samples()), dtype_argument=True, torch_equivalent=equivalent, skip=skip, data=(0,)
        )
        yield weighted(name, [
            Sample((data(3, 5), mask(3, 5)), {"dim": 1, "weight": weights(3, 5)}, mask=1, name="weight"),
            Sample((data(3, 5), mask(3, 1)), {"weight": weights(5)}, mask=1, name="weight broadcast"),
        ], skip={k: v for k, v in skip.items() if k != "partial_gradients"}, data=(0,))  # fmt: skip


NUMERICS = (
    "value gradient dtypes mixed_dtypes accumulation finite gradient_overflow partial_gradients masked_garbage "
    "masked_upstream weight_zero kept_nonfinite kept_upstream nothing_kept layouts upstream_layouts sizes "
    "inputs_unchanged uninitialized repeatable no_sync autocast"
).split()


def by_composite(kernel: Subject) -> Subject:
    """The same subject with its kernels switched off: the numbers of the contract hold on every route."""
    once = {c: "the kernel's subject checks it: transforms and compilation take the composite there" for c in CHECKS}
    skip = {c: reason for c, reason in (once | dict(kernel.skip)).items() if c not in NUMERICS or c in kernel.skip}
    name = f"{kernel.name} (composite)"
    return dataclasses.replace(kernel, op=composite(kernel.op, kernel.name), name=name, skip=skip, direct=None)


def weighted(name, samples, skip, **describe):
    """The gradient of the weight: the composite computes it."""
    once = "the same op's main subject checks it"
    skip = skip | {
        "saved_bytes": COMPOSITE,
        "peak_memory": COMPOSITE,
        "inductor": once,
        "export": once,
        "errors": once,
        "accumulation": once,
    }
    return subject(name, samples, skip=skip, suffix=" (gradient of the weight)", **describe)


# Losses --------------------------------------------------------------------------------------------------------------
LOSSES = {
    "mse_loss": (F.mse_loss, {}),
    "l1_loss": (F.l1_loss, {}),
    "smooth_l1_loss": (F.smooth_l1_loss, {"beta": 0.75}),
    "huber_loss": (F.huber_loss, {"delta": 1.25}),
}


def _torch_loss(function):
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


def loss_samples(parameters):
    def sample(x, y, options, **rest):
        return Sample((x, y), {**options, **parameters}, differentiable=(0, 1), **rest)

    x, y = data(3, 5, seed=1), data(3, 5, seed=2)
    four = data(2, 3, 4, 5, seed=3), data(2, 3, 4, 5, seed=4)
    yield sample(x, y, {"mask": mask(3, 5)}, name="mean", slow=True)
    yield sample(
        x, y, {"mask": mask(3, 5), "weight": weights(3, 5), "reduction": "none"}, name="none, weighted", slow=True
    )
    yield sample(
        x, y, {"mask": mask(3, 1), "weight": weights(5), "reduction": "sum"}, name="sum, mask and weight broadcast"
    )
    yield sample(*four, {"mask": mask(2, 1, 4, 5), "weight": weights(2, 3, 4, 5)}, name="mean of four dims, weighted")
    yield sample(*four, {"mask": mask(5), "reduction": "none"}, name="none of four dims")
    yield sample(x, y[:, :1], {"mask": mask(3, 5)}, name="target broadcast")
    yield sample(x[0], y, {"mask": mask(3, 5), "reduction": "none"}, name="input broadcast")
    # Not one that rounds: the direct op takes the denominator as a tensor.
    yield sample(x, y, {"mask": mask(3, 5), "denominator": torch.tensor(4.5, dtype=torch.float64)}, name="denominator")
    yield sample(x, y, {}, name="neither mask nor weight")


def losses():
    for name, (function, parameters) in LOSSES.items():
        yield subject(
            name,
            list(loss_samples(parameters)),
            torch_equivalent=_torch_loss(function),
            data=(0, 1),
            skip={"finite": "not a safe_ function"},
        )
        x, y = data(3, 5, seed=5), data(3, 5, seed=6)
        yield weighted(
            name,
            [
                Sample((x, y), {"mask": mask(3, 5), "weight": weights(3, 5), **parameters}, name="weight"),
                Sample(
                    (x, y),
                    {"mask": mask(3, 5), "weight": weights(5), "reduction": "none", **parameters},
                    name="weight broadcast, none",
                ),
                Sample(
                    (x, y),
                    {"mask": mask(3, 5), "denominator": torch.tensor(4.5, dtype=torch.float64), **parameters},
                    name="denominator with a gradient",
                ),
            ],
            skip={"finite": "not a safe_ function"},
            data=(0, 1),
        )
