"""Where a value goes: whether what a rewrite makes fp32 would meet half in an operation that takes one dtype."""

import libcst as cst

from safeops.lint.syntax import descendants, dotted, operation

STRICT = set(
    """matmul mm bmm mv dot vdot inner addmm addmv addbmm baddbmm tensordot einsum linear bilinear conv1d conv2d conv3d
    cross lerp index_add index_copy index_put index_reduce scatter scatter_add scatter_reduce masked_scatter
    scaled_dot_product_attention""".split()
)


def meets_one_dtype(body, node, imports):
    """Whether `node`, an expression in a function's body, goes into such an operation, also through names.

    A layer (`self.proj(x)`) and a write through an index (`x[i] = v`) count too: both raise for fp32 beside half.
    """
    nodes = list(descendants(body))
    assignments = [n for n in nodes if isinstance(n, (cst.Assign, cst.AnnAssign, cst.AugAssign)) and n.value]
    names = set()

    def carries(expression):
        return any(n is node or isinstance(n, cst.Name) and n.value in names for n in descendants(expression))

    while True:
        found = {name for a in assignments if carries(a.value) for name in _targets(a)}
        if found <= names:
            break
        names |= found
    for n in nodes:
        if isinstance(n, (cst.Call, cst.BinaryOperation)) and _strict(n, imports) and carries(n):
            return True
        if isinstance(n, cst.Assign) and isinstance(n.targets[0].target, cst.Subscript) and carries(n.value):
            return True
    return False


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
