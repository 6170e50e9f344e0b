"""What the lines of a GPU check say of each op, and the records that follow. Of the standard library alone."""

import json
import re
from collections import Counter

BAD = ("failed", "error")
# Tests of torch itself, and of tools that work on any route.
OF_NO_KERNEL = ("test_what_torch_does.py", "test_debug.py", "test_to_device.py")


def read(path):
    """The lines of a log; one that a kill has cut off is left out."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def op_of(test, ops):
    """The op a test is about: the longest op name that stands alone in the test's parameters, or else in its name."""
    _, _, name = test.rpartition("::")
    function, _, parameters = name.partition("[")
    for text in (parameters, function):
        found = [op for op in ops if re.search(rf"(?<![a-z]){op}(?![a-z])", text)]
        if found:
            return max(found, key=len)
    return None


def outcomes(lines, stage):
    """{test: the worst that came of it} of all that were collected: "started" where it never ended, None where it never
    began."""
    order = [None, "started", "skipped", "passed", *BAD]
    found = {}
    for line in lines:
        if line.get("stage") == stage:
            for test in line.get("collected", ()):
                found.setdefault(test, None)
            if "test" in line:
                found[line["test"]] = max(found.get(line["test"]), line["outcome"], key=order.index)
    return found


def verdicts(lines):
    """{op: "passed" | "failed" | "incomplete"} of the ops with kernels. Passed: by `safeops verify`, and its own tests
    were collected and ended, in both stages, and the sanitizer found nothing. A test of no op in particular that fails,
    fails them all, unless it tests no kernel."""
    ops = machine(lines)["identities"]
    verified = {line["op"]: line["verdict"] for line in lines if line.get("stage") == "verify" and "op" in line}
    unsound = {line["op"] for line in lines if line.get("stage") == "sanitizer" and line.get("errors")}
    tests = {stage: {op: [] for op in ops} for stage in ("gpu", "contract")}
    everyone = False
    for stage, of_op in tests.items():
        for test, outcome in outcomes(lines, stage).items():
            if not any(name in test for name in OF_NO_KERNEL):
                about = op_of(test, ops)
                everyone |= about is None and outcome in BAD
                if about is not None:
                    of_op[about].append(outcome)
    found = {}
    for op in ops:
        own = [of_op[op] for of_op in tests.values()]
        ended = all("passed" in results and set(results) <= {"passed", "skipped", *BAD} for results in own)
        if (
            everyone
            or op in unsound
            or verified.get(op) == "failed"
            or any(o in BAD for results in own for o in results)
        ):
            found[op] = "failed"
        else:
            found[op] = "passed" if ended and verified.get(op) == "passed" else "incomplete"
    return found


def machine(lines):
    """What the fresh install said of itself."""
    empty = {"gpu": None, "identities": {}}
    return next((line["machine"] for line in lines if "machine" in line), empty)


def updated_records(records, lines):
    """verified.json after this run: each op that passed, or failed, has its record of it; the rest are as they were."""
    here, found = machine(lines), {_key(record): record for record in records}
    facts = {key: here.get(key) for key in ("driver", "torch", "date")}
    for op, verdict in verdicts(lines).items():
        if verdict != "incomplete":
            passed = verdict == "passed"
            record = here["identities"][op] | facts | {"passed": passed, "why": "" if passed else "the GPU check"}
            found[_key(record)] = record
    return sorted(found.values(), key=lambda record: json.dumps(record, sort_keys=True))


def record(log, path):
    """Write verified.json, at path, by the log of a run. Gives why not, or None."""
    if not log.is_file():
        return f"there is no {log}"
    lines = read(log)
    if not machine(lines)["identities"]:
        return f"{log} names no machine and no op: it is no log of a run that got past its first stage"
    if not machine(lines)["gpu"]:
        return f"{log} is of a run without a GPU"
    records = updated_records(json.loads(path.read_text()), lines)
    path.write_text(json.dumps(records, indent=1) + "\n")
    counts = Counter(verdicts(lines).values())
    print(f"== {', '.join(f'{n} {verdict}' for verdict, n in sorted(counts.items()))}: recorded in {path}")


def _key(record):
    """As safeops/_verified.py has it."""
    return tuple(record.get(name) for name in ("op", "gpu", "capability", "triton", "source"))
