"""Where the CUDA kernels may be trusted: where exactly they have passed, by a record.

A record is {"op", "gpu", "capability", "driver", "torch", "triton", "source", "date", "passed", "why"}, where "source"
is the fingerprint of all that the op's kernels are made of, as installed. `verified.json` holds those that are shipped;
`safeops verify` adds those of the user's own GPUs, in the cache folder, which are asked first.
"""

import contextlib
import functools
import importlib
import importlib.util
import json
import os
import pathlib
import sys
import tempfile
import warnings
from typing import NamedTuple

import torch

from safeops import _library, _sources

SHIPPED = pathlib.Path(__file__).with_name("verified.json")
LEAST = (8, 0)  # compute capability
KEY = ("op", "gpu", "capability", "triton", "source")  # a record is asked where these agree; the rest is told
FIELDS = {*KEY, "date", "passed", "why"}  # without which it is none


class Verdict(NamedTuple):
    """Whether an op's kernels run on a device, why, and whether `safeops verify` could change that."""

    kernel: bool
    reason: str
    open: bool = False


# ---- records


def cache_folder() -> pathlib.Path:
    """$SAFEOPS_CACHE, else safeops in the user's cache folder (for a user without a home in "~", as Triton's is)."""
    if folder := os.environ.get("SAFEOPS_CACHE"):
        return pathlib.Path(folder)
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "safeops"


def user_file() -> pathlib.Path:
    return cache_folder() / "verified.json"


def read(path) -> list[dict]:
    """The records of a file. One that cannot be read holds none, and says so: no training stops for it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, list) or not all(isinstance(x, dict) and FIELDS <= x.keys() for x in found):
            raise ValueError(f"it is no list of records with {', '.join(sorted(FIELDS))}")
        return found
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        warnings.warn(f"safeops: {path} is not used: {error}", RuntimeWarning, stacklevel=2)
        return []


@functools.cache
def records() -> list[dict]:
    return read(user_file()) + read(SHIPPED)


def key(record) -> tuple:
    return tuple(record[name] for name in KEY)


def merged(old: list[dict], new: list[dict]) -> list[dict]:
    """The old records, each replaced by the new one of the same key."""
    found = {key(record): record for record in (*old, *new)}
    return sorted(found.values(), key=lambda record: json.dumps(record, sort_keys=True))


def save(new: list[dict], path=None):
    """Add records to a file, the user's by default, which readers see before or after, never in between."""
    path = path or user_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(merged(read(path), new), indent=1)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(f"{text}\n")
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)
    forget()


def forget():
    """Ask everything again: records have changed."""
    records.cache_clear()
    for trust in _trusts.values():
        trust.clear()


