"""Run under compute-sanitizer: the ops that are named, on small calls, those of `safeops verify`.

Each name is printed before its op runs: what the sanitizer says next is the op's.
"""

import sys

import torch

from safeops._op import registry
from safeops.testing import run
from safeops.testing.layouts import LAYOUTS
from safeops.testing.values import fitting
from safeops.verify.checks import subject

for name in sys.argv[1:]:
    print(f"op: {name}", flush=True)
    made = subject(registry[name], "cuda")
    for sample in made.samples:
        sample = sample.to("cuda")
        sized = sample.grown(5000)
        for i, cast in enumerate(fitting(sized).values()):
            run(made.op, cast.map(LAYOUTS["offset"]) if i % 2 else cast)
        run(made.op, sample.cast(torch.float32).map(lambda t: t.mT.contiguous().mT if t.dim() > 1 else t))
    torch.cuda.synchronize()
print("done")
