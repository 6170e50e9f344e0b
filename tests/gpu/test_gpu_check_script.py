"""scripts/gpu_check.py's own logic, on any machine: time limits, what a killed stage keeps, verdicts, records."""

import importlib.util
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


gpu_verdicts = load("gpu_verdicts")
gpu_check = load("gpu_check")
OPS = {name: True for name in ("masked_fill", "masked_mean", "l1_loss", "smooth_l1_loss")}


# ---- time limits


def test_a_stage_beyond_its_limit_is_killed_with_its_children():
    marker = f"safeops-orphan-{time.time_ns()}"
    child = f"import time, sys; '{marker}'; print('started', flush=True); time.sleep(60)"
    parent = f"import subprocess, sys; print('before', flush=True); subprocess.run([sys.executable, '-c', {child!r}])"
    begin = time.monotonic()
    status, output = gpu_check.run_limited([sys.executable, "-c", parent], 2)
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
    assert gpu_check.run_limited([sys.executable, "-c", "print('x'); raise SystemExit(3)"], 30) == (3, "x\n")


def check(minutes, elapsed=0.0):
    made = object.__new__(gpu_check.Check)
    made.args = SimpleNamespace(minutes=minutes)
    made.started = time.monotonic() - elapsed
    return made


def test_stages_together_stay_within_the_minutes():
    """However long each stage takes, the last one ends in time; and none starves."""
    assert abs(sum(share for share, _ in gpu_check.STAGES.values()) - 1) < 1e-9
    elapsed = 0.0
    for stage in gpu_check.STAGES:
        limit = check(8, elapsed).seconds_for(stage)
        assert limit >= 0.9 * gpu_check.STAGES[stage][0] * 480
        elapsed += limit
    assert elapsed <= 481


def test_time_left_over_goes_to_later_stages():
    assert check(8, 10).seconds_for("gpu") > gpu_check.STAGES["gpu"][0] * 480
    assert check(8, 10).seconds_for("benchmarks") == pytest.approx(470, abs=1)
    assert check(8, 1000).seconds_for("benchmarks") == 1


# ---- results of a killed run


def test_a_killed_test_run_keeps_the_finished_tests(tmp_path):
    (tmp_path / "test_slow.py").write_text(
        "import time, pytest\n"
        "@pytest.mark.parametrize('name', ['masked_fill'])\n"
        "def test_quick(name): pass\n"
        "def test_broken(): assert 1 == 2\n"
        "@pytest.fixture\n"
        "def bad(): raise OSError('no device')\n"
        "def test_setup(bad): pass\n"
        "@pytest.mark.skip(reason='not here')\n"
        "def test_skipped(): pass\n"
        "def test_slow(): time.sleep(60)\n"
    )
    log = tmp_path / "log.jsonl"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "gpu_check", "-p", "no:cacheprovider", str(tmp_path)]
    command += ["-c", "/dev/null", "--rootdir", str(tmp_path)]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "scripts"), gpu_check.LOG: str(log)}
    status, _ = gpu_check.run_limited(command, 6, cwd=tmp_path, env=environment)
    assert status is None
    found = {line["test"].rpartition("::")[2]: line for line in gpu_check.read_log(log)}
    outcomes = {name: line["outcome"] for name, line in found.items()}
    assert outcomes == {
        "test_quick[masked_fill]": "passed",
        "test_broken": "failed",
        "test_setup": "error",
        "test_skipped": "skipped",
    }
    assert "assert 1 == 2" in found["test_broken"]["message"] and "not here" in found["test_skipped"]["reason"]


def test_a_line_cut_off_by_the_kill_is_left_out(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({"test": "a", "outcome": "passed"}) + '\n{"test": "b", "outc')
    assert [line["test"] for line in gpu_check.read_log(log)] == ["a"]
    assert gpu_check.read_log(tmp_path / "none") == []


# ---- verdicts and records


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


