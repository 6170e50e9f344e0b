"""`python -m benchmarks.rivals` prepares and times contests in workers that may crash, and writes the table."""

import fcntl
import importlib
import json
import os
import sys
import types

import pytest
import torch

from benchmarks import timing
from benchmarks.rivals import __main__ as runner
from benchmarks.rivals import agreement, report
from benchmarks.rivals.contest import OURS
from benchmarks.rivals.worker import CHOOSERS, one_at_a_time
from benchmarks.served import Served


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    """Lets comparisons end without undisturbed samples, so that tests do not wait on a busy machine."""
    monkeypatch.setattr(timing, "PATIENCE", 0.0)


def run(tmp_path, *arguments):
    path, threads = tmp_path / "rivals.json", torch.get_num_threads()
    code = runner.main([*"--rounds 1 --no-compile --json".split(), str(path), *arguments])
    torch.set_num_threads(threads)
    return code, json.loads(path.read_text()), path.with_suffix(".md").read_text()


@pytest.mark.slow
def test_a_run(tmp_path, capsys):
    code, results, text = run(tmp_path, "--only", "masked_sum/bf16/rows,cross_entropy/fp32,clip_grad_norm_/fp32")
    assert code == 0 and text in capsys.readouterr().out
    pairs = [(record["contest"], record["direction"]) for record in results["records"]]
    assert pairs == [
        ("masked_sum/bf16/rows", "forward"), ("masked_sum/bf16/rows", "total"),
        ("cross_entropy/fp32/32k", "forward"), ("cross_entropy/fp32/32k", "total"), ("clip_grad_norm_/fp32", "forward"),
    ]  # fmt: skip
    for record in results["records"]:
        assert min(record["milliseconds"].values()) > 0 and {OURS, "copy"} < set(record["milliseconds"])
    (rows, entropy, clip) = results["contests"]
    assert entropy["absent"] == {
        "compile": "torch.compile is left out", **dict.fromkeys(("liger*", "fla", "fla*"), "runs on CUDA alone"),
    }  # fmt: skip
    assert clip["ready"] == [OURS, "torch foreach", "torch, loop"] and not clip["left_out"]
    assert rows["values"][OURS] == pytest.approx(rows["values"]["(x*m).sum(d)"], rel=1e-2)
    assert (
        "5 comparisons, 5 of them with a rival" in text and "runs on CUDA alone: cross_entropy/fp32/32k liger*" in text
    )


def test_a_case_without_us_fails_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(agreement.BUDGET, "bf16", 0.0)
    code, results, _ = run(tmp_path, "--only", "masked_sum/bf16/rows")
    assert code == 1 and not results["records"]
    assert "FAILED masked_sum/bf16/rows: errors" in capsys.readouterr().err


def test_no_contest_of_that_name(tmp_path):
    with pytest.raises(SystemExit, match="no contest has 'mask_sum'"):
        run(tmp_path, "--only", "mask_sum")


