"""Checks the values, gradients and route of each op. A clean environment's interpreter runs it, outside of the tree.

Arguments: the environment's folder, `kernel` or `composite` (the expected route), and the tree, which has the records
of the ops' tests.
"""

import sys
from pathlib import Path

import safeops.kernels
import torch

import safeops
from safeops.core.op import registry
from safeops.testing import run_check

folder, route, tree = Path(sys.argv[1]).resolve(), sys.argv[2], sys.argv[3]
for module in (safeops, safeops.kernels):
    assert Path(module.__file__).resolve().is_relative_to(folder), f"{module.__name__} is {module.__file__}"

for name in sorted({raw for op in registry.values() for raw in op.raw}):
    attached = torch._C._dispatch_has_kernel_for_dispatch_key(f"safeops::{name}", "CPU")
    assert attached == (route == "kernel"), f"{name}: C++ kernel attached: {attached}, expected {route}"

sys.path.insert(0, tree)  # only for tests.ops: the installed safeops is imported already
from tests.ops import RECORDS  # noqa: E402

for record in RECORDS.values():
    subject = next(record.subjects(), None)
    for check in ("value", "gradient"):  # each sample, in each dtype
        if subject is not None:
            run_check(subject, check)
print(route, "ok")
