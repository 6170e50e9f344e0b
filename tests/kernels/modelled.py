"""Predictions of the GPU model (benchmarks/gpu_model.py) for the launches of every Triton kernel. modelled_cuda.py has
those of the C++ kernels.

`python -m tests.kernels.modelled` writes the table of docs/gpu-model.md, which test_gpu_model.py holds the kernels to.
"""

import torch
from safeops.kernels.divergences import divergence
from safeops.kernels.reductions.segment_backward import SEGMENT_BACKWARD, WAYS

from benchmarks import machine_code
from benchmarks.gpu_model import GPUS, load_of, predict
from benchmarks.machine_code import AVOIDED
from tests.kernels import measured, modelled_cuda
from tests.kernels import plans_classification as classes
from tests.kernels import plans_divergence as divergences
from tests.kernels import plans_regions as regions
from tests.kernels import plans_rows as rows
from tests.kernels import plans_segments as segments
from tests.kernels import plans_statistics as statistics
from tests.kernels.measured import DOCUMENT, HEAD
from tests.kernels.plans_statistics import BF16, F16, F32, F64, STATISTICS, meta
from tests.kernels.test_triton_build import BIN, LOSSES, TARGETS, formulas, mapped, mse_loss, reduced

DTYPES = {"bf16": BF16, "fp32": F32}
SIZES = {"64M": 1 << 26, "4M": 1 << 22}
COLUMNS, CLASSES, SEGMENT = 4096, 32768, 1000
DIVERGENCES = {
    "kl_div_with_logits": divergence.KL,
    "js_div_with_logits": divergence.JS,
    "tv_with_logits": divergence.TV,
}


def flat(n, dtype, start=0):
    return meta((n + start,), dtype)[start:], meta((n + start,), torch.bool)[start:]


