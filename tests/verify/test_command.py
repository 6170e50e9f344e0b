"""`safeops verify` chooses the right ops and devices, turns off failed ones, prints results, and sets its exit code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from safeops import cli
from safeops.core import availability, failures
from safeops.core.availability import KnownFault
from safeops.core.op import registry
from safeops.verify import command, pool
from tests.test_availability import H200, T4, availability_of, fail, machine  # noqa: F401

WORKER = Path(__file__).with_name("scripted_worker.py")


@pytest.fixture
def gpu(machine, monkeypatch, tmp_path):  # noqa: F811
    """Returns the pretended machine of tests/test_availability.py, with workers that give `machine.results`."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(machine.gpus))
    machine.results, machine.ran = {}, []

    def stand_in(ops, worker, jobs, seconds):
        machine.ran.append((list(ops), worker))
        for op in ops:
            yield machine.results.get(op, pool.Result(op, pool.PASSED, checks={"value": (0.5, 4)}))

    monkeypatch.setattr(pool, "Pool", stand_in)
    machine.gpus = [H200]
    return machine


def verify(*arguments):
    return cli.main(["verify", *arguments])


MSE, DIV = registry["mse_loss"], registry["safe_div"]


def test_what_passes_needs_no_record(gpu, capsys):
    assert verify() == 0
    ops, worker = gpu.ran[0]
    assert sorted(ops) == sorted(name for name, op in registry.items() if op.owner)
    assert ops.index("triplet_margin_loss") < ops.index("binary_cross_entropy") < ops.index("masked_amax")
    assert worker[-2:] == ["--device", "cuda:0"]
    out = capsys.readouterr().out
    assert f"{len(ops)} ops on NVIDIA H200" in out and out.splitlines()[-1] == f"{len(ops)} passed"
    assert not failures.path().exists()


def test_a_failure_turns_an_op_off_until_it_passes_and_no_verdict_does_not(gpu, capsys):
    gpu.results["mse_loss"] = pool.Result("mse_loss", pool.FAILED, "graph: killed by SIGABRT")
    gpu.results["safe_div"] = pool.Result("safe_div", pool.UNKNOWN, "value: silent for 180 s")
    assert verify("--ops", "mse_loss", "safe_div", "l1_loss") == 1
    availability.forget()
    assert availability_of(DIV, 0).kernel and availability_of(registry["l1_loss"], 0).kernel
    assert not availability_of(MSE, 0).kernel and "graph: killed by SIGABRT" in availability_of(MSE, 0).reason
    out = capsys.readouterr().out
    assert "mse_loss: failed, 0.0 s: graph: killed by SIGABRT" in out
    assert out.splitlines()[-1] == "1 passed, 1 failed, 1 not judged"
    gpu.results["mse_loss"] = pool.Result("mse_loss", pool.UNKNOWN, "value: out of memory: 2 GiB")
    assert verify("--ops", "mse_loss") == 1
    availability.forget()
    assert not availability_of(MSE, 0).kernel, "it has not passed"
    del gpu.results["mse_loss"]
    assert verify("--ops", "mse_loss") == 0
    availability.forget()
    assert availability_of(MSE, 0).kernel and not failures.path().exists()


def test_a_failure_of_another_op_or_gpu_stays(gpu):
    fail(DIV)
    fail(MSE, gpu="NVIDIA A100")
    assert verify("--ops", "mse_loss") == 0
    assert sorted((x["op"], x["gpu"]) for x in failures.read()) == [
        ("mse_loss", "NVIDIA A100"),
        ("safe_div", "NVIDIA H200"),
    ]


def test_what_is_known_to_be_wrong_is_not_run(gpu, capsys, monkeypatch):
    monkeypatch.setattr(availability, "KNOWN_FAULTS", (KnownFault("mse_loss", None, None, "it is wrong"),))
    assert verify("--ops", "mse_loss", "safe_div") == 0
    assert gpu.ran[0][0] == ["safe_div"]
    assert "mse_loss  not run" in capsys.readouterr().out


def test_one_device_of_each_model(gpu):
    gpu.gpus = [H200, T4, H200, ("NVIDIA A100", (8, 0))]
    assert verify("--ops", "mse_loss") == 0
    assert [worker[-1] for ops, worker in gpu.ran if ops] == ["cuda:0", "cuda:3"]


