"""A pytest plugin (-p gpu_plugin) of scripts/gpu_check.py: a line of JSON for each test, written as things happen.

    {"stage", "collected": [test, ...]}   before the first
    {"stage", "test", "outcome": "started" | "passed" | "failed" | "error" | "skipped", ...}

A test after which the device takes no more work, and one that hangs, end their process: under xdist another takes its
place, and the test is the one that failed.
"""

import faulthandler
import json
import os
import sys

import pytest

LOG, STAGE, SECONDS = "SAFEOPS_GPU_CHECK_LOG", "SAFEOPS_GPU_CHECK_STAGE", "SAFEOPS_GPU_CHECK_SECONDS"
RECOVERS_NOT = 13  # exit status


def write(**line):
    if LOG in os.environ:
        text = json.dumps({"stage": os.environ[STAGE], **line})
        with open(os.environ[LOG], "a") as log:
            log.write(f"{text}\n")


def is_worker():
    return "PYTEST_XDIST_WORKER" in os.environ


def synchronise():
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def pytest_collection_finish(session):
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0":  # each collects them all
        write(collected=[item.nodeid for item in session.items])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    write(test=item.nodeid, outcome="started")
    if SECONDS in os.environ:
        faulthandler.dump_traceback_later(float(os.environ[SECONDS]), exit=True)
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
    """Where reports come together: under xdist in the first process, which makes those of crashed workers itself."""
    if is_worker() or not (report.when == "call" or report.outcome != "passed"):
        return
    line = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 3)}
    if report.when in ("setup", "teardown") and report.outcome == "failed":
        line["outcome"] = "error"
    if report.outcome == "skipped":
        line["reason"] = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
    elif report.outcome == "failed":
        line["message"] = str(report.longrepr)[-2000:]
    write(**line)
