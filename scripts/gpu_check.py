"""Everything that only a GPU can show, in one run with a time limit: correctness, then speed.

    python scripts/gpu_check.py --wheel dist/safeops-*.whl [--minutes 8] [--out DIR] [--record]

Needs a GPU, torch >= 2.11 and pytest; no network, no make, no compiler. The wheel is installed into a temporary
folder, and the tests run against that copy with SAFEOPS_UNVERIFIED=1, so that the kernels are the route. Stages, each
with a share of the time and killed beyond it (what it had found is kept):

    install      the wheel, and which ops run a kernel on CUDA
    contract     tests/contract on the GPU
    gpu          tests/gpu: streams, graphs, synchronisation, launches, 2^31 elements, rounding, repeatability, memory
    sanitizer    compute-sanitizer memcheck and racecheck, where the tool is present
    benchmarks   python -m benchmarks

Results go to benchmarks/results/<gpu>/gpu-check-<date>.json (also to --out or $OUT). Exit status 1 if anything failed
or was killed before it was done. --record then writes safeops/verified.json: each op whose contract and GPU tests all
passed gets a record of this GPU and of its sources' fingerprint, each op with a failure loses its own, and an op not
reached keeps it.

--device cpu runs the same machinery without a GPU: contract and benchmarks on the CPU; the GPU tests skip. It records
nothing.
"""

import argparse
import datetime
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from gpu_verdicts import updated_records, verdicts  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]

# name: (share of --minutes, most it may use when earlier stages left some)
STAGES = {
    "install": (0.07, 0.15),
    "contract": (0.30, 0.45),
    "gpu": (0.28, 0.45),
    "sanitizer": (0.15, 0.30),
    "benchmarks": (0.20, 1.00),
}
LOG = "SAFEOPS_GPU_CHECK_LOG"


# ---- as a pytest plugin (-p gpu_check): one line per finished test, so that a killed run keeps its results


def pytest_runtest_logreport(report):
    if LOG not in os.environ or "PYTEST_XDIST_WORKER" in os.environ:
        return
    if report.when == "call" or report.outcome != "passed":
        line = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 3)}
        if report.when != "call" and report.outcome == "failed":
            line["outcome"] = "error"
        if report.outcome == "skipped":
            line["reason"] = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        elif report.outcome == "failed":
            line["message"] = str(report.longrepr)[-2000:]
        with open(os.environ[LOG], "a") as log:
            log.write(json.dumps(line) + "\n")


# ---- stages


