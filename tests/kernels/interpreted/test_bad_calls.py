"""Bad input by Triton's launchers: the errors of every other route, by name, before anything is written."""

import pytest
import torch

import safeops
from safeops._library import launchers
from safeops._op import registry
from safeops.ops.rows import _classification
from tests.contract.common import case, on
from tests.contract.refusals import BAD_CALLS, assert_refused, kernels
from tests.ops import RECORDS

LAUNCHERS = {name: launchers[op.forward] for name, op in registry.items() if vars(op).get("forward") in launchers}
PARTS = {name: {name, *(part.name for part in op.parts)} for name, op in registry.items()}
NAMES = [name for name in BAD_CALLS if PARTS.get(name, set()) & LAUNCHERS.keys()]


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """As on a GPU, where nobody looks at class indices either."""
    monkeypatch.setattr(_classification, "has_missing_class", lambda *operands: False)
    with kernels(LAUNCHERS):
        yield


def test_every_op_of_triton_is_here():
    assert {name for name, op in registry.items() if op.owner == "Triton"} == LAUNCHERS.keys() <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_named_error(name):
    for i, bad in enumerate(BAD_CALLS[name]):
        with case(i, *bad.words):
            assert_refused(getattr(safeops, name), bad, looks=False)


STRANGE = {
    "of integers": torch.Tensor.long,
    "of bools": torch.Tensor.bool,
    "of complex numbers": lambda x: x + 0j,
    "of one more dimension": lambda x: x[None],
    "of its first alone": lambda x: x[:1],
    "twice as long": lambda x: torch.cat([x, x], -1),
    "of nothing": lambda x: x[:0],
}


@pytest.mark.parametrize("name", sorted(LAUNCHERS))
@pytest.mark.filterwarnings("ignore")  # that shapes are broadcast
def test_what_the_composite_refuses_is_refused(name):
    """Each operand of a good call replaced by a strange one, which one op takes and another does not."""
    record, refusals = RECORDS[name], 0
    for key, x in record.tensors().items():
        for what, change in STRANGE.items():
            if x.dim():
                call = {**record.call, **record.kernel_call, key: change(x)}
                expected, got = (outcome(on(route, name), call) for route in ("composite", "kernel"))
                refusals += isinstance(expected, str)
                assert isinstance(expected, str) == isinstance(got, str) and expected in (got, None), (key, what, got)
    assert refusals >= 3


def outcome(function, call):
    """The text of its refusal, None where it takes the call."""
    try:
        function(**call)
    except (TypeError, ValueError, IndexError) as error:
        return f"{type(error).__name__}: {error}"
