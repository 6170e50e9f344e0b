"""Finds the steps (slices, reductions, views) by which a tensor got its shape, as far as the code shows. If two tensors
differ in their steps, their shapes may differ, so that they may broadcast."""

import libcst as cst

from safeops_lint.syntax import dotted, number
from safeops_lint.tables import CONSTRUCTORS, HALVED, REDUCTIONS, SHAPING, words

# Operations that keep the number of dims and make no dim's size 1. `steps` ignores them.
KEEP = words("contiguous clone cpu cuda data detach flip movedim permute requires_grad_ roll swapaxes t to transpose")
AS_ANOTHER = {"expand_as", "reshape_as", "view_as"}


def steps(node, walk, depth=0):
    """Returns the slices, reductions and views by which a tensor got its shape, as a tuple; `()` if the code shows
    none."""
    value = walk.value(node)
    made, op = value.node, value.op
    if depth > 12:
        return ()
    if isinstance(made, (cst.Attribute, cst.Subscript)) and walk.value(made.value).tensor:
        index = _index(made, walk) if isinstance(made, cst.Subscript) else ()
        return (*steps(made.value, walk, depth + 1), *([index] if index else []))
    if op is None or op.name in HALVED:
        return ()
    if op.name in AS_ANOTHER and op.args:
        return steps(op.args[0], walk, depth + 1)
    if op.name in CONSTRUCTORS:
        return steps(op.input, walk, depth + 1) if op.name.endswith("_like") else (walk.text(op.node),)
    operands = [n for n in (op.input, *op.args) if n is not None and walk.value(n).tensor]
    reduces = op.name in REDUCTIONS and len(operands) == 1
    if reduces or op.name in SHAPING - KEEP:
        name = "reduce" if reduces else op.name.replace("view", "reshape")
        options = [f"{key}={walk.text(n)}" for key, n in op.kwargs.items() if key != "dtype"]
        return (*steps(op.input, walk, depth + 1), (name, *map(walk.text, op.args), *options))
    shapes = {steps(n, walk, depth + 1) for n in operands}
    if () in shapes or not shapes:  # x - x.mean(0), x / scale: the result has the shape of x
        return ()
    return shapes.pop() if len(shapes) == 1 else tuple(sorted(map(str, shapes)))


def _index(node, walk):
    """Returns what each part of an index does to the shape: equal for `x[1:]` and `x[:-1]`, `()` for `x[:, :]`."""
    parts = [_part(element.slice, walk) for element in node.slice]
    while parts and parts[-1] in (0, "..."):
        parts.pop()
    return tuple(parts)


def _part(part, walk):
    if isinstance(part, cst.Index):
        value = part.value
        named = isinstance(value, cst.Ellipsis) or dotted(value) == "None" or walk.value(value).tensor
        return walk.text(value) if named else "one"
    bounds = [number(n) if n is not None else 0 for n in (part.lower, part.upper)]
    if part.step is None and None not in bounds and bounds[1] <= 0 <= bounds[0]:
        return bounds[0] - bounds[1] if part.upper is None or bounds[1] else walk.text(part)
    return walk.text(part)
