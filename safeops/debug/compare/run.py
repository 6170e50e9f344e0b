"""A run's entries, and the file that holds them: JSON, so that it can be read by any torch and by people."""

import dataclasses
import json
import os

import torch

from safeops.core import VERSION
from safeops.debug.common import ranks
from safeops.debug.compare.entry import PHASES, Entry, together

FORMAT = 1


@dataclasses.dataclass
class Run:
    """name: how reports call it. ranks: of how many processes it is. facts: versions and settings, for the reports."""

    name: str
    entries: list
    ranks: int = 1
    facts: dict = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        self.facts = self.facts or _facts(self.entries)

    def of(self, phase):
        return [entry for entry in self.entries if entry.phase == phase]


def run_of(capture, name):
    """The Run of a stopped Capture. On several ranks, that of all of them together, on each."""
    group = ranks.everyone()
    if group is None:
        return Run(name, [entry for entry, _ in capture.entries])
    of_ranks = ranks.gather("sketch", capture.entries, group)
    return Run(name, together(list(of_ranks.values())), len(of_ranks))


def path_to_write(function, file, name="file"):
    """The absolute path of `file`, the argument `name`. Raises now, not at the end of a run, if it is not writable."""
    if not isinstance(file, (str, bytes, os.PathLike)):
        raise TypeError(f"{function}: {name} must be a path, got {type(file).__name__}")
    file = os.path.abspath(os.fsdecode(file))
    if not os.path.isdir(os.path.dirname(file)):
        raise FileNotFoundError(f"{function}: {name}={file!r}: no such folder")
    if os.path.isdir(file):
        raise IsADirectoryError(f"{function}: {name}={file!r} is a folder")
    return file


def write(file, run):
    entries = [dataclasses.asdict(entry) for entry in run.entries]
    contents = {"safeops_sketch": FORMAT, "ranks": run.ranks, "facts": run.facts, "entries": entries}
    text = json.dumps(contents, allow_nan=False, separators=(",", ":")).replace('{"phase"', '\n{"phase"')
    with open(file, "w", encoding="utf-8") as stream:  # a line for each entry
        stream.write(text)


def read(file):
    """The Run in a file. Raises FileNotFoundError, IsADirectoryError, or ValueError where it holds no sketch."""
    if os.path.isdir(file):
        raise IsADirectoryError(f"compare: {file} is a folder, not a file of sketches")
    if not os.path.exists(file):
        raise FileNotFoundError(f"compare: no such file: {file}")
    try:
        with open(file, encoding="utf-8") as stream:
            contents = json.load(stream)
        version = contents["safeops_sketch"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(f"compare: {file} holds no sketch, as safeops.debug.sketch writes one") from None
    if version != FORMAT:
        raise ValueError(f"compare: {file} is of format {version!r}, safeops {VERSION} reads {FORMAT}: write it again")
    try:
        entries = [Entry(**{**entry, "shape": tuple(entry["shape"])}) for entry in contents["entries"]]
        if not all(entry.phase in PHASES and len(entry.stats) > 64 for entry in entries):
            raise ValueError
        return Run(os.path.basename(file), entries, int(contents["ranks"]), dict(contents["facts"]))
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"compare: {file} is damaged: an entry of it cannot be read") from None


def _facts(entries):
    """Versions, devices and dtypes."""
    dtypes = dict.fromkeys(entry.autocast or entry.dtype for entry in entries if entry.phase == "forward")
    cuda = torch.cuda.is_available()
    return {
        "torch": torch.__version__,
        "safeops": VERSION,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "dtypes": list(dtypes),
        "tf32": bool(cuda and torch.backends.cuda.matmul.allow_tf32),
    }
