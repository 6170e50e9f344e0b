"""`safeops verify`: its arguments, what it prints, and what it records."""

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from safeops import _verified
from safeops._op import registry
from safeops.verify import pool

EXIT_PASSED, EXIT_FAILED, EXIT_NOTHING = 0, 1, 2
SECONDS = 180  # that a worker may be silent: a check compiles up to a hundred kernels


def add_parser(commands):
    parser = commands.add_parser(
        "verify",
        help="run the CUDA kernels against their fp64 definitions on this machine's GPUs, and trust those that pass",
        description="Runs every CUDA and Triton kernel, forward and backward, against its definition in fp64, in "
        "processes of their own, and records which have passed: those are used from then on.",
        epilog="Exit codes: 0 all passed; 1 one failed, or could not be judged; 2 bad arguments, or no GPU.",
    )
    parser.add_argument("--full", action="store_true", help="more layouts, sizes and dtypes; memory left unwritten")
    parser.add_argument("--ops", nargs="+", default=[], metavar="OP", help="these (default: all)")
    parser.add_argument("--missing", action="store_true", help="only those without a record")
    parser.add_argument(
        "--device", help="cuda:1, ...; cpu tries the CPU kernels and records nothing (default: all GPUs)"
    )
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="processes (default: one per core, at most 8)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"limit of a check (default: {SECONDS})")
    parser.add_argument("--log", type=Path, metavar="FILE", help="the results as lines of JSON, too, as they come")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="where to (default: verified.json in the cache folder)"
    )


def run(arguments):
    """Verify; return the exit code."""
    unknown = sorted(set(arguments.ops) - set(registry))
    if unknown:
        return _refuse(f"there is no op {unknown[0]!r}")
    try:
        devices = [torch.device(arguments.device)] if arguments.device else each_gpu()
    except RuntimeError as error:
        return _refuse(str(error).splitlines()[0])
    if not devices or (devices[0].type == "cuda" and not torch.cuda.is_available()):
        return _refuse("torch sees no CUDA device (--device cpu tries the same checks on the CPU kernels)")
    if devices[0].type not in ("cpu", "cuda"):
        return _refuse(f"{devices[0]}: there are kernels for CPUs and CUDA devices")
    if devices[0].type == "cuda" and (devices[0].index or 0) >= torch.cuda.device_count():
        return _refuse(f"there is no {devices[0]}")
    try:
        with _verified.locked():
            return max(verify(device, arguments) for device in devices)
    except OSError as error:
        return _refuse(f"{error} (records go to {_verified.cache_folder()}: SAFEOPS_CACHE may name another folder)")


def _refuse(why):
    print(f"safeops verify: {why}", file=sys.stderr)
    return EXIT_NOTHING


def each_gpu():
    """One device of each model."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    models = {_verified.gpu(i): i for i in reversed(range(count))}
    return [torch.device("cuda", i) for i in sorted(models.values())]


def due(device, names=(), missing=False):
    """({op: why it is not run}, the ops to run) on a device: those with kernels of their own."""
    left, found = {}, []
    for name, op in sorted(registry.items()):
        if not op.raw or (names and name not in names):
            continue
        if device.type == "cpu":
            found.append(name) if op.cpu else left.update({name: "no kernel for the CPU"})
            continue
        verdict = _verified.verdict(op, device.index or 0, ask=False)
        if not verdict.kernel:
            left[name] = verdict.reason
        elif not missing or _verified.verdict(op, device.index or 0).open:
            found.append(name)
    return ({} if missing else left), found


def verify(device, arguments):
    """One device: the exit code."""
    left, ops = due(device, arguments.ops, arguments.missing)
    where = _verified.gpu(device.index or 0)[0] if device.type == "cuda" else "the CPU"
    print(f"safeops verify: {len(ops)} ops on {where}", flush=True)
    if not ops and not left:
        return EXIT_PASSED
    facts, results = of_machine(), []
    name = f"cuda:{device.index or 0}" if device.type == "cuda" else "cpu"
    jobs = arguments.jobs or min(8, os.cpu_count() or 1)
    with progress(len(ops)) as tell:
        for result in pool.Pool(ops, pool.command(name, arguments.full), jobs, arguments.seconds):
            results.append(result)
            tell(result)
            if arguments.log:
                with open(arguments.log, "a") as log:
                    log.write(f"{json.dumps({'stage': 'verify', **dataclasses.asdict(result)})}\n")
            if device.type == "cuda" and result.verdict != pool.UNKNOWN:
                _verified.save([record(result, device.index or 0, facts)], arguments.record)
    print(table(results, left))
    return EXIT_FAILED if any(result.verdict != pool.PASSED for result in results) else EXIT_PASSED


def of_machine():
    """What a record says beside what it is asked by."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    told = subprocess.run(query, capture_output=True, text=True).stdout.split() if shutil.which(query[0]) else []
    driver = told[0] if told else None
    return {"driver": driver, "torch": torch.__version__, "date": datetime.date.today().isoformat()}


def record(result, index, facts):
    passed = result.verdict == pool.PASSED
    return _verified.identity(registry[result.op], index) | facts | {"passed": passed, "why": result.why}


# ---- what is printed


@contextlib.contextmanager
def progress(count):
    """A function that is told each result: a bar where rich is installed and someone looks, else a line each."""
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        Progress = None
    if Progress is None or not sys.stdout.isatty():
        done = iter(range(1, count + 1))
        yield lambda result: print(f"[{next(done)}/{count}] {_line(result)}", flush=True)
        return
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns) as bar:
        task = bar.add_task("", total=count)

        def tell(result):
            bar.update(task, advance=1, description=result.op)
            if result.verdict != pool.PASSED:
                bar.console.print(_line(result), markup=False, highlight=False)

        yield tell


def _line(result):
    return f"{result.op}: {result.verdict}, {result.seconds:.1f} s" + (f": {result.why}" if result.why else "")


def table(results, left):
    """Every op, what came of it, and what was checked."""
    rows = [("op", "verdict", "checks", "seconds", "")]
    for result in sorted(results, key=lambda result: result.op):
        samples = sum(ran for _, ran in result.checks.values())
        checks = f"{sum(ran > 0 for _, ran in result.checks.values())} on {samples} calls"
        rows.append((result.op, result.verdict, checks, f"{result.seconds:.1f}", result.why[:160]))
    rows += [(name, "not run", "", "", why) for name, why in sorted(left.items())]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0])).rstrip() for row in rows]
    counts = {
        verdict: sum(r.verdict == verdict for r in results) for verdict in (pool.PASSED, pool.FAILED, pool.UNKNOWN)
    }
    return "\n".join(["", *lines, "", ", ".join(f"{n} {verdict}" for verdict, n in counts.items() if n or not results)])


# ---- at the first call


def automatically(index):
    """What SAFEOPS_VERIFY=auto does: the ops of device `index` without a record, in one go. Of several processes one
    does it, and the others find the records."""
    arguments = argparse.Namespace(full=False, ops=[], missing=True, jobs=0, seconds=SECONDS, log=None, record=None)
    with _verified.locked():
        _verified.forget()
        with contextlib.redirect_stdout(sys.stderr):
            verify(torch.device("cuda", index), arguments)
