"""What a function is by who calls it: one without a graph, one that is given fp32."""

import libcst as cst

from safeops.lint.scope import switched_off
from safeops.lint.syntax import descendants, dotted, names_of


def detached(reach, clues):
    """Marks what methods of `torch.autograd.Function` call, and nothing else does."""
    inside = {name for name in reach.classes if "Function" in reach.ends_of_bases(name)}
    if inside:
        called = {True: set(), False: set()}
        for class_name, node in reach.functions:
            called[class_name in inside] |= {id(function) for _, function in reach.called(node, class_name)}
        for found in called[True] - called[False]:
            clues[found].detached = True


def widened(reach, clues):
    """Marks private functions that are called with autocast off, or with what was cast to fp32, wherever they are."""
    given = {}
    for class_name, node in reach.functions:
        nodes = list(descendants(node.body))
        off = {id(n) for part in nodes if isinstance(part, cst.With) and _autocast_off(part) for n in descendants(part)}
        targets = [n.targets[0].target for n in nodes if isinstance(n, cst.Assign) and _widens(n.value)]
        wide = {name for target in targets for name in names_of(target)}
        for call, (_, function) in reach.calls(node, class_name):
            if function.name.value.startswith("_") and function is not node:
                known = id(call) in off or any(_widens(a.value) or names_of(a.value) & wide for a in call.args)
                given.setdefault(id(function), []).append(known)
    for found, known in given.items():
        clues[found].wide = all(known)


def _autocast_off(node):
    calls = [item.item for item in node.items if isinstance(item.item, cst.Call)]
    return any("autocast" in (dotted(call.func) or "") and switched_off(call) for call in calls)


def _widens(node):
    """`x.float()`, `x.float().view(-1)`"""
    func = node.func if isinstance(node, cst.Call) else None
    return isinstance(func, cst.Attribute) and (func.attr.value in ("float", "double") or _widens(func.value))
