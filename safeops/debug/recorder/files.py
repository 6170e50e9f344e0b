"""The folder of a step that was not finite: the report, and what another machine needs to run the step again.

| file | holds |
|---|---|
| `report.txt`, `page.html` | the report, and trace's page of the replay |
| `step.pt` | the batch, the random states, autocast, buffers, the loss scale (torch.load) |
| `weights.json` | name, shape, dtype and CRC-32 of each parameter |
| `weights.pt` | the parameters, with `save_weights=True` |
| `about.json` | versions and hardware |
"""

import ctypes
import itertools
import json
import os
import pickle
import platform
import sys
import tempfile
import zlib
from pathlib import Path

import torch

from safeops.amp._nested import map_tensors
from safeops.core import VERSION, check
from safeops.core.group import is_running
from safeops.debug.recorder.body import Body, Call

FORMAT = 1


def prepared(folder):
    """The folder, made if it is not there; raises OSError if nothing can be written into it."""
    try:
        folder = Path(os.path.abspath(os.fsdecode(folder)))
    except TypeError:
        raise TypeError(f"recorder: folder must be a path, got {type(folder).__name__}") from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise type(error)(error.errno, f"recorder: folder: {error.strerror}", str(folder)) from None
    return folder


def folder(parent, step):
    """A new folder for a step: step-123, of several ranks step-123/rank-1. That of an earlier run stays: step-123.2."""
    rank = f"rank-{torch.distributed.get_rank()}" if is_running() and torch.distributed.get_world_size() > 1 else ""
    names = itertools.chain([f"step-{step}"], (f"step-{step}.{i}" for i in itertools.count(2)))
    paths = (parent / name / rank for name in names)
    path = next(path for path in paths if not path.exists())
    path.mkdir(parents=True)
    return path


def write(path, recorder, slot, report):
    (path / "report.txt").write_text(f"{report}\n", encoding="utf-8")
    (path / "about.json").write_text(json.dumps(about(recorder, slot), indent=1), encoding="utf-8")
    (path / "weights.json").write_text(json.dumps(weights(recorder._model), indent=1), encoding="utf-8")
    paths = {id(module): path for path, module in recorder._model.named_modules()}
    owners = getattr(slot.buffers, "owners", ())
    names = {id(x): f"{paths[id(module)]}.{name}".lstrip(".") for module, name, x in owners if id(module) in paths}
    step = {
        "batch": _on_disk(slot.batch),
        "is_call": isinstance(slot.body, Call),  # by recorder.run: the batch is (args, kwargs)
        "is_loop": not isinstance(slot.body, (Call, Body)),  # by safeops run --record: the script has no recorder
        "random": slot.random,
        "autocast": slot.autocast,
        "buffers": {plain(names[id(x)]): copied for x, copied in slot.buffers if id(x) in names},
        "scale": (slot.scale or {}).get("_scale"),
    }
    torch.save(step, path / "step.pt")
    if recorder.save_weights:
        torch.save({plain(name): _local(p) for name, p in recorder._model.named_parameters()}, path / "weights.pt")


def about(recorder, slot):
    device = next(iter(recorder._devices), torch.device("cpu"))
    return {
        "format": FORMAT,
        "step": slot.number,
        "model": type(recorder._model).__name__,
        "safeops": VERSION,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "command": sys.argv,
    }


def weights(model):
    """{name: [shape, dtype, CRC-32 of the bytes]} of this rank's part of each parameter."""
    result = {}
    for name, p in model.named_parameters():
        data = _local(p).cpu().contiguous()
        raw = ctypes.string_at(data.data_ptr(), data.nbytes) if data.nbytes else b""
        result[plain(name)] = [list(p.shape), str(p.dtype).removeprefix("torch."), zlib.crc32(raw)]
    return result


def plain(name):
    """A parameter's name without what torch.compile and DistributedDataParallel put before it."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def _local(x):
    return (x.to_local() if check.mesh(x) is not None else x).detach()


def _on_disk(batch):
    """The batch as it can be pickled: what cannot be is replaced by its text."""
    try:
        pickle.dumps(map_tensors(lambda x: None, batch))
        return batch
    except Exception:
        if isinstance(batch, dict):
            return {key: _on_disk(x) for key, x in batch.items()}
        if isinstance(batch, (list, tuple)):
            return [_on_disk(x) for x in batch]
        return batch if isinstance(batch, torch.Tensor) else f"not kept: {batch!r}"[:200]
