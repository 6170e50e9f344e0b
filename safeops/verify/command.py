"""`safeops verify`: its arguments and its output. A kernel that fails is recorded, and is off from then on."""

import contextlib
import dataclasses
import datetime
import json
import os
import sys
from pathlib import Path

import torch

from safeops.core import availability, failures
from safeops.core.op import registry
from safeops.verify import pool
from safeops.verify.samples import OF_ROWS

EXIT_PASSED, EXIT_FAILED, EXIT_NOTHING = 0, 1, 2
SECONDS = 180  # longest silence of a worker: a check compiles some ten kernels


def add_parser(commands):
    parser = commands.add_parser(
        "verify",
        help="a self-test: run the CUDA kernels against their fp64 definitions on this machine's GPUs",
        description="Runs every CUDA and Triton kernel, forward and backward, against its definition in fp64, in "
        "processes of their own. A kernel that fails is off on this machine until it passes.",
        epilog="Exit codes: 0 all passed; 1 one failed, or was not judged; 2 bad arguments, no GPU, or no kernels.",
    )
    parser.add_argument("--full", action="store_true", help="more layouts, sizes and dtypes; memory left unwritten")
    parser.add_argument("--ops", nargs="+", default=[], metavar="OP", help="these (default: all)")
    parser.add_argument(
        "--device", help="cuda:1, ...; cpu tries the CPU kernels and turns none off (default: one GPU of each model)"
    )
    parser.add_argument(
        "--jobs", type=int, default=0, metavar="N", help="processes (default: one per core, at most 16)"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"limit of a check (default: {SECONDS})")
    parser.add_argument("--log", type=Path, metavar="FILE", help="the results as lines of JSON, too, as they come")


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
    if arguments.jobs < 0:
        return _refuse(f"--jobs must not be negative, got {arguments.jobs}")
    if availability.mode() == "off":
        return _refuse(f"{availability.VARIABLE}=off: there are no kernels to run")
    try:
        with failures.locked():  # before anything runs: failures can be recorded
            pass
    except OSError as error:
        return _refuse(f"{error} (failures go to {failures.cache_folder()}: SAFEOPS_CACHE may name another folder)")
    codes = [verify(device, arguments) for device in devices]
    return max((code for code in codes if code != EXIT_NOTHING), default=EXIT_NOTHING)


def _refuse(why):
    print(f"safeops verify: {why}", file=sys.stderr)
    return EXIT_NOTHING


def each_gpu():
    """One device of each GPU model."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    models = {availability.gpu(i): i for i in reversed(range(count))}
    return [torch.device("cuda", i) for i in sorted(models.values())]


def due(device, names=()):
    """Returns ({op: why it is not run}, [ops to run]) on a device. Ops with kernels of their own run, also if they have
    failed before."""
    left, results = {}, []
    for name, op in sorted(registry.items()):
        if not op.raw or (names and name not in names):
            continue
        if device.type == "cpu":
            results.append(name) if op.cpu else left.update({name: "no kernel for the CPU"})
            continue
        there = availability.availability(op, device.index or 0, judged=False)
        results.append(name) if there.kernel else left.update({name: there.reason})
    return left, results


def verify(device, arguments):
    """Verify the kernels on one device; return the exit code."""
    left, ops = due(device, arguments.ops)
    where = availability.gpu(device.index or 0)[0] if device.type == "cuda" else "the CPU"
    print(f"safeops verify: {len(ops)} ops on {where}", flush=True)
    today, results = datetime.date.today().isoformat(), []
    name = f"cuda:{device.index or 0}" if device.type == "cuda" else "cpu"
    jobs = arguments.jobs or min(16, os.cpu_count() or 1)
    # The families with the most kernels to compile go first: if one of them started late, all would wait for it.
    costly = {"losses": 1} | dict.fromkeys(OF_ROWS, 0)
    ops.sort(key=lambda op: costly.get(registry[op].family, 2))
    with progress(len(ops)) as tell:
        for result in pool.Pool(ops, pool.command(name, arguments.full), jobs, arguments.seconds):
            results.append(result)
            tell(result)
            if arguments.log:
                with open(arguments.log, "a") as log:
                    log.write(f"{json.dumps({'stage': 'verify', **dataclasses.asdict(result)})}\n")
            if device.type == "cuda" and result.verdict != pool.UNKNOWN:
                op = result.op, availability.triton_of(registry[result.op])
                failures.save({op: result.why if result.verdict == pool.FAILED else None}, where, today)
    print(table(results, left))
    if not results:
        return _refuse(f"there are no kernels of {', '.join(arguments.ops) or 'any op'} on {where}")
    return EXIT_FAILED if any(result.verdict != pool.PASSED for result in results) else EXIT_PASSED


# ---- what is printed


@contextlib.contextmanager
def progress(count):
    """Yields a function to call with each result: it moves a bar if rich is installed and stdout is a terminal, else
    prints a line."""
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
    """The table of all ops, with verdict and number of checks."""
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
