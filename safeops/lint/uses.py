"""Where a value goes: nowhere that a gradient comes from."""

import libcst as cst

from safeops.lint.syntax import children, descendants, dotted

COMPARED = set("eq ne lt gt le ge isclose".split())
NO_GRADIENT = COMPARED | set("item tolist detach argmax argmin argsort long int bool float numpy print".split())


def no_gradient(body, node, ends=NO_GRADIENT):
    """Whether what `node` makes leaves the function without a gradient: it is compared, fetched or printed (or what
    `ends` says)."""
    if body is None:
        return False
    nodes = list(descendants(body))
    carries = _carriers(nodes, node, ends)
    for n in nodes:
        if isinstance(n, (cst.Return, cst.Yield)) and n.value is not None and carries(n.value):
            return False
        if (
            isinstance(n, cst.Assign)
            and not isinstance(n.targets[0].target, (cst.Name, cst.Tuple))
            and carries(n.value)
        ):
            return False
        if isinstance(n, cst.Expr) and carries(n.value):  # losses.append(x)
            return False
    return True


def _with_gradient(expression, ends):
    """Its parts, less those that no gradient goes through."""
    todo = [expression]
    while todo:
        node = todo.pop()
        called = node.func if isinstance(node, cst.Call) else None
        name = (
            called.attr.value if isinstance(called, cst.Attribute) else dotted(called) if called is not None else None
        )
        if isinstance(node, cst.Comparison) or name in ends:
            continue
        yield node
        todo += [node.value] if isinstance(node, cst.Subscript) else children(node)


def _carriers(nodes, node, ends):
    """Whether an expression has `node` among its parts, or a name that stands for what was made of it."""
    assignments = [n for n in nodes if isinstance(n, (cst.Assign, cst.AnnAssign, cst.AugAssign)) and n.value]
    names = set()

    def carries(expression):
        return any(n is node or isinstance(n, cst.Name) and n.value in names for n in _with_gradient(expression, ends))

    while True:
        found = {name for a in assignments if carries(a.value) for name in _names(a)}
        if found <= names:
            return carries
        names |= found


def _names(assignment):
    targets = [t.target for t in assignment.targets] if isinstance(assignment, cst.Assign) else [assignment.target]
    return {
        n.value for t in targets if not isinstance(t, cst.Subscript) for n in descendants(t) if isinstance(n, cst.Name)
    }
