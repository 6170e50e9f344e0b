"""Decides where CUDA kernels run: on every GPU of compute capability 8.0 or more for which there is code.

The environment variable SAFEOPS_KERNELS is `auto` (the default), `require` (a CUDA tensor whose op has no kernel
raises) or `off` (every op runs its definition, on every device). KNOWN_FAULTS lists kernels that are known to be wrong.
An op that failed `safeops verify` on this machine is off until it passes (failures.py).
"""

import functools
import importlib
import os
import re
from typing import NamedTuple

import torch

from safeops.core import failures, library

VARIABLE, MODES = "SAFEOPS_KERNELS", ("auto", "require", "off")
LEAST_CAPABILITY, LEAST_TRITON = (8, 0), (3, 6)


class KnownFault(NamedTuple):
    """An op whose CUDA kernels are wrong on GPUs of `capability` with a Triton version that begins with `triton`.

    capability=None: all GPUs; triton=None: all versions of Triton."""

    op: str
    capability: tuple | None
    triton: str | None
    why: str


KNOWN_FAULTS: tuple[KnownFault, ...] = ()


class Availability(NamedTuple):
    """kernel: True if an op's kernels run on a device. reason: which code runs, or why none does."""

    kernel: bool
    reason: str


def mode() -> str:
    """The value of SAFEOPS_KERNELS. ValueError if it is none of the three."""
    value = os.environ.get(VARIABLE) or MODES[0]
    if value not in MODES:
        raise ValueError(f"{VARIABLE} must be {', '.join(MODES[:-1])} or {MODES[-1]}, got {value!r}")
    return value


def availability(op, index, judged=True) -> Availability:
    """The Availability of an op's kernels on CUDA device `index`. judged=False: ignore failures of `safeops verify`."""
    if not op.owner:
        return Availability(True, "plain torch")
    if mode() == "off":
        return Availability(False, f"{VARIABLE}=off")
    if torch.version.hip:
        return Availability(False, "a ROCm build of torch")
    if (result := gpu(index)) is None:
        return Availability(False, "no CUDA device here")
    name, capability = result
    if capability < LEAST_CAPABILITY:
        return Availability(False, "compute capability {}.{}, below {}.{}".format(*capability, *LEAST_CAPABILITY))
    code = _triton_code() if op.owner == "Triton" else _cpp_code(capability)
    if not code.kernel:
        return code
    if not has_kernels(op):
        return Availability(False, "no kernel for CUDA")
    why = _known_fault(op, capability) or (judged and failures.why(op.name, name, triton_of(op)))
    return Availability(False, why) if why else code


def gpu(index) -> tuple | None:
    """(name, capability) of a CUDA device. None without CUDA: a fake tensor may be on a device that does not exist."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_name(index), tuple(torch.cuda.get_device_capability(index))


def has_kernels(op) -> bool:
    """True if this build has the op's own CUDA kernels."""
    return bool(op.owner) and all(library.has_kernel(name, "CUDA") for name in op.raw)


def triton() -> str | None:
    return importlib.import_module("triton").__version__ if library.has_triton else None


def triton_of(op) -> str | None:
    """The version of the Triton that compiles the op's kernels; None for C++ kernels."""
    return triton() if op.owner == "Triton" else None


def _triton_code():
    try:
        version = triton()
    except Exception as error:
        return Availability(False, f"Triton cannot be imported: {type(error).__name__}: {error}".splitlines()[0])
    if version is None:
        return Availability(False, "Triton is not installed")
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < LEAST_TRITON:
        return Availability(False, "Triton {}, older than {}.{}".format(version, *LEAST_TRITON))
    if why := _triton_fails():
        return Availability(False, f"Triton cannot start: {why}")
    return Availability(True, f"Triton {version}")


@functools.cache
def _triton_fails():
    """Why Triton's driver does not start, or None. Triton compiles the driver's C code once, with a C compiler."""
    try:
        importlib.import_module("triton.runtime").driver.active.get_current_target()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


def _cpp_code(capability):
    """The Availability of C++ kernels: machine code of the GPU's major capability and at most its minor one, or PTX."""
    extension = library.cuda_extension
    if extension is None:
        return Availability(False, "this build has no CUDA extension")
    archs = [(int(arch[:-1]), int(arch[-1])) for arch in extension.archs.split()]
    fitting = [arch for arch in archs if arch[0] == capability[0] and arch <= capability]
    if not fitting and capability < archs[-1]:
        return Availability(False, "no code for sm_{}{} in this build (sm_{})".format(*capability, extension.archs))
    # A driver runs machine code of its own major version of CUDA. It compiles PTX of versions up to its own.
    needed = extension.runtime // 1000 * 1000 if fitting else extension.runtime
    if extension.driver() < needed:
        versions = (f"{number // 1000}.{number % 1000 // 10}" for number in (extension.driver(), needed))
        return Availability(False, "the driver knows CUDA {}, this build needs {}".format(*versions))
    return Availability(True, "C++ for sm_{}{}".format(*fitting[-1]) if fitting else "C++ by PTX")


def _known_fault(op, capability):
    for fault in KNOWN_FAULTS:
        here = fault.op == op.name and fault.capability in (None, capability)
        if here and (fault.triton is None or f"{triton_of(op)}.".startswith(f"{fault.triton}.")):
            return f"known to be wrong here: {fault.why}"
    return None


# ---- lookups at each call

_devices, _warned = {}, set()


class Devices(dict):
    """{index of a CUDA device: True if the op's kernels run there}, filled at the op's first call on each device."""

    judged = True  # `safeops verify` sets it to False on the class: an op that has failed may pass now

    def __init__(self, op):
        super().__init__()
        self.op = op
        _devices[op.name] = self

    def __missing__(self, index):
        result = availability(self.op, index, self.judged)
        if not result.kernel:
            _say_why(self.op, index, result.reason)
        self[index] = result.kernel
        return result.kernel


def available(name, index):
    """True if an op's kernels run on a CUDA device. For traces, which pass the op's name."""
    return _devices[name][index]


available._dynamo_marked_constant = True  # Dynamo calls it while it traces: the result is a constant of the graph


def forget():
    """Clear the cached answers: the next calls check again."""
    failures.records.cache_clear()
    for devices in _devices.values():
        devices.clear()


def _say_why(op, index, reason):
    """Warn that an op has no kernel, once for each reason and model of GPU; raise if SAFEOPS_KERNELS=require."""
    name = result[0] if (result := gpu(index)) else f"cuda:{index}"
    if mode() == "require":
        raise RuntimeError(f"{op.name}: no kernel on {name}: {reason} ({VARIABLE}=require)")
    if mode() == "auto" and (name, reason) not in _warned:
        _warned.add((name, reason))
        failures.warn(f"{op.name} runs as plain torch on {name}: {reason} (`safeops doctor` shows the others)")
