"""The ops with Triton kernels, each as a Subject of the contract's tests (an op with its definition and sample calls):
which calls are executed, and how results are compared."""

import dataclasses
import warnings

import torch

from safeops.core import library
from safeops.core.op import registry
from safeops.testing import NotApplicable, run
from safeops.testing.compare import assert_right
from tests.kernels.executed.launching import executed, on_launchers
from tests.ops import RECORDS

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def launched():
    """Returns {name: Subject} for each op with a Triton kernel."""
    raw = {op.name().removeprefix("safeops::") for op in library.launchers}
    names = [name for name, op in registry.items() if op.cpu and raw.intersection(op.raw)]
    return {name: next(RECORDS[name].subjects()) for name in names}


def resized(sample, rows, columns):
    """Returns the 2-d sample call with operands of this size, whose values repeat the sample's."""

    for axis, size in ((-1, columns), (-2, rows)):
        sample = sample._resize(lambda t, a, size=size: t.index_select(a, torch.arange(size) % t.shape[a]), axis)
    return dataclasses.replace(sample, name=f"{sample.name}, {rows} x {columns}")


def rows_of(subject):
    """Returns the {name: sample} of the subject whose rows are contiguous in memory."""

    def shape(sample):
        try:
            return sample.shape()
        except NotApplicable:
            return ()

    return {x.name: x for x in subject.samples if len(shape(x)) == 2 and x.kwargs.get("dim", -1) in (None, -1, 1)}


def assert_agrees(subject, sample, dtype, **options):
    """Assert that values and gradients of an executed call agree with the fp64 definition; returns its launches."""
    cast = sample.cast(dtype)
    if any(not torch.equal(t.isfinite(), sample.get(key).isfinite()) for key, t in cast.floats().items()):
        raise NotApplicable(f"values do not fit {dtype}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about broadcast operands, which are intended here
        with executed(**options) as launches, on_launchers():
            result = run(subject.op, cast, grad=bool(sample.leaves()))
        truth = subject.truth(cast, result.upstream or None)
    try:
        assert_right(cast, result, truth, f"{sample.name} in {dtype}")
    except AssertionError as error:
        raise AssertionError(f"{subject.name}, {sample.name}, {[x.kernel for x in launches]}: {error}") from error
    return launches
