"""Unusual programs that are right, and of which the recorder must say nothing."""

import pytest
import torch

import safeops
from tests.debug.test_recorder_body import run_source


def test_a_part_of_a_model_whose_output_holds_inf(record):
    """Masked logits come to backward with their own gradient, 0 at each -inf."""
    model = torch.nn.Linear(4, 3)
    recorder = record(model, torch.optim.SGD(model.parameters(), 0.1), action="raise")
    with recorder.step(x := torch.ones(2, 4)):
        logits = model(x).masked_fill(torch.tensor([False, True, False]), -torch.inf)
        logits.backward(torch.tensor([[1.0, 0, 1]]).expand(2, 3))
    assert not recorder.found


def test_a_scale_that_the_user_lowers(record, model, optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    recorder = record(model, optimizer, action="raise")
    for _ in range(3):
        with recorder.step(x := torch.ones(2, 4)):
            scaler.scale(model(x).mean()).backward()
            scaler.step(optimizer)
            scaler.update(700.0)
    assert not recorder.found and not recorder.overflows


def test_a_scaler_that_is_off(record, model, optimizer):
    """A step that cannot run again is told at once, as without a scaler."""
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    recorder = record(model, optimizer, scaler=scaler)
    source = "class A:\n  with recorder.step(x):\n    scaler.scale(model(x).mean()).backward(); scaler.step(optimizer)"
    with pytest.warns(UserWarning, match="will not be replayed"):
        run_source(source, {"recorder": recorder, "model": model, "optimizer": optimizer, "scaler": scaler,
                            "x": torch.zeros(2, 4)})  # fmt: skip
    assert recorder.found == 1


def test_updates_without_steps_do_not_pile_up(record, model, optimizer):
    recorder = record(model, optimizer)
    for _ in range(200):
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step()
    assert len(recorder._findings.waiting) < 100 and isinstance(recorder, safeops.debug.recorder)
