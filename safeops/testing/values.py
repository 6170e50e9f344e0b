"""Values, gradients and dtypes: against float64, in every dtype and every mix of them."""

from __future__ import annotations

import contextlib

import torch

from .compare import assert_close, assert_no_worse, assert_nonfinite_alike, assert_right, cancellation
from .registry import check
from .sample import NotApplicable, Sample
from .subject import DTYPES, HALVES, Subject, run


def _cast(sample: Sample, dtype) -> Sample:
    cast = sample.cast(dtype)
    if any(not torch.equal(t.isfinite(), sample.get(k).isfinite()) for k, t in cast.floats().items()):
        raise NotApplicable(f"values do not fit {dtype}")
    return cast


def fitting(sample: Sample, dtypes=DTYPES) -> dict:
    """Returns {dtype: the sample in it} for the dtypes that can hold its values. sample.dtypes overrides `dtypes`."""
    casts = {}
    for dtype in sample.dtypes or dtypes:
        with contextlib.suppress(NotApplicable):
            casts[dtype] = _cast(sample, dtype)
    if not casts:
        raise NotApplicable("values fit none of the dtypes")
    return casts


def each_dtype(sample: Sample, dtypes=DTYPES):
    """The sample in every dtype that can hold its values."""
    return list(fitting(sample, dtypes).values())


def _label(sample: Sample) -> str:
    return "in " + ", ".join(str(t.dtype).removeprefix("torch.") for t in sample.floats().values())


@check("the value is the fp64 definition's, in each dtype, and no worse than torch's in the same dtype")
def check_value(subject: Subject, sample: Sample) -> None:
    for cast in each_dtype(sample):
        got = run(subject.op, cast, grad=False, keys=())
        _judge(subject, cast, got, "value")


@check("each gradient is the fp64 definition's, in each dtype, and no worse than torch's in the same dtype")
def check_gradient(subject: Subject, sample: Sample) -> None:
    if not sample.leaves():
        raise NotApplicable("nothing is differentiable")
    for cast in each_dtype(sample):
        got = run(subject.op, cast)
        _judge(subject, cast, got, "gradient")


def _judge(subject, cast, got, part):
    truth = subject.truth(cast, got.upstream or None)
    wanted = [(what, t) for what, t in got if what.startswith(part)]
    assert_right(cast, wanted, truth, _label(cast))
    if subject.torch_equivalent is None:
        return
    try:
        theirs = run(subject.torch_equivalent, cast, got.upstream or None, unused_ok=True, grad=part == "gradient")
    except (RuntimeError, TypeError):
        return  # torch refuses this dtype or mix: nothing to be compared with
    value_scale, grad_scales = cancellation(cast, truth)
    scales = {f"gradient of operand {k!r}": scale for k, scale in grad_scales.items()}
    truths, rivals = dict(truth), dict(theirs)
    for what, tensor in wanted:
        rival = rivals[what]
        if tensor.is_floating_point() and rival.dtype.itemsize <= tensor.dtype.itemsize:
            assert_no_worse(f"{what} {_label(cast)}", tensor, rival, truths[what], scale=scales.get(what, value_scale))


@check("output dtypes follow the rule, `dtype=` overrides it, and every gradient has its own input's dtype and shape")
def check_dtypes(subject: Subject, sample: Sample) -> None:
    for cast in each_dtype(sample):
        _assert_dtypes(subject, cast)
        if subject.dtype_argument:
            for dtype in DTYPES:
                _assert_dtypes(subject, cast.with_kwargs(dtype=dtype))


@check("operands of different dtypes are each read as they are: dtypes, values and gradients")
def check_mixed_dtypes(subject: Subject, sample: Sample) -> None:
    keys = list(sample.floats())
    if len(keys) < 2:
        raise NotApplicable("one floating operand only")
    # Latin square: every operand meets every dtype, and every pair of neighbours differs.
    for shift in range(len(DTYPES)):
        for stride in (1, 3):
            mixed = {k: DTYPES[(shift + stride * i) % len(DTYPES)] for i, k in enumerate(keys)}
            try:
                cast = _cast(sample, mixed)
            except NotApplicable:
                continue
            got = _assert_dtypes(subject, cast)
            assert_right(cast, got, subject.truth(cast, got.upstream or None), _label(cast))


def _assert_dtypes(subject, sample):
    want = subject.out_dtype(sample)
    got = run(subject.op, sample)
    dtype = sample.kwargs.get("dtype")
    for value in got.values:
        if value.is_floating_point() and value.dtype != want:
            asked = f", dtype={dtype}" if dtype else ""
            raise AssertionError(f"result is {value.dtype} {_label(sample)}{asked}, want {want}")
    for key, grad in got.grads.items():
        operand = sample.get(key)
        if grad.dtype != operand.dtype or grad.shape != operand.shape:
            raise AssertionError(
                f"gradient of operand {key!r} is {grad.dtype} {tuple(grad.shape)}, "
                f"the operand is {operand.dtype} {tuple(operand.shape)}"
            )
    return got


