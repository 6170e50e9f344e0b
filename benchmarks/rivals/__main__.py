"""Runs the contests: `python -m benchmarks.rivals --help` lists the options."""

import argparse
import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import rivals

# The most seconds for starting a worker, for compiling one contender, and for timing one contest.
START, PREPARE, TIME = 180, 120, 90


def parse(argv):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rivals", description=rivals.__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", default="", help="comma-separated parts of contests' names; all by default")
    parser.add_argument("--json", type=Path, help="the file to write, a .md beside it; `-`: none")
    parser.add_argument("--rounds", type=int, default=15, help="samples of each contender (default: %(default)s)")
    parser.add_argument("--full", action="store_true", help="full sizes on a CPU too, where small ones are the default")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--workers", type=int, help="processes (default: CUDA: cores - 2, at most 14; CPU: none)")
    options = parser.parse_args(argv)
    if options.workers is None:
        options.workers = 0 if options.device == "cpu" else max(1, min(14, (os.cpu_count() or 2) - 2))
    options.small = options.device == "cpu" and not options.full
    return options


class Local:
    """A Worker in this process, with the interface of Served, whose worker is in another process."""

    def __init__(self):
        from .worker import Worker

        self.worker, self.ended = Worker(), False

    def ask(self, what, *arguments, limit=None):
        try:
            return getattr(self.worker, what)(*arguments)
        except Exception as error:
            raise RuntimeError(f"{what} {' '.join(map(str, arguments))}: {type(error).__name__}: {error}") from error

    def close(self):
        pass


class Place:
    """Holds a worker, and starts another one if it crashes or hangs."""

    def __init__(self, options, lock):
        self.options, self.lock, self.worker = options, lock, None

    def ask(self, *request, limit=None):
        if self.worker is None or self.worker.ended:
            self.worker = self.started()
        return self.worker.ask(*request, limit=limit)

    def started(self):
        from ..served import Served

        command = [sys.executable, "-m", f"{__package__}.worker"]
        worker = Served("rivals", command) if self.options.workers else Local()
        worker.ask(
            "start", self.options.device, self.options.small, not self.options.no_compile, self.lock, limit=START
        )
        return worker

    def close(self):
        if self.worker and not self.worker.ended:
            self.worker.close()


def prepare(place, name) -> dict:
    """Compiles and checks all contenders of a contest. Returns the contest's entry in the results, without times."""
    from .agreement import BUDGET, agrees
    from .contest import build, dtype_of

    entry = {"contest": name, "ready": [], "errors": {}, "values": {}, "other": {}, "absent": {}, "left_out": {}}
    for who in build(name, "cpu", small=True).contenders():
        try:
            result = place.ask("prepare", name, who, limit=PREPARE)
        except RuntimeError as error:
            entry["left_out"][who] = str(error).splitlines()[0][:300]
            continue
        if "absent" in result:
            entry["absent"][who] = result["absent"]
            continue
        if result["other"]:
            entry["other"][who] = result["other"]
        entry["errors"] |= {who: result["errors"]} if "errors" in result else {}
        if agrees(result.get("errors", {}), dtype_of(name)):
            entry["ready"].append(who)
            entry["values"][who] = result["value"]
        else:
            entry["left_out"][who] = f"errors {result['errors']} beyond {BUDGET[dtype_of(name)]}"
    return entry


def collect(options, names, write) -> dict:
    """Takes a batch of as many contests as there are workers: prepares them in parallel, then times them one by one,
    each in the worker that has compiled it. Calls write(results) after each batch, so that an interrupted run keeps its
    results."""
    import torch

    from .. import report
    from ..__main__ import routes

    results = {"hardware": report.hardware(options.device), "routes": routes(options.device)}
    results |= {"records": [], "contests": []}
    results["settings"] = {"device": options.device, "rounds": options.rounds, "small": options.small}
    results["settings"]["load"] = [round(os.getloadavg()[0], 1)] * 2
    results["hardware"]["threads"] = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        lock = str(Path(folder) / "lock") if options.workers and options.device == "cuda" else None
        places = [Place(options, lock) for _ in range(max(1, options.workers))]
        with ThreadPoolExecutor(len(places)) as pool:
            for start in range(0, len(names), len(places)):
                batch = names[start : start + len(places)]
                for place, entry in zip(places, list(pool.map(prepare, places, batch))):
                    results["contests"].append(timed(place, entry, options.rounds, results["records"]))
                results["settings"]["load"][1] = round(os.getloadavg()[0], 1)
                write(results)
        for place in places:
            place.close()
    return results


def timed(place, entry, rounds, records) -> dict:
    """Times a prepared contest and adds its records to `records`. Returns the contest's entry."""
    from .contest import OURS

    if any("OutOfMemoryError" in why for why in entry["left_out"].values()):  # prepared alone on the GPU, it may fit
        entry = prepare(place, entry["contest"])
    if OURS in entry["ready"]:
        try:
            records += place.ask("time", entry["contest"], entry["ready"], rounds, limit=TIME)
        except RuntimeError as error:
            entry["left_out"]["all"] = str(error).splitlines()[0][:300]
    return entry


def failures(results) -> list[str]:
    """Returns a line for each contest in which safeops was not timed."""
    timed = {record["contest"] for record in results["records"]}
    return [
        f"{entry['contest']}: {entry['left_out'].get('safeops') or entry['left_out'].get('all')}"
        for entry in results["contests"]
        if entry["contest"] not in timed
    ]


def main(argv=None):
    options = parse(argv)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from ..report import SCRATCH, write_text
    from . import contest, report

    parts = options.only.split(",")
    names = [name for name in contest.names() if any(part in name for part in parts)]
    if not names:
        raise SystemExit(f"no contest has {options.only!r} in its name; there are {contest.names()}")
    path = options.json or SCRATCH / f"rivals-{options.device}.json"

    def write(results):
        if str(path) != "-":
            write_text(path, json.dumps(results, indent=1) + "\n")
            write_text(path.with_suffix(".md"), report.markdown(results))

    results = collect(options, names, write)
    print(report.markdown(results))
    for line in failures(results):
        print(f"FAILED {line}", file=sys.stderr)
    return 1 if failures(results) else 0


if __name__ == "__main__":
    sys.exit(main())
