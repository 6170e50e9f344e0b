"""Program for compute-sanitizer: runs one compiled op on the calls and variations of `safeops verify`.

Each process runs one op, so that the sanitizer's summary belongs to that op.
"""

import sys

import torch

from safeops.core.op import registry
from safeops.testing import NotApplicable, run
from safeops.testing.values import each_dtype
from safeops.verify.checks import subject
from safeops.verify.variations import variations

MOST = 100_000  # elements: a larger operand takes the sanitizer minutes

op_subject = subject(registry[sys.argv[1]], "cuda")
for sample in op_subject.samples:
    sample = sample.to("cuda")
    for cast in each_dtype(sample):
        run(op_subject.op, cast)
    try:
        for _, laid in variations(sample):
            if laid.shape().numel() <= MOST:
                run(op_subject.op, laid)
    except NotApplicable:
        pass
torch.cuda.synchronize()
print("done", flush=True)
