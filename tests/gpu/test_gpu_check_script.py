"""scripts/gpu_check.py keeps its time limits, loses only what a crash or hang must cost, and gives right verdicts. The
tests need no GPU."""

import importlib.util
import json
import os
import re
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.gpu import guards

ROOT = Path(__file__).resolve().parents[2]


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


gpu_verdicts = load("gpu_verdicts")
gpu_processes = load("gpu_processes")
gpu_kernels = load("gpu_kernels")
gpu_check = load("gpu_check")
gpu_plugin = load("gpu_plugin")
OPS = ("masked_fill", "masked_mean", "l1_loss", "smooth_l1_loss")


# ---- time limits


def test_a_stage_beyond_its_limit_is_killed_with_its_children():
    marker = f"safeops-orphan-{time.time_ns()}"
    child = f"import time, sys; '{marker}'; print('started', flush=True); time.sleep(60)"
    parent = f"import subprocess, sys; print('before', flush=True); subprocess.run([sys.executable, '-c', {child!r}])"
    begin = time.monotonic()
    status, output = gpu_processes.run_limited([sys.executable, "-c", parent], 2)
    assert status is None and time.monotonic() - begin < 12
    assert "before" in output
    time.sleep(0.2)
    alive = [p for p in Path("/proc").glob("[0-9]*/cmdline") if marker.encode() in _read(p)]
    assert not alive


def _read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_a_stage_within_its_limit_keeps_status_and_output():
    assert gpu_processes.run_limited([sys.executable, "-c", "print('x'); raise SystemExit(3)"], 30) == (3, "x\n")


def check(minutes, elapsed=0.0):
    result = object.__new__(gpu_check.Check)
    result.stages = gpu_check.CORRECTNESS
    result.args = SimpleNamespace(minutes=minutes)
    result.started = time.monotonic() - elapsed
    return result


def test_stages_together_stay_within_the_minutes():
    """If each stage uses its whole limit, the last stage still ends in time, and each gets at least 0.9 of its
    share."""
    for stages in (gpu_check.CORRECTNESS, gpu_check.SPEED):
        assert abs(sum(share for share, _ in stages.values()) - 1) < 1e-9
    elapsed = 0.0
    for stage, (share, _) in gpu_check.CORRECTNESS.items():
        limit = check(8, elapsed).seconds_for(stage)
        assert limit >= 0.9 * share * 480
        elapsed += limit
    assert elapsed <= 481


def test_time_left_over_goes_to_later_stages():
    assert check(8, 10).seconds_for("gpu") > gpu_check.CORRECTNESS["gpu"][0] * 480
    assert check(8, 10).seconds_for("sanitizer") == pytest.approx(470, abs=1)
    assert check(8, 1000).seconds_for("sanitizer") == 1


# ---- tests that fail, crash or hang, and tests after which the device takes no more work

TESTS = """
import os, signal, sys, time, pytest

@pytest.mark.parametrize("name", ["masked_fill"])
def test_quick(name): pass
def test_broken(): assert 1 == 2
@pytest.fixture
def bad(): raise OSError("no device")
def test_setup(bad): pass
@pytest.mark.skip(reason="not here")
def test_skipped(): pass
def test_crash(): os.kill(os.getpid(), signal.SIGSEGV)
def test_hang(): time.sleep(600)
def test_compile():
    from triton import knobs
    for _ in range(4):
        time.sleep(3)
        knobs.compilation.listener(src=None)
def test_illegal():
    sys.modules["gpu_plugin"].synchronise = dead
def dead(): raise RuntimeError("CUDA error: an illegal memory access")
def test_after(): pass
"""
NAMES = "quick[masked_fill] broken setup skipped crash hang compile illegal after".split()


def run_tests(folder, options, seconds=60):
    """Run the tests of a folder under the plugin; returns (exit status, lines of the log)."""
    (folder / "test_it.py").write_text(TESTS)
    log = folder / "log.jsonl"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "gpu_plugin", "-p", "no:cacheprovider", str(folder)]
    command += ["-c", "/dev/null", "--rootdir", str(folder), *options]
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(ROOT / "scripts"),
        "SAFEOPS_GPU_CHECK_LOG": str(log),
        "SAFEOPS_GPU_CHECK_STAGE": "gpu",
        "SAFEOPS_GPU_CHECK_SECONDS": "8",
    }
    status, output = gpu_processes.run_limited(command, seconds, cwd=folder, env=environment)
    return status, gpu_verdicts.read(log)


