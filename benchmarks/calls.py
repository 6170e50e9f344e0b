"""Measures the host time of a CUDA op's call, part by part: `make bench ARGS="--ops calls"`.

Needs no GPU: see standin.py. A C++ op is timed as a whole: the public function, the dispatcher and the host code, up to
a runtime that does nothing. A Triton op's call that repeats an earlier one is launched without Python (csrc/launch):

    route      the public function, up to the raw op
    launch     torch's dispatcher, the lookup of the call by its operands, the outputs, a driver that does nothing

If only a number argument differs from earlier calls, the launcher in Python launches from a plan that it has. If the
sizes are new, as in batches of variable length, the first call makes a plan in Python (the kernel is loaded already),
and the second is also traced: its steps from sizes to arguments are recorded. Later calls are launched by that trace,
as long as it holds for their sizes (kernels/engine/trace.py).
"""

import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from time import perf_counter

from . import standin

GOAL, CPP_GOAL = 10 / 1.5, 8 / 1.5  # in times of a bare aten op, which takes 1.5 us: 10 us, 8 us for C++ ops
PARTS = ("route", "launch")
# measure_parts needs ops that launch one kernel each.
OPS = ("mse_loss", "huber_loss", "masked_sum", "masked_mean", "masked_mean_rows", "masked_var", "masked_softmax",
       "normalize", "cosine_similarity")  # fmt: skip
CPP = ("safe_div", "safe_log", "masked_fill", "masked_compact_50", "safe_gather", "total_variation", "ssim")
STEP, SIZES = 1024, 32  # elements between two sizes (one row), and how many sizes
ROUNDS, REPEATS = 200, 20  # samples, and calls in a sample: so short that most are not interrupted


def measure(ops=OPS, cpp=CPP) -> list[dict]:
    """Returns a record for each op. The Triton ops and the C++ ops are each measured in a process of their own, which
    has the stand-in driver or runtime."""
    if why := standin.unusable():
        print(f"calls: not measured, {why}", file=sys.stderr)
        return []
    if cpp and not standin.objects():
        print("calls: of C++ ops not measured, csrc/cuda is not built (`make architectures`)", file=sys.stderr)
        cpp = ()
    return [record for kind, names in (("triton", ops), ("cpp", cpp)) if names for record in _served(kind, names)]


def _served(kind, ops):
    done = subprocess.run([sys.executable, "-m", __name__, kind, *ops], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"calls: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def best(call) -> float:
    """Returns the microseconds per call of the fastest sample."""
    call()
    return min(sample(call) for _ in range(ROUNDS)) * 1e6


def sample(call) -> float:
    start = perf_counter()
    for _ in range(REPEATS):
        call()
    return (perf_counter() - start) / REPEATS


def spied(owner, name, seen):
    """Make owner.name append its arguments to `seen`. Returns a function that undoes this."""
    function = getattr(owner, name)

    def spy(*arguments):
        seen.append(arguments)
        return function(*arguments)

    setattr(owner, name, spy)
    return partial(setattr, owner, name, function)


def measure_parts(call, lazy, forget) -> dict:
    """Returns microseconds of a call that launches one kernel: in total ("total"), of each part, and in total if the
    launcher in Python launches it ("python")."""
    import torch

    call()
    forget()
    seen = {x: [] for x in lazy}
    undo = [spied(x, "launch", seen[x]) for x in lazy if x.launch]
    call()
    for back in undo:
        back()
    ((launcher, (arguments,)),) = [(x, calls) for x, calls in seen.items() if calls]
    raw, python = (getattr(torch.ops.safeops, f"_{launcher.name}{end}").default._op for end in ("", "_launch"))
    leading = len(arguments)  # how many arguments the public function passes: no trailing defaults
    while leading and arguments[leading - 1] is launcher.defaults[leading - 1]:
        leading -= 1
    total, op = best(call), best(partial(raw, *arguments[:leading]))
    results = {"total": total, "python": total - op + best(partial(python, *arguments[:leading]))}
    return results | dict(zip(PARTS, (total - op, op), strict=True))


def new_sizes(calls, forget) -> dict:
    """Returns microseconds of the first, the second and a later call of a series in which each size is new. The series
    is repeated, each time without any plans, and the best time of each call counts: interruptions distort calls this
    short."""
    for call in calls:
        call()
    times = [[] for _ in calls]
    for _ in range(ROUNDS // 4):
        forget()
        for call, taken in zip(calls, times):
            start = perf_counter()
            call()
            taken.append(perf_counter() - start)
    first, second, *others = (min(taken) * 1e6 for taken in times)
    return {"first_size": first, "traced": second, "new_size": sum(others) / len(others)}


def serve(ops):
    with tempfile.TemporaryDirectory() as folder:
        library, lazy = standin.install(Path(folder))
        import torch
        from safeops.kernels.engine import launch

        from safeops.core.library import cpu_extension

        from . import case

        def forget(plans=False):
            cpu_extension.forget()
            if plans:
                launch._plans.clear()

        case.names()
        torch.set_num_threads(1)
        x, records, aten = torch.ones(8), [], []
        for name in ops:
            cases = [case.build(name, STEP * (8 + i), torch.float32, "cpu") for i in range(SIZES)]
            calls = [partial(benchmark.ours, *(t.detach() for t in benchmark.inputs)) for benchmark in cases]
            record = {"op": name, "parts": measure_parts(calls[0], lazy, forget)}
            records.append(record | new_sizes(calls, partial(forget, plans=True)))
            aten.append(best(lambda: torch.add(x, x)))
        print(json.dumps([record | {"aten": min(aten)} for record in records]))


def serve_cpp(ops):
    with tempfile.TemporaryDirectory() as folder:
        standin.install_cuda(Path(folder))
        import torch

        from . import case

        case.names()
        torch.set_num_threads(1)
        x, totals, aten = torch.ones(8), {}, []
        for name in ops:
            benchmark = case.build(name, STEP * 8, torch.float32, "cpu")
            totals[name] = best(partial(benchmark.ours, *(t.detach() for t in benchmark.inputs)))
            aten.append(best(lambda: torch.add(x, x)))
        records = [{"op": f"{op} (C++)", "parts": {"total": us}, "aten": min(aten)} for op, us in totals.items()]
        print(json.dumps(records))


if __name__ == "__main__":
    {"triton": serve, "cpp": serve_cpp}[sys.argv[1]](sys.argv[2:])
