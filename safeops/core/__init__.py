"""The foundation of every op, none of it public: records, routes, checks, sums. It imports nothing above it.

    op.py               the record of an op, and of a function made of ops
    autograd.py         how a call comes back as gradients
    route.py            who computes a call: kernel, composite or compiler
    sums.py             the masked sum, mean and count, of which other ops are made; reduction.py: their record
    loss_reduction.py   what all losses share: reduction, denominator, nothing kept
    library.py          the namespace of torch.library: the built extensions, raw ops, where an op's kernels are
    check.py            argument checks; dtypes.py, symbolic.py, definitions.py: pieces of definitions
    availability.py     on which GPUs kernels run; failures.py: what `safeops verify` has seen fail
    group.py            the processes of a call
    private_torch.py    every private name of torch that is used

The layers above hook in: `Op.call_over_ranks` is safeops.distributed's, `check.watchers` safeops.debug's.
"""

import os

VERSION = "0.1.0"
NAME = __name__.partition(".")[0]  # of the package, and of the ops: another than safeops on the Hugging Face Hub
PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
