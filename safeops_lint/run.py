"""Lints paths: finds their files, spreads them over processes, and chooses the rules for each file."""

import concurrent.futures
import dataclasses
import multiprocessing
import os
import sys
import traceback

from safeops_lint import config, source
from safeops_lint.check import CannotLint, in_cell, lint_source, rewrite, scripted_by
from safeops_lint.finding import Problem
from safeops_lint.rules import chosen

SUFFIXES = (".py", ".pyi", ".ipynb")


@dataclasses.dataclass
class Outcome:
    """The result of linting one file, or all of them."""

    findings: list = dataclasses.field(default_factory=list)
    problems: list = dataclasses.field(default_factory=list)
    files: int = 0
    fixed: int = 0
    changed: list = dataclasses.field(default_factory=list)  # (path, old text, new text)

    def add(self, other):
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


@dataclasses.dataclass(frozen=True)
class Options:
    select: tuple = ()
    ignore: tuple = ()
    mode: str = "check"  # check | fix | diff
    jobs: int = 0  # 0: one per core
    scripted: frozenset = frozenset()  # names that torch.jit.script may compile


def lint_paths(paths, options):
    """Returns the Outcome for files and folders. Raises BadConfig if a pyproject.toml is wrong."""
    total = Outcome()
    files = list(dict.fromkeys(_files(paths, total.problems)))
    options = dataclasses.replace(options, scripted=frozenset().union(*map(_scripted, files)))
    jobs = min(options.jobs or _cores(), (len(files) + 15) // 16)
    if jobs <= 1:
        for path in files:
            total.add(lint_file(path, options))
        return total
    # With fork, on Linux, a worker need not import the modules again.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        futures = [pool.submit(lint_file, path, options) for path in files]
        for path, future in zip(files, futures):
            try:
                total.add(future.result())
            except concurrent.futures.process.BrokenProcessPool:
                total.problems.append(Problem(path, "not linted: a worker died (try --jobs 1)"))
    return total


def _scripted(path):
    try:
        return scripted_by(source.read_bytes(path).decode("utf-8", "ignore"))
    except source.Unreadable:  # reported when the file is linted
        return frozenset()


def _cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _files(paths, problems):
    for path in paths:
        if os.path.isdir(path):
            yield from _below(path)
        elif not os.path.exists(path):
            problems.append(Problem(path, "does not exist"))
        elif path.endswith(SUFFIXES) or _python_script(path):
            if not config.find(path).excludes(path):
                yield path
        else:
            what = ".py, .pyi, .ipynb, or a script that starts with #!...python"
            problems.append(Problem(path, f"is neither Python nor a notebook ({what})"))


def _below(folder):
    for here, folders, names in os.walk(folder):
        folders[:] = sorted(f for f in folders if f not in config.SKIPPED and not _excluded(os.path.join(here, f)))
        for name in sorted(names):
            path = os.path.join(here, name)
            if name.endswith(SUFFIXES) and os.path.isfile(path) and not _excluded(path):
                yield path


def _excluded(path):
    return config.find(os.path.dirname(path) or ".").excludes(path)


def _python_script(path):
    try:
        with open(path, "rb") as file:
            first = file.readline(200)
    except OSError:
        return True  # reading it later reports the error
    return first.startswith(b"#!") and b"python" in first


def lint_file(path, options):
    """Lint one file; with mode "fix", rewrite it. Returns its Outcome."""
    settings = config.find(path)
    select = options.select or settings.select
    ignore = (*options.ignore, *settings.ignore, *settings.ignored_in(path))
    rules = chosen(select, ignore)
    possible = bool(select)  # selected rules also report possible findings
    result = Outcome(files=1)
    try:
        if path.endswith(".ipynb"):
            _lint_notebook(path, rules, possible, result)
            return result
        text, encoding, bom = source.read(path)
        if options.mode == "check":
            result.findings = lint_source(text, path, rules, possible=possible, scripted=options.scripted)
            return result
        new, result.fixed, left = rewrite(text, path, rules, possible, options.scripted)
        if new != text:
            result.changed.append((path, text, new))
            if options.mode == "fix":
                source.write(path, new, encoding, bom)
        if options.mode == "diff" and new != text:
            left = lint_source(text, path, rules, possible=possible, scripted=options.scripted)
        result.findings = left
    except (CannotLint, source.Unreadable) as error:
        result.problems.append(error.problem)
    except Exception as error:  # a defect of the linter must not keep the other files from being linted
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{type(error).__name__}: {error} ({os.path.basename(place.filename)}:{place.lineno})"
        result.problems.append(Problem(path, f"internal error, please report: {where}"))
    return result


def _lint_notebook(path, rules, possible, result):
    """Lint all cells as one program. Cells that do not parse are reported; the others are still linted."""
    lines, where = [], []
    for number, text in source.notebook(path):
        try:
            lint_source(text, path, [])
        except CannotLint as error:
            problem = dataclasses.replace(error.problem, message=f"cell {number} {error.problem.message}")
            result.problems.append(problem)
            continue
        cell = text.splitlines(keepends=True)
        lines += cell
        where += [(number, i) for i in range(1, len(cell) + 1)]
    for finding in lint_source("".join(lines), path, rules, possible=possible):
        result.findings.append(in_cell(finding, *where[finding.line - 1]))
