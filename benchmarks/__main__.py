"""Runs the benchmarks: `python -m benchmarks --help` lists the options."""

import argparse
import fnmatch
import itertools
import os
import sys
from pathlib import Path

TABLES = ("debugging", "calls", "distributed")  # names that are not ops; each has a table of its own


def parse(argv):
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ops", default="", help="comma-separated, also patterns: 'cross_entropy*'; all by default")
    parser.add_argument("--dtypes", default="bf16,fp32", help="of fp16,bf16,fp32,fp64 (default: %(default)s)")
    parser.add_argument("--size", default="", help="elements, e.g. 1M,16M (default: 16M; CUDA: 1M to 256M)")
    parser.add_argument("--rounds", type=int, default=0, help="samples of each contender (default 15; --quick 5)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="the file to write, a .md beside it; `-`: none")
    parser.add_argument("--quick", action="store_true", help="one size, fewer rounds, no torch.compile")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile, which takes most of the run")
    parser.add_argument("--fresh-memory", action="store_true", help="leave malloc as it is (CPU): page faults included")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal is missed")
    parser.add_argument(
        "--compare", metavar="CHECKOUT", help="another checkout's build beside this one; 1 where this one is slower"
    )
    options = parser.parse_args(argv)
    options.no_compile |= options.quick
    options.rounds = options.rounds or (5 if options.quick else 15)
    sizes = options.size or ("16M" if options.device == "cpu" else "64M" if options.quick else "64M,1M,256M,16M,4M")
    options.sizes = [elements(size) for size in sizes.split(",")]
    return options


def is_full(options) -> bool:
    """True if all options but --json and --check have their defaults: only such a run replaces the kept results."""
    default = parse(["--device", options.device])
    return all(getattr(options, key) == value for key, value in vars(default).items() if key not in ("json", "check"))


def elements(text: str) -> int:
    for suffix, factor in (("K", 2**10), ("M", 2**20), ("G", 2**30)):
        if text.upper().endswith(suffix):
            return int(float(text[:-1]) * factor)
    return int(text)


def chosen(options) -> list[str]:
    """Returns the names to measure: of cases, and of TABLES."""
    from . import case

    choices = [*case.names(), *TABLES]
    asked = options.ops.split(",") if options.ops else ["*"]
    if unknown := [pattern for pattern in asked if not fnmatch.filter(choices, pattern)]:
        raise SystemExit(f"unknown ops {sorted(unknown)}; there are {choices}")
    return [name for name in choices if any(fnmatch.fnmatch(name, pattern) for pattern in asked)]


def collect(options, path) -> dict:
    import torch

    from . import calls, case, debugging, distributed, memory, overhead, report, speed, timing

    names = chosen(options)
    if options.device == "cpu" and not options.fresh_memory:
        timing.steady_memory()
    torch.set_num_threads(options.threads)
    settings = {"device": options.device, "rounds": options.rounds, "fresh_memory": options.fresh_memory}
    settings["load"] = [round(os.getloadavg()[0], 1)] * 2
    results = {"hardware": report.hardware(options.device), "settings": settings}
    results |= {"routes": routes(options.device), "speed": [], "overhead": [], "memory": []}
    # The ops are the inner loop, so that a run that is cut off has a result for every op.
    ops = [name for name in names if name not in TABLES]
    plan = list(itertools.product(options.dtypes.split(","), options.sizes, ops))
    for done, (dtype, n, name) in enumerate(plan):
        print(f"\r{done}/{len(plan)} {name} {dtype} {n} elements        ", end="", file=sys.stderr, flush=True)
        benchmark = case.build(name, n, case.DTYPES[dtype], options.device)
        results["speed"] += speed.measure(benchmark, dtype, options.device, options.rounds, not options.no_compile)
        if n == options.sizes[0]:
            results["memory"] += memory.measure(benchmark, dtype, options.device)
            if dtype == options.dtypes.split(",")[0]:
                results["overhead"] += overhead.measure(name, options.device, 4 * options.rounds)
        settings["load"][1] = round(os.getloadavg()[0], 1)
        if path:
            report.write(results, path)
    print("\r" + " " * 60 + "\r", end="", file=sys.stderr)
    if "debugging" in names:
        results["debugging"] = debugging.measure(options.device, options.rounds)
    if "calls" in names:
        results["calls"] = calls.measure()
    if "distributed" in names and options.device == "cpu":
        results["distributed"] = distributed.measure(options.rounds)
    if path:
        report.write(results, path)
    return results


def routes(device: str) -> dict:
    """Returns {op: "kernel" or "composite"}: what runs on this device, a kernel of the op or its definition in torch
    ops."""
    from safeops.core.op import registry

    return {name: "kernel" if op.runs_on(device) else "composite" for name, op in registry.items()}


def main(argv=None):
    options = parse(argv)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces each of its starts
    from . import compare, report

    name = f"{options.device}.json"
    path = options.json or report.SCRATCH / (f"compare-{name}" if options.compare else name)
    path = None if str(path) == "-" else path
    if options.compare:
        return compare.run([name for name in chosen(options) if name not in TABLES], options, path)
    results = collect(options, path)
    print(report.markdown(results))
    written = [path] if path else []
    if is_full(options):
        written.append(report.publish(results))
    if written:
        print("written:", *written)
    return 1 if options.check and report.misses(results) else 0


if __name__ == "__main__":
    sys.exit(main())
