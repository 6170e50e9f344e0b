"""Every op of the registry has a complete record: an op that is added without tests fails here.

tests/benchmarks checks that it has a benchmark."""

import importlib
import inspect
import itertools
import re
from pathlib import Path

import pytest

import safeops
from safeops.core.library import launchers
from safeops.core.op import registry
from tests.ops import RECORDS

ROOT = Path(__file__).resolve().parents[1]
each_op = pytest.mark.parametrize("name", sorted(registry))


@each_op
def test_every_op_has_a_whole_record(name):
    """Every record must have samples, bad calls, a plain call and a GPU case, or a sentence that says why it has
    none."""
    assert name in RECORDS, f"{name}: no record in tests/ops"
    record = RECORDS[name]
    for what in ("samples", "bad_calls", "call", "gpu"):
        assert getattr(record, what), f"{name}: its record has no {what}"


@each_op
def test_the_plain_call_has_every_argument(name):
    """The plain call must have every argument, as tests/callers vary only those; reduction, empty and keepdim have
    tests of their own."""
    call = RECORDS[name].call
    if not isinstance(call, str):
        arguments = inspect.signature(getattr(safeops, name)).parameters.keys()
        assert call.keys() <= arguments and arguments - call.keys() <= {"reduction", "empty", "keepdim"}


def test_every_record_is_of_a_function():
    assert set(RECORDS) <= {*registry, *safeops.__all__}


def test_every_op_is_exported():
    public = {name for name, op in registry.items() if op.public_function}
    assert public <= set(safeops.__all__) and safeops.__all__ == sorted(set(safeops.__all__))
    assert all(getattr(safeops, name) is registry[name].public_function for name in public)


def test_every_op_is_in_the_table_of_functions():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    tables = re.findall(r"^\| function \|.*\n\|[-|: ]+\n((?:\|.*\n)+)", "".join(p.read_text() for p in pages), re.M)
    listed = {name for row in "".join(tables).splitlines() for name in re.findall(r"`(\w+)", row.split(" | ")[0])}
    assert not {name for name, op in registry.items() if op.public_function} - listed


def test_every_declaration_names_a_function_of_the_kernels():
    for launcher in launchers.values():
        path = ROOT.joinpath("kernels", *launcher.module.split(".")).with_suffix(".py")
        assert re.search(rf"^(def )?(\w+, )?{launcher.name}\b", path.read_text(), re.M), f"{path}: no {launcher.name}"


def test_every_cuda_kernel_meets_its_bad_calls():
    """Every C++/CUDA kernel must be tried with its op's bad calls, in the tests that execute CUDA kernels. (Triton's
    launchers are tried in the interpreter.)"""
    files = Path(__file__).parent.glob("kernels/test_cuda_executed*.py")
    tried = [getattr(importlib.import_module(f"tests.kernels.{file.stem}"), "REFUSED", ()) for file in files]
    owned = {name for name, op in registry.items() if op.owner == "C++/CUDA"}
    assert set(itertools.chain(*tried)) == {name for name in owned if not isinstance(RECORDS[name].bad_calls, str)}
