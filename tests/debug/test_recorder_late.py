"""The recorder where answers come late, as from a GPU: a stand-in for its copy and event delays them by some steps."""

import pytest
import torch

from safeops.debug.recorder import health
from tests.debug.recording import BAD, Positive, batches, equal, weights

OPTIMIZERS = {
    "put back": lambda p: torch.optim.AdamW(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
}


class Late:
    """An event that has happened `delay` half steps after it was made. waits: how often somebody waited for one."""

    clock = waits = 0

    def __init__(self, delay):
        self.end = Late.clock + delay

    def query(self):
        return Late.clock >= self.end

    def synchronize(self):
        Late.waits += not self.query()
        self.end = 0


@pytest.fixture(params=[1, 2, 3], ids=["at its end", "at the next", "at the next one's end"])
def delay(request, monkeypatch):
    """The answers come by the route of a device, half steps later."""
    monkeypatch.setattr(health, "IMMEDIATE", "none")
    monkeypatch.setattr(health, "_sent", lambda x: (x.clone(), Late(request.param)))
    return request.param


def train(model, optimizer, data, recorder=None):
    seen = []
    for x in data:
        Late.clock += 1
        with recorder.step(x) if recorder else torch.enable_grad():
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            Late.clock += 1
        seen.append(weights(model))
    return seen


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_bad_step_and_those_until_its_answer_do_not_reach_the_weights(record, delay, name):
    model = Positive()
    optimizer = OPTIMIZERS[name](model.parameters())
    recorder = record(model, optimizer, steps=3)
    seen = train(model, optimizer, batches(8), recorder)
    (report,) = recorder.reports
    assert (report.step, report.op, report.kind) == (BAD, "log", "undefined") and not report.notes
    told = BAD + (delay - 1) // 2  # the step at whose end, or behind which, the answer is there
    assert all(equal(seen[BAD - 2], x) for x in seen[BAD - 1 : told]) and not equal(seen[told - 1], seen[told])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_training_goes_on_as_if_these_steps_were_not_there(record, delay, name):
    """Also the optimizer's moments and its count of steps."""
    data = batches(8)

    def run(data, recorded):
        torch.manual_seed(0)
        model = Positive()
        optimizer = OPTIMIZERS[name](model.parameters())
        train(model, optimizer, data, record(model, optimizer, steps=3) if recorded else None)
        return [*weights(model), *optimizer.state[model.inner.weight].values()]

    skipped = range(BAD - 1, BAD + (delay - 1) // 2)
    expected = run([x for i, x in enumerate(data) if i not in skipped], False)
    assert equal(run(data, True), expected)


def test_an_answer_that_comes_too_late_for_the_ring(record, monkeypatch):
    monkeypatch.setattr(health, "IMMEDIATE", "none")
    monkeypatch.setattr(health, "_sent", lambda x: (x.clone(), Late(6)))
    model = Positive()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = record(model, optimizer, steps=1)
    seen = train(model, optimizer, batches(8), recorder)
    assert recorder.reports[0].kind == "not repeated" and "give steps= more" in recorder.reports[0].why
    assert equal(seen[BAD - 2], seen[BAD])


def test_an_update_after_the_block_whose_answer_is_there(record, monkeypatch):
    """The scan at the end of the block has been asked before the update takes its flag."""
    monkeypatch.setattr(health, "IMMEDIATE", "none")
    monkeypatch.setattr(health, "_sent", lambda x: (x.clone(), Late(0)))
    model = Positive()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = record(model, optimizer, steps=3)
    for x in batches(5):
        before = weights(model)
        with recorder.step(x):
            optimizer.zero_grad()
            model(x).square().mean().backward()
        optimizer.step()
        assert model.inner.weight.isfinite().all() and (x[2, 0] != 0 or equal(before, weights(model)))
    assert [report.op for report in recorder.reports] == ["log"] and "ended" not in repr(recorder)


def test_no_finding_changes_nothing(record, delay):
    def run(recorded):
        torch.manual_seed(0)
        model = Positive()
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        return train(model, optimizer, batches(bad=0), record(model, optimizer) if recorded else None)[-1]

    waits = Late.waits
    assert equal(run(True), run(False)) and Late.waits == waits
