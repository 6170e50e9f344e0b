"""The statistics' plans, forward and backward, for test_triton_build.py: of tensors without data."""

import re

import torch
from safeops.kernels.engine import elementwise
from safeops.kernels.reductions import fold, statistic, statistic_backward

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
FLAT = (1 << 26,)


# what the architectures other than sm_90 are compiled for: the largest state in each layout, and the backward
OFTEN = re.compile(
    r"aligned (var|linear_backward|(columns weight|few rows) VAR) bfloat16|aligned var weight bf16.*|"
    r"general transposed VAR bfloat16"
)


def meta(shape, dtype, strides=None):
    shape = tuple(shape)
    return torch.empty_strided(shape, strides or torch.empty(shape, device="meta").stride(), dtype=dtype, device="meta")


def folded(result, x, mask=None, weight=None, dims=None, shape=None, **options):
    shape = x.shape if shape is None else shape
    gone = [dims is None or d in dims for d in range(len(shape))]
    given = [t.dtype for t in (x, weight) if t is not None]
    dtype = torch.int64 if result is statistic.COUNT else F64 if x.dtype == F64 else F32
    return fold.plan(result, (x, mask, weight), shape, gone, dtype, F64 if F64 in given else F32, **options)


def returned(kind, x, mask=None, weight=None, dims=None):
    """The backward; grad, origin and scale as the launcher has them, with reduced dimensions of size 1."""
    thin = [1 if dims is None or d in dims else n for d, n in enumerate(x.shape)]
    grad, origin, scale = meta(thin, F32), meta(thin, F64), meta(thin, F64)
    shape = statistic_backward.KINDS[kind]
    scaled = elementwise.UNWEIGHTED if shape in statistic_backward.MASKING else elementwise.BY_WEIGHT
    tensors = (x, origin, mask, weight, grad, scale, torch.empty_like(x), None)
    return elementwise.plan(shape, tensors, x.shape, F64 if x.dtype == F64 else F32, scaled=scaled)


def cases():
    found = {}
    s = statistic
    for dtype in (F16, BF16, F32, F64):
        name, x, mask = str(dtype)[6:], meta(FLAT, dtype), meta(FLAT, torch.bool)
        found[f"aligned var {name}"] = folded(s.VAR, x, mask)
        if dtype != F16:  # as bf16
            found[f"aligned logsumexp {name}"] = folded(s.LOGSUMEXP, x, mask)
            found[f"aligned linear_backward {name}"] = returned(0, x, mask)
    x, mask, w = meta(FLAT, BF16), meta(FLAT, torch.bool), meta(FLAT, F32)
    found["aligned amax bf16"] = folded(s.LARGEST, x, mask)
    found["aligned norm bf16"] = folded(s.NORM, x, mask)
    found["aligned norm -inf bf16"] = folded(s.LARGEST, x, mask, absolute=True, negate=True)
    found["aligned norm 1 bf16"] = folded(s.ABSOLUTE_SUM, x, mask)
    found["aligned safe_norm bf16"] = folded(s.NORM, x, mask, absolute=True, saturate=True)
    found["aligned sum of squares bf16"] = folded(s.SQUARE_SUM, x, mask)
    found["aligned std bf16"] = folded(s.STD, x)
    found["aligned rms weight bf16"] = folded(s.RMS, x, mask, x)
    found["aligned var weight bf16+fp32"] = folded(s.VAR, x, mask, w)
    found["aligned logsumexp weight bf16"] = folded(s.LOGSUMEXP, x, mask, x)
    found["count flat bf16"] = folded(s.COUNT, None, mask, shape=FLAT)
    found["aligned count weight bf16"] = folded(s.COUNT, None, mask, x, shape=FLAT)
    for kind, shape in enumerate(statistic_backward.KINDS[1:], 1):
        found[f"aligned {shape.__name__}_backward bf16"] = returned(kind, x, mask, x if kind == 2 else None)
    for dtype in (BF16, F32):
        name, x, mask = str(dtype)[6:], meta((8192, 4096), dtype), meta((8192, 4096), torch.bool)
        for result in ("VAR", "LOGSUMEXP", "LARGEST"):
            found[f"aligned rows {result} {name}"] = folded(getattr(s, result), x, mask, dims=[1])
            found[f"aligned columns {result} {name}"] = folded(getattr(s, result), x, mask, dims=[0])
        found[f"aligned few rows VAR {name}"] = folded(s.VAR, meta((64, 1 << 20), dtype), dims=[1])
        found[f"aligned columns weight VAR {name}"] = folded(s.VAR, x, mask, x, dims=[0])
        found[f"aligned rows linear_backward {name}"] = returned(0, x, mask, x, dims=[1])
        found[f"aligned columns exponential_backward {name}"] = returned(2, x, mask, dims=[0])
        found[f"aligned 2^33 VAR {name}"] = folded(s.VAR, meta((1 << 33,), dtype))
        across = meta((8192, 4096), dtype, (1, 8192))
        found[f"general transposed VAR {name}"] = folded(s.VAR, across, mask, x)
        found[f"general odd rows LOGSUMEXP {name}"] = folded(s.LOGSUMEXP, meta((511, 4095), dtype), dims=[1])
        found[f"general batch and space VAR {name}"] = folded(s.VAR, meta((32, 64, 4095), dtype), dims=[0, 2])
        found[f"general transposed linear_backward {name}"] = returned(0, across, mask, dims=[1])
    rare = re.compile(r".*(rows|batch|2\^33|LOGSUMEXP|columns \w+).* float32")  # no other path than in bf16
    return {name: plan for name, plan in found.items() if not rare.match(name)}


def covered(plans):
    """Every statistic's launcher, and every shape of the backward, is among the plans."""
    results = {plan.constants.get("RESULT") for plan in plans}
    assert set(range(len(fold.MODE))) <= results
    assert set(statistic_backward.KINDS) <= {plan.constants.get("F") for plan in plans}
