"""Prints an Outcome in four formats (text for people, JSON, GitHub's workflow commands, SARIF 2.1.0), or as a diff."""

import difflib
import json
import pathlib
from urllib.parse import quote

from safeops_lint import version
from safeops_lint.rules import RULES


def text(outcome):
    lines = [_line(f) for f in outcome.findings]
    lines += [f"{_place(p)}: error: {p.message}" for p in outcome.problems]
    return "\n".join(lines)


def _line(f):
    place = f"{f.path}:cell {f.cell}:{f.line}:{f.column}" if f.cell else f"{f.path}:{f.line}:{f.column}"
    marks = ("" if f.likely else "[?] ") + ("[*] " if f.fixable else "")
    return f"{place}: {f.code} {marks}{f.message}"


def _place(problem):
    parts = [problem.path, *(str(n) for n in (problem.line, problem.column) if n is not None)]
    return ":".join(parts)


def summary(outcome, mode):
    """Returns the last line of a text report, which goes to stderr."""
    parts = []
    left = len(outcome.findings)
    if mode != "check":
        verb = "would be rewritten" if mode == "diff" else "rewritten"
        kept = left - outcome.fixed if mode == "diff" else left  # with --diff, findings are those before the rewrites
        parts.append(f"{outcome.fixed} {verb} in {_files(len(outcome.changed))}, {max(kept, 0)} left as they are")
    fixable = sum(f.fixable for f in outcome.findings)
    result = f"{left} finding{'s' * (left != 1)} in {_files(outcome.files)}"
    parts.append(result if left else f"{_files(outcome.files)}, no findings")
    if fixable and mode == "check":
        parts.append(f"{fixable} [*] can be rewritten by --fix")
    possible = sum(not f.likely for f in outcome.findings)
    if possible:
        parts.append(f"{possible} [?] are possible, and not told without --select")
    if outcome.problems:
        parts.append(f"{len(outcome.problems)} could not be linted")
    return "safeops lint: " + "; ".join(parts)


def _files(count):
    return f"{count} file{'s' * (count != 1)}"


def as_json(outcome):
    fields = ("path", "cell", "line", "column", "end_line", "end_column", "code", "message", "fixable", "likely")
    findings = [{**{name: getattr(f, name) for name in fields}, "name": RULES[f.code].name} for f in outcome.findings]
    problems = [{"path": p.path, "line": p.line, "column": p.column, "message": p.message} for p in outcome.problems]
    report = {"version": version(), "files": outcome.files, "fixed": outcome.fixed}
    return json.dumps({**report, "findings": findings, "problems": problems}, indent=2)


def github(outcome):
    lines = []
    for f in outcome.findings:
        properties = {"file": f.path, "line": f.line, "endLine": f.end_line}
        if f.line == f.end_line:  # GitHub takes columns only for a single line
            properties |= {"col": f.column, "endColumn": f.end_column}
        if f.cell:  # a line of a cell is not a line of the file
            properties = {"file": f.path}
        message = f"cell {f.cell}, line {f.line}: {f.message}" if f.cell else f.message
        properties["title"] = f"{f.code} {RULES[f.code].name}"
        lines.append(_command("warning" if f.likely else "notice", properties, message))
    for p in outcome.problems:
        place = {"line": p.line} if p.line else {}
        lines.append(_command("error", {"file": p.path, **place, "title": "safeops lint"}, p.message))
    return "\n".join(lines)


def _command(name, properties, message):
    def escape(value):
        return str(value).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")

    values = ",".join(f"{k}={escape(v).replace(':', '%3A').replace(',', '%2C')}" for k, v in properties.items())
    return f"::{name} {values}::{escape(message)}"


def sarif(outcome):
    codes = list(RULES)
    rules = [
        {
            "id": r.code,
            "name": r.name,
            "shortDescription": {"text": r.name.replace("-", " ")},
            "fullDescription": {"text": f"{r.what} {r.why}"},
            "help": {"text": r.fix},
            "defaultConfiguration": {"level": "warning"},
        }
        for r in RULES.values()
    ]
    results = [
        {
            "ruleId": f.code,
            "ruleIndex": codes.index(f.code),
            "level": "warning" if f.likely else "note",
            "message": {"text": f"cell {f.cell}, line {f.line}: {f.message}" if f.cell else f.message},
            "locations": [{"physicalLocation": _location(f)}],
        }
        for f in outcome.findings
    ]
    notes = [
        {"level": "error", "message": {"text": p.message}, "locations": [{"physicalLocation": _location(p)}]}
        for p in outcome.problems
    ]
    run = {
        "tool": {"driver": {"name": "safeops lint", "version": version(), "rules": rules}},
        "columnKind": "unicodeCodePoints",
        "invocations": [{"executionSuccessful": not notes, "toolExecutionNotifications": notes}],
        "results": results,
    }
    schema = "https://json.schemastore.org/sarif-2.1.0.json"
    return json.dumps({"$schema": schema, "version": "2.1.0", "runs": [run]}, indent=2)


def _location(f):
    location = {"artifactLocation": _uri(f.path)}
    if not getattr(f, "cell", True):
        region = {"startLine": f.line, "startColumn": f.column, "endLine": f.end_line, "endColumn": f.end_column}
        location["region"] = region
    return location


def _uri(path):
    path = pathlib.Path(path)
    return {"uri": path.as_uri() if path.is_absolute() else quote(path.as_posix())}


def diff(outcome):
    lines = []
    for path, old, new in outcome.changed:
        path = pathlib.PurePath(path).as_posix().lstrip("/")  # without `./`, which git does not apply
        lines += difflib.unified_diff(
            old.splitlines(keepends=True), new.splitlines(keepends=True), f"a/{path}", f"b/{path}", lineterm="\n"
        )
    return "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines)


FORMATS = {"text": text, "json": as_json, "github": github, "sarif": sarif}
