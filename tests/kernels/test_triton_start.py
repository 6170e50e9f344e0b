"""A launch by the extension passes the driver the bits that Triton's own launcher passes. The next call of the same
kind does not reach Python, and passes the same bits with the addresses of its own tensors.

The driver is the stand-in of benchmarks/standin.py, which records what arrives, in a process of its own (see below).
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
@pytest.mark.parametrize("what", ["compare", "repeat_all"])
def test_the_driver_gets_the_same(what):
    done = subprocess.run([sys.executable, "-m", __name__, what], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


SPLIT = ("split", "slices", "apart")  # "apart": its partial results exceed the stream's buffer, so it has its own


def calls():
    """Returns {name: function that returns (new tensors, the call on them)}."""
    import torch

    import safeops

    def maker(call, view=slice(None), shape=(6, 4096)):
        def anew():
            x, y = torch.randn(shape)[view], torch.randn(shape)[view]
            mask = (torch.randn(shape) > 0)[view]
            return (x, y, mask), lambda: call(x, y, mask)

        return anew

    return {
        "split": maker(lambda x, y, m: safeops.mse_loss(x, y, mask=m)),
        "whole": maker(lambda x, y, m: safeops.masked_sum(x, m), (0, slice(64))),
        "floats": maker(lambda x, y, m: safeops.huber_loss(x, y, delta=0.7, reduction="none")),
        "slices": maker(lambda x, y, m: safeops.masked_mean(x, m, dim=1), (slice(None), slice(1, None))),
        "rows": maker(lambda x, y, m: safeops.masked_softmax(x, m)),
        "apart": maker(lambda x, y, m: safeops.masked_sum(x, m, dim=0), shape=(1024, 8192)),
        "columns": maker(lambda x, y, m: safeops.masked_var(x, m, dim=0)),
    }


def flat(kinds):
    for kind in kinds:
        if isinstance(kind, tuple):
            yield from flat(kind)
        elif kind != "constexpr":
            yield BYTES.get(kind, 8)  # a pointer has 8 bytes


class Driver:
    """Reads the launches that arrived at the stand-in driver."""

    def __init__(self):
        import ctypes

        self.memset = ctypes.memset
        driver = ctypes.CDLL("libcuda.so.1")
        self.sizes = (ctypes.c_int * 256).in_dll(driver, "sizes")
        self.shape = (ctypes.c_uint * 7).in_dll(driver, "last_shape")
        self.function = ctypes.c_ulonglong.in_dll(driver, "last_function")
        self.arguments = (ctypes.c_ulonglong * 256).in_dll(driver, "last_arguments")
        self.capturing = ctypes.c_int.in_dll(driver, "capturing")

    def expect(self, plan):
        for i, size in enumerate([*flat(plan.signature.values()), 0]):
            self.sizes[i] = size

    def after(self, call):
        """Returns (the words of the launch that the call makes, the call's result); the words are all 1 without a
        launch."""
        self.memset(self.arguments, 255, 256 * 8)
        result = call()
        return [*self.shape, self.function.value, *self.arguments], result


def addresses(tensors, results):
    """Returns {address: name of its tensor}."""
    results = results if isinstance(results, tuple) else (results,)
    return {t.data_ptr(): f"argument {i}" for i, t in enumerate(tensors)} | {
        t.data_ptr(): f"result {i}" for i, t in enumerate(results)
    }


def compare():
    with tempfile.TemporaryDirectory() as folder:
        kept = standin.install(Path(folder))
        import torch
        from safeops.kernels.engine import launch
        from triton import knobs

        from safeops.core import library

        driver, original, seen = Driver(), launch.Plan.__call__, []

        def launched(plan, tensors, places, *floats):
            """Launch by Triton's launcher with the tensors, and then by the plan, with hooks and without."""
            driver.expect(plan)
            hooked = []
            theirs, _ = driver.after(lambda: plan.loaded(0)[0][plan.grid](*plan.arguments(tensors, floats)))
            knobs.runtime.launch_enter_hook.add(hooked.append)
            original(plan, tensors, places, *floats)
            knobs.runtime.launch_enter_hook.remove(hooked.append)
            assert len(hooked) == 1  # a profiler's hooks are called
            ours, _ = driver.after(lambda: original(plan, tensors, places, *floats))
            assert ours == theirs, (ours, theirs)
            assert any(a != 2**64 - 1 for a in ours[8:])
            seen.append(plan.grid)

        launch.Plan.__call__ = launched
        for name, anew in calls().items():
            seen.clear()
            runs = []
            for _ in range(3):
                tensors, call = anew()
                arrived, result = driver.after(call)
                owners = addresses(tensors, result)
                runs.append([owners.get(word, word) for word in arrived])
            assert len(seen) == 1, (name, seen)  # Python launched only the first call, the extension the others
            assert (seen[0][1] > 1) == (name in SPLIT), (name, seen)
            # At most two words differ between runs without being a tensor's address: a second result that the caller
            # drops.
            hidden = [[a for a, b, c in zip(*runs) if not a == b == c] for run in runs]
            assert all(len(run) <= 2 and all(isinstance(word, int) for word in run) for run in hidden), (name, hidden)
            assert any(isinstance(word, str) for word in runs[1]), name

            # These calls must reach Python: with hooks, in a capture that needs its own buffers, and after `forget`.
            knobs.runtime.launch_enter_hook.add(ignore)
            call()
            knobs.runtime.launch_enter_hook.remove(ignore)
            assert len(seen) == 2, name
            call()
            assert len(seen) == 2, name
            torch.cuda.is_current_stream_capturing, driver.capturing.value = lambda: True, 1
            call()
            torch.cuda.is_current_stream_capturing, driver.capturing.value = bool, 0
            assert len(seen) == 2 + (name in SPLIT), name
            library.cpu_extension.forget()
            call()
            assert len(seen) == 3 + (name in SPLIT), name

        def astray(plan, tensors, places, *floats):
            """Launch without writing the results: a call that the extension cannot keep, so each call must reach
            Python."""
            seen.append(plan.grid)
            rest = [None if t is None else tensors[0] for t in tensors[len(places) :]]
            original(plan, (*tensors[: len(places)], *rest), places, *floats)

        launch.Plan.__call__ = astray
        library.cpu_extension.forget()
        seen.clear()
        call()
        call()
        assert len(seen) == 2

        def refuse(plan, *_):
            raise MemoryError("none left")

        launch.Plan.__call__ = refuse
        library.cpu_extension.forget()
        with pytest.raises(MemoryError, match="none left"):  # Python's error, and not a RuntimeError of the extension
            call()
        with pytest.raises(RuntimeError, match="MemoryError: none left"):
            torch.ops.safeops._masked_var(*tensors[::2])
        del kept


def ignore(_):
    pass


def repeat_all():
    """Assert that no op's second call reaches Python, forward or backward. One compiled kernel stands in for all: which
    kernel is launched does not matter here."""
    with tempfile.TemporaryDirectory() as folder:
        kept = standin.install(Path(folder))
        import torch
        from safeops.kernels.engine import launch

        from benchmarks import case

        original, compile_one, seen, binaries = launch.Plan.__call__, launch.Plan.compile, [], []

        def launched(plan, *arguments):
            seen.append(plan.kernel.fn.__name__)
            return original(plan, *arguments)

        def compile_once(plan, target):
            if not binaries:
                binaries.append(compile_one(plan, target))
            return binaries[0]

        launch.Plan.__call__, launch.Plan.compile = launched, compile_once
        launches = 0
        for name in case.names():
            benchmark = case.build(name, 4096, torch.float32, "cpu")
            for again in (False, True):
                seen.clear()
                result = benchmark.ours(*benchmark.inputs)
                if benchmark.backward_bytes is not None:
                    result.backward(torch.ones_like(result))
                assert not (again and seen), (name, seen)
                launches += len(seen)
        assert launches > 100
        del kept


if __name__ == "__main__":
    globals()[sys.argv[1]]()
