"""Processes with a time limit, and what compute-sanitizer prints of them."""

import concurrent.futures
import os
import re
import signal
import subprocess
import tempfile


def run_limited(command, seconds, **options):
    """(exit status or None if killed, output). The whole process group goes, so that no child outlives its stage."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, **options)
        status = None
        try:
            status = process.wait(timeout=max(seconds, 1))
        except subprocess.TimeoutExpired:
            for sig, patience in ((signal.SIGTERM, 3), (signal.SIGKILL, 10)):
                try:
                    os.killpg(process.pid, sig)
                    process.wait(timeout=patience)
                except ProcessLookupError:
                    break
                except subprocess.TimeoutExpired:
                    continue
        output.seek(0)
        return status, output.read()


def run_all(commands, seconds, **options):
    """run_limited of each, at once."""
    with concurrent.futures.ThreadPoolExecutor(len(commands)) as pool:
        return list(pool.map(lambda command: run_limited(command, seconds, **options), commands))


def reports(output):
    """{op: what the sanitizer has found}, of the target's output, which names each op before it runs."""
    found, op = {}, "?"
    for line in output.splitlines():
        if line.startswith("op: "):
            op = line.removeprefix("op: ")
            found.setdefault(op, [])
        elif re.match(r"=+ +(Invalid|Misaligned|Uninitialized|Error|Barrier|Illegal|\S* ?Race|.*hazard)", line):
            found.setdefault(op, []).append(line.strip("= "))
    return found
