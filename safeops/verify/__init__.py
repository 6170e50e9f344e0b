"""`safeops verify`: compare the kernels of this machine's GPUs with the fp64 definitions, by the contract's checks.

    samples.py     sample calls of each op, for the arguments of its family
    variations.py  layouts and sizes of a call
    checks.py      the checks: clauses of safeops.testing, and errors that only a GPU can make
    worker.py      a process that runs the checks, op by op, and reports its progress
    pool.py        the processes: one that dies or hangs fails only its current op, and is replaced
    command.py     the command: progress and table; a kernel that fails is off from then on

It needs torch alone, and runs from the installed wheel.
"""
