"""Where a value goes: into an operation that takes one dtype, or nowhere that a gradient comes from."""

import libcst as cst

from safeops.lint.syntax import children, descendants, dotted, operation

STRICT = set(
    """matmul mm bmm mv dot vdot inner addmm addmv addbmm baddbmm tensordot einsum linear bilinear conv1d conv2d conv3d
    cross lerp index_add index_copy index_put index_reduce scatter scatter_add scatter_reduce masked_scatter
    scaled_dot_product_attention""".split()
)

NO_SLOPE = set("item tolist detach argmax argmin argsort long int bool float numpy print eq ne lt gt le ge".split())


def meets_one_dtype(body, node, imports):
    """Whether `node`, an expression in a function's body, goes into such an operation, also through names.

    A layer (`self.proj(x)`) and a write through an index (`x[i] = v`) count too: both raise for fp32 beside half.
    """
    nodes = list(descendants(body))
    carries = _carriers(nodes, node, descendants)
    for n in nodes:
        if isinstance(n, (cst.Call, cst.BinaryOperation)) and _strict(n, imports) and carries(n):
            return True
        if isinstance(n, cst.Assign) and isinstance(n.targets[0].target, cst.Subscript) and carries(n.value):
            return True
    return False


def no_slope(body, node):
    """Whether what `node` makes leaves the function without a gradient: it is compared, fetched or printed."""
    if body is None:
        return False
    nodes = list(descendants(body))
    carries = _carriers(nodes, node, _with_slope)
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


def _with_slope(expression):
    """Its parts, less those that no gradient goes through."""
    todo = [expression]
    while todo:
        node = todo.pop()
        called = node.func if isinstance(node, cst.Call) else None
        name = (
            called.attr.value if isinstance(called, cst.Attribute) else dotted(called) if called is not None else None
        )
        if isinstance(node, cst.Comparison) or name in NO_SLOPE:
            continue
        yield node
        todo += [node.value] if isinstance(node, cst.Subscript) else children(node)


def _carriers(nodes, node, parts):
    """Whether an expression has `node` among its parts, or a name that stands for what was made of it."""
    assignments = [n for n in nodes if isinstance(n, (cst.Assign, cst.AnnAssign, cst.AugAssign)) and n.value]
    names = set()

    def carries(expression):
        return any(n is node or isinstance(n, cst.Name) and n.value in names for n in parts(expression))

    while True:
        found = {name for a in assignments if carries(a.value) for name in _targets(a)}
        if found <= names:
            return carries
        names |= found


def _targets(assignment):
    targets = [t.target for t in assignment.targets] if isinstance(assignment, cst.Assign) else [assignment.target]
    return {
        n.value for t in targets if not isinstance(t, cst.Subscript) for n in descendants(t) if isinstance(n, cst.Name)
    }


def _strict(node, imports):
    if isinstance(node, cst.Call) and (dotted(node.func) or "").startswith("self.") and node.func.value.value == "self":
        return True
    op = operation(node, imports)
    return op is not None and op.name in STRICT
