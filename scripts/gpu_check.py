"""Checks a wheel on a GPU within a time limit: its correctness, or with --benchmarks its speed.

    python scripts/gpu_check.py --wheel dist/safeops-*.whl [--kernels dist/gpu-kernels.tar.xz] [--minutes 6]
                                [--out DIR] [--benchmarks]

Needs a GPU, torch >= 2.11 and pytest, but no network, make or compiler. With pytest-xdist up to 16 processes share the
GPU, and one that crashes or hangs is replaced. The wheel is installed into a temporary folder, and tests run against it
with SAFEOPS_KERNELS=require, so that a missing kernel is an error. --kernels are Triton kernels that gpu_kernels.py has
compiled: they are put into Triton's cache; other kernels are compiled during the check. The stages, in order; each has
a share of the time, and is killed when it has used it:

    install      installs the wheel, and describes the machine
    unseen       tests/gpu/test_unseen.py: calls that no executor without a GPU has run, or has found wrong
    timing       linear_cross_entropy, forward and backward, beside the prediction: one line
    verify       `safeops verify`: every op, as on a user's GPU
    gpu          the rest of tests/gpu: streams, graphs, synchronization, launches, 2^31 elements, rounding,
                 repeatability, memory
    contract     tests/contract, without the tests that do not depend on the device
    sanitizer    compute-sanitizer memcheck and racecheck of every op, each in a process of its own, if the tool is
                 present
    benchmarks   python -m benchmarks --quick; with --benchmarks, the only stage after `install`

Results are written as lines of JSON, as they come, to gpu-check-<date>.jsonl in the folder --out (or $OUT, or
benchmarks/results). At the end comes a verdict on each op: passed, failed, or not judged, if a test did not end. The
exit status is 1 if anything failed or was not judged. With --device cpu `unseen` calls the CPU kernels, and the other
GPU tests skip.
"""

import argparse
import datetime
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import gpu_kernels  # noqa: E402
import gpu_processes  # noqa: E402
import gpu_verdicts  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
# name: (share of --minutes, most it may use when earlier stages left some)
CORRECTNESS = {
    "install": (0.06, 0.15),
    "unseen": (0.25, 0.40),
    "timing": (0.06, 0.10),
    "verify": (0.18, 0.30),
    "gpu": (0.15, 0.40),
    "contract": (0.20, 0.70),
    "sanitizer": (0.10, 1.00),
}
SPEED = {"install": (0.06, 0.15), "benchmarks": (0.94, 1.00)}
PROCESSES = min(16, os.cpu_count() or 1)
TEST_SECONDS = 60  # a test counts as hung after this time, measured from the last kernel that it compiled
# Clauses of the contract that do not depend on the device: traces, transforms, errors, and second derivatives.
SAME_EVERYWHERE = (
    "composite opcheck opcheck_traced compile inductor export errors direct threads gradcheck gradgradcheck forward_ad "
    "torch_func vmap batched_gradients masked_garbage_transforms"
).split()
ELSEWHERE = ("test_tracing.py", "test_instruction_sets.py", "test_properties.py")


