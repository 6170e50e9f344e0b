"""Finds the kind of each function of a file (a loss, part of a loss, a training step), and what its body shows about
names."""

import dataclasses
import re

import libcst as cst

from safeops_lint.kinds import kind, plumbing, total
from safeops_lint.syntax import NESTED, children, descendants, dotted, names_of, operation
from safeops_lint.tables import ARRAY_METHODS, CONSTRUCTORS, NO_TENSOR, TENSOR_ATTRIBUTES, TENSOR_METHODS

DIMS = {"dim", "keepdim"}  # keywords of torch alone: numpy has axis and keepdims


@dataclasses.dataclass(slots=True)
class Clues:
    """Facts about a function. `loss`, `helper` and `metric` also depend on its callers in the file."""

    tensors: set = dataclasses.field(default_factory=set)  # names used in ways that only tensors allow
    arrays: set = dataclasses.field(default_factory=set)  # names used in ways that tensors and arrays allow
    masks: set = dataclasses.field(default_factory=set)  # names that are a factor, and summed: (x * m).sum() / m.sum()
    backward: bool = False  # the function calls .backward(), or an optimizer's step
    computes: bool = False  # it calls a loss of torch or safeops
    returns: bool = False  # it returns a value
    returns_loss: bool = False  # a returned expression contains a call of a loss, or a name with "loss"
    reduces: bool = False  # it returns a mean or a sum over all elements
    loss: bool = False  # it is a loss, or part of one
    helper: bool = False  # it is part of a loss, not a loss itself; or "formula": see kinds.kind
    metric: bool = False


def survey(module, imports, reach):
    """Returns (clues, helpers). clues: {id(node): Clues} for each FunctionDef and the module. helpers: the names of the
    functions that losses call; such a function is part of the loss."""
    clues = {id(node): _clues(node.body, imports) for _, node in reach.functions}
    clues[id(module)] = _clues(module, imports)
    metrics = set(_metrics(module))
    todo, helpers = [], set()
    for class_name, node in reach.functions:
        clue = clues[id(node)]
        if class_name in metrics:  # a metric class may call a loss, but is no training step
            clue.computes = False
            continue
        clue.loss, clue.helper, clue.metric = kind(node, class_name, clue)
        if clue.loss:
            todo.append((class_name, node))
    _spread(todo, reach, clues, helpers, metrics)
    return clues, helpers


def _spread(todo, reach, clues, helpers, metrics):
    """Mark the functions that losses call as parts of losses. A metric that a loss calls becomes part of the loss, too.
    todo: [(class, FunctionDef)] of the losses."""
    while todo:
        class_name, node = todo.pop()
        caller = clues[id(node)]
        for owner, function in reach.called(node, class_name):
            clue, name = clues[id(function)], function.name.value
            helpers.add(name)
            if clue.backward or owner in metrics or plumbing(name, clue):
                continue
            if not clue.loss:
                clue.loss, clue.helper, clue.metric = True, caller.helper or True, caller.metric
            elif clue.metric and not (caller.metric or caller.helper == "formula"):
                clue.metric, clue.helper = False, True
            else:
                continue
            todo.append((owner, function))


def _metrics(module):
    """Yield the names of the classes that are metrics: by a base class, or since they have `update` and `compute`."""
    for node in descendants(module, stop=cst.FunctionDef):
        if isinstance(node, cst.ClassDef):
            methods = {n.name.value for n in node.body.body if isinstance(n, cst.FunctionDef)}
            counts = "compute" in methods and methods & {"update", "_update"}
            if counts or any("Metric" in (dotted(b.value) or "") for b in node.bases):
                yield node.name.value


def _clues(body, imports):
    clues, totals, counted, factors, results = Clues(), set(), set(), set(), []
    todo = [body]
    while todo:
        node = todo.pop()
        if isinstance(node, NESTED):
            continue
        if isinstance(node, cst.Call):
            _call_clues(node, imports, clues, counted)
        elif isinstance(node, cst.Subscript) and isinstance(node.value, cst.Name):
            parts = [getattr(e.slice, "value", None) for e in node.slice]
            if any(isinstance(part, cst.Ellipsis) or dotted(part) == "None" for part in parts):  # no index of a list
                clues.arrays.add(node.value.value)
        elif isinstance(node, cst.Attribute) and isinstance(node.value, cst.Name):
            if node.attr.value in TENSOR_ATTRIBUTES:
                clues.tensors.add(node.value.value)
        elif isinstance(node, cst.BinaryOperation):
            sides = {side.value for side in (node.left, node.right) if isinstance(side, cst.Name)}
            if isinstance(node.operator, cst.MatrixMultiply):
                clues.tensors |= sides
            elif isinstance(node.operator, cst.Multiply):
                factors |= sides
        elif isinstance(node, cst.Assign) and isinstance(node.targets[0].target, cst.Name):
            if total(node.value, ()):
                totals.add(node.targets[0].target.value)
        elif isinstance(node, cst.Return) and node.value is not None:
            results.append(node.value)
        todo.extend(children(node))
    if not imports.arrays:
        clues.tensors |= clues.arrays
    clues.masks = counted & factors
    clues.returns, clues.reduces = bool(results), any(total(value, totals) for value in results)
    parts = [n for value in results for n in descendants(value, stop=NESTED)]
    named = any(re.search(r"(^|_)loss(_|$)", name) for value in results for name in names_of(value))
    clues.returns_loss = named or any(_calls_loss(n, imports) for n in parts)
    return clues


def _call_clues(node, imports, clues, counted):
    func, op = node.func, operation(node, imports)
    clues.computes |= _calls_loss(node, imports)
    if isinstance(func, cst.Attribute):
        name, owner = func.attr.value, getattr(func.value, "value", None)
        optimizer = name == "step" and "optim" in (dotted(func.value) or "")
        clues.backward |= optimizer or name == "backward" and imports.resolve(func) is None
        if isinstance(func.value, cst.Name):
            if name in TENSOR_METHODS | ARRAY_METHODS:
                (clues.tensors if name in TENSOR_METHODS else clues.arrays).add(owner)
            if name == "sum":
                counted.add(owner)
    if op and op.origin != "method" and isinstance(op.input, cst.Name):
        plain = op.name.startswith(("set_", "get_", "is_", "_"))
        if not plain and op.name not in NO_TENSOR | CONSTRUCTORS | {"stack", "cat"}:
            clues.tensors.add(op.input.value)


def _calls_loss(node, imports):
    """True for a call of a loss of torch or safeops: `F.mse_loss(...)`, `safeops.l1_loss(...)`."""
    if not isinstance(node, cst.Call):
        return False
    full = imports.resolve(node.func) or ""
    name = full.rsplit(".", 1)[-1]
    return full.startswith(("torch.nn.functional.", "safeops.")) and (
        name.endswith(("_loss", "cross_entropy", "cross_entropy_with_logits")) or name == "kl_div"
    )
