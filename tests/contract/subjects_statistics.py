"""The statistics as subjects."""

import torch

from safeops.testing import Sample
from tests.contract import definitions_statistics as definitions
from tests.contract.bad_calls_statistics import BAD_CALLS, STATISTICS
from tests.contract.subjects import COMPOSITE, data, mask, reduction_samples, subject, weighted, weights

INF = float("inf")
SKIP = {
    "masked_upstream": "the result is reduced",
    "finite": "reduces: finite in, finite out is in test_statistics",
    "partial_gradients": "one operand; the weight's gradient has a subject of its own",
}


def _plain(function):
    """What users write: the masked elements set to `neutral`, then torch's own reduction. Without weights."""

    def call(input, mask=None, dim=None, *, keepdim=False, weight=None, dtype=None, empty="zero", **parameter):
        if weight is not None:
            raise TypeError("torch has no weights")
        axes = tuple(range(input.dim())) if dim is None or dim == () else dim
        return function(input, mask, axes, keepdim, **parameter)

    return call


def _filled(x, mask, neutral):
    return x if mask is None else torch.where(mask, x, neutral)


def _torch_var(x, mask, axes, keepdim, correction=1):
    if mask is None:
        return x.var(axes, correction=correction, keepdim=keepdim)
    n = mask.expand(x.shape).sum(axes, keepdim=True)
    mean = _filled(x, mask, 0).sum(axes, keepdim=True) / n
    value = torch.where(mask, (x - mean).square(), 0).sum(axes, keepdim=True) / (n - correction)
    return value if keepdim else value.squeeze(axes)


TORCH = {
    "masked_var": _torch_var,
    "masked_std": lambda *args, **kwargs: _torch_var(*args, **kwargs).sqrt(),
    "masked_amax": lambda x, m, axes, keepdim: _filled(x, m, -INF).amax(axes, keepdim),
    "masked_amin": lambda x, m, axes, keepdim: _filled(x, m, INF).amin(axes, keepdim),
    "masked_norm": lambda x, m, axes, keepdim, ord=2: torch.linalg.vector_norm(
        _filled(x, m, 0 if ord != -INF else INF), ord, axes, keepdim
    ),
    "masked_sum_of_squares": lambda x, m, axes, keepdim: _filled(x, m, 0).square().sum(axes, keepdim),
    "masked_rms": lambda x, m, axes, keepdim: (
        _filled(x, m, 0).square().sum(axes, keepdim)
        / torch.ones_like(x, dtype=torch.bool if m is not None else x.dtype)
        .logical_and(torch.ones_like(x, dtype=torch.bool) if m is None else m)
        .sum(axes, keepdim)
    ).sqrt(),
    "masked_logsumexp": lambda x, m, axes, keepdim: _filled(x, m, -INF).logsumexp(axes, keepdim),
}


def _with(samples, **parameter):
    """The samples, each called with the parameter."""
    return [s.with_kwargs(**parameter) for s in samples]


def _heavy(sample):
    """Weights of which a few weigh more than a correction of 1: the divisor stays away from 0."""
    weight = sample.kwargs.get("weight")
    return sample if weight is None else sample.with_kwargs(weight=weight + 2)


def spread_terms(sample, outcome):
    """A deviation is rounded like the largest one of its result."""
    if not outcome.grads:
        return 0.0, {}
    x, ((key, grad),) = sample.args[0].detach(), outcome.grads.items()
    grad = grad.nan_to_num(0, 0, 0).abs()
    value = float((x.nan_to_num(0, 0, 0).abs() * grad).sum())
    dims = sample.kwargs.get("dim")
    return value, {key: grad.amax(dims if dims is not None else (), keepdim=True) if grad.numel() else grad}


def exponential_terms(sample, outcome):
    """exp(x - origin) loses |x - origin| / 2 roundings."""
    x = sample.args[0].detach().nan_to_num(0, 0, 0)
    value = float(1 + x.abs().max()) if x.numel() else 0.0
    return value, {key: grad.abs() * value / 8 for key, grad in outcome.grads.items()}


def _extra(name):
    x, m = data(4, 6, seed=7), mask(4, 6, seed=7)
    if name in ("masked_var", "masked_std"):
        yield Sample((x + 50, m), {"dim": 1, "correction": 0}, mask=1, name="population, mean far from 0")
        yield Sample((x, m), {"dim": 0, "correction": 1.5, "weight": weights(4, 6) + 2}, mask=1, differentiable=(0,),
                     name="correction that is no integer, weighted")  # fmt: skip
        yield Sample((x, m), {"dim": 1, "correction": 3}, mask=1, name="rows with too few for the correction")
    if name in ("masked_amax", "masked_amin", "masked_norm"):
        ties = (x * 2 / 3).round()
        orders = [{}] if name != "masked_norm" else [{"ord": INF}, {"ord": -INF}]
        for order in orders:
            options = {**order, "weight": weights(6)}
            yield Sample((ties, m), {"dim": 1, **order}, mask=1, smooth=False, name=f"ties {order}")
            yield Sample(
                (x, m), {"dim": 0, **options}, mask=1, differentiable=(0,), name=f"columns, weighted {order}", slow=True
            )
            yield Sample((x, m), order, mask=1, name=f"all dims {order}")
    if name == "masked_norm":
        yield Sample((x, m), {"dim": 1, "ord": 1}, mask=1, name="ord 1", slow=True)
        yield Sample((x, m), {"ord": 1, "weight": weights(4, 1)}, mask=1, differentiable=(0,), name="ord 1, weighted")
    if name == "masked_logsumexp":
        yield Sample((x + 90, m), {"dim": 1}, mask=1, name="exponentials beyond fp16 and fp32")
    zeros = torch.zeros_like(x)
    zeros[2:] = x[2:]
    if name not in ("masked_amax", "masked_amin"):
        yield Sample((zeros, m), {"dim": 1}, mask=1, smooth=False, name="rows of zeros")


