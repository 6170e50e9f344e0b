"""A launch by engine/start.py hands the driver what Triton's own way to launch does, to the bit.

The driver is the stand-in of benchmarks/standin.py, which notes what arrives: in a process of its own, see below.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from benchmarks import standin

BYTES = {"i32": 4, "i64": 8, "fp64": 8}


@pytest.mark.slow
@pytest.mark.skipif(bool(standin.unusable()), reason=str(standin.unusable()))
def test_the_driver_gets_the_same():
    done = subprocess.run([sys.executable, "-m", __name__], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


SPLIT = ("split", "slices")


def calls():
    import torch

    import safeops

    x, y = torch.randn(6, 4096), torch.randn(6, 4096)
    return {
        "split": lambda: safeops.mse_loss(x, y, mask=x > 0),
        "whole": lambda: safeops.masked_sum(x[0, :64], x[0, :64] > 0),
        "floats": lambda: safeops.huber_loss(x, y, delta=0.7, reduction="none"),
        "slices": lambda: safeops.masked_mean(x[:, 1:], x[:, 1:] > 0, dim=1),
        "rows": lambda: safeops.masked_softmax(x, x > 0),
        "columns": lambda: safeops.masked_var(x, x > 0, dim=0),
    }


def flat(kinds):
    for kind in kinds:
        if isinstance(kind, tuple):
            yield from flat(kind)
        elif kind != "constexpr":
            yield BYTES.get(kind, 8)  # pointers


def compare():
    import ctypes

    with tempfile.TemporaryDirectory() as folder:
        kept = standin.install(Path(folder))
        from safeops.kernels.engine import launch
        from triton import knobs

        driver = ctypes.CDLL("libcuda.so.1")
        sizes = (ctypes.c_int * 64).in_dll(driver, "sizes")
        shape = (ctypes.c_uint * 7).in_dll(driver, "last_shape")
        function = ctypes.c_ulonglong.in_dll(driver, "last_function")
        arguments = (ctypes.c_ulonglong * 64).in_dll(driver, "last_arguments")
        original, seen = launch.Plan.__call__, []

        def launched(plan, tensors, addresses, *floats):
            """By the plan, then as Triton has it: by tensors, with hooks."""
            for i, size in enumerate([*flat(plan.signature.values()), 0]):
                sizes[i] = size
            found, hooked = [], []
            own = lambda: original(plan, tensors, addresses, *floats)  # noqa: E731
            for way in (own, lambda: plan.loaded(0)[0][plan.grid](*tensors, *floats, *plan.tail)):
                ctypes.memset(arguments, 255, ctypes.sizeof(arguments))
                way()
                found.append((list(shape), function.value, list(arguments)))
            knobs.runtime.launch_enter_hook.add(hooked.append)
            own()
            knobs.runtime.launch_enter_hook.remove(hooked.append)
            assert len(hooked) == 1  # a profiler's hooks are called
            assert found[0] == found[1], found
            assert any(a != 2**64 - 1 for a in found[0][2])
            seen.append(plan.grid)

        launch.Plan.__call__ = launched
        for name, call in calls().items():
            seen.clear()
            call()
            assert len(seen) == 1, (name, seen)
            assert (seen[0][1] > 1) == (name in SPLIT), (name, seen)
        del kept


if __name__ == "__main__":
    compare()