@check("sums accumulate wide: over 2**18 elements the error stays at rounding level")
def check_accumulation(subject: Subject, sample: Sample) -> None:
    if (
        max((v.numel() for v in run(subject.op, sample, grad=False, keys=()).values), default=0)
        >= sample.shape().numel()
    ):
        raise NotApplicable("nothing is summed")
    if "dtype" in sample.kwargs:
        raise NotApplicable("the result is rounded to a dtype that was asked for")
    large = sample.grown(2**18)
    # All values have one size (and are probabilities): partial sums grow with n, so that narrow adding loses digits.
    large = large.replace(
        {k: 0.75 + t / (8 * t.abs().max().clamp(min=1)) for k, t in large.floats().items() if isinstance(k, int)}
    )
    for cast in (large.cast(torch.float32), large.cast(torch.float16), large.cast(torch.bfloat16)):
        got = run(subject.op, cast, grad=False, keys=())
        truth = subject.truth(cast)
        for (what, value), wide in zip(got, truth.values):
            if not wide.is_floating_point() and torch.equal(value, wide):
                continue
            if value.dtype != torch.float32:
                raise AssertionError(f"{what}: {value.dtype} for {_label(cast)}")
            positive = wide.abs().clamp(min=wide.abs().max() * 2**-10)  # elements that cancelled tell nothing
            error = float(((value.double() - wide).abs() / positive).max())
            if not error <= 32 * 2**-24:
                raise AssertionError(
                    f"{what} {_label(cast)}: relative error {error:.2g} over {large.shape().numel()} elements"
                )


# Where arithmetic breaks: zeros of both signs, subnormals, the smallest and the largest numbers of each dtype.
def _extremes(dtype) -> list[float]:
    info = torch.finfo(dtype)
    tiny = [0.0, -0.0, info.smallest_normal, -info.smallest_normal, info.smallest_normal * info.eps]
    return [*tiny, info.eps, 1.0, -1.0, 3.0, info.max**0.5, info.max / 2, info.max, -info.max]


@check("finite in, finite out: over pairs of extreme numbers the result is finite, and the gradient is never NaN")
def check_finite(subject: Subject, sample: Sample) -> None:
    if not subject.finite:
        raise NotApplicable("not a safe_* function")
    keys = [k for k in sample.floats() if isinstance(k, int)]
    for dtype in DTYPES:
        pool = torch.tensor(_extremes(dtype), dtype=torch.float64, device=subject.device)
        grid = torch.cartesian_prod(*[pool] * len(keys)).reshape(-1, len(keys)).unbind(-1)
        extreme = Sample(grid, {k: v for k, v in sample.kwargs.items() if not isinstance(v, torch.Tensor)}).cast(dtype)
        got = run(subject.op, extreme, torch.ones_like)
        truth = subject.truth(extreme, got.upstream)
        for what, tensor in got:
            bad = ~tensor.isfinite() if what.startswith("value") else tensor.isnan()
            if bad.any():
                i = int(bad.nonzero()[0])
                inputs = ", ".join(repr(t[i].item()) for t in extreme.args)
                raise AssertionError(f"{what} in {dtype}: {tensor[i].item()} for finite operands {inputs}")
        assert_right(extreme, got, truth, f"at extremes in {dtype}")


@check("a gradient that overflows its dtype is inf (GradScaler looks for it), never saturated")
def check_gradient_overflow(subject: Subject, sample: Sample) -> None:
    result = False
    for cast in each_dtype(sample, HALVES[:1]):
        for size in (2.0**15, 2.0**15 * 1.5, 2.0**60):
            unit = run(subject.op, cast)
            dtype = unit.values[0].dtype
            if size > torch.finfo(dtype).max:
                continue
            got = run(subject.op, cast, lambda out, size=size: torch.full_like(out, size))
            truth = subject.truth(cast, got.upstream)
            for key, grad in got.grads.items():
                rounded = truth.grads[key].to(grad.dtype)
                result |= bool((rounded.isinf() & truth.grads[key].isfinite()).any())
                edge = (truth.grads[key].abs() / torch.finfo(grad.dtype).max - 1).abs() < 1e-3
                what = f"gradient of operand {key!r} at upstream {size:g}"
                assert_nonfinite_alike(what, torch.where(edge, rounded, grad), rounded)
    if not result:
        raise NotApplicable("no gradient overflows here")


@check("the gradient for any subset of operands is the same as for all: none depends on which others are wanted")
def check_partial_gradients(subject: Subject, sample: Sample) -> None:
    keys = list(sample.leaves())
    if len(keys) < 2:
        raise NotApplicable("one differentiable operand only")
    sample = sample.cast(torch.float32)
    every = run(subject.op, sample)
    for chosen in [[k] for k in keys] + ([[k for k in keys if k != left] for left in keys] if len(keys) > 2 else []):
        got = run(subject.op, sample, every.upstream, keys=chosen)
        for key, grad in got.grads.items():
            scale = every.grads[key].double().abs().max().item() if grad.numel() else 0.0
            what = f"gradient of operand {key!r} when only {chosen} require one"
            assert_close(what, grad, every.grads[key].double(), scale=scale)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            values = subject.op(*sample.args, **sample.kwargs)
        first = values if isinstance(values, torch.Tensor) else values[0]
        if first.requires_grad:
            raise AssertionError(f"the result requires a gradient under {mode.__name__}")
        assert_close(
            f"value under {mode.__name__}",
            first.clone(),
            every.values[0].double(),
            scale=float(every.values[0].abs().max()) if first.numel() else 0,
        )
