"""Which kernels a GPU may run: records, what they are asked by, and that a call asks its own device."""

import json
import os
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

import safeops
from safeops import _library, _op, _route, _verified, cli
from safeops.verify import command

H200, A100, T4 = ("NVIDIA H200", (9, 0)), ("NVIDIA A100", (8, 0)), ("Tesla T4", (7, 5))
MSE, DIV = _op.registry["mse_loss"], _op.registry["safe_div"]  # of Triton, of C++


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine that has the kernels, and these GPUs: what a test changes."""
    made = SimpleNamespace(gpus=[H200, A100], triton="3.7.1", archs="80 90 120", sources={"safe_div": "of safe_div"})
    monkeypatch.setenv("SAFEOPS_CACHE", str(tmp_path))
    for name in ("SAFEOPS_UNVERIFIED", "SAFEOPS_VERIFY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(_verified, "SHIPPED", tmp_path / "shipped.json")
    monkeypatch.setattr(_verified, "gpu", lambda index: made.gpus[index])
    monkeypatch.setattr(_verified, "triton", lambda: made.triton)
    monkeypatch.setattr(_verified, "source", lambda op, owner: made.sources.get(op, f"of {op}"))
    monkeypatch.setattr(_verified, "_warned", set())
    monkeypatch.setattr(_verified, "_asked", set())
    monkeypatch.setattr(_library, "has_kernel", lambda name, key: True)
    extension = SimpleNamespace(archs=made.archs, sources="")
    monkeypatch.setattr(_library, "cuda_extension", extension)
    made.extension = extension
    _verified.has_code.cache_clear()
    _verified.forget()
    yield made
    _verified.has_code.cache_clear()
    monkeypatch.undo()
    _verified.forget()


def passed(op, index, **changes):
    facts = {"driver": "580.1", "torch": "2.13.0", "date": "2026-01-02", "passed": True, "why": ""}
    return _verified.identity(op, index) | facts | changes


def save(*records):
    _verified.save(list(records))


def told(op, index):
    return _verified.verdict(op, index)


def test_without_a_record_the_composite(machine):
    assert told(MSE, 0) == (False, "never verified on this GPU model", True)


def test_each_gpu_model_has_its_own_answer(machine):
    save(passed(MSE, 0))
    assert told(MSE, 0) == (True, "passed on 2026-01-02", False)
    assert not told(MSE, 1).kernel and told(MSE, 1).open
    assert not told(DIV, 0).kernel, "a record of another op"
    with pytest.warns(RuntimeWarning):
        assert (MSE.runs_on("cuda:0"), MSE.runs_on("cuda:1")) == (True, False)


def test_another_triton_is_another_kernel_and_nothing_to_cpp(machine):
    save(passed(MSE, 0), passed(DIV, 0))
    machine.triton = "3.8.0"
    assert told(MSE, 0) == (False, "verified with Triton 3.7.1, here is 3.8.0", True)
    assert told(DIV, 0).kernel
    save(passed(MSE, 0))  # by both, now
    assert told(MSE, 0).kernel
    machine.triton = "3.7.1"
    assert told(MSE, 0).kernel


def test_another_driver_or_torch_changes_no_kernel(machine):
    save(passed(MSE, 0, driver="1.0", torch="2.11.0"))
    assert told(MSE, 0).kernel


def test_another_capability_under_the_same_name_is_another_gpu(machine):
    save(passed(MSE, 0))
    machine.gpus[0] = ("NVIDIA H200", (9, 1))
    assert told(MSE, 0) == (False, "never verified on this GPU model", True)


def test_other_sources_are_another_kernel(machine):
    save(passed(DIV, 0))
    machine.sources["safe_div"] = "changed"
    assert told(DIV, 0) == (False, "verified with other sources of it", True)


def test_what_has_failed_is_not_run_nor_asked_again(machine):
    save(passed(MSE, 0))
    save(passed(MSE, 0, passed=False, why="graph: differs"))
    assert told(MSE, 0) == (False, "failed on 2026-01-02: graph: differs", False)


def test_the_users_record_is_asked_before_the_shipped_one(machine):
    _verified.save([passed(MSE, 0), passed(MSE, 1)], _verified.SHIPPED)
    assert told(MSE, 0).kernel and told(MSE, 1).kernel
    save(passed(MSE, 0, passed=False, why="here it does not"))
    assert not told(MSE, 0).kernel and told(MSE, 1).kernel


@pytest.mark.parametrize("unverified", ["0", "1"])
def test_what_no_record_could_change(machine, monkeypatch, unverified):
    monkeypatch.setenv("SAFEOPS_UNVERIFIED", unverified)
    machine.gpus = [T4, ("NVIDIA B200", (10, 0)), None]
    assert told(MSE, 0) == (False, "compute capability 7.5, below 8.0", False)
    machine.extension.archs = "90 120"
    assert told(DIV, 1) == (False, "no code for sm_100 in this build", False)
    assert told(MSE, 1).kernel == (unverified == "1"), "Triton compiles for what it meets"
    assert told(MSE, 2) == (False, "no CUDA device here", False)
    assert told(_op.registry["linear_cross_entropy"], 2) == (True, "plain torch", False)
    monkeypatch.setattr(_library, "has_kernel", lambda name, key: False)
    assert told(MSE, 1) == (False, "no kernel for CUDA", False)
    monkeypatch.setattr(_library, "has_kernel", lambda name, key: True)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert told(MSE, 1) == (False, "a ROCm build of torch", False)


@pytest.mark.parametrize(
    "archs, has, lacks",
    [
        ("80 90 100 120", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1), (13, 0)], []),
        ("90", [(9, 0), (10, 0)], [(8, 0), (8, 9)]),  # a development build; the driver compiles for newer ones
        ("86", [(8, 6), (8, 9), (9, 0)], [(8, 0)]),
    ],
)
def test_code_for_an_architecture(machine, archs, has, lacks):
    machine.extension.archs = archs
    assert [c for c in has + lacks if _verified.has_code(c)] == has


def test_the_switch_skips_the_question(machine, monkeypatch):
    monkeypatch.setenv("SAFEOPS_UNVERIFIED", "1")
    assert told(MSE, 0) == (True, "SAFEOPS_UNVERIFIED=1", False)


def test_the_warning_names_the_command_once_a_model(machine):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for op in (MSE, DIV):
            for index in (0, 1, 0):
                assert not op.runs_on(f"cuda:{index}")
    texts = [str(w.message) for w in found]
    assert len(texts) == 2 and all("\n" not in text and "`safeops verify`" in text for text in texts)
    assert "mse_loss runs as plain torch on NVIDIA H200" in texts[0] and "A100" in texts[1]


def test_auto_verifies_at_the_first_call(machine, monkeypatch):
    monkeypatch.setenv("SAFEOPS_VERIFY", "auto")
    asked = []

    def automatically(index):
        asked.append(index)
        save(passed(MSE, index), passed(DIV, index, passed=False, why="value: wrong"))

    monkeypatch.setattr(command, "automatically", automatically)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert MSE.runs_on("cuda:0") and not DIV.runs_on("cuda:0") and MSE.runs_on("cuda:0")
        assert asked == [0]
        assert MSE.runs_on("cuda:1") and asked == [0, 1]


def test_auto_asks_once_a_device(machine, monkeypatch):
    """Also where there was no verdict: no memory left, say."""
    monkeypatch.setenv("SAFEOPS_VERIFY", "auto")
    asked = []
    monkeypatch.setattr(command, "automatically", asked.append)
    with pytest.warns(RuntimeWarning):
        assert not any(op.runs_on("cuda:0") for op in (MSE, DIV))
    assert asked == [0]


def test_auto_without_a_place_to_record_goes_on_by_the_composite(machine, monkeypatch, tmp_path):
    monkeypatch.setenv("SAFEOPS_VERIFY", "auto")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SAFEOPS_CACHE", str(tmp_path / "file" / "folder"))
    with pytest.warns(RuntimeWarning, match="SAFEOPS_VERIFY=auto has failed"):
        assert not MSE.runs_on("cuda:0")


# ---- a call


class OnGpu:
    """As much of a CUDA tensor as the route looks at."""

    is_cpu, is_cuda, requires_grad = False, True, False

    def __init__(self, index):
        self.device, self.get_device = torch.device("cuda", index), lambda: index


def test_the_route_asks_the_operands_own_device(machine, monkeypatch):
    monkeypatch.setattr(_route, "PLAIN", _route.PLAIN | {OnGpu})
    save(passed(MSE, 0))

    def kernel(*devices):
        operands = [torch.ones(2) if i is None else OnGpu(i) for i in devices]
        return _route.route(MSE, operands) is not None

    with pytest.warns(RuntimeWarning):
        assert (kernel(0, 0), kernel(1, 1), kernel(None, None)) == (True, False, True)
    assert not kernel(None, 0) and not kernel(0, None)


def test_a_trace_asks_the_same(machine):
    save(passed(MSE, 0))

    def f(x):
        if _verified.trusted("mse_loss", 0):
            x = x + 1
        if _verified.trusted("mse_loss", 1):
            x = x + 10
        return x

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            torch._dynamo.reset()
            assert torch.compile(f, fullgraph=True, backend="eager")(torch.zeros(1)).item() == 1
            assert f(torch.zeros(1)).item() == 1
    assert len([w for w in found if "safeops verify" in str(w.message)]) == 1, "once, whoever asks first"


# ---- the doctor


def test_the_doctor_says_why_for_each_device(machine, monkeypatch, capsys):
    monkeypatch.setattr(cli, "_cuda_count", lambda: 2)
    save(passed(MSE, 0))
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if line.startswith("mse_loss"))
    assert "kernel (passed on 2026-01-02)" in line and "composite (never verified on this GPU model)" in line
    assert "cuda:0 NVIDIA H200 (sm_90), cuda:1 NVIDIA A100 (sm_80)" in out and "`safeops verify` runs them" in out
    ops = {op["name"]: op for op in cli.examine()["ops"]}
    assert ops["cosine_embedding_loss"]["devices"]["cuda:0"]["route"] == "its parts'"
    assert "cosine_similarity" in ops["cosine_embedding_loss"]["parts"]


def test_the_doctor_advises_nothing_where_nothing_is_open(machine, monkeypatch, capsys):
    monkeypatch.setattr(cli, "_cuda_count", lambda: 1)
    monkeypatch.setenv("SAFEOPS_UNVERIFIED", "1")
    cli.main(["doctor"])
    out = capsys.readouterr().out
    assert "kernel (SAFEOPS_UNVERIFIED=1)" in out and "safeops verify" not in out


# ---- files


def test_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("SAFEOPS_CACHE", str(tmp_path / "own"))
    assert _verified.cache_folder() == tmp_path / "own"
    monkeypatch.delenv("SAFEOPS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _verified.cache_folder() == tmp_path / "safeops"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert _verified.cache_folder() == tmp_path / "home" / ".cache" / "safeops"


def test_a_user_without_a_home_has_no_records_and_no_error(machine, monkeypatch, tmp_path):
    """As in a container under a number that has no name there."""
    for name in ("SAFEOPS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    with pytest.warns(RuntimeWarning, match="never verified"):
        assert not MSE.runs_on("cuda:0")


def test_a_folder_in_the_place_of_the_file_is_told(machine):
    _verified.user_file().mkdir()
    with pytest.warns(RuntimeWarning, match="verified.json is not used"):
        assert told(MSE, 0).open


SAVES = """
import sys
from safeops import _verified
_, who, count = sys.argv
print("ready", file=sys.stderr, flush=True)
sys.stdin.read()
with _verified.locked():
    for i in range(int(count)):
        record = {"op": f"{who} {i}", "gpu": "x", "capability": "9.0", "triton": None, "source": "y"}
        _verified.save([record | {"date": "2026-01-02", "passed": True, "why": ""}])
