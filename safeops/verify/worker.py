"""A process that checks ops, one at a time. It reads their names as lines, and writes its progress as lines of JSON.

    begun, passed    a check: {"op", "check", "state", "seconds", "samples"}
    done             the op has passed all checks
    failed, memory   the op is given up: "why"; "alive": true if the device still works (else the process ends). memory:
                     the device ran out of memory, which is no error of the op

The output of libraries goes to stderr.
"""

import argparse
import json
import os
import sys
import time

import torch

from safeops.core import availability
from safeops.core.op import registry
from safeops.verify import checks

RECOVERS_NOT = 13  # exit status


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", required=True)
    parser.add_argument("--full", action="store_true")
    arguments = parser.parse_args(argv)
    availability.Devices.judged = False  # also run kernels that are recorded as failed
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    if arguments.device.startswith("cuda"):
        torch.cuda.set_device(arguments.device)

    def say(**line):
        out.write(f"{json.dumps(line)}\n")

    for line in sys.stdin:
        check_op(registry[line.strip()], arguments.device, arguments.full, say)
    return 0


def check_op(op, device, full, say):
    name = "samples"
    try:
        subject = checks.subject(op, device, full)
        for name in checks.names(op, full):
            say(op=op.name, check=name, state="begun")
            begin = time.monotonic()
            ran = checks.apply(op, subject, name)
            synchronise(device)  # an error on the device is then raised in this check
            say(op=op.name, check=name, state="passed", seconds=round(time.monotonic() - begin, 3), samples=ran)
    except Exception as error:
        short = any(isinstance(e, torch.OutOfMemoryError) for e in (error, error.__cause__))
        why = " ".join(f"{'' if isinstance(error, AssertionError) else type(error).__name__ + ': '}{error}".split())
        alive = recovers(device)
        say(op=op.name, check=name, state="memory" if short else "failed", why=why[:1000], alive=alive)
        if not alive:
            os._exit(RECOVERS_NOT)
        return
    say(op=op.name, check=None, state="done")


def synchronise(device):
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def recovers(device):
    """True if the device takes more work: after an illegal access its context never does."""
    try:
        synchronise(device)
    except Exception:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
