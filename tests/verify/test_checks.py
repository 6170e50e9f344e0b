"""The checks of `safeops verify`, run in this process, find wrong kernels and pass the CPU kernels."""

import os

import pytest
import torch

from safeops.core.op import registry
from safeops.testing import run
from safeops.verify import checks, variations, worker
from tests.contract.common import unless_first
from tests.verify.stand_in import stand_in

DEFECTS = {
    "wrong": ("value", "wrong"),
    "wrong_at_the_end": ("variations", "1 of"),
    "hides_nan": ("kept_nonfinite", "NaN in the wrong places"),
    "flat": ("variations", "wrong"),
    "waits": ("no_sync", "synchronises"),
    "differs": ("repeated", "differs from run to run"),
    "raises": ("kernel_runs", "RuntimeError: CUDA error: no kernel image"),
}


@pytest.fixture
def small(monkeypatch):
    """Limits the sizes to 70,000 elements, more than the 60,000 that stand for one wave of blocks."""
    monkeypatch.setattr(variations, "SIZES", (1, 1000, 70_000))


def lines(op, full=False):
    """Returns the lines that a worker writes about an op."""
    said = []
    worker.check_op(op, "cpu", full, lambda **line: said.append(line))
    return said


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_found_and_named(name):
    check, words = DEFECTS[name]
    with stand_in(name) as op:
        last = lines(op)[-1]
    assert (last["op"], last["check"], last["state"], last["alive"]) == (op.name, check, "failed", True)
    assert words in last["why"]


@pytest.mark.usefixtures("small")
def test_what_is_right_passes_every_check():
    with stand_in("right") as op:
        said = lines(op, full=True)
        due = checks.names(op, full=True)
    assert said[-1] == {"op": op.name, "check": None, "state": "done"}
    assert [line["check"] for line in said if line["state"] == "passed"] == due


def test_a_composite_in_the_kernels_place_does_not_pass():
    with stand_in("wrong") as op:
        op.takes = False
        last = lines(op)[-1]
    assert (last["check"], last["state"]) == ("kernel_runs", "failed") and "not the kernels" in last["why"]


def test_no_memory_left_is_no_verdict():
    with stand_in("runs_out") as op:
        assert lines(op)[-1]["state"] == "memory"


def test_a_device_that_does_not_recover_ends_the_worker(monkeypatch):
    def synchronise(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    ended = []
    monkeypatch.setattr(worker, "synchronise", synchronise)
    monkeypatch.setattr(os, "_exit", ended.append)
    with stand_in("right") as op:
        last = lines(op)[-1]
    assert (last["check"], last["state"], last["alive"]) == ("kernel_runs", "failed", False)
    assert "illegal memory access" in last["why"] and ended == [worker.RECOVERS_NOT]


def test_an_op_without_samples_does_not_pass(monkeypatch):
    with stand_in("right") as op:
        monkeypatch.setattr(checks, "samples", lambda op, full: ())
        assert "no samples" in lines(op)[-1]["why"]


KERNELS = sorted(name for name, op in registry.items() if op.raw)


@pytest.mark.parametrize("name", KERNELS)
def test_every_sample_runs_the_kernels(name):
    op = registry[name]
    assert checks.apply(op, checks.subject(op, "cpu"), checks.KERNEL_RUNS) >= 1


@pytest.mark.parametrize("name", KERNELS)
def test_the_samples_are_where_the_op_is_defined(name):
    """No result may be NaN, which equals nothing: neither of a sample nor of its operands times 1/2, with which a graph
    is replayed."""
    subject = checks.subject(registry[name], "cpu", full=True)
    for sample in subject.samples:
        cast = sample.cast(torch.float32)
        for operands in (cast, cast.replace({key: x / 2 for key, x in cast.leaves().items()})):
            for what, result in run(subject.op, operands):
                assert not result.isnan().any(), (sample.name, what)


FIRSTS = ["mse_loss", "masked_mean", "safe_div", "masked_compact", "grad_norm"]
SHORT = [name for name in checks.QUICK if name not in ("variations", "kept_nonfinite", "no_sync")]


@pytest.mark.parametrize("name", FIRSTS)
def test_the_kernels_pass(name):
    op = registry[name]
    subject = checks.subject(op, "cpu")
    for check in checks.names(op):
        if check in SHORT:
            checks.apply(op, subject, check)


@pytest.mark.slow
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", map(unless_first, KERNELS))
def test_every_kernel_passes(name):
    assert lines(registry[name])[-1]["state"] == "done"


@pytest.mark.slow
@pytest.mark.parametrize("name", FIRSTS)
def test_the_kernels_pass_in_full(name):
    assert lines(registry[name], full=True)[-1]["state"] == "done"


def test_by_the_composite_no_kernel_runs():
    op = registry["mse_loss"]
    with checks._Calls() as calls, checks.kernels_off([op]):
        torch.ops.safeops.mse_loss(torch.ones(3), torch.zeros(3))
    assert not [name for name in calls.names if name.startswith("_")] and op.cpu