class Check:
    """One run of the check, with its folders, its remaining time, and its log."""

    def __init__(self, args, log):
        self.args, self.log, self.started = args, log, time.monotonic()
        self.failed, self.open = [], []
        self.stages = SPEED if args.benchmarks else CORRECTNESS
        self.work = Path(tempfile.mkdtemp(prefix="safeops-gpu-check-"))
        self.site = self.work / "site"
        # The tests run from a copy of their folders: in the checkout they would import its safeops/ instead of the
        # wheel.
        for name in ("tests", "benchmarks", "scripts"):
            if (ROOT / name).exists():
                ignore = shutil.ignore_patterns("__pycache__", "results")
                shutil.copytree(ROOT / name, self.work / name, ignore=ignore)
        # A test may run this in a worker of pytest-xdist; the processes that it starts are no workers.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
        self.environment = inherited | {
            "PYTHONPATH": os.pathsep.join([str(self.site), str(self.work / "scripts"), str(self.work)]),
            "SAFEOPS_KERNELS": "require",
            "SAFEOPS_CACHE": str(self.work / "cache"),
            "SAFEOPS_TEST_DEVICE": args.device,
            "SAFEOPS_GPU_CHECK_LOG": str(log.resolve()),
            "SAFEOPS_GPU_CHECK_SECONDS": str(TEST_SECONDS),
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def write(self, stage, **line):
        with open(self.log, "a") as log:
            log.write(f"{json.dumps({'stage': stage, **line})}\n")

    def seconds_for(self, stage):
        share, most = self.stages[stage]
        total = self.args.minutes * 60
        names = list(self.stages)
        reserved = sum(self.stages[later][0] for later in names[names.index(stage) + 1 :]) * total
        left = total - (time.monotonic() - self.started)
        least = 30 if stage == "install" else 1  # to read torch from a cold disk takes long, and all stages need it
        return max(min(most * total, left - reserved), min(share * total, left), least)

    def stage(self, name, command, failed=bool):
        """Runs a stage's command. Returns (exit status, or None if it was killed; output). failed(status): True if the
        stage failed. A stage that did not fail, but has a status other than 0, is open: it is not judged."""
        begin, limit = time.monotonic(), self.seconds_for(name)
        print(f"== {name} (at most {limit:.0f} s)", flush=True)
        self.environment["SAFEOPS_GPU_CHECK_STAGE"] = name
        self.environment["SAFEOPS_GPU_CHECK_UNTIL"] = str(time.time() + limit)
        status, output = gpu_processes.run_limited(command, limit, cwd=self.work, env=self.environment)
        self.ended(name, status, begin, output, failed(status))
        return status, output

    def ended(self, name, status, begin, output, failed):
        seconds = round(time.monotonic() - begin, 1)
        if status:
            how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
        else:
            how = "ok" if status == 0 else "killed at its time limit"
        if failed:
            self.failed.append(name)
        elif status != 0:
            self.open.append(name)
        self.write(name, status=status, ended=how, seconds=seconds, output=output[-6000:])
        print(f"   {how}, {seconds} s", flush=True)

    def skip(self, name, reason):
        print(f"== {name}: skipped: {reason}", flush=True)
        self.write(name, skipped=reason)

    # ---- the stages

    def install(self):
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(self.site)]
        probe = [sys.executable, str(self.work / "scripts" / "gpu_probe.py"), self.args.device]
        command = f"{shlex.join([*pip, str(self.args.wheel)])} && {shlex.join(probe)}"
        status, output = self.stage("install", ["bash", "-c", command])
        if status == 0:
            machine = json.loads(output.splitlines()[-1])
            self.write("install", machine=machine)
            print("   " + describe(machine), flush=True)
            if self.args.kernels:
                brought = gpu_kernels.unpack(self.args.kernels, gpu_kernels.cache_folder())
                self.write("install", kernels=brought)
                print(f"   {brought} compiled kernels", flush=True)
            self.compiled = gpu_kernels.compiled()
        else:
            print(output[-2000:], flush=True)
        return status == 0

    def unseen(self):
        # load, maxschedchunk: each process gets one test at a time, in the file's order: the most important ones first.
        self.pytest("unseen", "tests/gpu/test_unseen.py", spread=("--dist", "load", "--maxschedchunk", "1"))

    def timing(self):
        _, output = self.stage("timing", [sys.executable, "-m", "tests.gpu.linear_cross_entropy_time"])
        print("   " + output.strip()[-500:], flush=True)

    def verify(self):
        log = self.environment["SAFEOPS_GPU_CHECK_LOG"]
        command = [sys.executable, "-m", "safeops", "verify", "--device", self.args.device]
        command += ["--log", log, "--seconds", "40"]  # limit of each op's check, since one may hang
        command += ["--jobs", str(PROCESSES)]

        def failed(status):
            lines = gpu_verdicts.read(self.log)
            return any(line["stage"] == "verify" and line.get("verdict") == "failed" for line in lines)

        _, output = self.stage("verify", command, failed)
        print("\n".join("   " + line for line in output.splitlines() if ": failed" in line or ": not judged" in line))

    def pytest(self, name, tests, *options, spread=("--dist", "worksteal")):
        if not (self.work / tests).exists():
            return self.skip(name, f"{tests} is not there")
        ini = self.work / "pytest.ini"
        ini.write_text("[pytest]\nmarkers =\n    gpu: needs a CUDA device\n    slow: more than ten seconds\n")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "gpu_plugin", "-p", "no:cacheprovider", "-c", str(ini)]
        command += ["--rootdir", str(self.work), "--import-mode=importlib", "--tb=short", tests, *options]
        if importlib.util.find_spec("xdist"):
            # worksteal: neighboring tests, which test one op, go to one process; an idle process takes half of another
            # process's remaining tests.
            command += ["-n", str(PROCESSES), *spread, "--max-worker-restart", "1000"]

        def outcomes():
            return gpu_verdicts.outcomes(gpu_verdicts.read(self.log), name)

        # judged by the outcomes: pytest's status is also 1 if a worker was ended at its time limit and no test failed
        self.stage(name, command, failed=lambda status: set(outcomes().values()).intersection(gpu_verdicts.BAD))
        counts, names = {}, {None: "not begun", "started": "not ended"}
        for test, outcome in outcomes().items():
            outcome = names.get(outcome, outcome)
            counts[outcome] = counts.get(outcome, 0) + 1
            if outcome in gpu_verdicts.BAD:
                print(f"   {outcome.upper()} {test}", flush=True)
            elif outcome == "not ended":
                print(f"   not ended: {test}", flush=True)
        totals = (f"{n} {outcome}" for outcome, n in counts.items())
        print("   " + (", ".join(totals) or "no test was collected"), flush=True)

    def gpu(self):
        elsewhere = ("test_gpu_check_script.py", "test_unseen.py")
        self.pytest("gpu", "tests/gpu", *(f"--ignore={self.work}/tests/gpu/{name}" for name in elsewhere))

    def contract(self):
        chosen = "not (" + " or ".join(SAME_EVERYWHERE) + ")"
        ignored = [f"--ignore={self.work}/tests/contract/{name}" for name in ELSEWHERE]
        self.pytest("contract", "tests/contract", "-m", "not slow", "-k", chosen, *ignored)

    def sanitizer(self):
        if self.args.device == "cpu":
            return self.skip("sanitizer", "no GPU asked for")
        if not gpu_processes.sanitizer():
            return self.skip("sanitizer", "compute-sanitizer is not on this machine")
        ops = gpu_verdicts.machine(gpu_verdicts.read(self.log))["ops"]
        begin, limit = time.monotonic(), self.seconds_for("sanitizer")
        print(f"== sanitizer (at most {limit:.0f} s)", flush=True)
        environment = self.environment | gpu_processes.FOR_SANITIZERS
        target = self.work / "tests/gpu/sanitizer_target.py"
        commands = {
            (kind, op): gpu_processes.sanitizing(kind, target, op) for kind in gpu_processes.TOOLS for op in ops
        }
        verdicts = []
        for (kind, op), _, output in gpu_processes.run_all(
            commands, PROCESSES, begin + limit, gpu_processes.SANITIZER_SECONDS, cwd=self.work, env=environment
        ):
            if "Device not supported" in output:
                return self.skip("sanitizer", "compute-sanitizer does not support this device or its virtualisation")
            verdict, errors = gpu_processes.sanitized(output)
            verdicts.append(verdict)
            self.write("sanitizer", op=op, tool=kind, verdict=verdict, errors=errors[:20], output=output[-1000:])
            if verdict != "passed":
                print(f"   {op}: {kind}: {verdict}{''.join(': ' + error for error in errors[:1])}", flush=True)
        status = 0 if set(verdicts) == {"passed"} else 1
        return self.ended("sanitizer", status, begin, "", "failed" in verdicts)

    def benchmarks(self):
        if not (self.work / "benchmarks" / "__main__.py").exists():
            return self.skip("benchmarks", "benchmarks/ is not there")
        path = self.work / "quick.json"
        command = [sys.executable, "-m", "benchmarks", "--device", self.args.device, "--quick", "--json", str(path)]
        _, output = self.stage("benchmarks", command + (["--size", "64K"] if self.args.device == "cpu" else []))
        if path.exists():  # the run writes it as it goes: it exists even if the stage was killed
            self.write("benchmarks", results=json.loads(path.read_text()))
        lines = [line for line in output.splitlines() if not line.startswith("USDT")]
        return print("\n".join("   " + line for line in lines[-40:]), flush=True)

    def run(self):
        if self.install():
            for name in list(self.stages)[1:]:
                getattr(self, name)()
            self.write("compiled", kernels=gpu_kernels.compiled() - self.compiled)
            print(f"== {gpu_kernels.compiled() - self.compiled} kernels were compiled here", flush=True)


