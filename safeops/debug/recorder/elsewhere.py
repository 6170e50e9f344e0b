"""A recorded step on another machine: its folder, read and put into the place of a program's own first step."""

import dataclasses
import json
import pickle
import platform
from pathlib import Path

import torch

from safeops.amp._nested import map_tensors
from safeops.debug.recorder import files
from safeops.debug.recorder.replay import Replay
from safeops.debug.recorder.state import scaler_state


class Replayed(BaseException):
    """Ends a program whose first step was the recorded one. report: trace's, or None if the step is finite here."""

    def __init__(self, report, notes):
        self.report, self.notes = report, notes


class Unfit(BaseException):
    """The program is not the recorded one, in the words of the text. It ends the program as `Replayed` does."""


@dataclasses.dataclass
class Recorded:
    """The contents of a step's folder. device, dtype: to run it in; None: the program's."""

    about: dict
    weights: dict
    step: dict
    parameters: dict | None
    has_weights: bool = True  # False once the program's weights turned out to be others
    device: torch.device | None = None
    dtype: torch.dtype | None = None

    def __call__(self, recorder, slot, batch, body):
        """Run the recorded step in the place of the recorder's first. Raises Replayed."""
        recorder.take_over = None
        notes = self.prepare(recorder._model)
        slot.number, slot.body = self.about["step"], body()
        slot.copies = dict(self._pairs(batch))
        slot.random, slot.autocast, slot.grad_enabled = self.step["random"], self._autocast(recorder._model), True
        slot.buffers = [(x, self.step["buffers"][files.plain(name)]) for name, x in recorder._model.named_buffers()
                        if files.plain(name) in self.step["buffers"]]  # fmt: skip
        slot.buffers = [(x, saved.to(x.device, x.dtype)) for x, saved in slot.buffers]
        if recorder._scaler is None:
            recorder._scaler = next((x for x in slot.body.objects() if isinstance(x, torch.amp.GradScaler)), None)
        if recorder._scaler is not None and self.step["scale"] is not None:
            slot.scale = scaler_state(recorder._scaler) | {"_scale": self.step["scale"].to(self.device)}
        recorder._replays, replay = True, Replay(recorder, slot, update=0)
        with replay.before():
            report = replay.traced()
        raise Replayed(report, [*notes, *replay.notes])

    def prepare(self, model):
        """Move the model, and give it the recorded weights if there are any. Returns what a reader should know."""
        here = {files.plain(name): (list(p.shape), p) for name, p in model.named_parameters()}
        wrong = [f"{name} {shape}" for name, (shape, *_) in self.weights.items() if name not in here]
        wrong += [f"{name} {shape}, which the recording lacks" for name, (shape, _) in here.items()
                  if name not in self.weights]  # fmt: skip
        wrong += [f"{name} {here[name][0]}, recorded {shape}" for name, (shape, *_) in self.weights.items()
                  if name in here and here[name][0] != shape]  # fmt: skip
        if wrong:
            more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            kind, recorded = type(model).__name__, self.about["model"]
            raise Unfit(f"the model ({kind}) is not the recorded one ({recorded}): {'; '.join(wrong[:5])}{more}")
        notes = []
        if self.parameters is not None:
            with torch.no_grad():
                for name, (_, p) in here.items():
                    p.copy_(self.parameters[name])
        else:
            now = files.weights(model)
            others = sum(now[name][2] != crc for name, (*_, crc) in self.weights.items())
            if others:
                self.has_weights = False
                notes.append(
                    f"{others} of {len(now)} parameters are not those of the step: load its checkpoint, or record with "
                    "save_weights=True"
                )
        model.to(device=self.device, dtype=self.dtype)
        if self.about["torch"] != torch.__version__:
            notes.append(f"recorded with torch {self.about['torch']}, this is {torch.__version__}")
        return notes

    def _moved(self, x):
        return x.to(device=self.device, dtype=self.dtype if x.is_floating_point() else None)

    def _pairs(self, batch):
        """Yield (id of a tensor of the program's batch, (the tensor, the recorded one in its place))."""
        own, recorded = [], []
        map_tensors(lambda x: own.append(x) or x, batch)
        map_tensors(lambda x: recorded.append(x) or x, self.step["batch"])
        if len(own) != len(recorded):
            shapes = ([tuple(x.shape) for x in tensors] for tensors in (recorded, own))
            raise Unfit("the recorded batch has tensors of {}, the program's of {}".format(*shapes))
        for x, y in zip(own, recorded):
            yield id(x), (x, self._moved(y))

    def _autocast(self, model):
        """Autocast as it was, for the devices that the program uses. In fp64 it changes nothing."""
        kinds = {"cpu", *(p.device.type for p in model.parameters())}
        return [entry for entry in self.step["autocast"] if entry[0] in kinds]


def read(folder, device=None, dtype=None):
    """Raises OSError or ValueError, in one line, for what is no recording of this version."""
    folder = Path(folder)
    try:
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        if about["format"] != files.FORMAT:
            raise ValueError(f"{folder} is of format {about['format']}, this safeops reads {files.FORMAT}")
        weights = json.loads((folder / "weights.json").read_text(encoding="utf-8"))
        step = torch.load(folder / "step.pt", map_location="cpu", weights_only=False)
        parameters = folder / "weights.pt"
        parameters = torch.load(parameters, map_location="cpu") if parameters.exists() else None
    except FileNotFoundError as error:
        ranks = sorted(path.name for path in folder.glob("rank-*"))
        hint = f": name one rank's, {', '.join(ranks)}" if ranks else ""
        name = Path(error.filename).name if error.filename else "a file"
        raise ValueError(f"{folder} holds no recorded step ({name} is not there){hint}") from None
    except (json.JSONDecodeError, KeyError, TypeError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"{folder} holds no recorded step: {type(error).__name__}: {error}") from None
    except (AttributeError, ImportError) as error:
        raise ValueError(f"{folder}: its batch needs a class that is not here: {error}") from None
    return Recorded(about, weights, step, parameters, device=device and torch.device(device), dtype=dtype)


def here(recorded):
    """This machine, in words, and the one of the recording."""
    about = recorded.about
    where = f"on {recorded.device or about['device']}, torch {torch.__version__}, {platform.machine()}"
    return f"{where}; recorded on {about['device']}, torch {about['torch']}, {about['machine']}"