def ends(lines):
    return {test.partition("::test_")[2]: how for test, how in gpu_verdicts.outcomes(lines, "gpu").items()}


@pytest.mark.slow
def test_each_end_is_its_own_tests(tmp_path):
    pytest.importorskip("xdist"), pytest.importorskip("triton")
    options = ["-n", "2", "--dist", "worksteal", "--max-worker-restart", "100"]
    status, lines = run_tests(tmp_path, options, seconds=120)
    assert status == 1
    wanted = ["passed", "failed", "error", "skipped", "failed", "not ended", "passed", "failed", "passed"]
    assert ends(lines) == dict(zip(NAMES, wanted))
    (collected,) = [line["collected"] for line in lines if "collected" in line]
    assert len(collected) == len(NAMES)
    messages = {line["test"].partition("::test_")[2]: line.get("message", "") for line in lines if "test" in line}
    assert "assert 1 == 2" in messages["broken"] and "crashed" in messages["crash"]
    assert "Timeout" in messages["hang"] and "in test_hang" in messages["hang"]
    assert any("illegal memory access" in line.get("message", "") for line in lines)


def test_a_killed_run_keeps_what_it_has_found(tmp_path):
    status, lines = run_tests(tmp_path, ["-k", "quick or broken or hang or after"], seconds=4)
    assert status is None
    assert ends(lines) == {"quick[masked_fill]": "passed", "broken": "failed", "hang": "started", "after": None}


def test_a_line_cut_off_by_a_kill_is_left_out(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({"test": "a", "outcome": "passed"}) + '\n{"test": "b", "outc')
    assert [line["test"] for line in gpu_verdicts.read(log)] == ["a"]
    assert gpu_verdicts.read(tmp_path / "none") == []


CLEAN = """========= COMPUTE-SANITIZER
done
========= ERROR SUMMARY: 0 errors
"""
RACES = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at rows_kernel+0x1fe0 in tile.py:204
=========     and Write access at rows_kernel+0x1fe0 [96 hazards]
done
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
INVALID = """========= Invalid __global__ read of size 4 bytes
=========     at kernel+0x10
========= ERROR SUMMARY: 1 error
"""


@pytest.mark.parametrize(
    "output, verdict, words",
    [
        (CLEAN, "passed", None),
        (CLEAN.replace("ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards displayed (0 errors)"), "passed", None),
        (RACES, "failed", "Race reported"),
        (INVALID, "failed", "Invalid __global__ read"),
        ("done\n========= RACECHECK SUMMARY: 3 hazards displayed (0 errors, 3 warnings)", "failed", "3"),
        (CLEAN.replace("done", "RuntimeError: out of memory"), "not judged", None),
        ("done\n", "not judged", None),
        ("", "not judged", None),
    ],
)
def test_a_sanitizers_summary(output, verdict, words):
    result, errors = gpu_processes.sanitized(output)
    assert result == verdict and (words in errors[0] if words else not errors)


@pytest.mark.slow
def test_many_processes_end_in_time():
    sleep = "import sys, time; time.sleep(float(sys.argv[1])); print('done')"
    commands = {key: [sys.executable, "-S", "-c", sleep, str(key)] for key in (0, 0.1, 60, 61)}
    begin = time.monotonic()
    ends = {key: (status, text) for key, status, text in gpu_processes.run_all(commands, 1, begin + 8, 4)}
    assert time.monotonic() - begin < 20
    assert ends == {0: (0, "done\n"), 0.1: (0, "done\n"), 60: (None, ""), 61: (None, "")}


TOOL = """#!{python} -S
import sys
kind, op = sys.argv[2], sys.argv[-1]
if op != "masked_mean":
    print("done")
summary = "RACECHECK SUMMARY: " if kind == "racecheck" else "ERROR SUMMARY: "
print("=========", summary + str(int(op == "l1_loss" and kind == "racecheck")), "found")
"""


def test_each_op_has_a_sanitizer_of_its_own(tmp_path, monkeypatch):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(TOOL.format(python=sys.executable))
    tool.chmod(0o755)
    monkeypatch.setattr(gpu_check.shutil, "which", lambda name: str(tool))
    run = check(8)
    run.args.device, run.work, run.log = "cuda", tmp_path, tmp_path / "log.jsonl"
    run.environment, run.failed, run.open = dict(os.environ), [], []
    run.write("install", machine=MACHINE)
    run.sanitizer()
    judged = [line for line in gpu_verdicts.read(run.log) if line.get("stage") == "sanitizer" and "op" in line]
    results = {(line["tool"], line["op"]): line["verdict"] for line in judged}
    wanted = {(kind, op): "passed" for kind in ("racecheck", "memcheck") for op in OPS}
    wanted |= {("racecheck", "l1_loss"): "failed", ("racecheck", "masked_mean"): "not judged"}
    assert results == wanted | {("memcheck", "masked_mean"): "not judged"} and run.failed == ["sanitizer"]


