"""The benchmark runner states the bytes that kernels move, computes its shares from them, and judges the goals."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import case, report, speed
from benchmarks.__main__ import elements, is_full, main, parse, routes
from benchmarks.timing import DISTURBED, Samples
from safeops.core.op import Public, registry

pytestmark = [pytest.mark.xdist_group("benchmarks"), pytest.mark.slow]  # all tests read one run of the runner

RUN = "safe_div", "masked_compact_50", "masked_mean", "masked_mean_rows", "mse_loss"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "small.json"
    # --fresh-memory leaves this process's malloc as it is.
    arguments = "--quick --fresh-memory --size 4K --rounds 2 --threads 1 --dtypes bf16,fp64 --ops".split()
    arguments.append(",".join(RUN))
    threads = torch.get_num_threads()
    assert main([*arguments, "--json", str(path)]) == 0
    torch.set_num_threads(threads)
    assert "of-floor" in path.with_suffix(".md").read_text()
    return json.loads(path.read_text())


class Moved(TorchDispatchMode):
    """Counts the bytes of the operands and results of safeops' kernels, each tensor once."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.namespace == "safeops":
            leaves = tree_leaves((args, kwargs, result))
            self.bytes += sum({id(x): x.nbytes for x in leaves if isinstance(x, torch.Tensor)}.values())
        return result


@pytest.mark.parametrize("name", case.names())
def test_bytes_are_those_that_the_kernel_gets(name):
    """The stated bytes must be those of the kernels' operands and results. Numbers per row (a norm, a sum) are
    not stated: together they are at most half a byte per element, even in rows of 64."""
    benchmark = case.build(name, 2**16, torch.bfloat16, "cpu")
    assert {x.dtype for x in benchmark.inputs} <= {torch.bfloat16}
    stated = (benchmark.forward_bytes, benchmark.backward_bytes)
    for bytes_, call in zip(
        stated, speed.calls(benchmark.ours, benchmark.inputs, benchmark.backward_bytes is not None).values()
    ):
        with Moved() as moved:
            call()
        assert not benchmark.counted or bytes_ - 0.01 <= moved.bytes / benchmark.elements <= bytes_ + 0.5


def test_every_op_has_a_case():
    measured = " ".join(case.names())
    inner = {"health"}  # an op of safeops.debug, measured with it as `debugging`
    assert not [name for name in registry if name not in inner and not re.search(rf"\b{name}", measured)]


def test_wider_data_moves_more_bytes_but_the_mask_does_not(results):
    by = {(r["op"], r["dtype"], r["direction"]): r["bytes_per_element"] for r in results["speed"]}
    assert by["mse_loss", "fp64", "backward"] == 3 * 8 + 1
    assert by["safe_div", "fp64", "forward"] == 3 * 8


def test_rates_follow_from_bytes_and_times(results):
    for record in results["speed"]:
        assert record["elements"] == 4096
        total, times = record["bytes_per_element"] * 4096, record["milliseconds"]
        assert record["ours_GB_per_s"] == pytest.approx(total / (times["ours"] * 1e-3) / 1e9)
        assert record["copy_GB_per_s"] == pytest.approx(total / (times["copy"] * 1e-3) / 1e9)
        assert record["of_floor"] == pytest.approx(times["copy"] / times["ours"])
        eager = [value for name, value in times.items() if name.startswith("eager: ")]
        assert record["x_fastest_eager"] == pytest.approx(min(eager) / times["ours"])
        assert record["x_eager"] == pytest.approx(times["eager: " + record["eager_pattern"]] / times["ours"])


def test_disturbed_samples_do_not_count():
    samples = Samples()
    for seconds, waited in ((1.0, 0.0), (8.0, 0.5), (1.2, 0.0), (9.0, 0.9), (1.1, 0.01)):
        samples.add(seconds, waited)
    assert samples.time() == 1.1 and samples.share_clean() == 0.6
    busy = Samples()
    for seconds in (8.0, 7.0, 9.0):
        busy.add(seconds, 0.5)
    assert busy.time() == 7.0 and busy.share_clean() == 0


def test_a_wait_for_a_core_is_seen():
    """With two threads on one core a thread waits about half of the time; such a sample must count as disturbed."""
    if not hasattr(os, "sched_setaffinity") or not Path("/proc/self/schedstat").exists():
        pytest.skip("the system does not tell")
    probe = (
        "import os, threading; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from benchmarks.timing import _cpu_sample\n"
        "import hashlib; work = lambda: hashlib.sha256(bytes(300_000_000)).digest()\n"  # releases the GIL
        "other = threading.Thread(target=work); other.start()\n"
        "print(_cpu_sample(work, 1)[1])"
    )
    waited = float(subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout)
    assert waited > DISTURBED


