"""Prints the time and memory of linear_cross_entropy, forward and backward, beside the prediction of docs/speed.md.

It runs the mode in which gradients overwrite the logits, and passes no verdict. It is a process of its own and not a
test, since tests that share the GPU would distort the time.
"""

import statistics
import time

import torch

import safeops
from tests.ops.record import DEVICE

ON_GPU = DEVICE == "cuda"
ROWS, WIDTH, CLASSES = (8192, 4096, 128256) if ON_GPU else (64, 32, 1000)
PREDICTED = "predicted for an H100: 37.2 ms, 3.0 GiB"
RUNS = 10

synchronize = torch.cuda.synchronize if ON_GPU else lambda: None
x, weight = (torch.randn(n, WIDTH, device=DEVICE, dtype=torch.bfloat16) / 8 for n in (ROWS, CLASSES))
target = torch.randint(CLASSES, (ROWS,), device=DEVICE)
leaves = x.requires_grad_(), weight.requires_grad_()


def step():
    """Returns the milliseconds of one forward and backward."""
    synchronize()
    begin = time.perf_counter()
    torch.autograd.grad(safeops.linear_cross_entropy(*leaves, target), leaves)
    synchronize()
    return 1000 * (time.perf_counter() - begin)


step()
before = torch.cuda.memory_allocated() if ON_GPU else 0
if ON_GPU:
    torch.cuda.reset_peak_memory_stats()
milliseconds = statistics.median(step() for _ in range(RUNS))
peak = f"{(torch.cuda.max_memory_allocated() - before) / 2**30:.1f} GiB" if ON_GPU else "memory not measured"
print(f"linear_cross_entropy, {ROWS} x {WIDTH} x {CLASSES}, bf16: {milliseconds:.1f} ms, {peak} ({PREDICTED})")
