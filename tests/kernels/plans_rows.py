"""Makes plans (kernel, constants and launch options, from meta tensors) of softmax, normalize, cosine_similarity,
lpips_distance and triplet_margin_loss, forward and backward. test_triton_build.py compiles them."""

import re

import torch
from safeops.kernels.engine import row_backward as rows_backward
from safeops.kernels.engine import row_forward as rows
from safeops.kernels.engine import row_plan as row
from safeops.kernels.engine.elementwise import compute_dtype
from safeops.kernels.images import lpips_distance as lpips
from safeops.kernels.vectors import cosine_embedding_loss as embedding
from safeops.kernels.vectors import cosine_similarity as cosine
from safeops.kernels.vectors import triplet_margin_loss as triplet
from safeops.kernels.vectors import triplet_margin_loss_backward as triplet_backward

from tests.kernels.plans_statistics import BF16, F16, F32, F64, meta

SOFTMAX, LOG_SOFTMAX, NORMALIZE = (op.value for op in (rows.SOFTMAX, rows.LOG_SOFTMAX, rows.NORMALIZE))


OFTEN = re.compile(  # names of the plans that are compiled for other architectures than sm_90, too
    r"aligned (softmax_backward|log_softmax few long|normalize_backward channels|cosine(_backward)? channels) bfloat16|"
    r"aligned (log_softmax|normalize)(_backward)? odd long bfloat16|"
    r"aligned triplet(_backward)? swap bfloat16|aligned lpips(_backward)? bfloat16|"
    r"general log_softmax_backward transposed bfloat16"
)


def number(x, dim, dtype=F64):
    return meta(row.with_one_per_row(x.shape, dim), dtype)


def forward(op, x, mask=None, dim=-1):
    dim %= x.dim()
    second = None if op == NORMALIZE else number(x, dim)
    tensors = (x, mask, torch.empty_like(x), number(x, dim), second)
    return row.plan(rows.ROWS, tensors, (3, 4), x.shape, dim, compute_dtype(x), {"OP": op}, partials=3)


def backward(op, x, mask=None, dim=-1, grad=None):
    dim %= x.dim()
    second = None if op == NORMALIZE else number(x, dim)
    grad = torch.empty_like(x) if grad is None else grad
    tensors = (x, grad, mask, torch.empty_like(x), number(x, dim), second)
    compute = compute_dtype(x, grad)
    return row.plan(rows_backward.ROWS_BACKWARD, tensors, (4, 5), x.shape, dim, compute, {"OP": op}, partials=1)


def cosines(x, y, dim=-1):
    dim %= x.dim()
    tensors = (x, y, None, None, None, number(x, dim, compute_dtype(x, y)), number(x, dim), number(x, dim))
    compute = compute_dtype(x, y)
    return row.plan(cosine.COSINE, tensors, cosine.PER_ROW, x.shape, dim, compute, phases=row.SUM, partials=5)


def cosines_backward(x, y, dim=-1):
    dim %= x.dim()
    compute = compute_dtype(x, y)
    outputs = (torch.empty_like(t) if 0 not in t.stride() else meta(t.shape, compute) for t in (x, y))
    statistics = (number(x, dim, compute), number(x, dim, compute), number(x, dim), number(x, dim))
    tensors = (x, y, None, *statistics, *outputs)
    return row.plan(cosine.COSINE_BACKWARD, tensors, cosine.BACKWARD_PER_ROW, x.shape, dim, compute, phases=row.MAP)


def embeddings(x, keep=None, dtype=torch.int64):
    _, plan, options = embedding.prepare(x, x, meta(x.shape[:-1], dtype), keep)
    return row.plan(*plan, **options)


def embeddings_backward(x, dtype=torch.int64):
    rows = meta(x.shape[:-1], F64)
    grad = meta((), F32).expand(rows.shape)
    row_stats = meta(rows.shape, compute_dtype(x)), rows, rows
    _, plan, options = embedding.prepare_backward(grad, (x, x), meta(rows.shape, dtype), row_stats, (True, True))
    return row.plan(*plan, **options)


