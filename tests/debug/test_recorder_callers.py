"""The recorder where the update calls the step, and where another library wraps the optimizer."""

import pytest
import torch

from tests.debug.recording import BAD, Positive, batches, equal, weights

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "LBFGS": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=2),
}


@pytest.mark.parametrize("how", ["by place", "by name"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_that_runs_a_closure_is_skipped(record, name, how):
    model = Positive()
    optimizer = OPTIMIZERS[name](model.parameters())
    recorder, seen = record(model, optimizer), []

    def step(x):
        def closure():
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        return optimizer.step(closure) if how == "by place" else optimizer.step(closure=closure)

    for x in batches():
        with recorder.step(x):
            loss = step(x)
        assert isinstance(loss, torch.Tensor) or name == "LBFGS"
        seen.append(weights(model))
    (report,) = recorder.reports
    assert (report.step, report.op) == (BAD, "log") and "# HERE" in report.line.text
    assert equal(seen[BAD - 1], seen[BAD - 2]) and not equal(seen[BAD], seen[BAD - 1])


class Wrapper(torch.optim.Optimizer):
    """As accelerate's: an optimizer that holds another one, and none of its own state."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def step(self):
        self.optimizer.step()


def test_an_optimizer_in_a_wrapper_is_the_one_watched(record):
    model = Positive()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = record(model, Wrapper(Wrapper(optimizer)))
    before = weights(model)
    x = batches()[BAD - 1]
    with recorder.step(x):
        model(x).sum().backward()
        optimizer.step()
    assert recorder.reports[0].op == "log" and equal(before, weights(model))


@pytest.mark.parametrize("clips", [False, True])
def test_an_update_after_the_block_is_skipped_and_told_once(record, clips):
    """As transformers' Trainer does it."""
    model = Positive()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder, seen = record(model, optimizer), []
    for x in batches():
        recorder.run(lambda x: model(x).square().mean().backward(), x)
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(weights(model))
    assert [report.step for report in recorder.reports] == [BAD] and recorder.found == 1
    assert equal(seen[BAD - 1], seen[BAD - 2]) and not equal(seen[BAD], seen[BAD - 1])


@pytest.mark.parametrize("bad", [(2,), (2, 3), (4, 5), (1, 8)])
def test_micro_batches_after_a_spoiled_one_are_not_told(record, bad):
    model = Positive()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder, data = record(model, optimizer), batches(8, bad=0)
    for number in bad:
        data[number - 1][2] = 0
    for i, x in enumerate(data):
        with recorder.step(x):
            model(x).square().mean().backward()
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    assert [report.step for report in recorder.reports] == [*bad] and recorder.found == len(bad)
    assert all(report.op == "log" for report in recorder.reports) and weights(model)[0].isfinite().all()
    assert {path.name for path in recorder.folder.iterdir()} == {f"step-{number}" for number in bad}
