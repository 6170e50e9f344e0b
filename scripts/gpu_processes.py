"""Runs processes with a time limit, and under compute-sanitizer."""

import concurrent.futures
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SANITIZER_SECONDS = 90  # the time limit of one sanitized process
# tool -> its options. memcheck must not report API errors: torch makes driver calls that it expects to fail.
TOOLS = {"racecheck": (), "memcheck": ("--report-api-errors", "no")}
# Torch's caching allocator takes larger blocks than a tensor, so an access past the tensor's end would not be reported.
FOR_SANITIZERS = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def run_limited(command, seconds, **options):
    """Runs a command. Returns (exit status, or None if it was killed at its limit; output). Kills the whole process
    group, so that no child process outlives it."""
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


def run_all(commands, jobs, until, seconds, **options):
    """Runs the commands {key: command} by run_limited, `jobs` at a time, each for at most `seconds`. All end by the
    time `until` (of time.monotonic()); after it no command starts. Yields (key, status, output) as the commands end."""

    def one(key):
        left = until - time.monotonic()
        return key, *(run_limited(commands[key], min(left, seconds), **options) if left > 1 else (None, ""))

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for future in concurrent.futures.as_completed([pool.submit(one, key) for key in commands]):
            yield future.result()


def sanitizer():
    """Returns the path of compute-sanitizer, or None if this machine does not have it."""
    path = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    return path if Path(path).exists() else None


def sanitizing(tool, *program):
    """Returns the command that runs a Python program with its arguments under a tool of the sanitizer."""
    return [sanitizer(), "--tool", tool, *TOOLS[tool], sys.executable, "-u", *map(str, program)]


def sanitized(output):
    """Reads (verdict, errors) from the output of one tool on one op. The verdict is "failed" if the tool's summary
    counts errors, "passed" if it counts none and the target has printed "done", else "not judged"."""
    result = re.search(r"=+ (?:ERROR|RACECHECK) SUMMARY: (\d+)", output)
    kinds = r"=+ +(?:Invalid|Misaligned|Uninitialized|Error|Barrier|Illegal|\S* ?Race|.*hazard)"
    errors = [line.strip("= ") for line in output.splitlines() if re.match(kinds, line) and "SUMMARY" not in line]
    if result and int(result[1]):
        return "failed", errors or [result[0].strip("= ")]
    return ("passed" if result and re.search("^done$", output, re.M) else "not judged"), errors