def cases(n):
    """Returns {(op, direction, layout, dtype): plan} of about n elements. Layouts: `flat` reduces all elements; `rows`
    and `columns` have 4096 elements each; `offset` starts at an address that is no multiple of 16 bytes; `odd` has rows
    of odd length."""
    results = {}
    for name, dtype in (DTYPES | {"fp16": F16, "fp64": F64}).items():
        x, mask = flat(n, dtype)
        results["masked_mean", "forward", "flat", name] = reduced(None, x, None, mask)
        results["masked_mean", "backward", "flat", name] = mapped(None, x, None, mask)
        for module in (mse_loss, *(LOSSES if name in DTYPES else ())):
            for op, (value, derivative) in formulas(module).items():
                results[op[5:], "forward", "flat", name] = reduced(value, x, x, mask)
                results[op[5:], "backward", "flat", name] = mapped(derivative, x, x, mask)
    for name, dtype in DTYPES.items():
        x, mask = flat(n, dtype)
        for result in STATISTICS:
            results[result.lower(), "forward", "flat", name] = statistics.forward(
                result, None if result == "COUNT" else x, mask, shape=x.shape
            )
        for kind, slope in enumerate(statistics.statistic_backward.SLOPES):
            results[f"{slope.__name__} slope", "backward", "flat", name] = statistics.backward(kind, x, mask)
        offset, keep = flat(n, dtype, 1)
        results["mse_loss", "forward", "offset", name] = reduced(mse_loss.value, offset, offset, keep)
        results["mse_loss", "backward", "offset", name] = mapped(mse_loss.slope, offset, offset, keep)
        x, mask = meta((n // COLUMNS, COLUMNS), dtype), meta((n // COLUMNS, COLUMNS), torch.bool)
        for dim, layout in enumerate(("columns", "rows")):
            results["masked_mean", "forward", layout, name] = reduced(None, x, None, mask, dims=[dim])
            for result in ("VAR", "LOGSUMEXP"):
                results[result.lower(), "forward", layout, name] = statistics.forward(result, x, mask, dims=[dim])
        for op, number in (("softmax", rows.SOFTMAX), ("log_softmax", rows.LOG_SOFTMAX), ("normalize", rows.NORMALIZE)):
            keep = None if op == "normalize" else mask
            results[op, "forward", "rows", name] = rows.forward(number, x, keep)
            results[op, "backward", "rows", name] = rows.backward(number, x, keep)
        results["cosine", "forward", "rows", name] = rows.cosines(x, x)
        results["cosine", "backward", "rows", name] = rows.cosines_backward(x, x)
        results["triplet_margin_loss", "forward", "rows", name] = rows.triplets(x)
        results["triplet_margin_loss", "backward", "rows", name] = rows.triplets_backward(x)
        x = meta((n // 4, 4), dtype)
        results["box_iou_loss", "forward", "boxes", name] = classes.boxes(x)
        results["box_iou_loss", "backward", "boxes", name] = classes.boxes(x, gradient=True)
        for width in (128, 1024, CLASSES):
            x, layout = meta((n // width, width), dtype), f"rows of {width}"
            results["multi_margin_loss", "forward", layout, name] = classes.margins(x)
            results["multi_margin_loss", "backward", layout, name] = classes.margins(x, gradient=True)
        x = meta((n // 128, 128), dtype)
        results["triplet_margin_loss", "forward", "rows of 128", name] = rows.triplets(x)
        results["triplet_margin_loss", "backward", "rows of 128", name] = rows.triplets_backward(x)
        for layout, width in (("rows", CLASSES), ("odd", 50257)):
            x = meta((n // width, width), dtype)
            results["cross_entropy", "forward", layout, name] = classes.forward(x)
            results["cross_entropy", "backward", layout, name] = classes.backward(x)
            results["softmax", "forward", f"{layout} of {width}", name] = rows.forward(rows.SOFTMAX, x)
        x = meta((n // CLASSES, CLASSES), dtype)
        results["token_log_probs", "forward", "rows", name] = classes.forward(x, entropy=True)
        results["token_log_probs", "backward", "rows", name] = classes.backward(x, entropy=True)
        for op, kind in DIVERGENCES.items():
            results[op, "forward", "rows", name] = divergences.forward(kind, x, x)
            results[op, "backward", "rows", name] = divergences.backward(kind, x, x)
        # Only the backward: the forward of the reverse KL is that of KL with the operands exchanged.
        reverse = "reverse_kl_div_with_logits", "backward", "rows", name
        results[reverse] = divergences.backward(divergence.KL, x, x, False, True)
        for layout, x in (("rows", meta((n // 512, 512), dtype)), ("flat", meta((n,), dtype))):
            for op in segments.MODES:
                packed = {"sequences": -(-x.shape[0] // SEGMENT)}
                results[f"segment_{op}", "forward", layout, name] = segments.forward(op, x, **packed)
                results[f"segment_{op}", "backward", layout, name] = segments.backward(op, x, **packed)
        results["softmax", "forward", "one row", name] = rows.forward(rows.SOFTMAX, meta((1, n), dtype))
        x, target, mask = regions.operands((n >> 20, 16, 256, 256), dtype, masked=True)
        results["regions", "forward", "images", name] = regions.forward(x, target, mask)
        results["regions", "backward", "images", name] = regions.backward(x, target, mask)
    return results


def search_passes(plan):
    """Returns {bytes that one pass of a loop loads: number of passes} for loops that are not over tiles, or None. Such
    loops are in the segments' backward: a search for the sequences of the tile's first and last row, and, if a
    tile is long enough that these may differ, one for the sequence of each row."""
    if plan.kernel is not SEGMENT_BACKWARD:
        return None
    rows, threads, bound = plan.values["BM"], plan.config.threads, plan.dtypes["bounds"].itemsize
    ends, each = 2 * WAYS.value // threads * bound, max(rows // threads, 1) * bound
    return {ends: plan.values["steps"], each: (rows // SEGMENT + 1).bit_length() if rows >= SEGMENT else AVOIDED}


def predictions(gpu, plans):
    """Returns {name: (registers per thread, rounds, Prediction)}. rounds: trips to memory one after the other, in which
    the last block adds up the partial results. Each kernel is compiled once for all sizes."""
    arch, compiled, keys = f"sm_{gpu.arch}", {}, {}
    for name, plan in plans.items():
        key = plan.kernel.fn, repr((plan.signature, plan.attrs, plan.config)), tuple(plan.constants.items())
        if key not in compiled:
            binary = plan.compile(TARGETS[arch])
            compiled[key] = binary.asm["cubin"], binary.metadata.shared, search_passes(plan)
        keys[name] = key
    codes = dict(zip(compiled, machine_code.read([*compiled.values()], gpu.arch, BIN / "nvdisasm")))
    results = {}
    for name, plan in plans.items():
        code, load = codes[keys[name]], load_of(plan)
        results[name] = code.registers, load.rounds, predict(code, load, gpu)
    return results


def recorded():
    """Returns {name: (predicted share of the copy bandwidth at 64M elements, at 4M)} on the H200, from the document."""
    return {tuple(row[:4]): (float(row[9]), float(row[10])) for row in measured.table(DOCUMENT.read_text())[1]}


def main():
    launches = modelled_cuda.Plans()
    others = [name for name in GPUS if name != "H200"]
    tables = []
    for predicted, sizes in (
        (predictions, [cases(n) for n in SIZES.values()]),
        (modelled_cuda.predictions, [modelled_cuda.cases(n, launches) for n in SIZES.values()]),
    ):
        half = {name: plan for name, plan in sizes[0].items() if name[3] == "bf16"}
        runs = [(GPUS["H200"], plans) for plans in sizes] + [(GPUS[name], half) for name in others]
        tables.append([predicted(gpu, plans) for gpu, plans in runs])
    large, small, *more = (triton | cuda for triton, cuda in zip(*tables))
    lines = [HEAD + "".join(f" {name} |" for name in others), "|---" * (11 + len(others)) + "|"]
    for name, (registers, rounds, result) in large.items():
        runs = f"{result.instructions:.0f} | {registers} | {result.in_flight:.0f} | {rounds} | {result.bound}"
        results = [table[name][2] if name in table else None for table in (large, small, *more)]
        lines.append(" | ".join(("", *name, runs, *(f"{p.share:.2f}" if p else "" for p in results), ""))[1:-1])
    text = DOCUMENT.read_text()
    DOCUMENT.write_text(measured.with_measured(text[: text.index(HEAD)] + "\n".join(lines) + "\n"))


if __name__ == "__main__":
    main()
