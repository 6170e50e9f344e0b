"""Tests calls that the interpreter and the executor, which need no GPU, have never run or have found wrong.
gpu_check.py runs these tests first.

The most important cases of `CASES` come first, since the time may run out. On a CPU the cases run with fewer rows by
the CPU kernels, to test this file. As a program, `test_unseen.py NAME` makes the call of one case, for a sanitizer.
"""

import dataclasses
import faulthandler
import math
import os
import sys
import time
from collections.abc import Callable, Mapping

import pytest
import torch

import safeops
from safeops.testing import CHECKS, Sample, run
from safeops.testing.compare import assert_outcomes_equal, assert_right, assert_same_bits
from safeops.testing.layouts import LAYOUTS
from tests.gpu.guards import guarded
from tests.ops import RECORDS
from tests.ops.record import DEVICE

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
ON_GPU = DEVICE == "cuda"
# Largest norm of the error, relative to the norm of the truth. (A record's tolerance is per element, and loose where
# terms cancel.)
FAR = {BF16: 2**-6, FP32: 1e-4, FP64: 1e-11}
ELEMENTS = None if ON_GPU else 30_000  # None, or on a CPU the most elements of an operand: a larger one gets fewer rows
LONGEST = 2**30 + 8 if ON_GPU else 100_001  # classes of the longest row; in bf16 it has more than 2 GiB


# ---- operands


def generator(seed):
    return torch.Generator(DEVICE).manual_seed(seed)


def numbers(shape, dtype, seed=0):
    wide = torch.float64 if dtype == FP64 else torch.float32
    return (2 * torch.randn(shape, generator=generator(seed), device=DEVICE, dtype=wide)).to(dtype)


def indices(shape, classes):
    return torch.randint(classes, shape, generator=generator(9), device=DEVICE)


def vectors(count):
    return lambda shape, dtype: tuple(numbers(shape, dtype, seed) for seed in range(count))


def with_classes(shape, dtype):
    return numbers(shape, dtype), indices((shape[0], 1, *shape[2:]), shape[1])


def with_mask(shape, dtype):
    return numbers(shape, dtype), numbers(shape, FP32, 1) < 1


def images(shape, dtype):
    x, noise = (numbers(shape, FP64, seed) for seed in range(2))
    return x.sigmoid().to(dtype), (x + noise / 8).sigmoid().to(dtype)


def layer(shape, dtype):
    """Returns (rows (N, D), weight (C, D), labels (N,)) of a last linear layer. shape: (N, D, C)."""
    rows, width, classes = shape
    return numbers((rows, width), dtype), numbers((classes, width), dtype, 1) / 32, indices((rows,), classes)


OPERANDS = {
    **dict.fromkeys(("cross_entropy", "nll_loss", "multi_margin_loss"), with_classes),
    **dict.fromkeys(("cosine_similarity", "info_nce_loss"), vectors(2)),
    **dict.fromkeys((f"{name}_with_logits" for name in ("kl_div", "reverse_kl_div", "js_div", "tv")), vectors(2)),
    "triplet_margin_loss": vectors(3),
    "linear_cross_entropy": layer,
    "ms_ssim": images,
}
VIEWS = {
    "": lambda t: t,
    "[:, :-1]": lambda t: t[:, :-1],
    "[:, 1:]": lambda t: t[:, 1:],
    "begins anywhere": LAYOUTS["offset"],
}


# ---- cases


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of an op. Values and gradients must agree with the definition in fp64 within the record's tolerance, and
    have the same bits in each run. On a GPU nothing outside the results may be written."""

    op: str
    shape: tuple
    dtype: torch.dtype
    view: str = ""
    options: Mapping = dataclasses.field(default_factory=dict)
    operands: Callable | None = None

    def __str__(self):
        parts = self.op, "x".join(map(str, self.shape)), str(self.dtype).removeprefix("torch."), self.view
        return " ".join(filter(None, parts))

    @property
    def subject(self):
        return next(RECORDS[self.op].subjects())

    def sample(self):
        rows, *rest = self.shape
        if ELEMENTS is not None:
            rows = min(rows, max(6, ELEMENTS // math.prod(rest)))
        tensors = (self.operands or OPERANDS.get(self.op, vectors(1)))((rows, *rest), self.dtype)
        leaves = tuple(i for i, t in enumerate(tensors) if t.is_floating_point())
        tensors = tuple(VIEWS[self.view](t) if i in leaves else t for i, t in enumerate(tensors))
        options = {key: value(self.dtype) if callable(value) else value for key, value in self.options.items()}
        if self.op in ("cross_entropy", "nll_loss"):
            options |= {"dim": 1, "classes": self.shape[1]}
        return Sample(tensors, options, differentiable=leaves)

    def launch(self):
        return run(self.subject.op, self.sample())

    def check(self):
        subject, sample = self.subject, self.sample()
        first = run(subject.op, sample)
        truth = subject.truth(self.counted(sample), first.upstream)
        assert_right(sample, first, truth)
        for (what, got), (_, wide) in zip(first, truth):
            off = float((got.double() - wide).norm() / wide.norm())
            assert off <= FAR[self.dtype], f"{what}: off by {off:.2g} in the norm"

        def again():
            return run(subject.op, sample, first.upstream)

        for _ in range(3):
            assert_outcomes_equal(again(), first, "differs from run to run")
        if ON_GPU and not guarded(again, [tensor for _, tensor in first]):
            pytest.skip("right, and the same each time; but the allocator left no place between guards")

    def counted(self, sample):
        """Adds a mask that keeps all rows: the record's tolerance of a mean takes the number of rows from the mask."""
        if self.op not in ("cross_entropy", "nll_loss") or "mask" in sample.kwargs:
            return sample
        return sample.with_kwargs(mask=torch.ones_like(sample.args[1], dtype=torch.bool))


