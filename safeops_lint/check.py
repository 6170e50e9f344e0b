"""Lints one text: parses it, walks over it, applies noqa. Rewrites it until no finding can be rewritten any more."""

import ast
import bisect
import dataclasses
import gc
import re
import sys
import warnings

import libcst as cst

from safeops_lint import fix as fixing
from safeops_lint.finding import Finding, Problem
from safeops_lint.rules import RULES
from safeops_lint.syntax import Imports, descendants
from safeops_lint.walk import Walk

NOQA = re.compile(r"#\s*noqa(?P<codes>:\s?(?P<list>[A-Z]+[0-9]*(?:[\s,]+[A-Z]+[0-9]+)*))?", re.IGNORECASE)
SCRIPTS = re.compile(r"\bjit\b.*\bscript")  # torch.jit.script, from torch.jit import script
DEPTH = 6000  # recursion limit: CPython's parser stops at 200 parentheses, but `a + b + ...` nests without a limit
PASSES = 10  # most times that a text is rewritten


class CannotLint(Exception):
    """Raised if a text cannot be parsed. `.problem` is the Problem."""

    def __init__(self, problem):
        super().__init__(problem.message)
        self.problem = problem


def lint_source(source, path="<string>", rules=None, *, noqa=True, possible=None, scripted=frozenset()):
    """Lints a text. Returns its findings, in order of position.

    Args:
        source: the text of a Python file.
        path: the path that findings carry.
        rules: Rule objects; None: all rules, and only their likely findings.
        noqa: True: `# noqa` comments silence findings.
        possible: True: also report possible findings, which a caller or the data may well prevent; None: True if
            `rules` are given.
        scripted: names of functions and classes that are not rewritten, since torch.jit.script may compile them.

    Returns:
        A list of Finding. Empty for a text that does not import torch.

    Raises:
        CannotLint: the text does not parse.

    Example:
        >>> code = "import torch\\ndef loss(x):\\n    return torch.log(x + 1e-8).mean()\\n"
        >>> [(f.line, f.code) for f in lint_source(code)]
        [(3, 'SO206')]
    """
    if "torch" not in source:
        _must_parse(source, path)
        return []
    possible = rules is not None if possible is None else possible
    return _lint(source, path, rules, noqa, possible, scripted)[1]


def fix_source(source, path="<string>", rules=None):
    """Returns (the text with every rewrite applied, number of rewrites). Raises CannotLint if it does not parse."""
    return rewrite(source, path, rules, rules is not None)[:2]


def rewrite(source, path, rules=None, possible=False, scripted=frozenset()):
    """Returns (the rewritten text, number of rewrites, the findings that are left in it)."""
    if "torch" not in source:
        _must_parse(source, path)
        return source, 0, []
    total = 0
    module, findings = _lint(source, path, rules, True, possible, scripted)
    for _ in range(PASSES):  # a rewrite inside another one waits for the next pass
        sets = [f for f in findings if f.fixable]
        if not sets or module.code != source:
            break
        new, count = _rewrite(source, module, sets)
        if not count:
            break
        try:
            module, findings = _lint(new, path, rules, True, possible, scripted)
        except CannotLint:  # the rewritten text does not parse: keep the one before
            break
        source, total = new, total + count
    return source, total, findings


def scripted_by(text):
    """Returns all names in a text that mentions torch.jit.script, else none. torch.jit.script may compile any function
    or class of such a name, also one that another file defines, and it cannot compile calls of safeops."""
    return frozenset(re.findall(r"\w+", text)) if SCRIPTS.search(text) else frozenset()


def _rewrite(source, module, findings):
    chosen = [findings[i] for i in fixing.compatible([f.edits for f in findings])]
    edit, name = None, "safeops"
    if any(f.imports_safeops for f in chosen):
        edit, name = fixing.import_edit(module, source, module.default_newline)
        if _taken(module, name):
            chosen, edit = [f for f in chosen if not f.imports_safeops], None
    edits = []
    for finding in chosen:
        own = name != "safeops" and finding.imports_safeops
        for e in finding.edits:
            edits.append(dataclasses.replace(e, text=re.sub(r"\bsafeops\.", f"{name}.", e.text)) if own else e)
    if edit is not None:
        edits.append(edit)
    return fixing.apply(source, edits), len(chosen)


