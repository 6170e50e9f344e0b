"""What the tests that scripts/gpu_check.py ran say of each op, and the records that follow."""

import json
import re


def op_of(test, ops):
    """The op a test is about: the longest op name that stands alone in the test's parameters, or else in its name."""
    _, _, name = test.rpartition("::")
    function, _, parameters = name.partition("[")
    for text in (parameters, function):
        found = [op for op in ops if re.search(rf"(?<![a-z]){op}(?![a-z])", text)]
        if found:
            return max(found, key=len)
    return None


# Tests of torch itself, and of tools that work on any route.
OF_NO_KERNEL = ("test_what_torch_does.py", "test_debug.py", "test_to_device.py")


def verdicts(stages, ops):
    """{op: "passed" | "failed" | "incomplete"}. A test of no op in particular that fails, fails them all, unless it
    tests no kernel."""
    wanted = ("contract", "gpu")
    done = all(name in stages and not stages[name].get("killed") and "tests" in stages[name] for name in wanted)
    sound = stages.get("sanitizer", {}).get("ok", True) or stages["sanitizer"].get("killed", False)
    result = {}
    for op, on_kernel in ops.items():
        outcomes = {name: [] for name in wanted}
        for name in wanted:
            for test in stages.get(name, {}).get("tests", []):
                if any(name in test["test"] for name in OF_NO_KERNEL):
                    continue
                about = op_of(test["test"], ops)
                if about == op or (about is None and test["outcome"] in ("failed", "error")):
                    outcomes[name].append(test["outcome"])
        bad = any(o in ("failed", "error") for found in outcomes.values() for o in found)
        complete = done and all(found.count("passed") for found in outcomes.values())
        if bad or not sound:
            result[op] = "failed"
        else:
            result[op] = "passed" if complete and on_kernel else "incomplete"
    return result


def updated_records(records, results):
    """verified.json after this run: each op that passed, or failed, has its record of it; the rest are as they were."""
    machine, found = results["machine"], {_key(record): record for record in records}
    facts = {key: machine.get(key) for key in ("driver", "torch")} | {"date": results["date"]}
    for op, verdict in results["ops"].items():
        if op in machine["identities"] and verdict != "incomplete":
            passed = verdict == "passed"
            record = machine["identities"][op] | facts | {"passed": passed, "why": "" if passed else "the GPU check"}
            found[_key(record)] = record
    return sorted(found.values(), key=lambda record: json.dumps(record, sort_keys=True))


def _key(record):
    """As safeops/_verified.py has it."""
    return tuple(record.get(name) for name in ("op", "gpu", "capability", "triton", "source"))