@dataclasses.dataclass(frozen=True)
class Part(Case):
    """A call on some of the rows, or on a crop of the images. Their results must have the bits of the whole call's."""

    part: tuple = (slice(1, 2),)

    def __str__(self):
        part = ("..." if x is ... else f"{x.start or ''}:{x.stop}" for x in self.part)
        return f"{super().__str__()} [{', '.join(part)}]"

    def check(self):
        subject, sample = self.subject, self.sample()

        def cut(t):
            return t[self.part].contiguous() if ... in self.part else t[self.part]

        whole = run(subject.op, sample)
        part = dataclasses.replace(sample, args=tuple(map(cut, sample.args)))
        for (what, got), (_, want) in zip(run(subject.op, part, list(map(cut, whole.upstream))), whole):
            assert_same_bits(what, got, cut(want), "differs from the whole's")

    def launch(self):
        self.check()


@dataclasses.dataclass(frozen=True)
class LongRow(Case):
    """masked_log_softmax of one long row that repeats three numbers: values and gradients must repeat, too."""

    def sample(self):
        (length,) = self.shape
        x = torch.tensor([0.0, 1.0, 2.0], device=DEVICE, dtype=self.dtype).repeat(length // 3 + 2)[1 : length + 1]
        return Sample((x,), differentiable=(0,))

    def check(self):
        sample = self.sample()
        (x,), (length,) = sample.args, self.shape
        got = run(safeops.masked_log_softmax, sample, [x])
        period = x[:3].double()
        counts = torch.tensor([len(range(i, length, 3)) for i in range(3)], device=DEVICE)
        value = period - (counts * period.exp()).sum().log()
        gradient = period - value.exp() * (counts * period).sum()
        for (what, result), truth in zip(got, (value, gradient)):
            for i in range(3):
                error = (result[i::3] - truth[i].to(self.dtype)).abs().max()
                assert error <= 2**-7 * truth.abs().max(), f"{what}: off by {error}, want {truth[i]}"


@dataclasses.dataclass(frozen=True)
class Graph(Case):
    """A call captured with its backward as a CUDA graph. A replay on other numbers must equal an eager call."""

    def __str__(self):
        return f"{super().__str__()}, graph"

    def check(self):
        if not ON_GPU:
            pytest.skip("needs a GPU")
        CHECKS["cuda_graph"](self.subject, dataclasses.replace(self.sample(), dtypes=(self.dtype,)))


@dataclasses.dataclass(frozen=True)
class Sanitized(Case):
    """A call in a process of its own under a tool of compute-sanitizer, which must report no error."""

    tool: str = "memcheck"

    def __str__(self):
        return f"{super().__str__()}, {self.tool}"

    def check(self):
        if not ON_GPU:
            pytest.skip("needs a GPU")
        import gpu_processes as processes  # in scripts/, which gpu_check.py puts on the path

        if not processes.sanitizer():
            pytest.skip("compute-sanitizer is not on this machine")
        # The process has its own time limit, longer than a test's, so the test's is cancelled. It also ends with the
        # stage.
        faulthandler.cancel_dump_traceback_later()
        left = float(os.environ["SAFEOPS_GPU_CHECK_UNTIL"]) - time.time() - 5
        _, output = processes.run_limited(
            processes.sanitizing(self.tool, __file__, self),
            min(processes.SANITIZER_SECONDS, left),
            env=os.environ | processes.FOR_SANITIZERS,
        )
        verdict, errors = processes.sanitized(output)
        if verdict == "not judged":
            pytest.skip("its process did not end in time, or did not run under the sanitizer")
        assert verdict == "passed", errors


LENGTHS = (9_001, 50_257)
ROWS = {  # op -> options, for ops that return a value for each element of a row
    "masked_softmax": {},
    "masked_log_softmax": {},
    "normalize": {"dim": -1},
}
PAIRS = [name for name, operands in OPERANDS.items() if name.endswith("_with_logits")]
SEGMENTS = {"ends": (3, 3, 4, 10)}  # the sequences' ends, in tenths of all rows
MEAN_OF_LONG_ROWS = [
    Case("cross_entropy", (1_021, 32_000), BF16),
    Case("cross_entropy", (1_100, 32_000), BF16),
    Case("cross_entropy", (70_000, 1_000), BF16),
    Case("multi_margin_loss", (1_100, 20_000), FP32),
    Case("triplet_margin_loss", (1_100, 20_000), FP32),
]
TICKETS = [
    *MEAN_OF_LONG_ROWS[1:2],
    Case("masked_mean", (1_000_003,), FP32),
    Case("masked_var", (64, 9_001), BF16, options={"dim": 0}),
    Case("segment_sum", (50_003, 16), FP32, options=SEGMENTS),
]
IMAGES = {"options": {"reduction": "none"}}
MASKED = {"operands": with_mask}


def weights_of_classes(dtype):
    return numbers((9_001,), FP32, 5).abs() + 0.25


CASES = [
    # Calls that were wrong once: found by reading, and by executing compiled code.
    *MEAN_OF_LONG_ROWS,
    *(Case(op, (256, n), t, options=o) for op, o in ROWS.items() for n in LENGTHS for t in (BF16, FP32)),
    *(Case(op, (16, 17, 9_001), BF16, view, ROWS[op]) for op in ROWS for view in ("[:, :-1]", "[:, 1:]")),
    *(Case("js_div_with_logits", (32, n), FP64) for n in (2_049, 3_001, 4_096)),
    *(
        Part("cross_entropy", (2, classes, 16, 16), FP32, part=(..., slice(h), slice(w)), **IMAGES)
        for classes in (21, 100)
        for h, w in ((16, 4), (7, 7), (8, 8))
    ),
    *(Part(op, (3, n), FP32, **MASKED) for op in ("masked_softmax", "masked_log_softmax") for n in (1_000, 1_004)),
    Part("cross_entropy", (3, 9_001), BF16, options={"reduction": "none", "weight": weights_of_classes}),
    LongRow("masked_log_softmax", (LONGEST,), BF16),
    # Branches of the kernels that differ in fp64.
    *(Case(op, (64, n), FP64, options=o) for op, o in ROWS.items() for n in (1_000, 9_001)),
    *(Case(op, (64, n), FP64) for op in ("cross_entropy", "multi_margin_loss", *PAIRS[:1]) for n in (1_000, 9_001)),
    Case("cross_entropy", (2, 21, 56, 56), FP64),
    # Matrix products inside a kernel.
    *(Case("info_nce_loss", shape, t) for shape in ((512, 128), (1_001, 96)) for t in (BF16, FP32)),
    Case("info_nce_loss", (300, 40), FP64),
    Case("info_nce_loss", (512, 64), BF16, options={"temperature": 0.1}),
    # Blocks that run at the same time, of which the last to finish computes the result, under the sanitizer.
    *(Sanitized(**vars(case), tool="racecheck") for case in TICKETS),
    *(Sanitized(**vars(case)) for case in (*TICKETS, *MEAN_OF_LONG_ROWS[3:])),
    *TICKETS[1:],
    # Gradients that overwrite the logits: for all rows at once, in chunks, and in the mode with the least memory.
    *(Case("linear_cross_entropy", (2_048, 64, 32_000), t) for t in (BF16, FP32)),
    Case("linear_cross_entropy", (8_960, 64, 4_001), BF16),
    Case("linear_cross_entropy", (2_048, 32, 32_000), BF16, options={"memory": "low"}),
    # Kernels written after the last run on a GPU.
    *(Case("ms_ssim", (1, 1, 176, 181), t) for t in (BF16, FP32, FP64)),
    *(Case(op, (64, n), t) for op in PAIRS for n, t in ((1_000, FP32), (9_001, BF16), (32_000, BF16))),
    *(Case(f"segment_{op}", (9_973, 33), t, options=SEGMENTS) for op in ("sum", "mean", "max") for t in (BF16, FP32)),
    Case("segment_mean", (30_011,), FP32, options={**SEGMENTS, "shuffled": True}),
    # Rows that do not start at a multiple of 16 bytes.
    *(Case(op, (64, n), t, "begins anywhere", o) for op, o in ROWS.items() for n, t in ((1_001, FP32), (33_001, BF16))),
    *(Case("cross_entropy", (64, n), t, "begins anywhere") for n, t in ((1_001, FP32), (33_001, BF16))),
    Case("cosine_similarity", (64, 1_001), BF16, options={"dim": -1}),
    # Graph captures of the cases above.
    *(Graph(**vars(case)) for case in (*TICKETS, *MEAN_OF_LONG_ROWS[3:])),
    Graph("linear_cross_entropy", (2_048, 64, 32_000), BF16),
    Graph("info_nce_loss", (512, 128), BF16),
    Graph("js_div_with_logits", (64, 9_001), BF16),
    Graph("ms_ssim", (1, 1, 176, 181), BF16),
    Graph("masked_softmax", (64, 33_001), BF16, **MASKED),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.* is broadcast with")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_unseen(case):
    case.check()


if __name__ == "__main__":
    (wanted,) = [case for case in CASES if str(case) == sys.argv[1]]
    wanted.launch()
    if ON_GPU:
        torch.cuda.synchronize()
    print("done", flush=True)
