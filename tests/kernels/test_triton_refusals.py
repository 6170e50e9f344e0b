"""Bad calls are refused, also after good calls. The extension (csrc/launch) keeps the launches of good calls, and
follows their traces for calls of other sizes; it must not do so for a bad call.

The driver is the stand-in of benchmarks/standin.py, in a process of its own.
"""

import importlib
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest

from benchmarks import standin

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(standin.unusable()), reason=str(standin.unusable())),
]


def test_nothing_that_was_prepared_takes_a_bad_call():
    done = subprocess.run([sys.executable, "-m", __name__], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def larger(call, times):
    """Returns the call with each size above 1 multiplied by `times`: operands broadcast as they did. A box keeps its 4
    coordinates."""
    import torch

    def grown(x):
        if not isinstance(x, torch.Tensor) or not x.dim():
            return x
        sizes = [times if n > 1 else 1 for n in x.shape]
        return x.repeat(*sizes[:-1], 1 if "kind" in call and x.shape[-1] == 4 and x.dim() > 1 else sizes[-1])

    return {key: grown(x) for key, x in call.items()}


def main(folder):
    from safeops.kernels.engine.launch import Plan

    import safeops
    from safeops.core import check
    from safeops.core.library import launchers
    from safeops.core.op import registry
    from safeops.ops.classification import _classification
    from tests.contract.common import on
    from tests.contract.refusals import BAD_CALLS, assert_refused, refusal, strange_calls
    from tests.ops import RECORDS

    kept, compile_plan, binary = standin.install(folder), Plan.compile, []

    def compile_once(plan, target):
        if not binary:
            binary.append(compile_plan(plan, target))
        return binary[0]

    Plan.compile = compile_once
    box_iou_loss = importlib.import_module("safeops.ops.vectors.box_iou_loss")
    _classification.has_missing_class = box_iou_loss.has_missing_class = lambda *operands: False
    check.may_look = lambda x: False
    came = []  # calls that reached Python
    for launcher in launchers.values():
        launcher.validate = noted(launcher.validate, came)
    prepared = total = refused = 0
    for name, op in registry.items():
        if op.owner != "Triton":
            continue
        function, call = getattr(safeops, name), {**RECORDS[name].call, **RECORDS[name].kernel_call}
        for times in (1, 2, 3, 4, 3):
            came.clear()
            function(**larger(call, times))
        prepared += not came
        total += 1
        for times in (1, 3, 5):
            for what, strange in strange_calls(larger(call, times)):
                expected, got = (refusal(on(route, name), strange) for route in ("composite", "kernel"))
                assert got == expected, (name, what, got, expected)
                refused += got is not None
        for bad in BAD_CALLS[name]:
            if "raise" not in bad.words:  # refused by a count on the GPU, which the stand-in does not do
                assert_refused(function, bad, looks=False)
    assert prepared > 0.8 * total and refused > 500, (prepared, total, refused)
    del kept


def noted(validate, came):
    def wrapped(*operands):
        came.append(operands)
        validate(*operands)

    return wrapped


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as created:
        main(Path(created))
