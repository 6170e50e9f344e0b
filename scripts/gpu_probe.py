"""Printed by a fresh install for scripts/gpu_check.py: the machine, and the ops whose kernels it runs, as records have
them (of a CPU: their names)."""

import json
import platform
import sys
from pathlib import Path

import torch

import safeops
from safeops import _verified
from safeops._op import registry
from safeops.verify.command import due, of_machine

device = torch.device(sys.argv[1])
_, ops = due(device)
on_gpu = device.type == "cuda"
name, capability = _verified.gpu(0) if on_gpu else (None, None)
machine = {
    "gpu": name,
    "capability": capability,
    "cuda": torch.version.cuda,
    "triton": _verified.triton(),
    "python": platform.python_version(),
    "cpu": platform.processor() or platform.machine(),
    "safeops": safeops.__version__,
    "safeops_path": str(Path(safeops.__file__).parent),
    "identities": {op: _verified.identity(registry[op], 0) if on_gpu else {"op": op} for op in ops},
}
print(json.dumps(machine | of_machine()))
