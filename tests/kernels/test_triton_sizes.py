"""The extension launches a call of new sizes by a trace, the recorded steps from sizes to arguments
(kernels/engine/trace.py). The driver must get the same grid and arguments, and the caller results of the same sizes and
strides, as when Python plans the call.

The driver is the stand-in of benchmarks/standin.py, which records what arrives, in a process of its own.
"""

import importlib
import random
import subprocess
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import standin
from tests.kernels.test_triton_start import Driver, addresses

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(standin.unusable()), reason=str(standin.unusable())),
]
SIZES = 10  # sizes for each call
CASES = 6, 24  # calls of each benchmark: at least 6; up to 24 while some launcher has followed no trace yet
WORKSPACE = "memory of the launch alone"


@pytest.mark.parametrize("what", ["as_planned", "as_triton_launches"])
def test_the_driver_gets_the_same(what):
    done = subprocess.run([sys.executable, "-m", __name__, what], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def size(chance):
    """Returns a random size, often close to a limit of the plans: a multiple of an access, a tile or a split."""
    near = 1 << chance.randrange(2, 14)
    return max(chance.choice([chance.randrange(1, 40), near + chance.randrange(-2, 3), chance.randrange(16, 9000)]), 1)


def layouts():
    """Returns {name: function(shape, dtype) that makes an operand with this kind of strides and alignment}."""
    import torch

    return {
        "whole": lambda *shape, dtype: torch.zeros(shape, dtype=dtype),
        "odd": lambda a, *rest, dtype: (
            torch.zeros((a + 1, *rest), dtype=dtype).flatten()[1:][: torch.Size((a, *rest)).numel()].view(a, *rest)
        ),
        "parts": lambda a, b, dtype: torch.zeros(a, b + 24, dtype=dtype)[:, 8:-16],
        "across": lambda a, b, dtype: torch.zeros(b, a, dtype=dtype).t(),
        "spread": lambda a, b, dtype: torch.zeros(a, 1, dtype=dtype).expand(a, b),
    }


def calls():
    """Returns {name: (layouts, function of the operands x, y and a mask)}."""
    import safeops

    every = ("whole", "odd", "parts", "across", "spread")
    dense = ("whole", "parts", "across")
    return {
        "sum": (every, lambda x, y, m: safeops.masked_sum(x, m)),
        "mean of rows": (every, lambda x, y, m: safeops.masked_mean(x, m, dim=1)),
        "mean of columns": (every, lambda x, y, m: safeops.masked_mean(x, m, dim=0, keepdim=True)),
        "sums of many columns": (dense, lambda x, y, m: safeops.masked_sum(x, m, dim=0)),
        "one dimension or the other": (dense, lambda x, y, m: safeops.masked_sum(x, m, dim=x.shape[0] % 2)),
        "one row's mask": (dense, lambda x, y, m: safeops.masked_mean(x, m[:1], dim=0)),
        "variance": (every, lambda x, y, m: safeops.masked_var(x, m)),
        "variance of columns": (dense, lambda x, y, m: safeops.masked_var(x, m, dim=0)),
        "loss": (every, lambda x, y, m: safeops.mse_loss(x, y, mask=m)),
        "losses": (every, lambda x, y, m: safeops.huber_loss(x, y, delta=0.7, reduction="none")),
        "broadcast losses": (dense, lambda x, y, m: safeops.mse_loss(x, y[:, :1].expand_as(x), reduction="none")),
        "softmax": (dense, lambda x, y, m: safeops.masked_softmax(x, m)),
        "softmax of columns": (dense, lambda x, y, m: safeops.masked_softmax(x, dim=0)),
        "similarity": (dense, lambda x, y, m: safeops.cosine_similarity(x, y, dim=-1)),
        "classes": (dense, lambda x, y, m: safeops.cross_entropy(x, y[:, 0].long())),
        "weighted classes": (dense, lambda x, y, m: safeops.nll_loss(x, y[:, 0].long(), weight=y[0].relu() + 1)),
    }


class Comparison:
    """Runs each raw op twice, once planned by Python and once as the extension decides, and compares the launches."""

    def __init__(self, folder, by_triton):
        """by_triton: kernels are compiled, and the arguments are compared with those that Triton's own launcher passes.
        Else one compiled kernel stands in for all, and the arguments are compared with the plan's."""
        self.kept, self.lazy = standin.install(folder)
        from safeops.kernels.engine import launch, start

        self.driver, self.planned, self.twice, self.workspace, self.apart = Driver(), False, False, None, 0
        self.derived, self.total, self.watch = Counter(), Counter(), []
        plan_call, compile_plan, binaries = launch.Plan.__call__, launch.Plan.compile, []

        def launched(plan, tensors, places, *floats):
            if launch.active.tape is None:
                self.planned = True
                self.driver.expect(plan)
                self.workspace = tensors[plan.kernel.pointers.index("partial")].data_ptr() if plan.apart else None
                if self.twice:
                    plan_call(plan, tensors, places, *floats)
                elif by_triton and self.watch:
                    return plan.loaded(0)[0][plan.grid](*plan.arguments(tensors, floats))
            return plan_call(plan, tensors, places, *floats)

        def compile_once(plan, target):
            if not binaries:
                binaries.append(compile_plan(plan, target))
            return binaries[0]

        launch.Plan.__call__ = launched
        if not by_triton:
            launch.Plan.compile = compile_once
        extension = start.cpu_extension  # the extension sees self.watch as the profiler's hooks

        def use_driver(*arguments):
            extension.use_driver(*arguments[:-2], self.watch, [])

        start.cpu_extension = SimpleNamespace(
            launch=extension.launch, keep_buffers=extension.keep_buffers, use_driver=use_driver
        )

    def arrived(self, op, arguments):
        import torch

        words, results = self.driver.after(lambda: op(*arguments))
        results = results if isinstance(results, tuple) else (results,)
        owners = addresses([x for x in arguments if isinstance(x, torch.Tensor)], results)
        owners[self.workspace] = WORKSPACE
        return [owners.get(word, word) for word in words], [(x.shape, x.stride(), x.dtype) for x in results]

    def of(self, name, call):
        """Compare all launches that a call makes, forward and backward."""
        import torch

        launches, undo = [], [(x, x.launch) for x in self.lazy]
        for lazy in self.lazy:
            lazy.launch = spy(lazy, launches)
        self.by_python(call, twice=True)
        for lazy, launch in undo:
            lazy.launch = launch
        for launcher, arguments in launches:
            op = getattr(torch.ops.safeops, f"_{launcher}").default
            arrived = partial(self.arrived, op, arguments)
            self.by_python(arrived, twice=True)
            self.planned, self.workspace = False, None
            result = arrived()
            derived = not self.planned
            expected = self.by_python(arrived)
            if derived:
                own = {a: b for a, b in zip(result[0], expected[0]) if b == WORKSPACE}  # the extension's workspace
                words = [own.get(a, a) for a in result[0]]
                assert words == expected[0], (name, launcher, [(a, b) for a, b in zip(words, expected[0]) if a != b])
                assert result[1] == expected[1] and all(isinstance(a, int) for a in own), (name, launcher)
                self.apart += len(own)
            self.total[launcher] += 1
            self.derived[launcher] += derived

    def never(self):
        """Returns the launchers that have followed no trace yet."""
        return [name for name in self.total if not self.derived[name]]

    def by_python(self, call, twice=False):
        """Run the call, planned by Python. twice: Python launches twice, a call that the extension cannot keep."""
        self.watch.append(None)
        self.twice = twice
        result = call()
        self.watch.clear()
        self.twice = False
        return result


def spy(lazy, launches):
    launch = getattr(importlib.import_module(f"safeops.kernels.{lazy.module}"), lazy.name)

    def noted(*arguments):
        if all(type(x).__name__ != "Sized" for x in arguments):  # a trace passes Sized objects instead of tensors
            launches.append((lazy.name, arguments))
        return launch(*arguments)

    return noted


def both_ways(call, *operands):
    import torch

    result = call(*operands)
    if result.requires_grad:
        result.backward(torch.ones_like(result))


def run(by_triton, names, benchmarked):
    import torch

    from benchmarks import case

    chance = random.Random(3)
    with tempfile.TemporaryDirectory() as folder:
        comparison = Comparison(Path(folder), by_triton)
        for name in names:
            kinds, call = calls()[name]
            for kind in kinds:
                make = layouts()[kind]
                for _ in range(SIZES):
                    a, b = size(chance), size(chance)
                    b = min(b, max((1 << 21) // a, 1))
                    x, y = (make(a, b, dtype=torch.float32) for _ in range(2))
                    mask = make(a, b, dtype=torch.bool)
                    comparison.of(f"{name}, {kind}, {a} x {b}", partial(both_ways, call, x.requires_grad_(), y, mask))
        for name in case.names() if benchmarked else ():
            chance = random.Random(name)  # seeded by name: sizes do not depend on the other cases
            few, most = CASES
            for place in range(most):
                if place >= few and not comparison.never():
                    break
                n = 4096 * chance.randrange(3, 64)
                benchmark = case.build(name, n, torch.bfloat16, "cpu")
                comparison.of(f"{name}, {n}", partial(both_ways, benchmark.ours, *benchmark.inputs))
        del comparison.kept
    for name in comparison.total:
        print(name, comparison.derived[name], comparison.total[name])
    return comparison


def as_planned():
    comparison = run(False, calls(), True)
    assert not comparison.never() and comparison.apart, (comparison.never(), comparison.apart)
    assert len(comparison.total) > 40 and comparison.derived.total() > 0.4 * comparison.total.total()


def as_triton_launches():
    comparison = run(True, ("sum", "losses"), False)
    assert comparison.derived.total() > 0.3 * comparison.total.total()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
