"""`safeops verify` compiles few kernels, but with every value of every constant that occurs in the contract's tests."""

import importlib.util
import json
from collections import defaultdict
from pathlib import Path

import pytest

pytest.importorskip("triton")

from safeops.core import library
from safeops.core.op import registry
from safeops.testing import run_check
from tests.contract.common import unless_first
from tests.ops import RECORDS
from tests.ops.record import NUMERICS

spec = importlib.util.spec_from_file_location("gpu_kernels", Path(__file__).parents[2] / "scripts" / "gpu_kernels.py")
gpu_kernels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gpu_kernels)

ARCH = 90
MOST = 1075
SIZES = {"BM", "BN", "BS", "LM", "LN"}  # a tile's sizes: other values do not change the code's branches
OPS = [name for name, op in registry.items() if op.raw and op.owner == "Triton"]
needs_extension = pytest.mark.skipif(library.cpu_extension is None, reason="the extension is not built")


def variants(texts):
    """Returns {kernel: {(argument or its field, the pointer's type or the constant's value)}} of compiled kernels."""
    result = defaultdict(set)
    for request in map(json.loads, texts):
        kernel = result[request["kernel"]]
        for name, kind in request["signature"].items():
            kind = kind[0] if isinstance(kind, list) and kind else kind  # an operand's pointer
            if str(kind).startswith("*"):
                kernel.add((name, kind))
        arguments = list(gpu_kernels.function(request["kernel"]).fn.__annotations__.items())
        for (at, *field), value in request["constants"]:
            name, kind = arguments[at]
            if field:
                name = kind._fields[field[0]] if name == "config" else f"{name}.{kind._fields[field[0]]}"
            if name == "VEC":
                value = value == 1
            if name not in SIZES:
                kernel.add((name, json.dumps(value)))
    return result


def by_verify(names):
    return {text for name in names for text in gpu_kernels.request("verify", name, ARCH)}


def by_contract(names):
    with gpu_kernels.planned(ARCH) as result:
        for name in names:
            subject = next(iter(RECORDS[name].subjects()))
            for check in NUMERICS:
                if check not in subject.skip and check != "gradient_overflow":  # it needs computed values
                    run_check(subject, check)
    return set(result)


@needs_extension
def test_a_calls_variations_are_one_layout_and_one_size():
    """verify's calls of an op must share one layout and one size, since others would compile kernels of their own: each
    dtype and each variation then compiles a forward and a backward, and other checks hardly any kernel."""
    assert 10 <= len(by_verify(["mse_loss"])) <= 20


@pytest.mark.slow
@pytest.mark.exhaustive
@needs_extension
def test_verify_compiles_few_kernels():
    assert 400 < len(by_verify(OPS)) <= MOST


@pytest.mark.slow
@pytest.mark.exhaustive
@needs_extension
def test_verify_reaches_what_the_contract_reaches():
    reached, wanted = variants(by_verify(OPS)), variants(by_contract(OPS))
    missed = {kernel: sorted(wanted[kernel] - reached[kernel]) for kernel in wanted}
    assert len(wanted) > 10 and not any(missed.values()), missed


@pytest.mark.slow
@needs_extension
@pytest.mark.parametrize("name", map(unless_first, OPS))
def test_every_op_is_verified_in_both_precisions_of_the_arithmetic(name):
    result = variants(by_verify([name]))
    if name != "masked_count":  # masked_count has no floating-point arithmetic
        kinds = {value for arguments in result.values() for argument, value in arguments if argument == "C"}
        assert kinds == {'{"dtype": "fp32"}', '{"dtype": "fp64"}'}