# ---- calls that no executor has run


def test_what_no_executor_has_seen_stays_in_its_order(monkeypatch):
    """The stage `unseen` runs its tests in the order of the file, whose first ones are the most important. The stage
    `gpu` groups its tests by op."""
    importlib.import_module("safeops")
    names = [f"t.py::test[{name}]" for name in ("masked_mean 8", "l1_loss 8", "masked_mean 9")]
    for stage, wanted in (("unseen", names), ("gpu", sorted(names))):
        items = [SimpleNamespace(nodeid=name) for name in names]
        monkeypatch.setenv(gpu_plugin.STAGE, stage)
        gpu_plugin.pytest_collection_modifyitems(items)
        assert [item.nodeid for item in items] == wanted


def test_each_call_has_a_name_of_its_own():
    from tests.gpu.test_unseen import CASES

    names = list(map(str, CASES))
    assert len(set(names)) == len(names)


def test_a_time_is_a_line_beside_the_prediction():
    command = [sys.executable, "-m", "tests.gpu.linear_cross_entropy_time"]
    status, output = gpu_processes.run_limited(command, 120, cwd=ROOT)
    assert status == 0 and re.search(r"bf16: [\d.]+ ms, .*\(predicted for an H100: 37.2 ms, 3.0 GiB\)", output), output


WATCHED = """#!{python} -S
import subprocess, sys
print(subprocess.run(sys.argv[sys.argv.index({python!r}):], capture_output=True, text=True).stdout)
print("=========", "RACECHECK SUMMARY: {races} hazards displayed")
"""


@pytest.mark.parametrize("races", [0, 1])
def test_a_call_is_made_under_the_sanitizer(tmp_path, monkeypatch, races):
    """A sanitized case runs its call under compute-sanitizer, and fails if this reports races. A stand-in runs the
    command and reports `races` of them."""
    from tests.gpu import test_unseen

    tool = tmp_path / "compute-sanitizer"
    tool.write_text(WATCHED.format(python=sys.executable, races=races))
    tool.chmod(0o755)
    monkeypatch.setattr(gpu_processes.shutil, "which", lambda name: str(tool))
    monkeypatch.setattr(test_unseen, "ON_GPU", True)
    monkeypatch.setenv("SAFEOPS_GPU_CHECK_UNTIL", str(time.time() + 60))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    case = next(case for case in test_unseen.CASES if str(case) == "masked_mean 1000003 float32, racecheck")
    if races:
        with pytest.raises(AssertionError, match="SUMMARY: 1"):
            case.check()
    else:
        case.check()


class Arena:
    """An allocator that behaves as torch's: it gives a freed block of the requested size, else the next free place."""

    def __init__(self):
        self.memory, self.end, self.given = torch.zeros(2**24, dtype=torch.uint8), 0, []

    def __call__(self, size):
        for block, reference in self.given:
            if reference() is None and len(block) == size:
                break
        else:
            block = self.memory[self.end : self.end + size]
            self.end += size
        tensor = block[:]
        self.given = [(b, r) for b, r in self.given if b is not block] + [(block, weakref.ref(tensor))]
        return tensor.fill_(guards.PATTERN)


@pytest.mark.parametrize("size", [1000, 2**21])
@pytest.mark.parametrize("beside", [None, -1, 0])
def test_a_byte_beside_a_result_is_seen(size, beside):
    arena = Arena()

    def run():
        result = arena(size)
        at = result.storage_offset()
        result.fill_(1)
        if beside is not None:
            arena.memory[at + (size if beside == 0 else beside)] = 1
        return [("value", result)]

    expected = [torch.empty(size, dtype=torch.uint8)]
    if beside is None:
        assert guards.guarded(run, expected, arena, lambda: None)
        assert not guards.guarded(lambda: [("value", torch.ones(1))], expected, arena, lambda: None)
    else:
        with pytest.raises(AssertionError, match="1 bytes beside"):
            guards.guarded(run, expected, arena, lambda: None)


# ---- verdicts