@pytest.mark.slow
def test_a_rival_that_crashes_costs_itself_alone(tmp_path, monkeypatch):
    """A rival that ends its worker's process must only be left out itself; all other contenders must be timed."""
    package = tmp_path / "monai"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "losses.py").write_text("import os\n\ndef DiceLoss(**options):\n    os._exit(9)\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    code, results, text = run(tmp_path, "--workers", "1", "--only", "dice_loss/bf16,masked_sum/bf16/rows")
    rows, dice = results["contests"]
    assert code == 0 and len(results["records"]) == 4
    assert "the process ended" in dice["left_out"]["monai"] and dice["ready"] == [OURS, "one-hot"]
    assert not rows["left_out"] and f"- dice_loss/bf16, monai: {dice['left_out']['monai']}" in text


def test_a_worker_that_hangs_is_ended():
    answers = "import sys, time\nprint('{\"ok\": 1}', flush=True)\ntime.sleep(600)\n"
    worker = Served("rivals", [sys.executable, "-c", answers])
    assert worker.ask("prepare", "x", limit=60) == 1 and not worker.ended
    with pytest.raises(RuntimeError, match="rivals prepare y: the process ended"):
        worker.ask("prepare", "y", limit=0.2)
    assert worker.ended and worker.process.wait() != 0


def test_configurations_are_chosen_one_at_a_time(tmp_path, monkeypatch, capsys):
    class Chooser:
        def choose(self, n, plus=0):
            with open(tmp_path / "lock") as file:
                taken.append(n)
                with pytest.raises(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return n + plus

    taken, module = [], types.ModuleType("autotuner_of_a_compiler")
    module.Chooser = Chooser
    monkeypatch.setitem(sys.modules, module.__name__, module)
    one_at_a_time(module.__name__, "Chooser", "choose", str(tmp_path / "lock"))
    assert Chooser().choose(3, plus=1) == 4 and taken == [3]
    one_at_a_time(module.__name__, "Chooser", "select", str(tmp_path / "lock"))
    assert "select of autotuner_of_a_compiler is not there to be locked" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("module", "owner", "method"), CHOOSERS)
def test_what_chooses_is_there(module, owner, method):
    pytest.importorskip("triton")
    assert callable(getattr(getattr(importlib.import_module(module), owner), method))


def entry(**other):
    return {"contest": "x", "other": other, "absent": {}, "left_out": {}, "errors": {}, "values": {}}


class Crowded:
    """A worker that runs out of GPU memory at the first request, and has enough when it is asked again, alone."""

    def __init__(self, options, lock):
        self.asked = 0

    def ask(self, what, name, *rest, limit=None):
        if what == "time":
            return []
        self.asked += 1
        if self.asked == 1:
            raise RuntimeError(f"rivals prepare {name}: OutOfMemoryError: CUDA out of memory. Tried to allocate 12 GiB")
        return {"other": "", "errors": {"value": 0.0}, "value": float(self.asked)}

    def close(self):
        pass


def test_what_did_not_fit_beside_others_is_prepared_again(monkeypatch):
    monkeypatch.setattr(runner, "Place", Crowded)
    names, written = ["masked_sum/bf16/rows", "masked_var/bf16"], []
    write = lambda results: written.append([entry["contest"] for entry in results["contests"]])  # noqa: E731
    results = runner.collect(runner.parse(["--no-compile"]), names, write)
    assert written == [names[:1], names]  # results are written after each batch, for a run that is interrupted
    for entry in results["contests"]:
        assert entry["ready"][0] == OURS and not entry["left_out"]


def test_another_result_at_full_size_is_named():
    values = {OURS: 1.709e-6, "(x*m).sum()/m.sum()": 0.0, "compile": 1.71e-6, "floor: x @ w.T": 3.0}
    record = entry() | {"contest": "masked_mean/fp16", "values": values}
    results = {"contests": [record], "records": [], "routes": {}, "hardware": {"device": "H100"}}
    results["settings"] = {"device": "cuda", "rounds": 3, "load": [0, 0], "small": False}
    text = report.markdown(results)
    (line,) = [line for line in text.splitlines() if "where ours is" in line]
    assert line.startswith("- masked_mean/fp16, (x*m).sum()/m.sum(): 0 where ours is 1.709e-06")


def test_what_a_comparison_comes_to():
    times = {"copy": 0.9, OURS: 1.0, "compile": 1.4, "liger": 1.2, "cce": 0.5, "floor: x @ w.T": 0.1}
    record = {"contest": "x", "direction": "forward", "sizes": "", "bytes": 8, "flops": None, "milliseconds": times}
    result = report.standing(record, entry(cce="filters its gradient"))
    assert result == {"fastest": "liger", "ratio": 1.2, "share": "0.90"}
    product = record | {"bytes": None, "flops": 2e12, "milliseconds": {OURS: 1.0, "cce": 0.5}}
    assert report.standing(product, entry(cce="filters")) == {"fastest": "cce", "ratio": 0.5, "share": "2000 TFLOP/s"}
    records = [record, product, record | {"milliseconds": {"copy": 1, OURS: 1.0, "compile": 1.02}}]
    summary = report._sum_up(records, {"x": entry(cce="filters its gradient")})
    assert summary == "3 comparisons, 3 of them with a rival: ahead in 1, level in 1, behind in 1: x forward 0.50."


def test_the_table_has_both_times_on_cuda():
    times = {"copy": 0.9, OURS: 1.0, "compile": 1.4}
    record = {"contest": "x", "direction": "total", "sizes": "64", "bytes": 8, "flops": None, "milliseconds": times}
    record |= {"host_us": dict.fromkeys(times, 17.0) | {"compile": 70.0}, "peak": {OURS: 1 << 20, "compile": 3 << 20}}
    head, _, row = report._table([record], {"x": entry()}, cuda=True)[2:5]
    result = dict(zip(*([cell.strip() for cell in line.split("|")] for line in (head, row))))
    assert (result["GPU ms"], result["host us"], result["rival's host us"], result["rival's MiB"]) == (
        "1.000",
        "17",
        "70",
        "3",
    )