def test_what_cannot_run_says_why(gpu, capsys):
    gpu.gpus = [T4]
    assert verify("--ops", "mse_loss") == 2
    captured = capsys.readouterr()
    assert "mse_loss  not run" in captured.out and "there are no kernels of mse_loss on Tesla T4" in captured.err
    assert verify("--device", "cpu", "--ops", "psnr") == 2, "made of other ops"


def test_the_log_has_a_line_for_each_result(gpu, tmp_path):
    log = tmp_path / "log.jsonl"
    assert verify("--ops", "mse_loss", "l1_loss", "--log", str(log)) == 0
    results = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["stage"], line["op"], line["verdict"]) for line in results] == [
        ("verify", "l1_loss", "passed"),
        ("verify", "mse_loss", "passed"),
    ]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--ops", "nope"), "there is no op 'nope'"),
        (("--device", "nope"), "nope"),
        (("--device", "meta"), "CPUs and CUDA devices"),
        (("--device", "cuda:1"), "there is no cuda:1"),
        (("--jobs", "-1"), "--jobs must not be negative"),
    ],
)
def test_bad_arguments(gpu, capsys, arguments, words):
    assert verify(*arguments) == 2
    assert words in capsys.readouterr().err


def test_kernels_that_are_off_are_not_verified(gpu, capsys, monkeypatch):
    monkeypatch.setenv("SAFEOPS_KERNELS", "off")
    assert verify() == 2 and gpu.ran == []
    assert "SAFEOPS_KERNELS=off" in capsys.readouterr().err


def test_a_device_without_a_number_is_the_first(gpu):
    """Workers call torch.cuda.set_device, which needs a device with a number."""
    assert verify("--device", "cuda", "--ops", "mse_loss") == 0
    assert gpu.ran[0][1][-1] == "cuda:0"


def test_no_place_for_failures_is_said_before_anything_runs(gpu, capsys, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SAFEOPS_CACHE", str(tmp_path / "file" / "folder"))
    assert verify() == 2 and gpu.ran == []
    err = capsys.readouterr().err
    assert str(tmp_path / "file") in err and "SAFEOPS_CACHE" in err


def test_without_a_gpu_it_says_so(gpu, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert verify() == 2 and verify("--device", "cuda") == 2
    assert "--device cpu" in capsys.readouterr().err


def test_a_real_worker_checks_an_op(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("SAFEOPS_CACHE", str(tmp_path))
    assert verify("--device", "cpu", "--ops", "safe_gather", "--jobs", "1") == 0
    assert "safe_gather: passed" in capsys.readouterr().out
    assert not failures.path().exists(), "of a CPU there is nothing to turn off"


def test_the_worker_is_this_package_with_its_kernels(monkeypatch, tmp_path):
    """Even if a checkout is in the current folder, the worker must import the installed package, which is verified."""
    (tmp_path / "safeops").mkdir()
    (tmp_path / "safeops/__init__.py").write_text("raise SystemExit('another safeops')")
    environment = pool.environment(2) | {"PYTHONPATH": str(tmp_path)}
    assert environment["SAFEOPS_KERNELS"] == "require"
    started = subprocess.run(pool.command("cpu", True), input="", env=environment, cwd=tmp_path, text=True)
    assert started.returncode == 0


def test_progress_is_a_line_for_each_where_nobody_looks(capsys):
    with command.progress(2) as tell:
        tell(pool.Result("a", pool.PASSED, seconds=1.25))
        tell(pool.Result("b", pool.FAILED, "value: wrong", seconds=2))
    assert capsys.readouterr().out.splitlines() == ["[1/2] a: passed, 1.2 s", "[2/2] b: failed, 2.0 s: value: wrong"]


def test_progress_is_a_bar_where_somebody_does(capsys, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    with command.progress(2) as tell:
        tell(pool.Result("a", pool.PASSED))
        tell(pool.Result("b", pool.FAILED, "value: [3] wrong"))
    out = capsys.readouterr().out
    assert "b: failed, 0.0 s: value: [3] wrong" in out and "a: passed" not in out and "2/2" in out
