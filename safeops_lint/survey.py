"""Kinds of a file's functions: losses, parts of losses, training steps; and what their bodies say of their names."""

import dataclasses
import re

import libcst as cst

from safeops_lint.kinds import PLUMBING, kind, total
from safeops_lint.syntax import NESTED, children, descendants, dotted, names_of, operation
from safeops_lint.tables import ARRAY_METHODS, CONSTRUCTORS, NO_TENSOR, TENSOR_ATTRIBUTES, TENSOR_METHODS

DIMS = {"dim", "keepdim"}  # numpy's are axis and keepdims


@dataclasses.dataclass(slots=True)
class Clues:
    """Facts that a function's body shows, and those that the file adds."""

    tensors: set  # names used as only tensors are
    arrays: set  # names used as tensors and arrays are
    masks: set  # names that are a factor, and summed: (x * m).sum() / m.sum()
    backward: bool  # it calls .backward(), or an optimizer
    computes: bool  # it calls a loss of torch's or ours
    returns: bool  # it returns something
    returns_loss: bool  # something made of what is called a loss
    reduces: bool  # it returns the mean or the sum of all elements
    numpy: bool  # it calls numpy
    loss: bool = False  # it is a loss, or part of one
    helper: bool = False  # it is part of one, not one itself
    metric: bool = False


def survey(module, imports, reach):
    """({id of FunctionDef, or of the module: Clues}, names of functions that losses call). What a loss calls is part
    of it."""
    clues = {id(node): _clues(node.body, imports) for _, node in reach.functions}
    clues[id(module)] = _clues(module, imports)
    metrics = set(_metrics(module))
    todo, helpers = [], set()
    for class_name, node in reach.functions:
        clue = clues[id(node)]
        if class_name in metrics:  # what they count is no loss
            clue.computes = False
            continue
        clue.loss, clue.helper, clue.metric = kind(node, class_name, clue)
        if clue.loss:
            todo.append((class_name, node))
    _spread(todo, reach, clues, helpers, metrics)
    return clues, helpers


def _spread(todo, reach, clues, helpers, metrics):
    """Their callees are part of them; a metric's function is a loss where a loss calls it."""
    while todo:
        class_name, node = todo.pop()
        caller = clues[id(node)]
        for owner, function in reach.called(node, class_name):
            clue, name = clues[id(function)], function.name.value
            helpers.add(name)
            if clue.backward or owner in metrics or PLUMBING.search(name):
                continue
            if not clue.loss:
                clue.loss = clue.helper = True
                clue.metric = caller.metric
            elif clue.metric and not caller.metric:
                clue.metric, clue.helper = False, True
            else:
                continue
            todo.append((owner, function))


def _metrics(module):
    """Names of classes that are metrics by their base, or by what they can do, whatever they are called."""
    for node in descendants(module, stop=cst.FunctionDef):
        if isinstance(node, cst.ClassDef):
            methods = {n.name.value for n in node.body.body if isinstance(n, cst.FunctionDef)}
            counts = "compute" in methods and methods & {"update", "_update"}
            if counts or any("Metric" in (dotted(b.value) or "") for b in node.bases):
                yield node.name.value


def _clues(body, imports):
    tensors, arrays, returned, backward, computes = set(), set(), set(), False, False
    counted, factors = set(), set()
    assigned, results, numpy = [], [], False  # (name, expression); what it returns; it calls numpy
    todo = [body]
    while todo:
        node = todo.pop()
        if isinstance(node, NESTED):
            continue
        if isinstance(node, cst.Call):
            func = node.func
            computes = computes or _calls_loss(node, imports)
            numpy = numpy or (imports.resolve(func) or "").startswith("numpy.")
            if isinstance(func, cst.Attribute):
                optimizer = func.attr.value == "step" and "optim" in (dotted(func.value) or "")
                backward |= optimizer or func.attr.value == "backward" and imports.resolve(func) is None
                if isinstance(func.value, cst.Name):
                    if func.attr.value in TENSOR_METHODS:
                        tensors.add(func.value.value)
                    elif func.attr.value in ARRAY_METHODS:
                        arrays.add(func.value.value)
                    if func.attr.value == "sum":
                        counted.add(func.value.value)
            op = operation(node, imports)
            if op and op.origin != "method" and isinstance(op.input, cst.Name):
                if op.name not in NO_TENSOR | CONSTRUCTORS | {"stack", "cat"} and not op.name.startswith(
                    ("set_", "get_", "is_", "_")
                ):
                    tensors.add(op.input.value)
        elif isinstance(node, cst.Subscript) and isinstance(node.value, cst.Name):
            parts = [getattr(e.slice, "value", None) for e in node.slice]
            if any(isinstance(part, cst.Ellipsis) or dotted(part) == "None" for part in parts):  # no list has this
                arrays.add(node.value.value)
        elif isinstance(node, cst.Attribute) and isinstance(node.value, cst.Name):
            if node.attr.value in TENSOR_ATTRIBUTES:
                tensors.add(node.value.value)
        elif isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.MatrixMultiply):
            tensors |= {side.value for side in (node.left, node.right) if isinstance(side, cst.Name)}
        elif isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Multiply):
            factors |= {side.value for side in (node.left, node.right) if isinstance(side, cst.Name)}
        elif isinstance(node, cst.Assign) and isinstance(node.targets[0].target, cst.Name):
            assigned.append((node.targets[0].target.value, node.value))
        elif isinstance(node, cst.Return) and node.value is not None:
            results.append(node.value)
            returned |= names_of(node.value)
            if any(_calls_loss(n, imports) for n in descendants(node.value, stop=NESTED)):
                returned.add("loss")
        todo.extend(children(node))
    loss = any(re.search(r"(^|_)loss(_|$)", name) for name in returned)
    if not imports.arrays:
        tensors |= arrays
    totals = {name for name, value in assigned if total(value, ())}
    reduces = any(total(value, totals) for value in results)
    return Clues(tensors, arrays, counted & factors, backward, computes, bool(results), loss, reduces, numpy)


def _calls_loss(node, imports):
    """F.mse_loss(...), F.cross_entropy(...), safeops.l1_loss(...)"""
    if not isinstance(node, cst.Call):
        return False
    full = imports.resolve(node.func) or ""
    name = full.rsplit(".", 1)[-1]
    return full.startswith(("torch.nn.functional.", "safeops.")) and (
        name.endswith(("_loss", "cross_entropy", "cross_entropy_with_logits")) or name == "kl_div"
    )
