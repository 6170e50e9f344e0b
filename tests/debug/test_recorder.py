"""The recorder names the step that is not finite and its line, keeps it from the weights, and changes nothing else."""

import random
import warnings

import pytest
import torch

import safeops
from tests.debug.recording import BAD, Positive, batches, equal, weights

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.1),
    "fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.1),
}


def train(model, optimizer, data, step=None):
    """The weights after each step."""
    seen = []
    for x in data:
        with step(x) if step else warnings.catch_warnings():
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
        seen.append(weights(model))
    return seen


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_is_not_finite_is_named_and_skipped(record, name):
    model = Positive()
    optimizer = OPTIMIZERS[name](model.parameters())
    recorder = record(model, optimizer)
    seen = train(model, optimizer, batches(), recorder.step)
    (report,) = recorder.reports
    assert (report.step, report.op, report.kind, recorder.found, recorder.number) == (BAD, "log", "undefined", 1, 5)
    assert "# HERE" in report.line.text and report.lines[1].function == "train" and not report.notes
    assert equal(seen[BAD - 1], seen[BAD - 2]) and not equal(seen[BAD], seen[BAD - 1])
    assert "log(0) is -inf" in (recorder.folder / f"step-{BAD}" / "report.txt").read_text()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_finding_leaves_the_training_as_if_its_step_were_not_there(record, name):
    """Also the optimizer's state, and the random numbers of the later steps."""

    def run(data, recorded):
        torch.manual_seed(0)
        random.seed(0)
        model = Positive()
        optimizer = OPTIMIZERS[name](model.parameters())
        step = record(model, optimizer).step if recorded else None
        return train(model, optimizer, data, step)[-1], random.random(), torch.rand(3)

    data = batches()
    with_bad, *numbers = run(data, True)
    without, *others = run(data[: BAD - 1] + data[BAD:], False)
    assert equal(with_bad, without) and numbers[0] == others[0] and torch.equal(numbers[1], others[1])


def test_a_finite_training_is_the_same_to_the_bit(record):
    def run(recorded):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5))
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        step = record(model, optimizer).step if recorded else None
        return [*train(model, optimizer, batches(bad=0), step)[-1], *model.buffers(), torch.rand(3)]

    assert equal(run(True), run(False))


def test_the_replay_sees_the_batch_and_the_random_numbers_of_its_step(record):
    """A loader fills one buffer again and again, and the block writes into its batch."""
    seen = []

    class Noisy(Positive):
        def forward(self, x):
            noise = torch.rand(2), random.random()
            seen.append((x.clone(), *noise))
            return super().forward(x)

    model, buffer = Noisy(), torch.empty(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = record(model, optimizer)
    for data in batches():
        buffer.copy_(data)
        with recorder.step(buffer):
            optimizer.zero_grad()
            model(buffer).square().mean().backward()
            buffer.fill_(7)
            optimizer.step()
    first, again = seen[BAD - 1], seen[BAD]
    assert len(seen) == 6 and equal(first[:2], again[:2]) and first[2] == again[2]
    assert recorder.reports[0].op == "log"


def test_a_nested_batch(record):
    model = Positive()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = record(model, optimizer)
    for data in batches():
        batch = {"x": [data, "text"], "others": (torch.ones(2), None)}
        with recorder.step(batch):
            optimizer.zero_grad()
            x = batch["x"][0]
            model(x).mean().backward()
            x.zero_()
            optimizer.step()
    assert [report.op for report in recorder.reports] == ["log"]


def test_batchnorm_forgets_the_step(record):
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), Positive())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = record(model, optimizer)
    for data in (torch.rand(4, 4), torch.full((4, 4), torch.inf)):
        before = [b.clone() for b in model.buffers()]
        with recorder.step(data):
            model(data).mean().backward()
            optimizer.step()
    assert recorder.reports[0].kind == "came in" and equal(model.buffers(), before)