"""


def saving(who, count):
    process = subprocess.Popen(
        [sys.executable, "-c", SAVES, who, count], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr.readline() == "ready\n"
    return process


def test_of_two_processes_that_record_none_undoes_the_other(machine):
    both = saving("a", "50"), saving("b", "50")
    for process in both:
        process.stdin.close()
    assert [process.wait() for process in both] == [0, 0]
    assert {record["op"] for record in _verified.records()} == {f"{who} {i}" for who in "ab" for i in range(50)}


def test_who_waits_for_another_process_says_so(machine):
    with _verified.locked():
        process = saving("a", "1")
        process.stdin.close()
        assert "another process" in process.stderr.readline()
    assert process.wait() == 0


def test_records_of_one_key_replace_each_other(machine, tmp_path):
    save(passed(MSE, 0), passed(MSE, 1))
    save(passed(MSE, 0, date="2027-01-01"))
    found = json.loads(_verified.user_file().read_text())
    assert sorted((record["gpu"], record["date"]) for record in found) == [
        ("NVIDIA A100", "2026-01-02"),
        ("NVIDIA H200", "2027-01-01"),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["verified.json"], "nothing else is left behind"


FOREIGN = ["{}", "3", "null", "[1]", '[{"op": "mse_loss", "gpu": "NVIDIA H200"}]']


@pytest.mark.parametrize("text", ["", "{", '[{"op"', "\udcff", *FOREIGN])
def test_a_broken_or_foreign_file_is_told_and_not_used(machine, text):
    _verified.user_file().write_text(text, errors="surrogateescape")
    with pytest.warns(RuntimeWarning, match="verified.json is not used"):
        assert not told(MSE, 0).kernel
    with pytest.warns(RuntimeWarning):
        save(passed(MSE, 0))
    assert told(MSE, 0).kernel


def test_the_shipped_records_are_of_these_sources():
    """A record of other bytes is a claim nobody checked: drop it, or run the GPU check again."""
    for record in _verified.read(_verified.SHIPPED):
        op = _op.registry[record["op"]]
        if op.owner == "Triton":
            assert record["source"] == _verified.source(op.name, op.owner), f"{op.name} has changed since"


def test_a_cpu_call_asks_nothing(monkeypatch):
    def never(*_):
        raise AssertionError("a CPU tensor asked for a GPU")

    monkeypatch.setattr(_verified, "verdict", never)
    assert safeops.mse_loss(torch.ones(3), torch.zeros(3)).item() == 1