def statistics():
    for name in STATISTICS:
        samples = [_heavy(s) if name in ("masked_var", "masked_std") else s for s in reduction_samples()]
        yield subject(
            name,
            [*samples, *_extra(name)],
            definitions=definitions,
            bad_calls=BAD_CALLS,
            dtype_argument=True,
            torch_equivalent=_plain(TORCH[name]),
            terms=spread_terms if name in ("masked_var", "masked_std") else None,
            skip=SKIP,
            data=(0,),
        )
    yield subject(
        "safe_norm",
        [
            Sample((data(3, 5),), {"dim": 1}, name="rows", slow=True),
            Sample((data(3, 5),), {"mask": mask(3, 5)}, name="all dims, masked", slow=True),
            Sample(
                (data(2, 3, 4, 5),),
                {"dim": (1, -1), "mask": mask(2, 3, 1, 5), "keepdim": True},
                name="inner dims of four",
            ),
            Sample((data(3, 5),), {"dim": 0, "ord": INF}, name="columns, ord inf"),
        ],
        definitions=definitions,
        bad_calls=BAD_CALLS,
        dtype_argument=True,
        torch_equivalent=lambda x, dim=None, ord=2, keepdim=False, mask=None, dtype=None: torch.linalg.vector_norm(
            _filled(x, mask, 0), ord, dim, keepdim
        ),
        skip=SKIP | {"weight_zero": "has no weight", "mixed_dtypes": "one floating operand"},
    )


def counts():
    """The count has no gradient, and nothing that a dtype could change."""
    no_gradient = "a count has no gradient"
    yield subject(
        "masked_count",
        [
            Sample(s.args, s.kwargs, mask=s.mask, differentiable=(), name=s.name, slow=s.slow)
            for s in reduction_samples()
        ],
        definitions=definitions,
        bad_calls=BAD_CALLS,
        data=(0,),
        skip=SKIP
        | dict.fromkeys(
            ("gradient", "gradient_overflow", "kept_upstream", "upstream_layouts", "saved_bytes", "gradcheck",
             "gradgradcheck", "forward_ad", "torch_func", "batched_gradients", "masked_garbage_transforms"), no_gradient
        )
        | {
            "accumulation": "counts are exact",
            "kept_nonfinite": "a NaN counts as any other element",
            "nothing_kept": "an integer has no NaN: test_counts",
        },
    )  # fmt: skip


def gradients_of_weights():
    """The composite has them."""
    skip = {k: v for k, v in SKIP.items() if k != "partial_gradients"}
    for name in STATISTICS:
        if name in ("masked_amax", "masked_amin"):
            continue  # a weight masks out, and that is all
        heavy = 2 if name in ("masked_var", "masked_std") else 0
        samples = [
            Sample((data(3, 5), mask(3, 5)), {"dim": 1, "weight": weights(3, 5) + heavy}, mask=1, name="weight"),
            Sample((data(3, 5), mask(3, 1)), {"weight": weights(5) + heavy}, mask=1, name="weight broadcast"),
        ]
        if name == "masked_norm":
            samples += _with(samples, ord=1)
        yield weighted(
            name, samples, skip=skip, data=(0,), dtype_argument=False, definitions=definitions, bad_calls=BAD_CALLS
        )


def other_orders():
    """Norms without a kernel."""
    x, m = data(4, 6, seed=8, low=0.25), mask(4, 6, seed=8)
    signed = torch.where(mask(4, 6, seed=9), x, -x)
    zeros = torch.where(mask(4, 6, seed=10), signed, 0)
    skip = SKIP | {"saved_bytes": COMPOSITE, "peak_memory": COMPOSITE, "errors": "the op's main subject has them"}
    samples = [
        Sample((signed, m), {"dim": 1, "ord": ord}, mask=1, name=f"ord {ord}", slow=ord == 3)
        for ord in (3, 2.5, 0.5, -1, -2)
    ]
    samples += [
        Sample((zeros, m), {"dim": 1, "ord": ord, "weight": weights(6)}, mask=1, differentiable=(0,), smooth=False,
               name=f"zeros, weighted, ord {ord}")
        for ord in (4, 1.5, 0.5, 0)
    ]  # fmt: skip
    samples.append(Sample((zeros, m), {"dim": 1, "ord": -1}, mask=1, smooth=False, name="zeros, ord -1"))
    yield subject(
        "masked_norm",
        samples,
        definitions=definitions,
        bad_calls=BAD_CALLS,
        dtype_argument=True,
        skip=skip,
        data=(0,),
        suffix=" (orders without a kernel)",
    )