def distances(x, weight=None, keep=None):
    """Returns the plan of lpips_distance for one layer's features x (N, C, H, W)."""
    _, plan, options = lpips.prepare(x, x, weight, keep)
    return row.plan(*plan, **options)


def distances_backward(x, weight=None):
    results, _, _ = lpips.prepare(x, x, weight, None)
    grad = meta((), F32).expand(results[0].shape)
    _, plan, options = lpips.prepare_backward(grad, x, x, weight, results, (True, False))
    return row.plan(*plan, **options)


def triplets(x, swap=False, keep=None, mean=None):
    _, plan, constants, options = triplet.prepare(x, x, x, keep, swap, mean)
    return row.plan(*plan, constants, **options)


def triplets_backward(x, swap=False, mean=False):
    number = meta(x.shape[:-1], F64)
    distances = number, number, number if swap else meta((0,), F64)
    _, plan, constants, options = triplet_backward.prepare_backward(
        meta((), F32), (x,) * 3, distances, swap, (True,) * 3, meta((), F64) if mean else None
    )
    return row.plan(*plan, constants, **options)


def cases():
    results = {}
    for dtype in (F16, BF16, F32, F64):
        name, x, mask = str(dtype)[6:], meta((8192, 4096), dtype), meta((8192, 4096), torch.bool)
        results[f"aligned softmax {name}"] = forward(SOFTMAX, x, mask)
        results[f"aligned softmax_backward {name}"] = backward(SOFTMAX, x, mask)
        if dtype != F16:  # fp16 takes bf16's path
            results[f"aligned cosine {name}"] = cosines(x, x)
            results[f"aligned cosine_backward {name}"] = cosines_backward(x, x)
            results[f"aligned triplet {name}"] = triplets(x)
            results[f"aligned triplet_backward {name}"] = triplets_backward(x)
    for dtype in (BF16, F32):
        name, x, mask = str(dtype)[6:], meta((8192, 4096), dtype), meta((8192, 4096), torch.bool)
        longest, wide = meta((1 << 12, 1 << 14), dtype), meta((1 << 12, 1 << 15), dtype)  # the longest rows that fit
        wide_mask = meta(wide.shape, torch.bool)
        many, long, few = meta((1 << 12, 1 << 17), dtype), meta((4, 1 << 20), dtype), meta((4, 3, 1 << 20), dtype)
        channels, huge = meta((64, 256, 4096), dtype), meta((1 << 17, 1 << 16), dtype)
        across, odd = meta((8192, 4096), dtype, (1, 8192)), meta((511, 4095), dtype)
        tall = meta((1 << 18, 64), dtype)
        shared = meta((64, 256, 4096), torch.bool, (4096, 0, 1))
        for op, which in ((LOG_SOFTMAX, "log_softmax"), (NORMALIZE, "normalize")):
            keep, other = (None, None) if op == NORMALIZE else (mask, shared)
            for make, back in ((forward, ""), (backward, "_backward")):
                results[f"aligned {which}{back} rows {name}"] = make(op, x, keep)
                results[f"aligned {which}{back} longest {name}"] = make(op, longest)
                results[f"aligned {which}{back} 32768 {name}"] = make(op, wide, None if op == NORMALIZE else wide_mask)
                results[f"aligned softmax{back} 32768 {name}"] = make(SOFTMAX, wide, wide_mask)
                results[f"aligned {which}{back} many long {name}"] = make(op, many)
                results[f"aligned {which}{back} few long {name}"] = make(op, long)
                results[f"aligned {which}{back} channels {name}"] = make(op, channels, other, 1)
                results[f"aligned {which}{back} few long columns {name}"] = make(op, tall, None, 0)
                results[f"aligned {which}{back} 2^33 {name}"] = make(op, huge)
                results[f"general {which}{back} transposed {name}"] = make(op, across, keep)
                results[f"general {which}{back} odd {name}"] = make(op, odd, None)
                results[f"aligned {which}{back} odd long {name}"] = make(op, meta((1 << 12, 50257), dtype), None)
                results[f"aligned {which}{back} odd few long {name}"] = make(op, meta((4, (1 << 20) + 1), dtype), None)
        expanded = meta((8192, 4096), dtype, (0, 1))
        results[f"aligned cosine few long {name}"] = cosines(few, few)
        results[f"aligned cosine channels {name}"] = cosines(channels, channels, 1)
        results[f"aligned cosine_backward channels {name}"] = cosines_backward(channels, channels, 1)
        results[f"aligned cosine broadcast {name}"] = cosines(x, expanded)
        results[f"aligned cosine_backward broadcast {name}"] = cosines_backward(x, expanded)
        results[f"aligned embedding {name}"] = embeddings(x, meta((8192,), torch.bool))
        results[f"aligned embedding few long {name}"] = embeddings(long, None, dtype)
        results[f"aligned embedding channels {name}"] = embeddings(channels.mT)
        results[f"aligned embedding_backward {name}"] = embeddings_backward(x)
        results[f"general embedding odd {name}"] = embeddings(odd)
        results[f"general embedding_backward odd {name}"] = embeddings_backward(odd, dtype)
        results[f"general cosine transposed {name}"] = cosines(x, across)
        for which, shape, order in (
            ("", (64, 64, 64, 64), None), (" few", (64, 4, 64, 64), None), (" many", (64, 512, 32, 32), None),
            (" in parts", (64, 4096, 8, 8), None), (" last", (64, 256, 32, 32), torch.channels_last),
        ):  # fmt: skip
            layer = meta(shape, dtype).to(memory_format=order or torch.contiguous_format)
            weight, seen = meta((shape[1], 1, 1), F32), meta((shape[0], 1, *shape[2:]), torch.bool)
            results[f"aligned lpips{which} {name}"] = distances(layer, weight, seen)
            results[f"aligned lpips_backward{which} {name}"] = distances_backward(layer, weight)
        results[f"general lpips {name}"] = distances(meta((64, 512, 7, 7), dtype))
        results[f"general lpips_backward {name}"] = distances_backward(meta((64, 512, 7, 7), dtype))
        results[f"aligned triplet swap {name}"] = triplets(x, True, meta((8192,), torch.bool))
        results[f"aligned triplet_backward swap {name}"] = triplets_backward(x, True)
        results[f"aligned triplet of rows {name}"] = triplets(x, mean=True)
        results[f"aligned triplet of few long rows {name}"] = triplets(long, True, mean=True)
        results[f"aligned triplet_backward of rows {name}"] = triplets_backward(x, mean=True)
        results[f"aligned triplet few long {name}"] = triplets(long, True)
        results[f"aligned triplet channels {name}"] = triplets(channels.mT)
        results[f"aligned triplet_backward channels {name}"] = triplets_backward(channels.mT)
        results[f"general triplet odd {name}"] = triplets(odd)
        results[f"general triplet_backward odd {name}"] = triplets_backward(odd)
        results[f"general cosine_backward transposed {name}"] = cosines_backward(x, across)
    rare = re.compile(
        r".*(triplet|longest|many long|columns|2\^33|odd|broadcast|lpips|embedding| rows|normalize).* float32"
    )
    return {name: plan for name, plan in results.items() if not rare.match(name)}


def covered(plans):
    """Assert that every op has plans with rows held whole and read in parts; the row kernels also with split rows."""
    seen = {
        (p.kernel.fn.__name__, *(p.constants.get(name) for name in ("OP", "WHOLE", "SPLIT")))
        for p in plans
    }  # fmt: skip
    for kernel in ("rows_kernel", "rows_backward_kernel"):
        assert (kernel, SOFTMAX, True, False) in seen
        for op in (LOG_SOFTMAX, NORMALIZE):
            assert {(kernel, op, True, False), (kernel, op, False, False), (kernel, op, False, True)} <= seen
    for kernel in ("cosine_kernel", "triplet_kernel"):
        assert {(kernel, None, True, None), (kernel, None, False, None)} <= seen
    assert {("lpips_kernel", None, True, None), ("lpips_kernel", None, False, None)} <= seen
