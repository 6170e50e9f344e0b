"""Judges results by their goals, and writes them as tables and files."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
from pathlib import Path

import torch

from .calls import CPP_GOAL, PARTS
from .calls import GOAL as CALL_GOAL
from .debugging import GOAL as TRACE_GOAL
from .memory import SLACK

RESULTS = Path(__file__).parent / "results"  # tables of full runs only
SCRATCH = Path(__file__).parents[1] / "build" / "benchmarks"
FLOOR = (
    " Floor: a copy that moves as many bytes, in the same rounds. Where a function's arithmetic may be the limit, "
    "torch's own op in fp32 on as many elements stands beside it. Load average, at the start and the end: {load}."
)
HOW = {
    "cpu": "Contenders take turns, each from empty caches; times are medians of {rounds} undisturbed samples, in which "
    "no thread of ours waited for a core. Quiet: the share of our samples and the copy's that were; near 0 the fastest "
    "sample counts and the goals are not judged (?). Freed memory is kept by the allocator, for all alike." + FLOOR,
    "cuda": "Contenders take turns, each from empty caches; times are medians of {rounds} samples. GPU ms: between "
    "events behind a spin kernel, which keeps the queue full, so that no host time is in them. Host us: what the "
    "host takes to enqueue the call, in the same samples, the least of all. Quiet: the share of our samples and the "
    "copy's in which the queue stayed full; near 0, as of a call that waits for the GPU, the goals are not judged (?)."
    + FLOOR,
}
QUIET = 0.1  # least share of undisturbed samples; with fewer, a comparison is not judged


def goals(record: dict, device: str) -> dict[str, bool]:
    """Returns {goal: True if it is reached} for the goals that apply to the record."""
    if "of_floor" in record:
        share = 0.9 if device == "cuda" else 0.7
        verdict = {}
        if "of_bare" in record:  # the op's arithmetic may be its limit
            reached = record["of_floor"] >= share or record["of_bare"] >= share
            verdict[f">= {share} of floor or of torch's fp32 op"] = reached
        elif device == "cpu" or record["elements"] >= 2**26:
            verdict[f">= {share} of floor"] = record["of_floor"] >= share
        if device == "cuda":
            verdict[">= 1x eager"] = record["x_fastest_eager"] >= 1
        elif not record["variant"] and "of_bare" not in record:
            verdict[">= 5x eager"] = record["x_eager"] >= 5
        if "x_compile" in record:
            verdict["> compile"] = record["x_compile"] > 1
        return verdict
    if "over_us" in record:
        most = 6 if record["grad"] else 2
        return {f"<= {most} us over aten": record["over_us"] <= most}
    return {"output alone": record["ours_peak"] <= record["output"] + SLACK}


def hardware(device: str) -> dict:
    facts = {
        "device": torch.cuda.get_device_name() if device == "cuda" else _cpu_name(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if device == "cuda":
        facts["cuda"] = torch.version.cuda
        facts["triton"] = importlib.metadata.version("triton") if importlib.util.find_spec("triton") else None
    return facts


def _cpu_name() -> str:
    try:
        return re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text()).group(1).strip()
    except (OSError, AttributeError):
        return platform.processor() or platform.machine()


def markdown(results: dict) -> str:
    device = results["settings"]["device"]
    lines = ["# " + results["hardware"]["device"], ""]
    lines += [", ".join(f"{k} {v}" for k, v in results["hardware"].items() if k != "device") + ".", ""]
    lines += [HOW[device].format(**results["settings"]), "", _routes(results.get("routes", {})), ""]
    lines += _speed(results["speed"], device) + _overhead(results["overhead"], device)
    lines += _memory(results["memory"], device)
    lines += _debugging(results.get("debugging", [])) + _calls(results.get("calls", []))
    lines += _distributed(results.get("distributed", {"ops": [], "all_reduce": []}))
    patterns = {r["op"]: r["eager_pattern"] for r in results["speed"] if r["direction"] == "forward"}
    lines += ["x-eager: against the pattern as most write it:", "", *(f"- {k}: `{v}`" for k, v in patterns.items()), ""]
    if missed := misses(results):
        lines += [f"Goals missed: {len(missed)}", "", *(f"- {line}" for line in missed), ""]
    return "\n".join(lines)


def _routes(routes):
    """Returns a sentence: for how many ops a kernel was measured, and for which ops the definition in torch ops."""
    plain = sorted(op for op, route in routes.items() if route != "kernel")
    return f"Kernels: {len(routes) - len(plain)} ops. Plain torch definitions: {', '.join(plain) or 'none'}."


def misses(results: dict) -> list[str]:
    device = results["settings"]["device"]
    result = []
    for record in [*results["speed"], *results["overhead"], *results["memory"]]:
        where = " ".join(str(record[k]) for k in ("op", "dtype", "direction") if k in record)
        if "grad" in record:
            where += " with grad" if record["grad"] else " without grad"
        if quiet(record) < QUIET:
            why = "the GPU waited for the host" if device == "cuda" else "the machine was busy"
            result.append(f"{where}: not judged, {why}")
            continue
        result += [
            f"{where}, {record.get('elements', 8)} elements: {goal}"
            for goal, ok in goals(record, device).items()
            if not ok
        ]
    for record in results.get("debugging", []):
        if record["tool"] == "trace" and record["x_plain"] > TRACE_GOAL:
            result.append(f"a traced step takes {record['x_plain']:.2f} times a plain one, not {TRACE_GOAL}")
    for record in results.get("calls", []):
        goal = CALL_GOAL if "new_size" in record else CPP_GOAL  # C++ ops have no plans, so no "new_size" either
        for what, us in (("a call", record["parts"]["total"]), ("one of a new size", record.get("new_size", 0))):
            if (ratio := us / record["aten"]) > goal:
                result.append(f"{record['op']}: {what} takes {ratio:.1f} times an aten op's, not {goal:.1f}")
    return result


def quiet(record: dict) -> float:
    return min(record["undisturbed"][name] for name in ("ours", "copy")) if "undisturbed" in record else 1.0


def _mark(record, device):
    if quiet(record) < QUIET:
        return "?"
    return "yes" if all(goals(record, device).values()) else "NO"


def table(title, head, rows):
    if not rows:
        return []
    widths = [max(len(str(row[i])) for row in [head, *rows]) for i in range(len(head))]
    lines = ["| " + " | ".join(str(v).ljust(w) for v, w in zip(row, widths)) + " |" for row in [head, *rows]]
    return [f"## {title}", "", lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:], ""]


def _speed(records, device):
    cuda = device == "cuda"
    head = "op dtype direction elements bytes/elem ms GB/s of-floor of-torch-fp32".split()
    head += "x-eager x-fastest-eager x-compile".split()
    if cuda:
        head[head.index("ms")] = "GPU ms"
        head += ["host us", "eager's", "compile's"]
    head += ["quiet", "goals"]
    rows = []
    ops = list(dict.fromkeys(r["op"] for r in records))
    for r in sorted(records, key=lambda r: ops.index(r["op"])):  # the table is sorted by op, which the run is not
        row = [r["op"], r["dtype"], r["direction"], f"{r['elements'] / 2**20:g}M", f"{r['bytes_per_element']:.4g}"]
        row += [f"{r['milliseconds']['ours']:.3f}", f"{r['ours_GB_per_s']:.1f}", f"{r['of_floor']:.2f}"]
        row += [f"{r['of_bare']:.2f}" if "of_bare" in r else "-"]
        row += [f"{r['x_eager']:.1f}", f"{r['x_fastest_eager']:.1f}"]
        row += [f"{r['x_compile']:.1f}" if "x_compile" in r else "-"]
        if cuda:
            hosts = map(r["host_us"].get, ("ours", f"eager: {r['eager_pattern']}", "compile"))
            row += ["-" if us is None else f"{us:.0f}" for us in hosts]
        row += [f"{quiet(r):.0%}", _mark(r, device)]
        rows.append(row)
    return table("Speed", head, rows)


def _overhead(records, device):
    head = ["op", "grad", "ours us", "aten us", "over us", "goal"]
    rows = [
        [r["op"], "yes" if r["grad"] else "no", f"{r['ours_us']:.1f}", f"{r['aten_us']:.1f}", f"{r['over_us']:+.1f}"]
        + [_mark(r, device)]
        for r in records
    ]
    return table("Cost of a call (8 elements, beside a bare aten op; the best of many)", head, rows)


def _memory(records, device):
    def mib(n):
        return f"{n / 2**20:.1f}"

    head = ["op", "dtype", "direction", "output MiB", "ours peak MiB", "eager peak MiB", "goal"]
    rows = [
        [r["op"], r["dtype"], r["direction"], mib(r["output"]), mib(r["ours_peak"]), mib(r["eager_peak"])]
        + [_mark(r, device)]
        for r in records
    ]
    return table("Peak extra memory", head, rows)


def _debugging(records):
    head = ["the demo's training step", "ms", "x-plain", "quiet"]
    rows = [[r["tool"], f"{r['milliseconds']:.0f}", f"{r['x_plain']:.2f}", f"{r['undisturbed']:.0%}"] for r in records]
    return table("What watching costs", head, rows)


def _calls(records):
    head = ["op", "us", "x-aten", *(f"{part} us" for part in PARTS)]
    head += ["new number us", "first size us", "traced us", "new size us"]
    rows = []
    for r in records:
        parts = r["parts"]
        row = [r["op"], f"{parts['total']:.1f}", f"{parts['total'] / r['aten']:.1f}"]
        more = map((parts | r).get, (*PARTS, "python", "first_size", "traced", "new_size"))
        rows.append([*row, *("-" if us is None else f"{us:.1f}" for us in more)])
    return table("Host time of a CUDA op (fp32, no grad; beside a driver that does nothing)", head, rows)


def _distributed(records):
    rivals = ["loss_parallel", "gathering"]
    head = ["op", "ranks", "bytes a rank", "collectives", "ms", "local kernel ms"]
    head += [text for rival in rivals for text in (f"{rival} bytes", f"{rival} ms")]
    rows = []
    for r in records["ops"]:
        ms, size = r["milliseconds"], r["bytes"]
        row = [r["op"], r["ranks"], size["ours"], r["collectives"]["ours"], f"{ms['ours']:.2f}", f"{ms['local']:.2f}"]
        for rival in rivals:
            row += [size[rival], f"{ms[rival]:.2f}"] if rival in ms else ["-", "-"]
        rows.append(row)
    title = "Across ranks (gloo on this machine, forward and backward, one thread a rank; medians of the slowest rank)"
    times = [[r["bytes"], r["ranks"], f"{r['milliseconds']:.3f}"] for r in records["all_reduce"]]
    return table(title, head, rows) + table("One all-reduce of gloo", ["bytes", "ranks", "ms"], times)


def write(results: dict, path: Path):
    write_text(path, json.dumps(results, indent=1) + "\n")
    write_text(path.with_suffix(".md"), markdown(results))


def publish(results: dict):
    """Writes the table of a full run to RESULTS/<hardware>/<device>.md."""
    hardware, device = results["hardware"], results["settings"]["device"]
    name = hardware["device"] + (f" {hardware['capability']}" if device == "cpu" else "")
    path = RESULTS / re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-") / f"{device}.md"
    write_text(path, markdown(results))
    return path


def write_text(path: Path, text: str):
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")  # an interrupted run leaves the previous file whole
    partial.write_text(text)
    os.replace(partial, path)
