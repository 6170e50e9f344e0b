"""grad_norm and clip_grad_norm_ beside torch.nn.utils': `python -m benchmarks.amp [--device cuda] [--dtypes fp16,...]`.

They have no backward and take lists, so they have a table of their own. I/O: the norm reads each gradient, scaling
reads and writes it; nothing is written where no gradient has to be scaled.
"""

import argparse
import itertools
import os
import sys

LISTS = {  # name -> sizes of the gradients
    "2000 of 64 to 1024": [64 * (1 + i % 16) for i in range(2000)],
    "a transformer's 300": [(1024, 4096, 1024 * 256, 1024 * 64)[i % 4] for i in range(300)],
    "4 of 4M": [2**22] * 4,
}
UNCLIPPED = 1e30  # max_norm that no gradients exceed


def contenders(parameters, gradients):
    """{what: (ours, torch's, bytes per byte of gradient)}"""
    import torch

    import safeops

    clip = torch.nn.utils.clip_grad_norm_
    lower = itertools.count()
    start = safeops.grad_norm(parameters).item()

    def falling():
        """Lower at each call, so that each scales again."""
        return start * 0.999 ** next(lower)

    return {
        "norm": (lambda: safeops.grad_norm(parameters), lambda: torch.nn.utils.get_total_norm(gradients), 1),
        "clip, not needed": (
            lambda: safeops.clip_grad_norm_(parameters, UNCLIPPED),
            lambda: clip(parameters, UNCLIPPED),
            1,
        ),
        "clip": (lambda: safeops.clip_grad_norm_(parameters, falling()), lambda: clip(parameters, falling()), 3),
    }


def measure(sizes, dtype, device, rounds):
    """A row for each of the contenders: (what, ms ours, ms torch, factor, share of the floor, share undisturbed)."""
    import torch

    from .case import data
    from .timing import copy_of, interleave

    parameters = [torch.nn.Parameter(torch.zeros(n, dtype=dtype, device=device)) for n in sizes]
    for i, p in enumerate(parameters):
        p.grad = data(p.numel(), dtype, device, i, grad=False)
    gradients = [p.grad for p in parameters]
    total = sum(sizes) * dtype.itemsize
    for what, (ours, rival, share) in contenders(parameters, gradients).items():
        calls = {"ours": ours, "torch": rival, "copy": copy_of(total * share, device)}
        samples = interleave(calls, rounds, device)
        mine, theirs, copy = (samples[name].time() for name in calls)
        quiet = min(samples[name].share_clean() for name in calls)
        yield what, mine * 1e3, theirs * 1e3, theirs / mine, copy / mine, quiet


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.amp", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtypes", default="fp16,bf16,fp32")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(argv)
    if options.device == "cuda":
        os.environ.setdefault("SAFEOPS_UNVERIFIED", "1")  # before the import: it is the kernels that are measured
    import torch

    from .case import DTYPES
    from .timing import steady_memory

    torch.set_num_threads(options.threads)
    if options.device == "cpu":
        steady_memory()
    print("| gradients | dtype | what | ours ms | torch ms | x torch | of floor | quiet |")
    print("|---|---|---|---:|---:|---:|---:|---:|")
    for dtype in options.dtypes.split(","):
        for name, sizes in LISTS.items():
            for what, ours, theirs, factor, floor, quiet in measure(
                sizes, DTYPES[dtype], options.device, options.rounds
            ):
                numbers = f"{ours:.3f} | {theirs:.3f} | {factor:.1f} | {floor:.2f} | {quiet:.0%}"
                print(f"| {name} | {dtype} | {what} | {numbers} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
