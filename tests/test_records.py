"""Every op of the registry has a record, and the record everything: an op that is added is tested, or this fails.

That it has a benchmark, tests/benchmarks asks."""

import inspect

import pytest

import safeops
from safeops._op import registry
from tests.ops import RECORDS

each_op = pytest.mark.parametrize("name", sorted(registry))


@each_op
def test_every_op_has_a_whole_record(name):
    """Samples, bad calls, a plain call, a GPU case; or a sentence that says why there is none."""
    assert name in RECORDS, f"{name}: no record in tests/ops"
    record = RECORDS[name]
    for what in ("samples", "bad_calls", "call", "gpu"):
        assert getattr(record, what), f"{name}: its record has no {what}"


@each_op
def test_the_plain_call_has_every_argument(name):
    """But the choices, which have tests of their own: else the tests of strange callers would not see it."""
    call = RECORDS[name].call
    if not isinstance(call, str):
        arguments = inspect.signature(getattr(safeops, name)).parameters.keys()
        assert call.keys() <= arguments and arguments - call.keys() <= {"reduction", "empty", "keepdim"}


def test_every_record_is_of_a_function():
    assert set(RECORDS) <= {*registry, *safeops.__all__}
