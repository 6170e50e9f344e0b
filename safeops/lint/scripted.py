"""What torch.jit.script compiles, which knows torch's own functions alone: of a file, and of others through it."""

import libcst as cst

from safeops.lint.syntax import children, descendants, dotted

SCRIPT = ("torch.jit.script", "torch.jit.script_if_tracing", "torch.jit.script_method")


def given(module, imports):
    """The names in what a file gives to torch.jit.script, and in what these stand for: m, then L of `m = L()`."""
    names, assigned = set(), []
    for node in descendants(module):
        if isinstance(node, cst.Call) and node.args and imports.resolve(node.func) in SCRIPT:
            names |= _mentioned(node.args[0].value)
        elif isinstance(node, (cst.FunctionDef, cst.ClassDef)):
            if any(imports.resolve(d.decorator) in SCRIPT for d in node.decorators):
                names.add(node.name.value)
        elif isinstance(node, cst.Assign):
            assigned += [((dotted(t.target) or "").rpartition(".")[2], node.value) for t in node.targets]
    before = None
    while names and names != before:
        before = set(names)
        names.update(*(_mentioned(value) for name, value in assigned if name in before))
    return names


def compiled(names, reach):
    """{id: FunctionDef} of all that is compiled with the functions and classes of these names."""
    todo = [f for f in reach.functions if f[1].name.value in names]
    found, classes, more = {}, set(), names & reach.classes.keys()
    while todo or more:
        if more:
            name = more.pop()
            classes.add(name)
            todo += [f for f in reach.functions if f[0] == name]
            node = reach.classes[name]
        else:
            class_name, node = todo.pop()
            if id(node) in found:
                continue
            found[id(node)] = node
            todo += reach.called(node, class_name)
        mentioned = {n.value for n in descendants(node) if isinstance(n, cst.Name)}  # its bases, what it makes
        more |= mentioned & reach.classes.keys() - classes
    return found


def beyond(names, imports, reach):
    """The names from other files that what is compiled here mentions."""
    nodes = [n for function in compiled(names, reach).values() for n in descendants(function)]
    found = {imports.resolve(n) or "" for n in nodes if isinstance(n, (cst.Name, cst.Attribute))}
    return {full.rpartition(".")[2] for full in found if full and full.split(".")[0] != "torch"}


def _mentioned(expression):
    """The last of each dotted name in an expression."""
    names, todo = set(), [expression]
    while todo:
        node = todo.pop()
        name = dotted(node)
        if name is not None:
            names.add(name.rpartition(".")[2])
        else:
            todo += [node.value] if isinstance(node, (cst.Arg, cst.Attribute)) else children(node)  # Loss().eval()
    return names
