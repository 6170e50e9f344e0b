"""warmup compiles several kernels at a time; after it no call of its kind compiles, forward or backward.

The GPU is the stand-in of benchmarks/standin.py. Triton really compiles for it, in a process of its own.
"""

import subprocess
import sys
import tempfile
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import safeops
from benchmarks import standin
from safeops.core.op import registry
from tests.test_availability import machine  # noqa: F401

X = torch.zeros(4, 64)


@pytest.mark.parametrize(
    "arguments, options, error, words",
    [
        (["mse"], {"like": X}, ValueError, "warmup: safeops has no op 'mse'"),
        ([3], {"like": X}, TypeError, "warmup: ops must be ops of safeops or their names, got 3"),
        (["mse_loss"], {"like": [1.0]}, TypeError, "warmup: like must be a tensor, got float"),
        (["mse_loss"], {"like": ()}, ValueError, "warmup: like is empty"),
        (["mse_loss"], {"like": X, "dtypes": [torch.int64]}, TypeError, "warmup: dtypes must be floating dtypes"),
        (["mse_loss"], {"like": X, "dtypes": torch.float16}, TypeError, "warmup: dtypes must be floating dtypes"),
        (["mse_loss"], {"like": X, "dtypes": []}, TypeError, "warmup: dtypes must be floating dtypes"),
        (["health"], {"like": X}, ValueError, "warmup: safeops has no op 'health'"),
        ([torch.nn.functional.mse_loss], {"like": X}, TypeError, "warmup: ops must be ops of safeops"),
    ],
)
def test_it_refuses(arguments, options, error, words):
    with pytest.raises(error, match=words):
        safeops.warmup(*arguments, **options)


def test_a_cpu_has_nothing_to_compile():
    nothing = "cpu has no Triton kernels"
    assert safeops.warmup("mse_loss", safeops.ssim, like=X) == {"mse_loss": nothing, "ssim": nothing}
    assert safeops.warmup("mse_loss", like=X.to("meta")) == {"mse_loss": "meta has no Triton kernels"}


def test_where_an_op_is_plain_torch_it_says_why(machine):  # noqa: F811
    idle = sys.modules["safeops.amp.warmup"].idle
    assert idle(registry["mse_loss"], torch.device("cuda:0")) is None
    machine.gpus = [("Tesla T4", (7, 5))]
    registry["mse_loss"].cuda.clear()
    with pytest.warns(RuntimeWarning, match="plain torch on Tesla T4"):
        for name in ("mse_loss", "lpips_distance"):  # lpips_distance runs by its parts
            result = idle(registry[name], torch.device("cuda:0"))
            assert result == "plain torch: compute capability 7.5, below 8.0"


def test_while_a_graph_is_captured_it_refuses(monkeypatch):
    monkeypatch.setattr(sys.modules["safeops.amp.warmup"], "idle", lambda op, device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="cannot be compiled while a CUDA graph is captured: call it before"):
        safeops.warmup("mse_loss", like=X)


@pytest.mark.slow
@pytest.mark.skipif(bool(standin.unusable()), reason=str(standin.unusable()))
def test_no_call_compiles_after_it():
    done = subprocess.run([sys.executable, "-m", __name__], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def rehearse():
    from safeops.kernels.engine import launch

    module = sys.modules["safeops.amp.warmup"]
    module.idle, module.current = lambda op, device: None, lambda device: nullcontext
    compile_one, compiled, together = launch.Plan.compile, [], threading.Barrier(2)

    def compile_two(plan, target):
        """Stands in for the compiler. The first two kernels wait for each other: with one thread this would not end."""
        compiled.append(plan)
        if len(compiled) <= 2:
            together.wait(timeout=120)
        return compile_one(plan, target)

    launch.Plan.compile = compile_two
    x, keep = torch.randn(6, 1024, requires_grad=True), torch.rand(6, 1024) > 0.5
    dtypes = torch.float32, torch.bfloat16
    result = safeops.warmup("mse_loss", safeops.masked_mean, like=x.detach(), dtypes=dtypes, mask=keep)
    assert result == {"mse_loss": "ready", "masked_mean": "ready"}
    safeops.warmup("cross_entropy", like=(x, torch.zeros(6, dtype=torch.int64)))
    # two ops, two dtypes, two kernels each way; and cross_entropy, forward and backward in one dtype
    assert len(compiled) == 2 * 2 * 2 + 2, [plan.kernel.fn.__name__ for plan in compiled]
    safeops.warmup("mse_loss", safeops.masked_mean, like=x.detach(), dtypes=dtypes, mask=keep)
    assert len(compiled) == 10, "a second time there is nothing left to compile"

    torch.cuda.is_current_stream_capturing = lambda: True  # from here on a new kernel is refused
    for dtype in dtypes:
        for rows in (6, 7):
            y = torch.randn(rows, 1024, dtype=dtype, requires_grad=True)
            mask = torch.rand(rows, 1024) > 0.5
            safeops.mse_loss(y, y.detach().clone(), mask=mask).backward()
            safeops.masked_mean(y, mask).backward()
    safeops.cross_entropy(x, torch.zeros(6, dtype=torch.int64)).backward()
    with pytest.raises(RuntimeError, match="sum_kernel is new .* or safeops.warmup"):
        safeops.mse_loss(x.detach().double(), x.detach().double())
    assert len(compiled) == 10


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        kept = standin.install(Path(folder))
        rehearse()
        del kept
