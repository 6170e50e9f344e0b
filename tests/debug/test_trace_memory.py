"""trace finds the origin of a NaN in memory that is reused, written without torch, or received from another rank."""

import pytest
import torch

from tests.debug.tracing import leaf, traced


def test_nan_that_came_in():
    data = torch.tensor([1.0, float("nan")])
    report = traced(lambda: (leaf(1.0, 2.0) * data).sum().backward()).report
    assert report.kind == "came in" and report.op == "mul" and "1 NaN of 2 elements" in report.why


def test_a_gradient_left_by_an_earlier_step():
    x = leaf(1.0, 2.0)
    x.grad = torch.tensor([float("inf"), 0.0])
    report = traced(lambda: (x * 2).sum().backward()).report
    assert report.kind == "came in" and "zero_grad" in report.instead


def test_what_lay_in_memory_before_is_no_operand():
    x = leaf(0.0, 1.0)
    garbage = torch.full((2,), float("nan"))

    def step():
        torch.log(x.detach(), out=garbage)
        (x * garbage).sum().backward()

    assert traced(step).report.op == "log"
    garbage = torch.full((2,), float("nan"))

    def copy():
        garbage.copy_(torch.log(x.detach()))
        (x * garbage).sum().backward()

    assert traced(copy).report.op == "log"


def test_a_running_metric_is_no_finding_and_a_parameter_is():
    x, total = leaf(1.0, 2.0), torch.zeros(())

    def step():
        total.add_(torch.log(torch.zeros(())))
        (x * 2).sum().backward()

    assert traced(step).report is None

    def spoil():
        step()
        with torch.no_grad():
            x.sub_(torch.log(torch.zeros(2)))

    report = traced(spoil).report
    assert report.reached == "a parameter" and report.op == "log"


def test_memory_written_behind_torchs_back_is_read_again():
    x = torch.ones(4)
    shared = x.numpy()

    def step():
        y = x + 1
        shared[0] = float("nan")
        return (x[1:] * 2).sum() + y.sum()

    assert traced(step).report is None


@pytest.mark.parametrize("copy", [torch.clone, lambda x: torch.empty(4).copy_(x), lambda x: torch.ones(4).add_(x)])
def test_what_a_collective_brings_is_not_blamed_on_who_copies_it(copy):
    bucket, received = torch.ones(4), leaf(1.0, 1.0, 1.0, 1.0)
    shared = bucket.numpy()  # a write through it stands for another rank's gradient, which arrives between two ops

    def step():
        bucket.mul_(2)
        shared[0] = float("nan")
        (received * copy(bucket)).sum().backward()

    report = traced(step).report
    assert report.kind == "came in" and "another rank" in report.why, str(report)


def test_a_second_thread_of_memory_reuse():
    """A new tensor in freed memory must not be mistaken for the tensor that was there before."""

    def step():
        for i in range(50):
            y = torch.full((1000,), 1.0) + i
            del y
        return torch.log(torch.zeros(1000)).sum()

    assert traced(step).report.op == "log"
