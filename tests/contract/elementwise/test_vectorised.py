"""The compiler must vectorize the loop of safe_pow: a scalar loop takes ten times as long as torch's."""

import time

import pytest
import torch

import safeops
from safeops.core.op import registry
from tests.contract.common import DEVICE


@pytest.mark.skipif(DEVICE != "cpu" or not registry["safe_pow"].cpu, reason="the CPU kernel's loop")
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="torch's own is scalar there")
def test_safe_pow_is_about_as_fast_as_torchs():
    x, y = torch.rand(2**16) + 0.1, torch.randn(2**16)

    def best(call):
        times = []
        for _ in range(20):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return min(times)

    ours, theirs = best(lambda: safeops.safe_pow(x, y)), best(lambda: torch.pow(x, y))
    assert ours < 4 * theirs
