"""Which kernels a GPU runs: it depends on capability, built architectures, driver, known faults, and the call."""

import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

import safeops
from safeops import cli
from safeops.core import availability, failures, library, route
from safeops.core.availability import KnownFault
from safeops.core.op import registry

H200, A100, T4 = ("NVIDIA H200", (9, 0)), ("NVIDIA A100", (8, 0)), ("Tesla T4", (7, 5))
MSE, DIV = registry["mse_loss"], registry["safe_div"]  # MSE: a Triton kernel; DIV: a C++ kernel


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Returns a pretended machine with kernels and GPUs, which a test can change."""
    result = SimpleNamespace(gpus=[H200, A100], triton="3.7.1", fails=None, driver=13000)
    result.extension = SimpleNamespace(archs="80 90 100 120", runtime=13000, driver=lambda: result.driver)
    monkeypatch.setenv("SAFEOPS_CACHE", str(tmp_path))
    monkeypatch.delenv("SAFEOPS_KERNELS", raising=False)
    monkeypatch.setattr(availability, "gpu", lambda index: result.gpus[index])
    monkeypatch.setattr(availability, "triton", lambda: result.triton)
    result.start = availability._triton_fails.__wrapped__
    monkeypatch.setattr(availability, "_triton_fails", lambda: result.fails)
    monkeypatch.setattr(availability, "_warned", set())
    monkeypatch.setattr(availability, "KNOWN_FAULTS", ())
    monkeypatch.setattr(library, "has_kernel", lambda name, key: True)
    monkeypatch.setattr(library, "cuda_extension", result.extension)
    availability.forget()
    yield result
    monkeypatch.undo()
    availability.forget()


def availability_of(op, index):
    return availability.availability(op, index)


def fail(*ops, gpu=H200[0], why="value: wrong"):
    failures.save({(op.name, availability.triton_of(op)): why for op in ops}, gpu, "2026-01-02")
    availability.forget()


# ---- the reasons why a GPU runs no kernel


def test_kernels_are_on(machine):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert availability_of(MSE, 0) == (True, "Triton 3.7.1") and availability_of(DIV, 0) == (True, "C++ for sm_90")
        assert all(op.runs_on(f"cuda:{i}") for op in registry.values() for i in range(2))


@pytest.mark.parametrize(
    "archs, has, lacks",
    [
        ("80 90 100 120", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1), (13, 0)], []),
        ("90", [(9, 0), (10, 0)], [(8, 0), (8, 9)]),  # a build for one GPU; drivers compile its PTX for newer ones
        ("86", [(8, 6), (8, 9), (9, 0)], [(8, 0)]),
    ],
)
def test_code_for_an_architecture(machine, archs, has, lacks):
    machine.extension.archs, machine.gpus = archs, [("a GPU", capability) for capability in has + lacks]
    assert [availability_of(DIV, i).kernel for i in range(len(machine.gpus))] == [True] * len(has) + [False] * len(
        lacks
    )
    for i in range(len(has), len(machine.gpus)):
        assert availability_of(DIV, i).reason == "no code for sm_{}{} in this build (sm_{})".format(
            *lacks[i - len(has)], archs
        )


@pytest.mark.parametrize(
    "runtime, driver, gpu, reason",
    [
        (13000, 12080, H200, "the driver knows CUDA 12.8, this build needs 13.0"),
        (13020, 13000, H200, None),  # runs: machine code needs the major version
        (13020, 13000, ("NVIDIA X", (14, 0)), "the driver knows CUDA 13.0, this build needs 13.2"),  # PTX needs more
        (13020, 13020, ("NVIDIA X", (14, 0)), None),
        (13000, 14000, H200, None),
    ],
)
def test_a_driver_that_is_too_old_is_told(machine, runtime, driver, gpu, reason):
    machine.extension.runtime, machine.driver, machine.gpus = runtime, driver, [gpu]
    assert availability_of(DIV, 0) == (
        (False, reason) if reason else (True, "C++ for sm_90" if gpu is H200 else "C++ by PTX")
    )
    assert availability_of(MSE, 0).kernel, "Triton's ptxas is not the extension's"


@pytest.mark.parametrize("version, kernel", [("3.5.1", False), ("3.6.0", True), ("3.10.0+git1", True), ("4.0.0", True)])
def test_the_oldest_triton(machine, version, kernel):
    machine.triton = version
    assert availability_of(MSE, 0) == (kernel, f"Triton {version}" + ("" if kernel else ", older than 3.6"))
    assert availability_of(DIV, 0).kernel, "C++ needs no Triton"


def test_a_triton_that_cannot_start_is_told(machine):
    """Without a GPU or a C compiler Triton cannot start: its error is the reason given, and C++ kernels still run."""
    triton_runtime = pytest.importorskip("triton.runtime")
    try:
        triton_runtime.driver.active.get_current_target()
    except Exception as error:
        machine.fails = machine.start()
        assert machine.fails.startswith(f"{type(error).__name__}: ")
        assert (
            availability_of(MSE, 0) == (False, f"Triton cannot start: {machine.fails}")
            and availability_of(DIV, 0).kernel
        )
    else:
        assert machine.start() is None


def test_a_triton_that_cannot_be_imported_is_told(machine, monkeypatch):
    def broken():
        raise ImportError("libtriton broken")

    monkeypatch.setattr(availability, "triton", broken)
    assert (
        availability_of(MSE, 0) == (False, "Triton cannot be imported: ImportError: libtriton broken")
        and availability_of(DIV, 0).kernel
    )


def test_what_has_no_kernel(machine, monkeypatch):
    machine.gpus = [T4, ("NVIDIA B200", (10, 0)), None]
    assert availability_of(MSE, 0) == (False, "compute capability 7.5, below 8.0") == availability_of(DIV, 0)
    assert availability_of(MSE, 2) == (False, "no CUDA device here")
    assert availability_of(registry["linear_cross_entropy"], 0) == (True, "plain torch")
    machine.triton = None
    assert availability_of(MSE, 1) == (False, "Triton is not installed")
    monkeypatch.setattr(library, "cuda_extension", None)
    assert availability_of(DIV, 1) == (False, "this build has no CUDA extension")
    machine.triton = "3.7.1"
    monkeypatch.setattr(library, "has_kernel", lambda name, key: False)
    assert availability_of(MSE, 1) == (False, "no kernel for CUDA")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert availability_of(MSE, 1) == (False, "a ROCm build of torch")


@pytest.mark.parametrize(
    "fault, off",
    [
        (KnownFault("mse_loss", None, None, "it is wrong"), [True, True]),
        (KnownFault("mse_loss", (8, 0), None, "it is wrong"), [False, True]),
        (KnownFault("mse_loss", None, "3.7", "it is wrong"), [True, True]),
        (KnownFault("mse_loss", (9, 0), "3.6", "it is wrong"), [False, False]),
        (KnownFault("mse_loss", None, "3.7.1", "it is wrong"), [True, True]),
        (KnownFault("mse_loss", None, "3", "it is wrong"), [True, True]),
        (KnownFault("mse_loss", None, "3.", "it is wrong"), [False, False]),
        (KnownFault("l1_loss", None, None, "it is wrong"), [False, False]),
    ],
)
def test_what_is_known_to_be_wrong_is_off_there(machine, monkeypatch, fault, off):
    monkeypatch.setattr(availability, "KNOWN_FAULTS", (fault,))
    assert [not availability_of(MSE, i).kernel for i in range(2)] == off
    for i in range(2):
        assert availability_of(MSE, i).reason == ("known to be wrong here: it is wrong" if off[i] else "Triton 3.7.1")
        assert availability.availability(MSE, i, judged=False).kernel != off[i], "verify does not run it either"


def test_the_table_names_ops():
    for fault in availability.KNOWN_FAULTS:
        assert registry[fault.op].owner and fault.why


def test_what_has_failed_on_this_machine_is_off_until_it_passes(machine):
    fail(MSE)
    assert availability_of(MSE, 0) == (False, "failed `safeops verify` on 2026-01-02: value: wrong")
    assert availability_of(MSE, 1).kernel and availability_of(DIV, 0).kernel, "another GPU, another op"
    assert availability.availability(MSE, 0, judged=False).kernel
    machine.triton = "3.8.0"
    assert availability_of(MSE, 0).kernel, "another Triton makes another kernel"
    machine.triton = "3.7.1"
    fail(MSE, why=None)
    assert availability_of(MSE, 0).kernel


# ---- SAFEOPS_KERNELS


def test_off_is_off_on_every_device(machine, monkeypatch):
    monkeypatch.setenv("SAFEOPS_KERNELS", "off")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no warning: the user asked for it
        assert availability_of(MSE, 0) == (False, "SAFEOPS_KERNELS=off") and not MSE.runs_on("cuda:0")
    code = (
        "import safeops; from safeops.core.op import registry; print(*(op.name for op in registry.values() if op.cpu))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert set(run.stdout.split()) == {name for name in registry if name.startswith("linear_")}, run.stderr


def test_require_raises_where_there_is_no_kernel(machine, monkeypatch):
    monkeypatch.setenv("SAFEOPS_KERNELS", "require")
    machine.gpus = [H200, T4]
    assert MSE.runs_on("cuda:0")
    for _ in range(2):
        with pytest.raises(RuntimeError) as error:
            MSE.runs_on("cuda:1")
        assert str(error.value) == (
            "mse_loss: no kernel on Tesla T4: compute capability 7.5, below 8.0 (SAFEOPS_KERNELS=require)"
        )
    machine.triton = None
    availability.forget()
    with pytest.raises(RuntimeError, match="no kernel on NVIDIA H200: Triton is not installed"):
        MSE.runs_on("cuda:0")


def test_another_value_is_refused_at_the_import(monkeypatch):
    monkeypatch.setenv("SAFEOPS_KERNELS", "on")
    run = subprocess.run([sys.executable, "-m", "safeops", "doctor"], capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1] == "ValueError: SAFEOPS_KERNELS must be auto, require or off, got 'on'"


def test_an_empty_value_is_the_default(monkeypatch):
    monkeypatch.setenv("SAFEOPS_KERNELS", "")
    assert availability.mode() == "auto"


def test_auto_says_once_why_plain_torch_runs(machine):
    machine.gpus = [T4, A100, T4]
    machine.triton = "3.5.0"
    with warnings.catch_warnings(record=True) as results:
        warnings.simplefilter("always")
        for op in (MSE, registry["l1_loss"], DIV):
            for index in range(3):
                assert op.runs_on(f"cuda:{index}") == (op is DIV and index == 1)
    texts = [str(w.message) for w in results]
    assert texts == [
        f"safeops: mse_loss runs as plain torch on {why} (`safeops doctor` shows the others)"
        for why in (
            "Tesla T4: compute capability 7.5, below 8.0",
            "NVIDIA A100: Triton 3.5.0, older than 3.6",
        )
    ]


# ---- a call


class OnGpu:
    """Has the attributes of a CUDA tensor that decide the route."""

    is_cpu, is_cuda, requires_grad = False, True, False

    def __init__(self, index):
        self.device, self.get_device = torch.device("cuda", index), lambda: index


def test_the_route_asks_the_operands_own_device(machine, monkeypatch):
    monkeypatch.setattr(route, "PLAIN", route.PLAIN | {OnGpu})
    machine.gpus = [H200, T4]

    def kernel(*devices):
        operands = [torch.ones(2) if i is None else OnGpu(i) for i in devices]
        return route.route(MSE, operands) is not None

    with pytest.warns(RuntimeWarning):
        assert (kernel(0, 0), kernel(1, 1), kernel(None, None)) == (True, False, True)
    assert not kernel(None, 0) and not kernel(0, None)
    monkeypatch.setenv("SAFEOPS_KERNELS", "require")
    availability.forget()
    assert kernel(0, 0)
    with pytest.raises(RuntimeError, match="^mse_loss: no kernel on Tesla T4: "):
        kernel(1, 1)


def test_a_trace_takes_the_kernel_where_the_device_has_it(machine, monkeypatch):
    monkeypatch.setattr(route, "PLAIN", route.PLAIN | {OnGpu})
    monkeypatch.setattr(route, "is_dynamo_compiling", lambda: True)
    machine.gpus = [H200, T4]
    op = registry["cross_entropy"]
    assert "cuda" in op.compiled
    with pytest.warns(RuntimeWarning):
        results = [route.route(op, [OnGpu(i), *[None] * (op.tensors - 1)]) is not None for i in range(2)]
    assert results == [True, False]


def test_a_trace_asks_the_same(machine, monkeypatch):
    machine.gpus = [H200, T4]

    def f(x):
        if availability.available("mse_loss", 0):
            x = x + 1
        if availability.available("mse_loss", 1):
            x = x + 10
        return x

    with warnings.catch_warnings(record=True) as results:
        warnings.simplefilter("always")
        for _ in range(2):
            torch._dynamo.reset()
            assert torch.compile(f, fullgraph=True, backend="eager")(torch.zeros(1)).item() == 1
            assert f(torch.zeros(1)).item() == 1
    assert len([w for w in results if "plain torch on Tesla T4" in str(w.message)]) == 1, "once, whoever asks first"
    monkeypatch.setenv("SAFEOPS_KERNELS", "require")
    availability.forget()
    torch._dynamo.reset()
    with pytest.raises(Exception, match="mse_loss: no kernel on Tesla T4"):
        torch.compile(f, fullgraph=True, backend="eager")(torch.zeros(1))
    torch._dynamo.reset()


def test_a_cpu_call_asks_nothing(monkeypatch):
    def never(*_):
        raise AssertionError("a CPU tensor asked for a GPU")

    monkeypatch.setattr(availability, "availability", never)
    assert safeops.mse_loss(torch.ones(3), torch.zeros(3)).item() == 1


# ---- the doctor


def test_the_doctor_says_why_for_each_device(machine, monkeypatch, capsys):
    monkeypatch.setattr(cli, "_cuda_count", lambda: 2)
    machine.gpus = [H200, T4]
    fail(DIV)
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if line.startswith("mse_loss"))
    assert "kernel (Triton 3.7.1)" in line and "composite (compute capability 7.5, below 8.0)" in line
    line = next(line for line in out.splitlines() if line.startswith("safe_div"))
    assert "composite (failed `safeops verify` on 2026-01-02: value: wrong)" in line
    assert "cuda:0 NVIDIA H200 (sm_90), cuda:1 Tesla T4 (sm_75)" in out and "SAFEOPS_KERNELS=auto" in out
    ops = {op["name"]: op for op in cli.examine()["ops"]}
    assert ops["cosine_embedding_loss"]["devices"]["cuda:0"]["route"] == "its parts'"
    assert "cosine_similarity" in ops["cosine_embedding_loss"]["parts"]
