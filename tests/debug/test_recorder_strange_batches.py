"""Batches and buffers that a block changes, replaces or shares: the replay sees what was there when the step began."""

import collections
import dataclasses
import pathlib

import pytest
import torch

import safeops
from tests.debug.recording import Positive


@dataclasses.dataclass
class Data:
    x: torch.Tensor


class Encoding(collections.UserDict):
    pass


def pops(batch):
    return batch.pop("x")


def assigns(batch):
    batch["x"] = x = batch["x"] - 1
    return x + 1


def deletes(batch):
    x, *_ = batch
    del batch[0]
    return x


def sets(batch):
    batch.x = x = batch.x - 1
    return x + 1


@pytest.mark.parametrize(
    ("batch", "use"),
    [
        ({"x": torch.zeros(2, 4), "y": 1}, pops),
        ({"x": torch.zeros(2, 4)}, assigns),
        (Encoding(x=torch.zeros(2, 4)), pops),
        ([torch.zeros(2, 4), torch.ones(1)], deletes),
        (Data(torch.zeros(2, 4)), sets),
    ],
)
@pytest.mark.parametrize("calls", [False, True])
def test_a_batch_whose_entries_the_block_changes(record, model, optimizer, batch, use, calls):
    batch = type(batch)(batch) if not isinstance(batch, Data) else Data(batch.x)
    recorder = record(model, optimizer)
    if calls:
        recorder.run(lambda batch: model(use(batch)).mean().backward(), batch)
    else:
        with recorder.step(batch):
            model(use(batch)).mean().backward()
    (report,) = recorder.reports
    assert report.op == "log", str(report)
    saved = torch.load(recorder.folder / "step-1/step.pt", weights_only=False)["batch"]
    saved = saved[0][0] if calls else saved
    assert len(saved) == len(batch) + (use is not assigns) if not isinstance(batch, Data) else saved.x.sum() == 0


@pytest.mark.parametrize(
    "other",
    [
        lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
        lambda: torch.zeros(2, 4).to_sparse(),
        lambda: torch.zeros(0, 4),
        lambda: torch.zeros(1, 1).expand(2, 4),
        lambda: torch.zeros(2, requires_grad=True) * 1,
        lambda: torch.zeros(2, device="meta"),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_of_other_kinds(record, model, optimizer, other):
    recorder = record(model, optimizer)
    with torch.inference_mode():
        inference = torch.zeros(1)
    for x in (torch.ones(2, 4), torch.ones(2, 4), torch.zeros(2, 4)):
        with recorder.step((x, other(), inference)):
            model(x).mean().backward()
    (report,) = recorder.reports
    assert report.op == "log", str(report)


class Batch:
    def __init__(self, x):
        self.x = x


@pytest.mark.parametrize("kind", [Batch, lambda x: collections.deque([x])])
def test_a_batch_that_is_not_copied_is_told(record, model, optimizer, kind):
    recorder, x = record(model, optimizer), torch.zeros(2, 4)
    with pytest.warns(UserWarning, match="a batch that is a .* is not copied"), recorder.step(kind(x)):
        model(x).mean().backward()
    assert recorder.reports[0].op == "log"


class Running(Positive):
    """Its buffer is another tensor after each forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("table", torch.ones(1).expand(7))

    def forward(self, x):
        y = super().forward(x) + self.mean
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean()
        return y


def test_buffers_that_the_model_replaces(record):
    model = Running()
    recorder = record(model, torch.optim.SGD(model.parameters(), 0.1))
    for x in (torch.ones(2, 4), torch.zeros(2, 4)):
        before = model.mean.clone()
        with recorder.step(x):
            model(x).mean().backward()
    assert recorder.reports[0].op == "log" and torch.equal(model.mean, before) and before != 0
    assert torch.equal(torch.load(recorder.folder / "step-2/step.pt", weights_only=False)["buffers"]["mean"], before)


def test_a_graph_that_saved_a_buffer_stays_usable(record, model, optimizer):
    model.register_buffer("scale", torch.full((4,), 3.0))
    recorder, weight = record(model, optimizer), torch.ones(4, requires_grad=True)
    later = (weight * model.scale).sum()
    with recorder.step(x := torch.zeros(2, 4)):
        model(x).mean().backward()
    later.backward()
    assert recorder.reports[0].op == "log" and torch.equal(weight.grad, model.scale)


@pytest.mark.parametrize("name", ["report.txt", "page.html", "about.json", "weights.json"])
def test_a_full_disk_keeps_no_finding_back(record, model, optimizer, monkeypatch, name):
    recorder, write = record(model, optimizer, action="raise"), pathlib.Path.write_text

    def full(path, *args, **kwargs):
        if path.name == name:
            raise OSError(28, "No space left on device")
        return write(path, *args, **kwargs)

    monkeypatch.setattr(pathlib.Path, "write_text", full)
    with pytest.raises(safeops.debug.NonFiniteError, match="log") as error:
        with recorder.step(x := torch.zeros(2, 4)):
            model(x).mean().backward()
    assert name == "page.html" or "No space left" in error.value.report.notes[-1]
