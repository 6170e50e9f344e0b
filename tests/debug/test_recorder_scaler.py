"""The recorder beside GradScaler: its ordinary skips are no finding, a NaN is one, the scale moves as without it."""

import contextlib

import pytest
import torch

from tests.debug.recording import BAD, Positive, batches, equal, weights


class Half(torch.nn.Module):
    """Scaled gradients of its product overflow in fp16 while the loss is small."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        return (self.weight.half() * x.half()).float()


def train(model, scaler, data, step, optimizer):
    scales = []
    for x in data:
        with step(x):
            optimizer.zero_grad()
            loss = model(x).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_an_ordinary_skip_is_no_finding(record, fused, given):
    model, scaler = Half(), torch.amp.GradScaler("cpu", init_scale=2.0**22)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, fused=fused)
    recorder = record(model, optimizer, action="raise", scaler=scaler if given else None)
    scales = train(model, scaler, batches(8, bad=0), recorder.step, optimizer)
    plain, other = Half(), torch.amp.GradScaler("cpu", init_scale=2.0**22)
    optimizer = torch.optim.AdamW(plain.parameters(), 0.1, fused=fused)
    expected = train(plain, other, batches(8, bad=0), contextlib.nullcontext, optimizer)
    assert scales == expected and scales[0] == 2.0**21 and scales[-1] == scales[-2]
    assert torch.equal(model.weight, plain.weight) and not recorder.found
    skips = sum(a != b for a, b in zip([2.0**22, *scales], scales))
    assert len(recorder.overflows) == skips >= 2
    assert recorder.overflows[0].kind == "scaled overflow" and recorder.overflows[0].scale == 2.0**22


@pytest.mark.parametrize("fused", [False, True])
def test_a_nan_is_a_finding(record, fused):
    model, scaler = Positive(), torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=fused)
    recorder = record(model, optimizer)
    before, scales = None, []
    for x in batches(4):
        if x[2, 0] == 0:
            before = weights(model)
        scales += train(model, scaler, [x], recorder.step, optimizer)
        if x[2, 0] == 0:
            assert equal(before, weights(model))
    (report,) = recorder.reports
    assert (report.step, report.op, scales) == (BAD, "log", [8.0, 8.0, 4.0, 4.0]) and not recorder.overflows


def test_gradients_that_are_cleared_in_the_block(record):
    """A skip is seen by the scale where no gradient is left to look at."""
    model, scaler = Positive(), torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = record(model, optimizer)
    for x in batches(4):
        with recorder.step(x):
            scaler.scale(model(x).clamp(-90, 90).log().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert recorder.reports[0].step <= BAD


def test_a_scheduler_in_the_block_steps_once(record):
    model, scaler = Half(), torch.amp.GradScaler("cpu", init_scale=2.0**22)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    recorder = record(model, optimizer)
    for i, x in enumerate(batches(4, bad=0)):
        with recorder.step(x):
            scaler.scale(model(x).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
        assert scheduler.get_last_lr() == [0.1 * 0.5 ** (i + 1)] and scheduler.last_epoch == i + 1
    assert len(recorder.overflows) >= 2
