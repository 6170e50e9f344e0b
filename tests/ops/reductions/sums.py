"""Sums, means and counts."""

import torch

from safeops.testing import Bad, Sample
from tests.ops.bad_calls import KEEP, X
from tests.ops.operands import plain, plain_mask
from tests.ops.record import Record
from tests.ops.reductions.reduction import ONE, SKIP, bad_reductions, reduction, samples
from tests.ops.truth import kept, reduce, weighted


def masked_sum(input, mask=None, dim=None, *, keepdim=False, weight=None, empty="zero", mean=False):
    keep = kept(input.shape, mask, weight).to(input.device)
    return reduce(mean, weighted(input, keep, weight), keep, weight, dim, keepdim, empty)


def masked_mean(input, mask=None, dim=None, *, keepdim=False, weight=None, empty="zero"):
    return masked_sum(input, mask, dim, keepdim=keepdim, weight=weight, empty=empty, mean=True)


def masked_count(input, mask=None, dim=None, *, keepdim=False, weight=None):
    keep = kept(input.shape, mask, weight)
    keep = keep & input if input.dtype == torch.bool else keep
    return keep.sum(tuple(range(input.dim())) if dim is None or dim == () else dim, keepdim=keepdim)


def _torch_sum(input, mask=None, dim=None, *, keepdim=False, weight=None, dtype=None, empty="zero"):
    x = input if mask is None else torch.where(mask, input, 0)
    x = x if weight is None else x * weight
    return x.sum(dim if dim != () else None, keepdim=keepdim)


def _torch_mean(input, mask=None, dim=None, *, keepdim=False, weight=None, dtype=None, empty="zero"):
    top = _torch_sum(input, mask, dim, keepdim=keepdim, weight=weight)
    w = torch.ones_like(input) if weight is None else weight.expand_as(input)
    return top / _torch_sum(w.to(input.dtype), mask, dim, keepdim=keepdim)


reduction(masked_sum, _torch_sum)
reduction(masked_mean, _torch_mean)


# ---- counts: without gradient, and independent of the input's dtype

DIFFERENTIATES = (
    "gradient gradient_overflow kept_upstream upstream_layouts saved_bytes gradcheck gradgradcheck forward_ad "
    "torch_func batched_gradients masked_garbage_transforms"
).split()


def _bad_counts(name="masked_count"):
    for bad in bad_reductions(name):
        # Left out: masked_count also takes integers, and reads only the shape of its input.
        if bad.kwargs.get("dtype") is None and "floating" not in bad.words[:3] or "weight" in bad.words:
            yield bad
    yield Bad((KEEP[:1], KEEP), {}, ValueError, (name, "mask", "(2, 5)", "(1, 5)", "broadcast"))
    yield Bad((KEEP, X), {}, TypeError, (name, "mask", "bool", "torch.float32"))
    yield Bad((KEEP, None, 2), {}, IndexError, (name, "dim", "2"))
    yield Bad((X, KEEP), {"dtype": torch.int8}, TypeError, (name, "dtype", "torch.int8"))
    yield Bad((X, KEEP), {"empty": "nan"}, ValueError, (name, "nan", "torch.int64"))
    yield Bad((X, KEEP), {"empty": "nan", "dtype": torch.int32}, ValueError, (name, "nan", "torch.int32"))


Record(
    "masked_count",
    masked_count,
    [Sample(s.args, s.kwargs, mask=s.mask, differentiable=(), name=s.name, slow=s.slow) for s in samples()],
    bad_calls=_bad_counts(),
    call={"input": plain(), "mask": plain_mask(), "dim": 1, "keepdim": False, "weight": plain(2), "dtype": None},
    no_route="a count has no gradient",
    gpu="a count has no gradient: test_masked_count of tests/gpu/test_values.py",
    data=(0,),
    skip=SKIP
    | ONE
    | dict.fromkeys(DIFFERENTIATES, "a count has no gradient")
    | {
        "accumulation": "counts are exact",
        "kept_nonfinite": "a NaN counts as any other element",
        "nothing_kept": "an integer has no NaN: test_counts",
    },
)