def stages(**changes):
    """Both test stages with one passed test an op; `changes` adds tests: {stage: [(name, outcome)]}."""
    made = {}
    for stage in ("contract", "gpu"):
        tests = [{"test": f"t.py::test[{op}-x]", "outcome": "passed"} for op in OPS]
        tests += [{"test": f"t.py::{name}", "outcome": outcome} for name, outcome in changes.get(stage, [])]
        made[stage] = {"ok": True, "killed": False, "tests": tests}
    return made


def test_verdicts():
    assert set(gpu_verdicts.verdicts(stages(), OPS).values()) == {"passed"}
    failed = gpu_verdicts.verdicts(stages(gpu=[("test[l1_loss-y]", "failed")]), OPS)
    assert failed.pop("l1_loss") == "failed" and set(failed.values()) == {"passed"}
    assert gpu_verdicts.verdicts(stages(contract=[("test[masked_mean]", "error")]), OPS)["masked_mean"] == "failed"
    everyone = gpu_verdicts.verdicts(stages(gpu=[("test_mixed_devices", "failed")]), OPS)
    assert set(everyone.values()) == {"failed"}
    assert set(gpu_verdicts.verdicts(stages(gpu=[("test[l1_loss-z]", "skipped")]), OPS).values()) == {"passed"}
    torch_alone = gpu_verdicts.verdicts(stages(gpu=[("tests/gpu/test_what_torch_does.py::test_it", "failed")]), OPS)
    assert set(torch_alone.values()) == {"passed"}


def test_what_did_not_run_on_the_kernel_to_the_end_is_not_passed():
    assert gpu_verdicts.verdicts(stages(), OPS | {"masked_fill": False})["masked_fill"] == "incomplete"
    cut = stages()
    cut["gpu"]["killed"] = True
    assert set(gpu_verdicts.verdicts(cut, OPS).values()) == {"incomplete"}
    without = stages()
    del without["gpu"]
    assert set(gpu_verdicts.verdicts(without, OPS).values()) == {"incomplete"}
    untested = stages()
    untested["gpu"]["tests"] = [t for t in untested["gpu"]["tests"] if "masked_mean" not in t["test"]]
    assert gpu_verdicts.verdicts(untested, OPS)["masked_mean"] == "incomplete"
    racing = stages()
    racing["sanitizer"] = {"ok": False, "killed": False}
    assert set(gpu_verdicts.verdicts(racing, OPS).values()) == {"failed"}


def test_records_follow_the_verdicts():
    identities = {op: {"op": op, "gpu": "NVIDIA H200", "capability": "9.0", "triton": "3.6.0", "source": f"of {op}"}
                  for op in ("masked_fill", "l1_loss", "masked_mean")}  # fmt: skip
    machine = {"torch": "2.11.0", "driver": "1", "identities": identities}
    ops = {"masked_fill": "passed", "l1_loss": "failed", "masked_mean": "incomplete", "lpips_distance": "passed"}
    results = {"machine": machine, "date": "2030-01-02", "ops": ops}
    before = [identities["l1_loss"] | {"passed": True}, identities["masked_mean"] | {"passed": True, "date": "old"}]
    after = {record["op"]: record for record in gpu_verdicts.updated_records(before, results)}
    facts = {"torch": "2.11.0", "driver": "1", "date": "2030-01-02"}
    assert after == {
        "masked_fill": identities["masked_fill"] | facts | {"passed": True, "why": ""},
        "l1_loss": identities["l1_loss"] | facts | {"passed": False, "why": "the GPU check"},
        "masked_mean": before[1],
    }


def test_without_a_wheel_or_a_gpu_it_says_so(tmp_path, capsys, monkeypatch):
    with pytest.raises(SystemExit):
        gpu_check.main(["--wheel", str(tmp_path / "none.whl")])
    assert "a built wheel is needed" in capsys.readouterr().err
    wheel = tmp_path / "x.whl"
    wheel.write_text("")
    monkeypatch.setattr(gpu_check, "_no_gpu", lambda: True)
    assert gpu_check.main(["--wheel", str(wheel)]) == 2
    assert "no CUDA device" in capsys.readouterr().err