def _taken(module, name):
    """True if a parameter or a variable of the file has this name, so that it cannot stand for the package."""
    params = {n.name.value for n in descendants(module) if isinstance(n, cst.Param)}
    targets = (n.target for n in descendants(module) if isinstance(n, cst.AssignTarget))
    return name in params or any(isinstance(t, cst.Name) and t.value == name for t in targets)


def _must_parse(source, path):
    """Raise CannotLint if Python cannot parse the text. A file without torch has no findings, but must parse, too."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about escapes in strings are not the linter's task
            ast.parse(source, path)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        message = f"does not parse: {getattr(error, 'msg', None) or error}"
        place = (getattr(error, "lineno", None), getattr(error, "offset", None))
        raise CannotLint(Problem(path, message, *place)) from None


def _parse(source, path):
    _must_parse(source, path)  # Python's errors are clearer, and its limit on nesting protects libcst's stack
    try:
        return cst.parse_module(source)
    except cst.ParserSyntaxError as error:
        message = f"is Python that libcst cannot read: {error.message.splitlines()[0]}"
        raise CannotLint(Problem(path, message, error.raw_line, error.raw_column + 1)) from None
    except (RecursionError, ValueError) as error:
        raise CannotLint(Problem(path, f"does not parse: {error}")) from None


def _lint(source, path, rules, noqa, possible, scripted):
    limit, collecting = sys.getrecursionlimit(), gc.isenabled()
    sys.setrecursionlimit(max(limit, DEPTH))
    gc.disable()  # a tree is a million live objects: collections would take a third of the time
    try:
        module = _parse(source, path)
        imports = Imports(module, path)
        if not imports.torch:
            return module, []
        rules = list(RULES.values()) if rules is None else rules
        reports = Walk(module, imports, rules, source, possible, scripted | scripted_by(source)).run()
        if not reports:
            return module, []
        return module, _findings(source, path, module, reports, noqa)
    except RecursionError:
        raise CannotLint(Problem(path, "is nested too deeply to be read")) from None
    finally:
        sys.setrecursionlimit(limit)
        if collecting:
            gc.enable()


def _findings(source, path, module, reports, noqa):
    nodes = [n for r in reports for n in (r.node, r.last, *(old for old, _ in r.fix or ()))]
    spans = fixing.spans(module, nodes)
    data = module.code.encode()
    starts = [0] + [m.end() for m in re.finditer(rb"\r\n|\r|\n", data)]
    lines = [data[a:b].decode() for a, b in zip(starts, [*starts[1:], len(data)])]

    def place(offset):
        line = bisect.bisect_right(starts, offset) - 1
        return line + 1, len(data[starts[line] : offset].decode()) + 1

    results = []
    for r in reports:
        (start, end), (_, last) = spans[id(r.node)], spans[id(r.last)]
        line, column = place(start)
        end_line, end_column = place(end)
        if noqa and any(_silenced(lines[i - 1], r.rule.code) for i in {line, end_line, place(last)[0]}):
            continue
        edits = tuple(fixing.edit(data, old, *spans[id(old)], text) for old, text in r.fix or ())
        if len(fixing.compatible([[e] for e in edits])) < len(edits):  # the finding's own edits overlap
            edits = ()
        where = (path, line, column, end_line, end_column)
        imports = r.imports_safeops and bool(edits)
        results.append(Finding(*where, r.rule.code, r.message, edits, imports, r.likely))
    return sorted(results, key=lambda f: (f.line, f.column, f.code))


def _silenced(line, code):
    match = NOQA.search(line) if "noqa" in line.lower() else None
    if match is None:
        return False
    codes = match["list"]
    return codes is None or any(code.startswith(c) for c in re.split(r"[\s,]+", codes.upper()) if c)


def in_cell(finding, cell, line):
    """Returns the finding at its place in a notebook: cell number `cell`, line number `line` in that cell. It has no
    edits, since notebooks are not rewritten."""
    shift = finding.line - line
    return dataclasses.replace(
        finding, cell=cell, line=line, end_line=finding.end_line - shift, edits=(), imports_safeops=False
    )