@contextlib.contextmanager
def locked():
    """One process at a time: ranks of one job verify once, and the others wait."""
    import fcntl  # (which Windows has not, where there are no kernels)

    cache_folder().mkdir(parents=True, exist_ok=True)
    with open(cache_folder() / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"safeops: waiting for another process that verifies ({file.name})", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ---- what runs here


@functools.cache
def triton() -> str | None:
    return importlib.import_module("triton").__version__ if _library.has_triton else None


@functools.cache
def source(op: str, owner: str) -> str:
    """The fingerprint of an op's kernels: C++ tells its own, Triton's are the files that would be compiled, and what
    the extension tells of how it launches them."""
    if owner == "Triton":
        (folder,) = importlib.util.find_spec("safeops.kernels").submodule_search_locations
        found = _sources.fingerprint(op, pathlib.Path(folder).parent, pathlib.Path(folder).name)
        return found if _library.cpu_extension is None else f"{found}.{_library.cpu_extension.launch_source()}"
    return dict(mark.split("=") for mark in _library.cuda_extension.sources.split())[op]


@functools.cache
def has_code(capability: tuple) -> bool:
    """Whether the C++ extension has code for a GPU: of its generation and not newer, or what its driver compiles."""
    archs = [(int(arch[:-1]), int(arch[-1])) for arch in _library.cuda_extension.archs.split()]
    return any(arch[0] == capability[0] and arch <= capability for arch in archs) or capability >= archs[-1]


def gpu(index: int) -> tuple | None:
    """(name, capability) of a CUDA device; None where an operand stands for one that is elsewhere."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_name(index), tuple(torch.cuda.get_device_capability(index))


def has_kernels(op) -> bool:
    return all(_library.has_kernel(name, "CUDA") for name in op.raw)


def due(op) -> bool:
    """Whether there are kernels of the op's own to verify."""
    return bool(op.owner) and has_kernels(op)


def identity(op, index: int) -> dict:
    """The part of a record that says of what it is."""
    name, capability = gpu(index)
    version = triton() if op.owner == "Triton" else None
    found = {"op": op.name, "gpu": name, "capability": "{}.{}".format(*capability), "triton": version}
    return found | {"source": source(op.name, op.owner)}


def verdict(op, index: int, ask=True) -> Verdict:
    """Whether the kernels of an op run on CUDA device `index`. ask=False: whether they could, record or none."""
    if not op.owner:
        return Verdict(True, "plain torch")
    if not due(op):
        return Verdict(False, "no kernel for CUDA")
    if torch.version.hip:
        return Verdict(False, "a ROCm build of torch")
    if (found := gpu(index)) is None:
        return Verdict(False, "no CUDA device here")
    _, capability = found
    if capability < LEAST:
        return Verdict(False, "compute capability {}.{}, below {}.{}".format(*capability, *LEAST))
    if op.owner != "Triton" and not has_code(capability):
        return Verdict(False, "no code for sm_{}{} in this build".format(*capability))
    if not ask or os.environ.get("SAFEOPS_UNVERIFIED") == "1":
        return Verdict(True, "SAFEOPS_UNVERIFIED=1")
    mine = identity(op, index)
    here = ("op", "gpu", "capability")
    known = [record for record in records() if all(record[part] == mine[part] for part in here)]
    for record in known:
        if key(record) == key(mine):
            if record["passed"]:
                return Verdict(True, f"passed on {record['date']}")
            return Verdict(False, f"failed on {record['date']}: {record['why']}")
    if not known:
        return Verdict(False, "never verified on this GPU model", True)
    other = [record for record in known if record["source"] == mine["source"]]
    if not other:
        return Verdict(False, "verified with other sources of it", True)
    return Verdict(False, f"verified with Triton {other[0]['triton']}, here is {mine['triton']}", True)


# ---- what a call asks


_trusts, _warned, _asked = {}, set(), set()


class Trust(dict):
    """{index of a CUDA device: whether the op's kernels run there}, asked at the op's first call on each."""

    def __init__(self, op):
        super().__init__()
        self.op = op
        _trusts[op.name] = self

    def __missing__(self, index):
        found = verdict(self.op, index)
        if found.open and os.environ.get("SAFEOPS_VERIFY") == "auto" and index not in _asked:
            from safeops.verify.command import automatically

            _asked.add(index)  # what has no verdict now gets none by asking again
            try:
                automatically(index)
            except OSError as error:  # nowhere to record: training goes on
                warnings.warn(f"safeops: SAFEOPS_VERIFY=auto has failed: {error}", RuntimeWarning, stacklevel=2)
            found = verdict(self.op, index)
        if found.open:
            _warn(self.op, index, found)
        self[index] = found.kernel
        return found.kernel


def trusted(name, index):
    """The same, as a trace asks it."""
    return _trusts[name][index]


trusted._dynamo_marked_constant = True  # Dynamo asks it while it traces, and keeps the answer


def _warn(op, index, found):
    """Once for a GPU model: what is missing, and what to run."""
    name, _ = gpu(index)
    if name not in _warned:
        _warned.add(name)
        warnings.warn(
            f"safeops: {op.name} runs as plain torch on {name} ({found.reason}): run `safeops verify`, once, for the "
            "kernels (SAFEOPS_VERIFY=auto does it at the first call)",
            RuntimeWarning,
            stacklevel=2,
        )
