"""Where a value goes: nowhere that a gradient comes from, or only to where something is written over it."""

import libcst as cst

from safeops_lint.syntax import children, descendants, dotted

COMPARED = set("eq ne lt gt le ge isclose".split())
NO_GRADIENT = COMPARED | set("item tolist detach argmax argmin argsort long int bool float numpy print".split())
FILLS = {"masked_fill", "masked_fill_", "nan_to_num", "nan_to_num_", "where"}
ASSIGNMENTS = (cst.Assign, cst.AnnAssign, cst.AugAssign, cst.NamedExpr)
ENDS = (cst.Return, cst.Yield, cst.Expr)


def no_gradient(body, node, ends=NO_GRADIENT):
    """True if what `node` makes leaves the function without a gradient: it is compared, fetched or printed (or what
    `ends` says)."""
    return body is not None and not _leaves(body, node, ends)


def _leaves(body, node, ends):
    """True if a function returns, hands on or keeps what is made of `node`, other than by way of `ends`."""
    names, nodes = set(), [*_in_order(body)]
    maybe = {id(part) for n in nodes if isinstance(n, cst.If) for part in descendants(n)}
    for statement in nodes * 2:  # a loop's end goes before its start
        if isinstance(statement, cst.For) and _mentions(_followed(statement.iter, ends), node, names):
            return True
        if not isinstance(statement, (*ASSIGNMENTS, *ENDS)) or statement.value is None:
            continue
        mentioned, carried = (
            _mentions(parts, node, names) for parts in (descendants(statement.value), _followed(statement.value, ends))
        )
        targets = _targets(statement)
        if carried and not (targets and all(isinstance(t, (cst.Name, cst.Tuple)) for t in targets)):
            return True
        plain = {n.value for t in targets for n in descendants(t) if isinstance(n, cst.Name)}
        if carried:
            names |= plain
        elif mentioned and id(statement) not in maybe:  # x = x.detach()
            names -= plain
    return False


def _mentions(parts, node, names):
    return any(part is node or isinstance(part, cst.Name) and part.value in names for part in parts)


def _targets(statement):
    if isinstance(statement, cst.Assign):
        return [t.target for t in statement.targets]
    return [statement.target] if isinstance(statement, ASSIGNMENTS) else []


def _in_order(node):
    yield node
    for child in children(node):
        yield from _in_order(child)


def _followed(expression, ends):
    """Its parts, less those in comparisons and in calls of `ends`."""
    todo = [expression]
    while todo:
        node = todo.pop()
        called = node.func if isinstance(node, cst.Call) else None
        name = (
            called.attr.value if isinstance(called, cst.Attribute) else dotted(called) if called is not None else None
        )
        widened = name == "float" and isinstance(called, cst.Attribute)  # x.float(), unlike float(x)
        if isinstance(node, cst.Comparison) or name in ends and not widened:
            continue
        yield node
        todo += [node.value] if isinstance(node, cst.Subscript) else children(node)