def run_briefly(*arguments):
    threads = torch.get_num_threads()
    try:
        return main([*"--quick --fresh-memory --size 1K --rounds 1 --threads 1 --dtypes bf16".split(), *arguments])
    finally:
        torch.set_num_threads(threads)


def test_a_partial_run_leaves_the_results_alone(monkeypatch, tmp_path):
    """A quick run, or a run of a single op, must write only the scratch files, not the kept results."""
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(report, "SCRATCH", tmp_path / "scratch", raising=False)
    assert run_briefly("--ops", "masked_sum") == 0
    assert not (tmp_path / "results").exists()
    assert {path.name for path in (tmp_path / "scratch").iterdir()} == {"cpu.json", "cpu.md"}


def test_what_a_full_run_is():
    assert is_full(parse([])) and is_full(parse(["--device", "cuda", "--check"]))
    for arguments in ("--quick", "--ops masked_sum", "--dtypes bf16", "--size 1M", "--rounds 3", "--threads 1"):
        assert not is_full(parse(arguments.split())), arguments
    for arguments in ("--no-compile", "--fresh-memory", "--compare ."):
        assert not is_full(parse(arguments.split())), arguments


def test_a_full_run_is_kept_under_its_hardware(monkeypatch, tmp_path, results):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    results = results | {"hardware": results["hardware"] | {"device": "AMD EPYC (7763)", "capability": "AVX2"}}
    assert report.publish(results) == tmp_path / "AMD-EPYC-7763-AVX2" / "cpu.md"
    assert report.publish(results).read_text().startswith("# AMD EPYC (7763)")


def test_memory_sees_an_allocation(results):
    mean = [r for r in results["memory"] if r["op"] == "masked_mean" and r["dtype"] == "fp64"]
    for record in mean:
        assert record["eager_peak"] > 4096 * 0.5 * 8, "x[m] allocates most of x: the hook missed it"
        assert record["output"] == (4096 * 8 if record["direction"] == "backward" else 8)


def record(**changes):
    result = {"op": "x", "dtype": "bf16", "direction": "forward", "elements": 2**24, "variant": False}
    result |= {"of_floor": 0.8, "x_eager": 6.0, "x_fastest_eager": 6.0, "x_compile": 1.5}
    return result | changes


@pytest.mark.parametrize(
    ("row", "device", "reached"),
    [
        (record(), "cpu", True),
        (record(of_floor=0.69), "cpu", False),
        (record(x_eager=4.9), "cpu", False),
        (record(x_eager=4.9, variant=True), "cpu", True),
        (record(x_compile=0.99), "cpu", False),
        (record(of_floor=0.2, x_eager=2.0, of_bare=0.8), "cpu", True),  # limited by arithmetic, not by bytes
        (record(of_floor=0.2, of_bare=0.69), "cpu", False),
        (record(), "cuda", True),  # on CUDA the goal of 0.9 of the floor begins at 64M elements
        (record(elements=2**26), "cuda", False),
        (record(elements=2**26, of_floor=0.92), "cuda", True),
        (record(x_fastest_eager=0.9), "cuda", False),
        ({"over_us": 1.9, "grad": False}, "cpu", True),
        ({"over_us": 2.1, "grad": False}, "cpu", False),
        ({"over_us": 5.9, "grad": True}, "cpu", True),
        ({"over_us": 6.1, "grad": True}, "cpu", False),
        ({"ours_peak": 2**25, "output": 2**25}, "cpu", True),
        ({"ours_peak": 2**26, "output": 2**25}, "cpu", False),
    ],
)
def test_goals(row, device, reached):
    assert all(report.goals(row, device).values()) == reached


def test_a_busy_machine_proves_nothing():
    undisturbed = {"ours": 0.0, "copy": 1.0}
    results = {"settings": {"device": "cpu"}, "speed": [record(undisturbed=undisturbed)], "overhead": [], "memory": []}
    assert report.misses(results) == ["x bf16 forward: not judged, the machine was busy"]
    results["speed"] = [record(undisturbed={"ours": 1.0, "copy": 0.5})]
    assert report.misses(results) == []


def test_check_fails_on_a_missed_goal(monkeypatch):
    monkeypatch.setattr(report, "misses", lambda results: ["one"])
    arguments = ("--ops", "masked_sum", "--json", "-")
    assert run_briefly(*arguments, "--check") == 1
    assert run_briefly(*arguments) == 0


def test_sizes():
    assert [elements(text) for text in ("4K", "16M", "0.5G", "100")] == [4096, 2**24, 2**29, 100]


def test_the_routes_are_those_that_a_device_takes(monkeypatch):
    monkeypatch.setattr(Public, "runs_on", lambda op, device: device == "cpu" or op.name == "mse_loss")
    result = routes("cuda")
    assert (result["mse_loss"], result["l1_loss"]) == ("kernel", "composite")
    assert routes("cpu")["l1_loss"] == "kernel"
