"""Worker processes that share a list of ops. One that dies or hangs fails only its current op, and is replaced."""

import collections
import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import safeops

PASSED, FAILED, UNKNOWN = "passed", "failed", "not judged"
START = "its start"  # the time before a worker's first check: an error there is no op's fault
# Signals from outside (Ctrl-C, a scheduler, a machine out of memory): no kernel causes them.
OUTSIDE = (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM)


@dataclass
class Result:
    """The outcome of an op. `checks` are those that it has passed, {name: (seconds, samples)}."""

    op: str
    verdict: str = UNKNOWN
    why: str = ""
    checks: dict = field(default_factory=dict)
    seconds: float = 0.0


class Gone(Exception):
    """A worker has died or was killed: (how, the verdict on its op)."""


class Worker:
    """A process of `safeops.verify.worker`, or of a stand-in with its protocol."""

    def __init__(self, command, environment):
        self.errors = tempfile.TemporaryFile()
        # (in our own process group: a signal to the group, or Ctrl-C, ends the workers too)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors}
        self.process = subprocess.Popen(command, env=environment, **pipes)
        self.buffer = b""

    def send(self, op):
        try:
            self.process.stdin.write(f"{op}\n".encode())
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # `receive` will say how it ended

    def receive(self, seconds):
        """The next message. Raises Gone if the process has ended, or is silent for `seconds` (then it is killed)."""
        until = time.monotonic() + seconds
        while True:
            while b"\n" not in self.buffer:
                if not select.select([self.process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
                    self.kill()
                    raise Gone(
                        f"no answer for {seconds:g} s", UNKNOWN
                    )  # a slow compiler or a busy machine is no wrong result
                if not (read := os.read(self.process.stdout.fileno(), 65536)):
                    raise self._ending()
                self.buffer += read
            line, _, self.buffer = self.buffer.partition(b"\n")
            with contextlib.suppress(ValueError):  # libraries may print there until the worker redirects it
                message = json.loads(line)
                if isinstance(message, dict) and "state" in message:
                    return message

    def _ending(self):
        status = self.process.wait()
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        self.errors.seek(0)
        said = self.errors.read().decode(errors="replace").strip().splitlines()
        if said:  # the last line with an error: CUDA adds advice after it, C++ a stack
            how += f": {next((x for x in reversed(said) if 'rror: ' in x), said[-1]).strip()[:300]}"
        return Gone(how, UNKNOWN if -status in OUTSIDE else FAILED)

    def kill(self):
        self.process.kill()
        self.process.wait()


class Pool:
    """Run ops on several workers; iterate for the results as they come."""

    def __init__(self, ops, command, jobs, seconds):
        """command: the command line of a worker. seconds: the longest silence of a worker."""
        self.ops, self.command, self.seconds = collections.deque(ops), command, seconds
        self.count, self.jobs = len(self.ops), max(1, min(jobs, len(self.ops)))
        self.results, self.workers, self.stopped = queue.Queue(), set(), False

    def __iter__(self):
        threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(self.jobs)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(self.count):
                result = self.results.get()
                if isinstance(result, BaseException):
                    raise result
                yield result
        finally:
            self.stopped = True
            for worker in list(self.workers):
                worker.kill()

    def _serve(self):
        worker = None
        try:
            while not self.stopped:
                try:
                    op = self.ops.popleft()
                except IndexError:
                    return
                if worker is None:
                    worker = Worker(self.command, environment(self.jobs))
                    self.workers.add(worker)
                result, alive = self._check(worker, op)
                if not alive:
                    self._end(worker)
                    worker = None
                self.results.put(result)
        except BaseException as error:  # raised in __iter__, which would wait for ever
            self.results.put(error)
        finally:
            if worker is not None:
                self._end(worker)

    def _end(self, worker):
        worker.kill()
        self.workers.discard(worker)

    def _check(self, worker, op):
        """Returns (Result of the op, True if the worker can take another op)."""
        result, begin, check = Result(op), time.monotonic(), START
        worker.send(op)
        alive = True
        try:
            while True:
                line = worker.receive(self.seconds)
                state, check = line["state"], line["check"]
                if state == "passed":
                    result.checks[check] = line["seconds"], line["samples"]
                elif state == "done":
                    result.verdict = PASSED
                    break
                elif state != "begun":
                    result.verdict, alive = FAILED if state == "failed" else UNKNOWN, line["alive"]
                    result.why = f"{check}: {'out of memory: ' if state == 'memory' else ''}{line['why']}"
                    break
        except Gone as gone:
            how, verdict = gone.args
            result.verdict, result.why, alive = UNKNOWN if check == START else verdict, f"{check}: {how}", False
        result.seconds = time.monotonic() - begin
        return result, alive


def environment(jobs):
    """A worker's environment: ops must run as kernels, and its threads are a share of the cores."""
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    return os.environ | {"SAFEOPS_KERNELS": "require", "OMP_NUM_THREADS": threads}


def command(device, full=False):
    """The command line of a worker. In sys.path, this package's folder replaces the current folder, which may hold
    another safeops."""
    root = str(Path(safeops.__file__).resolve().parents[1])
    code = f"import sys; sys.path[0] = {root!r}; from safeops.verify import worker; sys.exit(worker.main())"
    return [sys.executable, "-c", code, "--device", device, *(["--full"] if full else [])]