@pytest.mark.parametrize(
    "test, op",
    [
        ("tests/contract/test_x.py::test_contract[masked_fill-values]", "masked_fill"),
        ("tests/contract/test_x.py::test_contract[smooth_l1_loss-values]", "smooth_l1_loss"),
        ("tests/contract/test_x.py::test_contract[l1_loss-values]", "l1_loss"),
        ("tests/contract/test_x.py::test_contract[masked_mean (gradient of the weight)-dtypes]", "masked_mean"),
        ("tests/gpu/test_large.py::test_masked_fill_broadcast[rows]", "masked_fill"),
        ("tests/gpu/test_values.py::test_mixed_devices_are_named", None),
        ("tests/gpu/test_execution.py::test_graph[dtype0-masked_mean]", "masked_mean"),
    ],
)
def test_a_test_belongs_to_its_op(test, op):
    assert gpu_verdicts.op_of(test, OPS) == op


MACHINE = {"gpu": "NVIDIA H200", "torch": "2.11.0", "driver": "1", "date": "2030-01-02", "ops": list(OPS)}


def lines(*more, verified="passed", without=()):
    """Returns the log of a run in which all tests passed. more: lines to add. without: lines to leave out."""
    result = [{"stage": "install", "machine": MACHINE}]
    result += [{"stage": "verify", "op": op, "verdict": verified} for op in OPS]
    for stage in ("gpu", "contract"):
        tests = [f"t.py::test[{op}-x]" for op in OPS]
        result.append({"stage": stage, "collected": tests})
        for test in tests:
            if (stage, test) not in without:
                result += [{"stage": stage, "test": test, "outcome": outcome} for outcome in ("started", "passed")]
    return result + list(more)


def line_of(stage, name, outcome):
    return {"stage": stage, "test": f"t.py::{name}", "outcome": outcome}


def verdicts(*more, **changes):
    return gpu_verdicts.verdicts(lines(*more, **changes))


def test_verdicts():
    assert set(verdicts().values()) == {"passed"}
    failed = verdicts(line_of("gpu", "test[l1_loss-y]", "failed"))
    assert failed.pop("l1_loss") == "failed" and set(failed.values()) == {"passed"}
    assert verdicts(line_of("contract", "test[masked_mean]", "error"))["masked_mean"] == "failed"
    assert set(verdicts(line_of("gpu", "test_mixed_devices", "failed")).values()) == {"failed"}
    assert set(verdicts(line_of("gpu", "test[l1_loss-z]", "skipped")).values()) == {"passed"}
    torch_alone = {"stage": "gpu", "test": "tests/gpu/test_what_torch_does.py::test_it", "outcome": "failed"}
    assert set(verdicts(torch_alone).values()) == {"passed"}
    assert verdicts({"stage": "verify", "op": "l1_loss", "verdict": "failed"})["l1_loss"] == "failed"
    racing = verdicts({"stage": "sanitizer", "op": "l1_loss", "verdict": "failed"})
    assert racing.pop("l1_loss") == "failed" and set(racing.values()) == {"passed"}
    killed = verdicts({"stage": "sanitizer", "op": "l1_loss", "verdict": "not judged"})
    assert killed.pop("l1_loss") == "not judged" and set(killed.values()) == {"passed"}


@pytest.mark.parametrize("stage", ["gpu", "contract"])
def test_what_did_not_end_has_not_passed(stage):
    """A test of an op that did not end makes this op "not judged" and leaves the verdicts of other ops alone."""
    test = "t.py::test[masked_mean-x]"
    for outcome in (None, "started", "not ended"):
        more = [{"stage": stage, "test": test, "outcome": outcome}] if outcome else []
        result = verdicts(*more, without={(stage, test)})
        assert result.pop("masked_mean") == "not judged" and set(result.values()) == {"passed"}
    further = {"stage": stage, "collected": ["t.py::test[masked_mean-more]"]}
    assert verdicts(further)["masked_mean"] == "not judged"
    assert set(verdicts(verified="not judged").values()) == {"not judged"}
    without = [line for line in lines() if line["stage"] != "verify"]
    assert set(gpu_verdicts.verdicts(without).values()) == {"not judged"}
    assert gpu_verdicts.verdicts([]) == {}


def test_an_op_has_calls_in_unseen_or_none():
    test = line_of("unseen", "test_unseen[masked_mean 8x9 float32]", "passed")
    assert set(verdicts(test).values()) == {"passed"}
    for outcome, verdict in (("failed", "failed"), ("started", "not judged")):
        result = verdicts(test | {"test": "t.py::test_unseen[masked_mean 8, graph]", "outcome": outcome}, test)
        assert result.pop("masked_mean") == verdict and set(result.values()) == {"passed"}