def run_limited(command, seconds, **options):
    """(exit status or None if killed, output). The whole process group goes, so that no child outlives its stage."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, **options)
        status = None
        try:
            status = process.wait(timeout=max(seconds, 1))
        except subprocess.TimeoutExpired:
            for sig, patience in ((signal.SIGTERM, 3), (signal.SIGKILL, 10)):
                try:
                    os.killpg(process.pid, sig)
                    process.wait(timeout=patience)
                except ProcessLookupError:
                    break
                except subprocess.TimeoutExpired:
                    continue
        output.seek(0)
        return status, output.read()


def read_log(path):
    """The finished tests of a log, a line cut off by a kill left out."""
    tests = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            tests.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return tests


class Check:
    """One run: where things lie, how much time is left, what was found."""

    def __init__(self, args):
        self.args, self.started = args, time.monotonic()
        self.work = Path(tempfile.mkdtemp(prefix="safeops-gpu-check-"))
        self.site = self.work / "site"
        self.stages = {}
        # The tests run from a copy: beside the repository's own safeops/, they would import that instead of the wheel.
        for name in ("tests", "benchmarks", "scripts"):
            if (ROOT / name).exists():
                ignore = shutil.ignore_patterns("__pycache__", "results")
                shutil.copytree(ROOT / name, self.work / name, ignore=ignore)
        self.environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(self.site), str(self.work / "scripts"), str(self.work)]),
            "SAFEOPS_UNVERIFIED": "1",
            "SAFEOPS_TEST_DEVICE": args.device,
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def seconds_for(self, stage):
        share, most = STAGES[stage]
        total = self.args.minutes * 60
        names = list(STAGES)
        reserved = sum(STAGES[later][0] for later in names[names.index(stage) + 1 :]) * total
        left = total - (time.monotonic() - self.started)
        return max(min(most * total, left - reserved), min(share * total, left), 1)

    def stage(self, name, command, **extra):
        """Run a stage's command; {"status", "seconds", "killed", "output"} goes into the results and is returned."""
        begin, limit = time.monotonic(), self.seconds_for(name)
        print(f"== {name} (at most {limit:.0f} s)", flush=True)
        status, output = run_limited(command, limit, cwd=self.work, env=self.environment | extra)
        result = {
            "ok": status == 0,
            "status": status,
            "killed": status is None,
            "seconds": round(time.monotonic() - begin, 1),
            "output": output[-6000:],
        }
        self.stages[name] = result
        verdict = "killed at its time limit" if result["killed"] else "ok" if result["ok"] else f"exit status {status}"
        print(f"   {verdict}, {result['seconds']} s", flush=True)
        return result

    def skip(self, name, reason):
        print(f"== {name}: skipped: {reason}", flush=True)
        self.stages[name] = {"ok": True, "skipped": reason}

    def install(self):
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(self.site)]
        probe = [sys.executable, str(self.work / "scripts" / "gpu_check.py"), "--probe"]
        command = f"{_quote([*pip, str(self.args.wheel)])} && {_quote(probe)}"
        result = self.stage("install", ["bash", "-c", command])
        if result["ok"]:
            self.machine = json.loads(result["output"].splitlines()[-1])
            print("   " + describe(self.machine), flush=True)
        else:
            self.machine = {"ops": {}}
        return result["ok"]

    def pytest(self, name, folder, workers=None):
        if not (self.work / folder).exists():
            return self.skip(name, f"{folder} is not there")
        log = self.work / f"{name}.jsonl"
        ini = self.work / "pytest.ini"
        ini.write_text("[pytest]\nmarkers =\n    gpu: needs a CUDA device\n    slow: more than ten seconds\n")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "gpu_check", "-p", "no:cacheprovider", "-c", str(ini)]
        command += ["--rootdir", str(self.work), "--import-mode=importlib", "--tb=short", folder]
        command += [f"--ignore={self.work}/tests/gpu/test_gpu_check_script.py"]  # tests this script, in its repository
        if workers and importlib.util.find_spec("xdist"):
            command += ["-n", str(workers)]
        result = self.stage(name, command, **{LOG: str(log)})
        result["tests"] = read_log(log)
        counts = {}
        for test in result["tests"]:
            counts[test["outcome"]] = counts.get(test["outcome"], 0) + 1
        print(
            "   " + (", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items())) or "no test ran"), flush=True
        )
        for test in result["tests"]:
            if test["outcome"] in ("failed", "error"):
                print(f"   {test['outcome'].upper()} {test['test']}", flush=True)
        if result["status"] == 5:  # pytest: no tests collected
            result["ok"] = False

    def sanitizer(self):
        tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
        if self.args.device == "cpu":
            return self.skip("sanitizer", "no GPU asked for")
        if not Path(tool).exists():
            return self.skip("sanitizer", "compute-sanitizer is not on this machine")
        target = [sys.executable, str(self.work / "tests" / "gpu" / "sanitizer_target.py")]
        runs = [[tool, "--tool", name, "--error-exitcode", "9", *target] for name in ("memcheck", "racecheck")]
        # The caching allocator would hide an access past a tensor's end inside its own larger block.
        command = ["bash", "-c", " && ".join(map(_quote, runs))]
        result = self.stage("sanitizer", command, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        if "Device not supported" in result["output"]:
            self.skip("sanitizer", "compute-sanitizer does not support this device or its virtualisation")

    def benchmarks(self):
        if not (self.work / "benchmarks" / "__main__.py").exists():
            return self.skip("benchmarks", "benchmarks/ is not there")
        folder = self.work / "benchmark-results"
        folder.mkdir()
        # First every op at one size; then, while time lasts, more sizes and torch.compile. Written as it goes.
        runner = [sys.executable, "-m", "benchmarks", "--device", self.args.device]
        quick, full = ["--quick", "--json", str(folder / "quick.json")], ["--json", str(folder / "full.json")]
        runs = [[*runner, *quick], [*runner, *full]]
        if self.args.device == "cpu":
            runs = [[*run, "--size", "64K"] for run in runs]
        done = folder / "quick.done"
        script = f"{_quote(runs[0])} && touch {done} && {_quote(runs[1])}"
        result = self.stage("benchmarks", ["bash", "-c", script])
        if result["killed"] and done.exists():
            result["ok"] = True  # the rest is for the time that is left
        result["results"] = {}
        for path in sorted(folder.rglob("*.json")):
            try:
                result["results"][path.relative_to(folder).as_posix()] = json.loads(path.read_text())
            except json.JSONDecodeError:
                result["results"][path.name] = "cut off"
        lines = [line for line in result["output"].splitlines() if not line.startswith("USDT")]
        print("\n".join("   " + line for line in lines[-40:]), flush=True)

    def run(self):
        if self.install():
            self.pytest("contract", "tests/contract", workers=min(8, os.cpu_count() or 1))
            self.pytest("gpu", "tests/gpu")
            self.sanitizer()
            self.benchmarks()
        return self.results()

    def results(self):
        return {
            "date": datetime.date.today().isoformat(),
            "device": self.args.device,
            "machine": self.machine,
            "wheel": Path(self.args.wheel).name,
            "minutes": round((time.monotonic() - self.started) / 60, 2),
            "ok": all(stage["ok"] for stage in self.stages.values()),
            "ops": verdicts(self.stages, self.machine["ops"]),
            "stages": self.stages,
        }


def _quote(command):
    return " ".join("'" + word.replace("'", "'\\''") + "'" for word in command)


# ---- the machine


def probe():
    """Printed by the fresh install: the machine, and which public ops run a kernel on CUDA there."""
    import torch

    import safeops
    from safeops import _verified
    from safeops._op import registry

    spec = importlib.util.find_spec("triton")
    gpu = torch.cuda.is_available()
    smi = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(smi, capture_output=True, text=True).stdout.split() if shutil.which("nvidia-smi") else []
    return {
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "capability": ".".join(map(str, torch.cuda.get_device_capability())) if gpu else None,
        "driver": driver[0] if driver else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": __import__("triton").__version__ if spec else None,
        "python": platform.python_version(),
        "cpu": platform.processor() or platform.machine(),
        "safeops": safeops.__version__,
        "safeops_path": str(Path(safeops.__file__).parent),
        "ops": {name: bool(op.owner) and gpu and op.runs_on("cuda") for name, op in registry.items()},
        "identities": {name: _verified.identity(op, 0) for name, op in registry.items() if gpu and _verified.due(op)},
    }


def describe(machine):
    keys = ("gpu", "driver", "torch", "triton", "python")
    return ", ".join(f"{key} {machine[key]}" for key in keys if machine.get(key))


def write(results, folders):
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"gpu-check-{results['date']}.json"
        path.write_text(json.dumps(results, indent=1) + "\n")
        print(f"== wrote {path}", flush=True)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheel", type=Path)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.probe:
        print(json.dumps(probe()))
        return 0
    if args.wheel is None or not args.wheel.exists():
        parser.error("--wheel: a built wheel is needed (make wheel)")
    args.wheel = args.wheel.resolve()
    check = Check(args)
    try:
        if args.device == "cuda" and _no_gpu():
            print("no CUDA device: nothing to check (--device cpu tries the machinery)", file=sys.stderr)
            return 2
        results = check.run()
    finally:
        shutil.rmtree(check.work, ignore_errors=True)
    gpu = re.sub(r"[^A-Za-z0-9._-]+", "-", results["machine"].get("gpu") or "no-gpu")
    folders = [ROOT / "benchmarks" / "results" / gpu] if args.device == "cuda" else []
    write(results, folders + ([Path(args.out)] if args.out else []))
    for op, verdict in results["ops"].items():
        print(f"   {op}: {verdict}")
    if args.record and args.device == "cuda":
        path = ROOT / "safeops" / "verified.json"
        records = json.loads(path.read_text()) if path.exists() else []
        path.write_text(json.dumps(updated_records(records, results), indent=1) + "\n")
        print(f"== recorded in {path}")
    print(
        "== all passed"
        if results["ok"]
        else "== FAILED: " + ", ".join(k for k, s in check.stages.items() if not s["ok"])
    )
    return 0 if results["ok"] else 1


def _no_gpu():
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code]).returncode != 0


if __name__ == "__main__":
    sys.exit(main())
