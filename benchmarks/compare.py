"""Implements `--compare OTHER_CHECKOUT`: times the other checkout's build (old) and this one (new), in one run.

Each checkout has a worker process that imports its safeops. Both run the cases of this checkout, which use public
functions alone. For each op the workers take turns, sample by sample, so that a machine that slows down slows both.
"""

import json
import os
import sys
from pathlib import Path

from .report import QUIET, table, write_text
from .served import Served
from .timing import alternate

ROOT = Path(__file__).resolve().parents[1]
SLOWEST = 0.95  # old time / new time: below it, an op is too slow
DEAREST = 0.3  # microseconds that a small call may take longer in the new build
AGAIN = 3  # an op that misses a limit is measured again with 3 times as many samples: most first misses are noise

# Program of a worker: imports safeops from the working folder, then this checkout's benchmarks. A checkout has its
# Triton kernels beside the package: without the appended path, those of an installed package would be imported.
START = """
import os, sys
sys.path.insert(0, os.getcwd())
import safeops
safeops.__path__.append(os.getcwd())
sys.path.insert(0, sys.argv[1])
from benchmarks.served import serve
from benchmarks.worker import Worker
serve(Worker(), sys.stdin)
"""


class Side(Served):
    """A checkout, with the worker process that measures it."""

    def __init__(self, name, checkout, options):
        checkout = Path(checkout).resolve()
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        super().__init__(name, [sys.executable, "-c", START, str(ROOT)], cwd=checkout, env=environment)
        result = self.ask("start", options.device, options.threads, options.fresh_memory)
        if Path(result["checkout"]) != checkout or not result["built"]:
            raise SystemExit(f"{checkout}: no safeops that is built there (imported: {result}); run `make setup` in it")


def compare(names, options) -> dict:
    sides = {"old": Side("old", options.compare, options), "new": Side("new", ROOT, options)}
    results = {"speed": [], "small": [], "absent": []}
    plan = [(dtype, n, name) for dtype in options.dtypes.split(",") for n in options.sizes for name in names]
    for done, (dtype, n, name) in enumerate(plan):
        print(f"\r{done}/{len(plan)} {name} {dtype} {n} elements        ", end="", file=sys.stderr, flush=True)
        labels = {"op": name, "dtype": dtype, "elements": n}
        results["speed"] += measure(sides, ("case", name, n, dtype, options.device), labels, options, results)
        if (dtype, n) == plan[0][:2]:
            results["small"] += measure(sides, ("small", name, options.device), {"op": name}, options, results)
    print("\r" + " " * 60 + "\r", end="", file=sys.stderr)
    for side in sides.values():
        side.close()
    return results


def measure(sides, request, labels, options, results) -> list[dict]:
    """Returns a record for each direction of a case, or for each kind of small call."""
    keys = sides["new"].ask(*request)
    try:
        sides["old"].ask(*request)
    except RuntimeError as error:
        results["absent"].append(str(error))
        return []
    records = []
    for key in keys:
        small = request[0] == "small"
        rounds = options.rounds * (4 if small else 1)
        record = labels | {"direction": key} | timed(sides, key, rounds, small)
        if verdict(record) == "NO":
            record |= timed(sides, key, AGAIN * rounds, small)
        records.append(record)
    return records


def timed(sides, key, rounds, small) -> dict:
    samples = alternate({name: lambda s=side: s.ask("sample", key) for name, side in sides.items()}, rounds)
    if small:  # the best sample counts: interruptions distort calls this short
        old, new = (samples[name].best() * 1e6 for name in ("old", "new"))
        return {"old_us": old, "new_us": new, "more_us": new - old}
    old, new = (samples[name].time() * 1e3 for name in ("old", "new"))
    quiet = min(samples[name].share_clean() for name in sides)
    results = {"old_ms": old, "new_ms": new, "ratio": old / new, "quiet": quiet}
    hosts = {f"{name}_host_us": samples[name].host() for name in sides}
    return results | {key: seconds * 1e6 for key, seconds in hosts.items() if seconds is not None}


def verdict(record) -> str:
    if "more_us" in record:
        return "yes" if record["more_us"] <= DEAREST else "NO"
    return "?" if record["quiet"] < QUIET else "yes" if record["ratio"] >= SLOWEST else "NO"


def missed(results) -> list[dict]:
    """Returns the records that are too slow, or not judged because the machine was busy."""
    return [record for record in results["speed"] + results["small"] if verdict(record) != "yes"]


def markdown(results: dict, options) -> str:
    lines = [f"# {ROOT} beside {Path(options.compare).resolve()}", ""]
    hosts = ["old_host_us", "new_host_us"] if options.device == "cuda" else []  # columns in addition to the GPU's times
    rows = [
        [r["op"], r["dtype"], r["direction"], f"{r['elements'] / 2**20:g}M", f"{r['old_ms']:.3f}", f"{r['new_ms']:.3f}"]
        + [f"{r['ratio']:.2f}", *(f"{r[key]:.0f}" for key in hosts), f"{r['quiet']:.0%}", verdict(r)]
        for r in sorted(results["speed"], key=lambda r: r["ratio"])
    ]
    head = ["op", "dtype", "direction", "elements", "old ms", "new ms", "old/new"]
    head += [*(key.replace("_", " ") for key in hosts), "quiet", f">= {SLOWEST}"]
    lines += table("Speed, slowest first", head, rows)
    rows = [
        [r["op"], r["direction"], f"{r['old_us']:.2f}", f"{r['new_us']:.2f}", f"{r['more_us']:+.2f}"] + [verdict(r)]
        for r in sorted(results["small"], key=lambda r: -r["more_us"])
    ]
    head = ["op", "grad", "old us", "new us", "new - old", f"<= +{DEAREST} us"]
    lines += table("Cost of a call (8 elements; the best of many), dearest first", head, rows)
    lines += ["Not in the old checkout:", "", *(f"- {line}" for line in results["absent"]), ""] * bool(
        results["absent"]
    )
    return "\n".join([*lines, f"Limits missed, or not judged (?) on a busy machine: {len(missed(results))}", ""])


def run(names, options, path: Path | None) -> int:
    results = compare(names, options)
    text = markdown(results, options)
    print(text)
    if path:
        write_text(path.with_suffix(".json"), json.dumps(results, indent=1) + "\n")
        write_text(path.with_suffix(".md"), text)
    return 1 if missed(results) else 0
