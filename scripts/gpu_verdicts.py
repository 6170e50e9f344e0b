"""Gives a verdict on each op from the log of a GPU check. Needs only the standard library."""

import json
import re

BAD = ("failed", "error")
OPEN = (None, "started", "not ended")  # outcomes of tests that did not end
# Tests of no kernel: they test torch itself, or tools that work with kernels and without.
OF_NO_KERNEL = ("test_what_torch_does.py", "test_debug.py", "test_to_device.py")


def read(path):
    """Returns the lines of a log as dicts. A line that a kill has cut off is left out."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def op_of(test, ops):
    """Returns the op that a test is about: the longest op name that is a whole word of the test's parameters, or else
    of its name."""
    _, _, name = test.rpartition("::")
    function, _, parameters = name.partition("[")
    for text in (parameters, function):
        results = [op for op in ops if re.search(rf"(?<![a-z]){op}(?![a-z])", text)]
        if results:
            return max(results, key=len)
    return None


def outcomes(lines, stage):
    """Returns {test: its worst outcome} for all tests collected in a stage. None: the test never began. "started": it
    began, and nothing more is known. "not ended": its time ran out."""
    order = [*OPEN, "skipped", "passed", *BAD]
    results = {}
    for line in lines:
        if line.get("stage") == stage:
            for test in line.get("collected", ()):
                results.setdefault(test, None)
            if "test" in line:
                results[line["test"]] = max(results.get(line["test"]), line["outcome"], key=order.index)
    return results


def verdicts(lines):
    """Returns {op: "passed" | "failed" | "not judged"} for the ops with kernels.

    An op has passed if `safeops verify` passed it, if all its tests in the stages `gpu`, `contract` and `unseen` (if it
    has any there) have ended and passed, and if no sanitizer that ran found an error. A failing test that belongs to no
    op fails all ops, unless it tests no kernel."""
    ops = machine(lines)["ops"]
    judged = {op: {"passed": [], "failed": [], "not judged": []} for op in ops}
    verdict_lines = [line for line in lines if line.get("op") in judged]
    for line in verdict_lines:
        judged[line["op"]][line["verdict"]].append(line["stage"])
    for stage in ("unseen", "gpu", "contract"):
        tests = {op: [] for op in ops}
        for test, outcome in outcomes(lines, stage).items():
            tested = None if any(name in test for name in OF_NO_KERNEL) else [op_of(test, ops)]
            for op in ops if tested == [None] and outcome in BAD else tested or ():
                if op is not None:
                    tests[op].append(outcome)
        for op, ends in tests.items():
            if stage == "unseen" and not ends:
                continue  # not every op has a test in `unseen`
            ended = "passed" in ends and not set(ends).intersection(OPEN)
            judged[op]["failed" if set(ends).intersection(BAD) else "passed" if ended else "not judged"].append(stage)
    for op, stages in judged.items():
        if not any(line["op"] == op and line["stage"] == "verify" for line in verdict_lines):
            stages["not judged"].append("verify")
    return {op: next(v for v in ("failed", "not judged", "passed") if stages[v]) for op, stages in judged.items()}


def machine(lines):
    """Returns the description of the machine that gpu_probe.py printed."""
    empty = {"gpu": None, "ops": []}
    return next((line["machine"] for line in lines if "machine" in line), empty)
