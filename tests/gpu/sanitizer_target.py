"""Run under compute-sanitizer: one op, on the calls and the variations of `safeops verify`, whose kernels are compiled.

A process has one op: the sanitizer's summary is then the op's.
"""

import sys

import torch

from safeops.core.op import registry
from safeops.testing import NotApplicable, run
from safeops.testing.values import each_dtype
from safeops.verify.checks import subject
from safeops.verify.variations import variations

MOST = 100_000  # elements: what is larger takes a sanitizer minutes

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
