"""Which kernels of GPUs have passed `make test-kernels`, by their sources and launches.

`python -m tests.kernels.passed` prints what has changed since then, and fails if anything has; `make test-slow` then
runs them again. `--write` is the end of `make test-kernels`: it writes passed.txt, which is committed with the
change."""

import hashlib
import itertools
import sys
import warnings
from pathlib import Path

import torch

from safeops.testing import NotApplicable, run
from tests.kernels.executed.launching import on_launchers, planned
from tests.kernels.executed.subjects import BF16, F32, launched

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_suffix(".txt")
ARCH = 90
SOURCES = {
    "csrc": "csrc/**/*.*",
    "kernels": "kernels/**/*.py",
    "tests/kernels": "tests/kernels/**/*.*",
    "setup.py": "setup.py",
    "requirements": "requirements-[dt]*.txt",
}


def digest(texts):
    return hashlib.sha256("\0".join(map(str, texts)).encode()).hexdigest()[:16]


def sources(pattern):
    """Returns the names and texts of these source files."""
    paths = (path for path in sorted(ROOT.glob(pattern)) if "__pycache__" not in path.parts and path != FILE)
    return [(path.relative_to(ROOT).as_posix(), path.read_text()) for path in paths if path.is_file()]


def launches(subject):
    """Returns what the op hands to each kernel on all its samples: all that the kernel is compiled for, its grid and
    integers, and for each operand which of the sample's tensors it is."""
    from triton.backends.compiler import GPUTarget

    from tests.kernels.compiled import gpu_kernels

    target, plans = GPUTarget("cuda", ARCH, 32), []
    for sample, dtype in itertools.product(subject.samples, (BF16, F32)):
        cast = sample.cast(dtype)
        addresses = {tensor.data_ptr(): key for key, tensor in cast.operands().items()}

        def record(plan, tensors, _, *floats, addresses=addresses):
            encoded = gpu_kernels().encoded(plan.source(), plan.options(target))
            operands = [None if x is None else (addresses.get(x.data_ptr()), x.dtype, x.shape) for x in tensors]
            plans.append((encoded, plan.grid, plan.numbers, operands, floats))

        try:
            with planned(record, ARCH), on_launchers():
                run(subject.op, cast, grad=bool(sample.leaves()))
        except NotApplicable:
            continue  # as in test_every_op
    return plans


def current():
    """Returns {name: digest} of the sources, and of each op's launches."""
    torch.manual_seed(0)
    results = {name: digest(sources(pattern)) for name, pattern in SOURCES.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about broadcast operands, which are intended here
        return results | {name: digest(launches(subject)) for name, subject in launched().items()}


def main():
    now = current()
    if "--write" in sys.argv:
        FILE.write_text("".join(f"{name} {value}\n" for name, value in now.items()))
        return
    lines = FILE.read_text().splitlines() if FILE.exists() else ()
    before = dict(line.split() for line in lines)
    if changed := [name for name in {**before, **now} if before.get(name) != now.get(name)]:
        sys.exit(f"changed since make test-kernels passed: {', '.join(changed)}")


if __name__ == "__main__":
    main()
