"""The base of every op; nothing here is public. It imports no other folder of safeops.

    op.py               `Op`, the record of an op and its call path; `Composed`, the record of a function made of ops
    autograd.py         builds the autograd Function of an op
    route.py            decides how a call runs: kernel, composite (plain torch ops) or torch.compile
    sums.py             masked sum, mean and count, which other ops use; reduction.py: the class of their records
    loss_reduction.py   the arguments `reduction`, `denominator` and `empty` of all losses
    library.py          the torch.library namespace: loads the built extensions, declares raw ops, attaches kernels
    check.py            argument checks; dtypes.py, symbolic.py, definitions.py: functions that definitions share
    availability.py     on which GPUs kernels run; failures.py: the file of ops that failed `safeops verify`
    group.py            process groups
    private_torch.py    every private name of torch that safeops uses

Two hooks serve the layers above: safeops.distributed sets `Op.call_over_ranks`, safeops.debug fills `check.watchers`.
"""

import os

VERSION = "0.1.0"
NAME = __name__.partition(".")[0]  # the package and torch.ops namespace; on the Hugging Face Hub it is not "safeops"
PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