def test_actions(tmp_path):
    def run(action):
        model = Positive()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        recorder = safeops.debug.recorder(model, optimizer, folder=tmp_path, action=action)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                train(model, optimizer, batches(), recorder.step)
            finally:
                recorder.close()
        return recorder, [w for w in warned if "recorder" in str(w.message)]

    with pytest.raises(safeops.debug.NonFiniteError, match=r"safeops.debug.recorder, step 3: the loss.*log") as raised:
        run("raise")
    assert raised.value.report.op == "log"
    recorder, (warning,) = run("warn")
    assert recorder.number == 5 and "step 3" in str(warning.message) and warning.filename == __file__
    assert not run("record")[1]


def test_an_exception_of_the_step_passes_and_the_finding_is_told(record):
    model = Positive()
    recorder = record(model, torch.optim.SGD(model.parameters(), 0.1), action="raise")
    with pytest.raises(ZeroDivisionError), pytest.warns(UserWarning, match="before the exception: step 1: .*log"):
        with recorder.step(x := torch.zeros(2, 4)):
            model(x).mean().backward()
            1 / 0  # noqa: B018
    recorder.action = "record"


def test_gradient_accumulation(record):
    """The step that made the NaN is named; the update after it is skipped."""
    model = Positive()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = record(model, optimizer)
    before = weights(model)
    for i, x in enumerate(batches(4, bad=2)):
        with recorder.step(x):
            model(x).mean().backward()
            if i == 3:
                optimizer.step()
    assert recorder.reports[0].step == 2 and equal(before, weights(model))


def test_an_update_outside_the_block(record):
    model = Positive()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = record(model, optimizer)
    for x in batches(3, bad=2):
        before = weights(model)
        with recorder.step(x):
            model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert equal(before, weights(model)) == (x[2, 0] == 0)
    assert [report.step for report in recorder.reports] == [2]


def test_two_optimizers(record):
    """The replay goes on behind the first's update, to the second loss."""
    model = torch.nn.ModuleList([torch.nn.Linear(4, 3), Positive()])
    first, second = (torch.optim.SGD(m.parameters(), 0.1) for m in model)
    recorder = record(model, [first, second])
    for x in batches():
        before = weights(model[1])
        with recorder.step(x):
            model[0](x).mean().backward()
            first.step()
            model[1](x).mean().backward()
            second.step()
            first.zero_grad(), second.zero_grad()
    (report,) = recorder.reports
    assert report.op == "log" and report.step == BAD and "later weights" in report.notes[0]
    assert before


def test_protect_false(record):
    model = Positive()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = record(model, optimizer, protect=False)
    train(model, optimizer, batches(3), recorder.step)
    assert not all(p.isfinite().all() for p in model.parameters())
    assert "later weights" in recorder.reports[0].notes[0]


def test_run(record):
    model = Positive()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = record(model, optimizer)

    def step(x, *, scale):
        optimizer.zero_grad()
        loss = model(x).mean() * scale
        loss.backward()
        x.zero_()
        optimizer.step()
        return loss

    losses = [recorder.run(step, x, scale=2).item() for x in batches()]
    assert losses[2] == -torch.inf and recorder.reports[0].op == "log"


def test_what_it_keeps_is_said(record):
    model = torch.nn.BatchNorm1d(1 << 16)
    recorder = record(model, torch.optim.SGD(model.parameters(), 0.1), steps=3)
    for _ in range(4):
        with recorder.step(x := torch.ones(8, 1 << 16)):
            model(x)
    assert "keeps 3 steps in 7.5 MiB" in repr(recorder) and "step 4" in repr(recorder)


def test_repeated_findings_end_at_sixteen(record):
    model = Positive()
    recorder = record(model, torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(18):
        with recorder.step(x := torch.zeros(1, 4)):
            model(x).mean().backward()
    assert len(recorder.reports) == 16 and recorder.found == 18
