"""The pytest plugin (-p gpu_plugin) of scripts/gpu_check.py: it writes lines of JSON while the tests run.

    {"stage", "collected": [test, ...]}   before the first test
    {"stage", "test", "outcome": "started" | "passed" | "failed" | "error" | "skipped" | "not ended", ...}

The process ends in two cases, and xdist replaces it: after a test that leaves the device in an error (the test has
failed), and if a test neither ends nor compiles a kernel for SECONDS (it is not judged). Tests are sorted by op, so
that one process loads an op's kernels; the stage `unseen` keeps the order of its file.
"""

import faulthandler
import json
import os
import sys
from pathlib import Path

import pytest
from gpu_verdicts import op_of

LOG, STAGE, SECONDS = "SAFEOPS_GPU_CHECK_LOG", "SAFEOPS_GPU_CHECK_STAGE", "SAFEOPS_GPU_CHECK_SECONDS"
RECOVERS_NOT = 13  # exit status of a process whose device is in an error


def write(**line):
    if LOG in os.environ:
        text = json.dumps({"stage": os.environ[STAGE], **line})
        with open(os.environ[LOG], "a") as log:
            log.write(f"{text}\n")


def stacks(worker):
    """Returns the file into which a process writes its threads' stacks when its time runs out; empty until then."""
    return Path(f"{os.environ.get(LOG, os.devnull)}.{worker}.stacks")


def is_worker():
    return "PYTEST_XDIST_WORKER" in os.environ


def synchronise():
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def pytest_collection_finish(session):
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0":  # each worker collects all tests; gw0 reports
        write(collected=[item.nodeid for item in session.items])


def pytest_collection_modifyitems(items):
    if os.environ.get(STAGE) == "unseen":
        return
    registry = sys.modules.get("safeops.core.op")
    ops = registry.registry if registry else ()
    # Tests of large tensors come together, too: one process runs them, so that no two need the memory at once.
    items.sort(key=lambda item: "" if "test_large" in item.nodeid else op_of(item.nodeid, ops) or "~")


class Limit:
    """Ends the process if a test neither ends nor compiles a kernel for SECONDS. Each compiled kernel restarts the
    time: a test may compile hundreds of kernels, which take seconds each."""

    def __init__(self):
        self.file = open(stacks(os.environ.get("PYTEST_XDIST_WORKER", "main")), "w")
        try:
            from triton import knobs

            knobs.compilation.listener = lambda **_: self.begin()
        except (ImportError, AttributeError):
            pass  # no Triton, or one without this listener

    def begin(self):
        if SECONDS in os.environ:
            faulthandler.dump_traceback_later(float(os.environ[SECONDS]), exit=True, file=self.file)


_limit = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    write(test=item.nodeid, outcome="started")
    if not _limit:
        _limit.append(Limit())
    _limit[0].begin()
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "call":
        try:
            synchronise()
        except Exception as error:
            text = f"{report.longrepr or ''}\n{error}"[-2000:]
            write(test=item.nodeid, outcome="failed", message=text)
            os._exit(RECOVERS_NOT)
    return report


def pytest_runtest_logreport(report):
    """Writes a test's outcome. Under xdist the main process does so for all workers, also for crashed ones."""
    if is_worker() or not (report.when == "call" or report.outcome != "passed"):
        return
    if report.when == "???" and (last_stacks := _stacks_of(report.node.gateway.id)):  # a worker's time ran out
        return write(test=report.nodeid, outcome="not ended", message=last_stacks[:2000])  # the innermost call is first
    line = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 3)}
    if report.when in ("setup", "teardown") and report.outcome == "failed":
        line["outcome"] = "error"
    if report.outcome == "skipped":
        line["reason"] = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
    elif report.outcome == "failed":
        line["message"] = str(report.longrepr)[-2000:]
    write(**line)


def _stacks_of(worker):
    path = stacks(worker)
    return path.read_text() if path.exists() else ""
