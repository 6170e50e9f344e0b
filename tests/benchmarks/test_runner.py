"""The runner: that it states the right bytes, and computes its fractions from them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import report, selection
from benchmarks.__main__ import builders, elements, main
from benchmarks.timing import DISTURBED, Samples

pytestmark = pytest.mark.xdist_group("benchmarks")  # one run of the runner serves all tests

BF16 = {  # bytes an element must move, forward and backward: what the design says
    "masked_fill": (5, 5),
    "safe_div": (6, 10),
    **{f"safe_{name}": (4, 6) for name in ("reciprocal", "log", "sqrt", "rsqrt", "exp", "acos", "asin")},
    **{name: (6, 10) for name in ("safe_pow", "safe_atan2", "xlogy")},
    "masked_sum": (3, 3),
    "masked_mean": (3, 3),
    **{
        f"masked_{name}": (3, 5)
        for name in ("var", "std", "amax", "amin", "norm", "sum_of_squares", "rms", "logsumexp")
    },
    **{name: (5, 7) for name in ("masked_softmax", "masked_log_softmax")},
    "normalize": (4, 6),
    "cosine_similarity": (4, 8),
    "mse_loss": (5, 7),
    "l1_loss": (5, 7),
    "smooth_l1_loss": (5, 7),
    "huber_loss": (5, 7),
}
BF16_SELECTION = {  # the same where the mask keeps a share, or an index of 8 bytes names what is read
    # read mask, what is kept; write it and its index / read its gradient and its index; write dx
    **{f"masked_compact_{p}": (1 + p / 100 * 12, 2 + p / 100 * 10) for p in (1, 10, 50, 90, 99)},
    # rows of 64: a 64th of the mask and of the index
    **{f"masked_compact_{p}_rows": ((1 + p / 100 * 264) / 64, 2 + p / 100 * 136 / 64) for p in (1, 10, 50, 90, 99)},
    "masked_select": (4, 4.5),
    "masked_scatter": (6.5, 6.5),
    "safe_gather": (12, 12),
    "safe_gather_one": (12 / 1024, 2 + 10 / 1024),
    **{name: (4.125, 4.125) for name in ("safe_index_select", "safe_index_select_columns")},
}
RUN = (
    "masked_fill",
    "safe_div",
    "safe_log",
    "masked_compact_50",
    "masked_mean",
    "masked_mean_rows",
    "masked_var",
    "masked_softmax",
    "mse_loss",
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "small.json"
    # fresh memory: the test process keeps its malloc as it is
    arguments = "--quick --fresh-memory --size 4K --rounds 2 --threads 1 --dtypes bf16,fp64 --ops".split()
    arguments.append(",".join(RUN))
    threads = torch.get_num_threads()
    assert main([*arguments, "--json", str(path)]) == 0
    torch.set_num_threads(threads)
    assert "of-floor" in path.with_suffix(".md").read_text()
    return json.loads(path.read_text())


def test_bytes_are_those_of_the_design():
    stated = {}
    for build in builders().values():
        case = build(2**16, torch.bfloat16, "cpu")
        if not case.variant:
            stated[case.op] = (case.forward_bytes, case.backward_bytes)
    assert stated == BF16


def test_bytes_of_the_selection():
    for name, build in selection.OPS.items():
        case = build(2**16, torch.bfloat16, "cpu")
        assert case.op == name and (case.forward_bytes, case.backward_bytes) == pytest.approx(BF16_SELECTION[name])
        assert {i.dtype for i in case.inputs} == {torch.bfloat16}
    assert selection.OPS.keys() == BF16_SELECTION.keys()


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
    """Two threads of ours on one core: one of them waits about half of the time."""
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


def test_memory_sees_an_allocation(results):
    mean = [r for r in results["memory"] if r["op"] == "masked_mean" and r["dtype"] == "fp64"]
    for record in mean:
        assert record["eager_peak"] > 4096 * 0.5 * 8, "x[m] allocates most of x: the hook missed it"
        assert record["output"] == (4096 * 8 if record["direction"] == "backward" else 8)


def speed(**changes):
    record = {"op": "x", "dtype": "bf16", "direction": "forward", "elements": 2**24, "variant": False}
    record |= {"of_floor": 0.8, "x_eager": 6.0, "x_fastest_eager": 6.0, "x_compile": 1.5}
    return record | changes


@pytest.mark.parametrize(
    ("record", "device", "reached"),
    [
        (speed(), "cpu", True),
        (speed(of_floor=0.69), "cpu", False),
        (speed(x_eager=4.9), "cpu", False),
        (speed(x_eager=4.9, variant=True), "cpu", True),
        (speed(x_compile=0.99), "cpu", False),
        (speed(of_floor=0.2, x_eager=2.0, of_bare=0.8), "cpu", True),  # arithmetic, not bytes
        (speed(of_floor=0.2, of_bare=0.69), "cpu", False),
        (speed(), "cuda", True),  # 0.9 of the floor is asked from 64M elements
        (speed(elements=2**26), "cuda", False),
        (speed(elements=2**26, of_floor=0.92), "cuda", True),
        (speed(x_fastest_eager=0.9), "cuda", False),
        ({"over_us": 1.9, "grad": False}, "cpu", True),
        ({"over_us": 2.1, "grad": False}, "cpu", False),
        ({"over_us": 5.9, "grad": True}, "cpu", True),
        ({"over_us": 6.1, "grad": True}, "cpu", False),
        ({"ours_peak": 2**25, "output": 2**25}, "cpu", True),
        ({"ours_peak": 2**26, "output": 2**25}, "cpu", False),
    ],
)
def test_goals(record, device, reached):
    assert all(report.goals(record, device).values()) == reached


def test_a_busy_machine_proves_nothing():
    shares = {"ours": 0.0, "copy": 1.0}
    results = {"settings": {"device": "cpu"}, "speed": [speed(undisturbed=shares)], "overhead": [], "memory": []}
    assert report.misses(results) == ["x bf16 forward: not judged, the machine was busy"]
    results["speed"] = [speed(undisturbed={"ours": 1.0, "copy": 0.5})]
    assert report.misses(results) == []


def test_check_fails_on_a_missed_goal(monkeypatch):
    monkeypatch.setattr(report, "misses", lambda results: ["one"])
    arguments = (
        "--quick --fresh-memory --size 1K --rounds 1 --threads 1 --dtypes bf16 --ops masked_sum --json -".split()
    )
    assert main([*arguments, "--check"]) == 1
    assert main(arguments) == 0


def test_sizes():
    assert [elements(text) for text in ("4K", "16M", "0.5G", "100")] == [4096, 2**24, 2**29, 100]
