"""Bad arguments of the recorder are refused before work; its own errors never end a training."""

import shutil
import sys
import threading

import pytest
import torch

import safeops
from tests.debug.recording import batches, equal, weights


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"model": 3}, TypeError, "recorder: model must be a torch.nn.Module, got int"),
        ({"optimizer": 3}, TypeError, "recorder: optimizer must be a torch.optim.Optimizer, got int"),
        ({"optimizer": []}, ValueError, "recorder: optimizer: an empty list"),
        ({"optimizer": torch.optim.SGD([torch.ones(1)])}, ValueError, r"none of the parameters of SGD is one of the"),
        ({"scaler": 2.0}, TypeError, "recorder: scaler must be a torch.amp.GradScaler, got float"),
        ({"steps": 0}, ValueError, "recorder: steps must be an int, at least 1, got 0"),
        ({"steps": 1.5}, ValueError, "recorder: steps must be an int"),
        ({"action": "stop"}, ValueError, r"recorder: action must be one of \('raise', 'warn', 'record'\), got 'stop'"),
        ({"last": -1}, ValueError, "recorder: last must be an int, at least 0, got -1"),
        ({"folder": 3}, TypeError, "recorder: folder must be a path, got int"),
        ({"folder": __file__}, OSError, "recorder: folder: .*test_recorder_errors.py"),
        ({"folder": f"{__file__}/inside"}, OSError, "recorder: folder: .*inside"),
        ({"folder": "/proc/nothing"}, OSError, "recorder: folder: .*nothing"),
    ],
)
def test_arguments(model, optimizer, tmp_path, change, error, text):
    arguments = {"model": model, "optimizer": optimizer, "folder": tmp_path, **change}
    with pytest.raises(error, match=text) as raised:
        safeops.debug.recorder(arguments.pop("model"), arguments.pop("optimizer"), **arguments)
    assert "\n" not in str(raised.value)


def test_a_step_inside_a_step(record, model, optimizer):
    recorder = record(model, optimizer)
    with pytest.raises(RuntimeError, match="recorder: step 1 is open: a step cannot begin inside it"):
        with recorder.step(()), recorder.step(()):
            pass
    with recorder.step(()):
        pass
    assert recorder.number == 2


class Uncopied(torch.Tensor):
    """A tensor that cannot be copied."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.clone, torch.Tensor.detach):
            raise RuntimeError("not this one")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_batch_that_cannot_be_copied(record, model, optimizer):
    """The step is found and skipped, and its report says why it was not replayed."""
    recorder, x = record(model, optimizer), torch.zeros(2, 4)
    before = weights(model)
    with pytest.warns(UserWarning, match="a batch could not be copied, .* not this one"):
        with recorder.step([x, torch.ones(2).as_subclass(Uncopied)]):
            model(x).mean().backward()
            optimizer.step()
    (report,) = recorder.reports
    assert report.kind == "not repeated" and "could not be copied: not this one" in report.why
    assert equal(before, weights(model))


def test_objects_without_tensors_are_kept_by_reference(record, model, optimizer):
    recorder, lock = record(model, optimizer), threading.Lock()
    with recorder.step({"x": (x := torch.zeros(2, 4)), "lock": lock}):
        model(x).mean().backward()
    saved = torch.load(recorder.folder / "step-1/step.pt", weights_only=False)
    assert saved["batch"]["lock"].startswith("not kept: <unlocked _thread.lock")


def test_an_error_of_its_own_ends_the_recording_not_the_training(record, model, optimizer, monkeypatch):
    recorder = record(model, optimizer, action="raise")
    monkeypatch.setattr(type(recorder._guard), "scan", lambda *_, **__: 1 / 0)
    seen = []
    with pytest.warns(UserWarning, match="recorder ended at step 1: ZeroDivisionError") as warned:
        for x in batches(3, bad=0):
            with recorder.step(x):
                model(x).mean().backward()
                seen.append(1)
    assert len(seen) == 3 and len(warned) == 1 and "ended" in repr(recorder)


def test_an_error_in_the_optimizer_s_hook_reaches_no_update(record, model, optimizer, monkeypatch):
    recorder = record(model, optimizer)
    monkeypatch.setattr(sys.modules["safeops.debug.recorder.guard"], "measured", lambda tensors: 1 / 0)
    before = weights(model)
    with pytest.warns(UserWarning, match="recorder ended at step 1: ZeroDivisionError"), recorder.step(()):
        model(torch.ones(1, 4)).mean().backward()
        optimizer.step()
    assert not equal(before, weights(model))


def test_a_folder_that_went_away(record, model, optimizer, tmp_path):
    """It is made again; where that fails, the finding is told all the same, and the training goes on."""
    recorder = record(model, optimizer, folder=tmp_path / "a")
    shutil.rmtree(tmp_path / "a")
    with recorder.step(x := torch.zeros(2, 4)):
        model(x).mean().backward()
    assert (tmp_path / "a/step-1/report.txt").exists()
    shutil.rmtree(tmp_path / "a")
    (tmp_path / "a").write_text("a file")
    with recorder.step(x):
        model(x).mean().backward()
    assert recorder.reports[1].op == "log" and "the step is not kept: " in recorder.reports[1].notes[0]


def test_after_close_nothing_is_recorded(record, model, optimizer):
    recorder = record(model, optimizer)
    recorder.close()
    recorder.close()
    with recorder.step(x := torch.zeros(2, 4)):
        model(x).mean().backward()
        optimizer.step()
    assert recorder.number == 0 and not model.inner.weight.isfinite().all()


def test_as_a_context(model, optimizer, tmp_path):
    with safeops.debug.recorder(model, optimizer, folder=tmp_path, action="warn") as recorder:
        with recorder.step(x := torch.ones(2, 4)):
            model(x).mean().backward()
        model.inner.weight.grad.fill_(torch.nan)
        optimizer.step()
        with pytest.warns(UserWarning, match="step 1"):
            recorder.close()
    assert model.inner.weight.isfinite().all()