def describe(machine):
    keys = ("gpu", "driver", "torch", "triton", "python")
    return ", ".join(f"{key} {machine[key]}" for key in keys if machine.get(key))


def parser():
    result = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="Exit codes: 0 all passed; 1 something failed, or was not judged; 2 bad arguments, or no GPU.",
    )
    add = result.add_argument
    add("--wheel", type=Path, metavar="FILE", help="the built wheel that is checked (`make wheel` makes it in dist)")
    add("--kernels", type=Path, metavar="FILE", help="Triton's kernels, compiled beforehand (`make gpu-kernels`)")
    add("--minutes", type=float, default=6.0, metavar="N", help="the time for all of it (default: 6)")
    out = os.environ.get("OUT") or ROOT / "benchmarks" / "results"
    add("--out", type=Path, default=out, metavar="DIR", help=f"where the results go as they come (default: {out})")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the machinery")
    add("--benchmarks", action="store_true", help="speed, in the place of correctness")
    return result


def main(argv=None):
    options = parser()
    args = options.parse_args(argv)
    if args.wheel is None or not args.wheel.exists():
        options.error("--wheel: a built wheel is needed (make wheel)")
    if args.kernels and not args.kernels.exists():
        options.error(f"--kernels: there is no {args.kernels}")
    args.wheel = args.wheel.resolve()
    if args.device == "cuda" and _no_gpu():
        print("no CUDA device: nothing to check (--device cpu tries the machinery)", file=sys.stderr)
        return 2
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"gpu-check-{datetime.datetime.now():%Y-%m-%d-%H%M%S}.jsonl"
    print(f"== writing {log}", flush=True)
    check = Check(args, log)
    try:
        check.run()
    finally:
        shutil.rmtree(check.work, ignore_errors=True)
    results = {} if args.benchmarks else gpu_verdicts.verdicts(gpu_verdicts.read(log))
    check.write("end", verdicts=results, failed=check.failed, open=check.open)
    for op, verdict in results.items():
        print(f"   {op}: {verdict}")
    for what, stages in {"FAILED": check.failed, "not judged": check.open}.items():
        if stages:
            print(f"== {what}: {', '.join(stages)}")
    if not check.failed and not check.open:
        print("== all passed")
        return 0
    return 1


def _no_gpu():
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code]).returncode != 0


if __name__ == "__main__":
    sys.exit(main())
