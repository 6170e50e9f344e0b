"""Safe mode slows down a training step of some 10 ms, most of whose torch calls it does not replace, only a little."""

import statistics
import time

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import safeops
from safeops.core.op import registry


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.wide = torch.nn.LayerNorm(width), torch.nn.Linear(width, 2 * width)
        self.narrow = torch.nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


class Count(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def training(rows, blocks=12, width=64):
    model = torch.nn.Sequential(*(Block(width) for _ in range(blocks)), torch.nn.Linear(width, 10))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    x, target = torch.randn(rows, width), torch.randint(0, 10, (rows,))

    def step():
        optimizer.zero_grad()
        y = model(x)
        loss = F.cross_entropy(y, target) + 0.01 * F.normalize(y).softmax(-1).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def seconds(step, count=4):
    begin = time.thread_time()
    for _ in range(count):
        step()
    return (time.thread_time() - begin) / count


def measure(pairs=60):
    """Returns (median CPU seconds of a step, median ratio of a step in safe mode to one outside, its torch calls)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = 64
        while seconds(training(rows)) < 0.009:
            rows += 32
        step, count = training(rows), Count()
        seconds(step)
        with count:
            step()
        plain, ratios = [], []
        for _ in range(pairs):
            plain.append(seconds(step))
            with safeops.safe_mode():
                ratios.append(seconds(step) / plain[-1])
    finally:
        torch.set_num_threads(threads)
    return statistics.median(plain), statistics.median(ratios), count.calls


@pytest.mark.slow
@pytest.mark.skipif(not registry["cross_entropy"].cpu, reason="the twins' definitions are slower than kernels")
def test_the_cost_of_a_step():
    step, ratio, calls = measure()
    print(f"{step * 1e3:.1f} ms, {calls} calls, in safe mode times {ratio:.3f}")
    assert ratio < 1.25  # 1.04 was measured on an idle machine, 1.14 where other processes use the caches
