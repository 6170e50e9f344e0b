"""Prints a description of the machine as JSON, with the names of the ops that have kernels on it. gpu_check.py runs it
in the fresh install."""

import datetime
import importlib.util
import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import torch

import safeops
from safeops.verify.command import due


def driver():
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    versions = subprocess.run(query, capture_output=True, text=True).stdout.split() if shutil.which(query[0]) else []
    return versions[0] if versions else None


def triton():
    return importlib.import_module("triton").__version__ if importlib.util.find_spec("triton") else None


device = torch.device(sys.argv[1])
_, ops = due(device)
on_gpu = device.type == "cuda"
machine = {
    "gpu": torch.cuda.get_device_name(0) if on_gpu else None,
    "capability": torch.cuda.get_device_capability(0) if on_gpu else None,
    "driver": driver(),
    "cuda": torch.version.cuda,
    "torch": torch.__version__,
    "triton": triton(),
    "python": platform.python_version(),
    "cpu": platform.processor() or platform.machine(),
    "date": datetime.date.today().isoformat(),
    "safeops": safeops.__version__,
    "safeops_path": str(Path(safeops.__file__).parent),
    "ops": list(ops),
}
print(json.dumps(machine))
