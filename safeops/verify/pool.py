"""Worker processes that share a list of ops. One that dies or hangs costs the op that it was at, and is replaced."""

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
START = "its start"  # of a worker: what goes wrong there is no op's fault
# Sent from outside (Ctrl-C, a scheduler, a machine without memory): no kernel dies of these.
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
    """A process of `safeops.verify.worker`, or of a stand-in that speaks like it."""

    def __init__(self, command, environment):
        self.errors = tempfile.TemporaryFile()
        # (in our own process group: who ends that, or presses Ctrl-C, ends the workers too)
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
        """The next message. Gone where the process has ended, or is silent for so long (it is killed)."""
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
            with contextlib.suppress(ValueError):  # before the worker has its output, anything may print there
                message = json.loads(line)
                if isinstance(message, dict) and "state" in message:
                    return message

    def _ending(self):
        status = self.process.wait()
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        self.errors.seek(0)
        said = self.errors.read().decode(errors="replace").strip().splitlines()
        if said:  # the error, behind which CUDA's have advice and C++'s a stack
            how += f": {next((x for x in reversed(said) if 'rror: ' in x), said[-1]).strip()[:300]}"
        return Gone(how, UNKNOWN if -status in OUTSIDE else FAILED)

    def kill(self):
        self.process.kill()
        self.process.wait()


class Pool:
    """Run ops on several workers; iterate for the results as they come."""

    def __init__(self, ops, command, jobs, seconds):
        """command: of a worker. seconds: how long one may be silent."""
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
        except BaseException as error:  # the one who iterates must not wait for ever
            self.results.put(error)
        finally:
            if worker is not None:
                self._end(worker)

    def _end(self, worker):
        worker.kill()
        self.workers.discard(worker)

    def _check(self, worker, op):
        """(what came of the op, whether the worker can take another)"""
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
    """A worker's environment: its kernels are the route, and it has a share of the cores."""
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    return os.environ | {"SAFEOPS_KERNELS": "require", "OMP_NUM_THREADS": threads}


def command(device, full=False):
    """A worker of this very package: in the place of the current folder, where another one may lie."""
    root = str(Path(safeops.__file__).resolve().parents[1])
    code = f"import sys; sys.path[0] = {root!r}; from safeops.verify import worker; sys.exit(worker.main())"
    return [sys.executable, "-c", code, "--device", device, *(["--full"] if full else [])]
