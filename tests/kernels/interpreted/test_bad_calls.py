"""Triton's launchers refuse bad input with the same named errors as every other route, before anything is written."""

import importlib

import pytest

import safeops
from safeops.core import check
from safeops.core.library import launchers
from safeops.core.op import registry
from safeops.ops.classification import _classification
from tests.contract.common import case, on
from tests.contract.refusals import BAD_CALLS, assert_refused, kernels, refusal, strange_calls
from tests.ops import RECORDS

LAUNCHERS = {name: launchers[op.forward] for name, op in registry.items() if vars(op).get("forward") in launchers}
PARTS = {name: {name, *(part.name for part in op.parts)} for name, op in registry.items()}
NAMES = [name for name in BAD_CALLS if PARTS.get(name, set()) & LAUNCHERS.keys()]


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """Makes the checks behave as on a GPU, where the host does not read class indices or the bounds of sequences."""
    for module in (_classification, importlib.import_module("safeops.ops.vectors.box_iou_loss")):
        monkeypatch.setattr(module, "has_missing_class", lambda *operands: False)
    monkeypatch.setattr(check, "may_look", lambda x: False)
    with kernels(LAUNCHERS):
        yield


def test_every_op_of_triton_is_here():
    assert {name for name, op in registry.items() if op.owner == "Triton"} == LAUNCHERS.keys() <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_named_error(name):
    for i, bad in enumerate(BAD_CALLS[name]):
        with case(i, *bad.words):
            assert_refused(getattr(safeops, name), bad, looks=False)


@pytest.mark.parametrize("name", sorted(LAUNCHERS))
@pytest.mark.filterwarnings("ignore")  # warnings about broadcast shapes
def test_what_the_composite_refuses_is_refused(name):
    refused = 0
    for what, call in strange_calls({**RECORDS[name].call, **RECORDS[name].kernel_call}):
        expected, got = (refusal(on(route, name), call) for route in ("composite", "kernel"))
        assert got == expected, what
        refused += got is not None
    assert refused >= 3