def test_the_help_says_what_each_option_is(capsys):
    with pytest.raises(SystemExit, match="0"):
        gpu_check.main(["--help"])
    out = capsys.readouterr().out
    options = out[out.index("\noptions:") :].splitlines()
    for option in "wheel kernels minutes out device benchmarks".split():
        (at,) = [i for i, line in enumerate(options) if line.startswith(f"  --{option} ") or line == f"  --{option}"]
        assert len(options[at].split()) > 3 or options[at + 1].startswith("   "), options[at]


def test_the_stages_are_there():
    from safeops.testing import CHECKS

    assert all(hasattr(gpu_check.Check, stage) for stage in (*gpu_check.CORRECTNESS, *gpu_check.SPEED))
    assert set(gpu_check.SAME_EVERYWHERE) - {"composite"} <= set(CHECKS)
    assert all((ROOT / "tests/contract" / name).is_file() for name in gpu_check.ELSEWHERE)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_run_on_the_cpu(tmp_path, monkeypatch):
    """On a CPU the script installs the wheel into a copy of its own and verifies it, within the time limit. The cases
    of `unseen` call its ops on the CPU; tests that need a GPU skip."""
    kernels = tmp_path / "kernels.tar.xz"
    gpu_kernels.pack(one_kernel(tmp_path / "theirs"), kernels)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "ours"))
    wheel = tmp_path / "wheel"
    pip = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheel)]
    assert gpu_processes.run_limited([*pip, str(ROOT)], 600, env=os.environ | {"SAFEOPS_NO_EXT": "1"})[0] == 0
    (built,) = wheel.glob("*.whl")
    options = ["--device", "cpu", "--minutes", "2", "--out", str(tmp_path), "--kernels", str(kernels)]
    gpu_check.main(["--wheel", str(built), *options])
    (log,) = tmp_path.glob("*.jsonl")
    results = gpu_verdicts.read(log)
    stages = [line["stage"] for line in results if "ended" in line or "skipped" in line]
    assert stages == list(gpu_check.CORRECTNESS)
    unseen = list(gpu_verdicts.outcomes(results, "unseen").values())
    assert "passed" in unseen and not set(unseen).intersection(gpu_verdicts.BAD)
    assert results[-1]["stage"] == "end" and "passed" not in results[-1]["verdicts"].values()
    (machine,) = [line["machine"] for line in results if "machine" in line]
    assert set(OPS) < set(machine["ops"]) and str(ROOT) not in machine["safeops_path"]
    counts = [(line["stage"], line["kernels"]) for line in results if "kernels" in line]
    assert counts == [("install", 1), ("compiled", 0)]  # 1 kernel is given by --kernels; a CPU compiles none


def one_kernel(cache):
    """Makes a folder in the form of Triton's cache, with one kernel."""
    folder = cache / "KEY"
    folder.mkdir(parents=True)
    files = {"k.cubin": "code", "k.json": "{}", "k.ptx": "text"}
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "__grp__k.json").write_text(json.dumps({"child_paths": {name: str(folder / name) for name in files}}))
    return cache


def test_kernels_that_come_along_know_where_they_are(tmp_path):
    gpu_kernels.pack(one_kernel(tmp_path / "theirs"), tmp_path / "kernels.tar.xz")
    assert gpu_kernels.unpack(tmp_path / "kernels.tar.xz", tmp_path / "ours") == 1
    folder = tmp_path / "ours" / "KEY"
    assert sorted(x.name for x in folder.iterdir()) == ["__grp__k.json", "k.cubin", "k.json"]
    paths = json.loads((folder / "__grp__k.json").read_text())["child_paths"]
    assert paths == {name: str(folder / name) for name in ("k.cubin", "k.json")}
    assert Path(paths["k.cubin"]).read_text() == "code"


def test_without_a_wheel_or_a_gpu_it_says_so(tmp_path, capsys, monkeypatch):
    with pytest.raises(SystemExit):
        gpu_check.main(["--wheel", str(tmp_path / "none.whl")])
    assert "a built wheel is needed" in capsys.readouterr().err
    wheel = tmp_path / "x.whl"
    wheel.write_text("")
    monkeypatch.setattr(gpu_check, "_no_gpu", lambda: True)
    assert gpu_check.main(["--wheel", str(wheel)]) == 2
    assert "no CUDA device" in capsys.readouterr().err
