"""`python -m benchmarks.rivals`, without a GPU: that all contests agree with their definitions; its machinery."""

import fcntl
import importlib
import json
import os
import re
import sys
import types
from pathlib import Path

import pytest
import torch

from benchmarks import timing
from benchmarks.rivals import __main__ as runner
from benchmarks.rivals import agreement, contest, report
from benchmarks.rivals.contest import OURS, Absent, Contest, library, pattern
from benchmarks.rivals.worker import CHOOSERS, one_at_a_time
from benchmarks.served import Served

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "NVIDIA-H100" / "rivals.md"
NAMES = contest.names()


def test_all_comparisons_of_the_results_are_there():
    measured = set(re.findall(r"^\| ([\w/]+) \| [^|]* \| (forward|total) \|", RESULTS.read_text(), re.MULTILINE))
    made = {name: contest.build(name, "cpu", small=True) for name in NAMES}
    assert measured == {
        (name, d) for name in NAMES for d in ("forward", "total") if d == "forward" or made[name].backward
    }
    assert len(measured) == 81


def test_full_sizes_are_those_of_the_results():
    """Of those that are small enough to be made here, the shapes; and of a few the bytes, by hand."""
    assert contest.Operands("bf16", "cpu", small=False).size(8192, 128256) == (8192, 128256)
    images = contest.build("cross_entropy/bf16/images", "cpu", small=False)
    assert images.inputs[0].shape == (8, 21, 512, 512)
    assert [round(n / 1e6) for n in images.bytes] == [105, 298]
    ssim = contest.build("ssim/fp32", "cpu", small=False)
    assert ssim.inputs[0].shape == (8, 3, 512, 512) and [round(n / 1e6) for n in ssim.bytes] == [50, 126]


@pytest.mark.parametrize("name", NAMES)
def test_we_and_the_rivals_that_are_here_agree_with_the_definition(name):
    made = contest.build(name, "cpu", small=True)
    truth, dtype, judged = agreement.exact(made), contest.dtype_of(name), []
    for who, rival in made.contenders().items():
        if rival.cuda or rival.other:
            continue
        try:
            own = contest.build(name, "cpu", small=True) if rival.overwrites else made
            found = agreement.against(own, rival, *truth)
        except Absent:
            continue
        assert agreement.agrees(found, dtype), (who, found)
        assert ("gradient" in found) == (rival.backward and made.backward), who
        judged.append(who)
    assert judged[0] == OURS and (len(judged) > 1 or name.endswith("/cce"))


def wrong(value, gradient=1.0):
    """masked_mean's contest with a rival that is off by these factors."""
    made = contest.build("masked_mean/fp32", "cpu", small=True)

    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * value

        @staticmethod
        def backward(ctx, dy):
            return dy * value * gradient

    rival = pattern(lambda x, m: Off.apply(made.definition(x, m)))
    return agreement.against(made, rival, *agreement.exact(made))


def test_a_rival_that_is_off_does_not_agree():
    assert agreement.agrees(wrong(1.0), "fp32")
    assert not agreement.agrees(wrong(1.001), "fp32")
    off = wrong(1.0, gradient=1.001)
    assert off["value"] < 1e-5 and not agreement.agrees(off, "fp32")
    assert wrong(float("nan"))["value"] == float("inf")


def test_a_library_that_is_not_there_is_absent():
    with pytest.raises(Absent, match="no_such_library cannot be imported"):
        library("no_such_library.losses", "f", lambda f, x: f(x)).load()
    with pytest.raises(AttributeError):  # but a name that a library has lost is a fault
        library("math", "no_such_function", lambda f, x: f(x)).load()


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    """Whatever the load of this machine, its samples will do."""
    monkeypatch.setattr(timing, "PATIENCE", 0.0)


def run(tmp_path, *arguments):
    path, threads = tmp_path / "rivals.json", torch.get_num_threads()
    code = runner.main([*"--rounds 1 --no-compile --json".split(), str(path), *arguments])
    torch.set_num_threads(threads)
    return code, json.loads(path.read_text()), path.with_suffix(".md").read_text()


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
    """A library that ends the process of its worker."""
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
    return {"contest": "x", "other": other, "absent": {}, "left_out": {}, "errors": {}}


def test_what_a_comparison_comes_to():
    times = {"copy": 0.9, OURS: 1.0, "compile": 1.4, "liger": 1.2, "cce": 0.5, "floor: x @ w.T": 0.1}
    record = {"contest": "x", "direction": "forward", "sizes": "", "bytes": 8, "flops": None, "milliseconds": times}
    found = report.standing(record, entry(cce="filters its gradient"))
    assert found == {"fastest": "liger", "ratio": 1.2, "share": "0.90"}
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
    found = dict(zip(*([cell.strip() for cell in line.split("|")] for line in (head, row))))
    assert (found["GPU ms"], found["host us"], found["rival's host us"], found["rival's MiB"]) == (
        "1.000",
        "17",
        "70",
        "3",
    )


def test_fla_is_taken_without_its_gluon_kernels(monkeypatch):
    """They are imported where Triton has Gluon, of any version."""
    package, backends, modules = (types.ModuleType(name) for name in ("fla", "fla.backends", "fla.modules"))
    backends.GluonBackend = type("GluonBackend", (), {"is_available": classmethod(lambda backend: True)})
    package.__path__, package.__spec__ = [], types.SimpleNamespace(name="fla")
    modules.FusedCrossEntropyLoss = lambda: lambda x, target: (x, backends.GluonBackend.is_available())
    for module in (package, backends, modules):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    rival = contest.build("cross_entropy/bf16/32k", "cpu", small=True).contenders()["fla"]
    assert rival.load()(1, 2) == (1, False)


def test_ours_is_named_once():
    made = Contest((), (), ours=abs, rivals={"a": abs}, definition=abs)
    assert list(made.contenders()) == [OURS, "a"]
