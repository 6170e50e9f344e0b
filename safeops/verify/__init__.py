"""`safeops verify`: the kernels of this machine's GPUs, held against the fp64 definitions by the contract's checks.

    samples.py     calls of each op, made of the arguments that its family has
    variations.py  layouts and sizes of a call
    checks.py      what is checked on them: clauses of safeops.testing, and what only a GPU can get wrong
    worker.py      a process that runs them, op by op, and says how far it is
    pool.py        the processes: who dies or hangs costs the op that it was at, and is replaced
    command.py     the command: progress, table, and what fails is off from then on

It needs torch alone, and runs from the installed wheel.
"""
