"""Apply edits to a source text. Everything outside the edited expressions stays as it is, byte for byte."""

import re

import libcst as cst

from safeops_lint.finding import Edit
from safeops_lint.syntax import dotted


def spans(module, nodes):
    """Returns {id(node): (start, end)}: where each node begins and ends in the UTF-8 bytes of the module's code."""
    from libcst.metadata import ByteSpanPositionProvider, MetadataWrapper

    # The tree comes directly from the parser, so no node occurs in it twice, and libcst need not copy it.
    result = MetadataWrapper(module, unsafe_skip_copy=True).resolve(ByteSpanPositionProvider)
    return {id(n): (result[n].start, result[n].start + result[n].length) for n in nodes}


def compatible(edit_sets):
    """Returns the indices of the sets of edits that can be applied together. A set that overlaps a set before it in the
    file is left out."""
    taken, chosen = [], []
    order = sorted(range(len(edit_sets)), key=lambda i: min(e.start for e in edit_sets[i]))
    for i in order:
        edits = edit_sets[i]
        if all(e.end <= start or end <= e.start for e in edits for start, end in taken):
            taken += [(e.start, e.end) for e in edits]
            chosen.append(i)
    return chosen


def edit(data, old, start, end, text):
    """Returns the Edit that replaces the expression `old`, at [start, end) of a file's bytes, by `text`. If `text` is a
    call of safeops, the Edit also replaces the parentheses around `old`, which a call does not need."""
    if text.startswith("safeops.") and text.endswith(")"):
        for _ in getattr(old, "lpar", ()):
            before, after = data[:start].rstrip(), re.match(rb"\s*\)", data[end:])
            if not before.endswith(b"(") or after is None or re.search(rb"\w\($", before):  # of a call, or `return(x)`
                break
            start, end = len(before) - 1, end + after.end()
    return Edit(start, end, text)


def apply(code, edits):
    """Returns the text `code` with the edits applied. They must not overlap."""
    data = code.encode()
    for edit in sorted(edits, key=lambda e: (e.start, e.end), reverse=True):
        data = data[: edit.start] + edit.text.encode() + data[edit.end :]
    return data.decode()


def import_edit(module, code, newline):
    """Returns (Edit, "safeops") with the Edit that adds `import safeops`; or (None, name) if the file already imports
    safeops under that name."""
    body = module.body
    for statement in body:
        for small in statement.body if isinstance(statement, cst.SimpleStatementLine) else ():
            if isinstance(small, cst.Import):
                for alias in small.names:
                    if dotted(alias.name) == "safeops":
                        return None, alias.evaluated_alias or "safeops"
    after = None
    for i, statement in enumerate(body):
        if not isinstance(statement, cst.SimpleStatementLine):
            break
        imports = all(isinstance(s, (cst.Import, cst.ImportFrom)) for s in statement.body)
        if not imports and (i or module.get_docstring(clean=False) is None):
            break
        after = statement
    line = f"import safeops{newline}"
    if after is None:  # insert it before the first statement, after the comments at the top
        start = spans(module, [body[0]])[id(body[0])][0] if body else len(code.encode())
        return Edit(start, start, line), "safeops"
    end = spans(module, [after])[id(after)][1]
    data = code.encode()
    stop = data.find(b"\n", end)
    if stop < 0:
        return Edit(len(data), len(data), f"{newline}{line}"), "safeops"
    return Edit(stop + 1, stop + 1, line), "safeops"
