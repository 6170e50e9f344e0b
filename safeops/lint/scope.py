"""What a function is: does it compute a loss, run under autocast, keep a graph, and which names are tensors in it."""

import dataclasses
import re

import libcst as cst

from safeops.lint.syntax import children, descendants, dotted, number, operation
from safeops.lint.values import (
    ARRAY_METHODS,
    FOREIGN,
    NO_TENSOR,
    NOTHING,
    TENSOR_ATTRIBUTES,
    TENSOR_METHODS,
    Value,
    named_eps,
    named_mask,
    named_tensor,
)

LOSS = re.compile(
    r"(^|_)(loss|losses|criterion|divergence|penalty|regulari[sz]er|nll|bce|mse|mae|rmse|elbo|kl|ssim|dice)(_|$|\d)"
    r"|loss$|_loss|^loss|(^|_)objective(_fn)?$",
    re.IGNORECASE,
)
LOSS_CLASS = re.compile(
    r"(Loss|Losses|Criterion|Objective|Divergence|Penalty|Regulari[sz]er|Distance|Similarity)(\d|[A-Z]|$)"
)
METRIC_CLASS = re.compile(r"(Metric|Dice|Score|IoU|SSIM|PSNR|Accuracy|Error)(\d|[A-Z]|$)")
NOT_A_LOSS = re.compile(
    r"^(plot|log(?!_(\w+_)?loss$)|print|get(?!_(\w+_)?loss$)|set|make|build|create|test|save|load|register|update|parse)_"
    r"|lossless",
    re.I,
)
NO_PART_OF_A_LOSS = re.compile(
    r"^_*(check|validate|assert|verify|ensure|init|reset|plot|print|save|load|test|register|update|parse)|^__", re.I
)
NESTED = (cst.FunctionDef, cst.ClassDef, cst.Lambda)


class Scope:
    """One function (or the module). Names are looked up here first, then where it was defined."""

    def __init__(self, name="", outer=None, class_name="", is_module=False):
        self.name, self.outer, self.class_name, self.is_module = name, outer, class_name, is_module
        self.names = {}
        self.depth = {}  # how many loops a name's assignment is in
        self.checked = set()  # names that a condition asked about
        self.loss = self.step = self.metric = False  # metric: a loss by its class alone, which need not have a graph
        self.parameters = set()  # arguments that are still the caller's tensors
        self.saved = {}  # name -> the operation that saved it for backward
        self.no_grad = self.autocast = self.wide = self.loops = 0
        self.scripted = outer is not None and outer.scripted  # torch.jit.script knows torch's own functions alone
        if outer is not None:
            self.no_grad, self.autocast, self.wide = outer.no_grad, outer.autocast, outer.wide

    @property
    def outermost(self):
        """Whether it is no function within another."""
        return self.outer is None or not self.outer.name

    def get(self, name):
        scope = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.outer
        if named_eps(name):
            return Value(positive=True)
        return NOTHING

    def bind(self, name, value):
        self.names[name] = value
        self.depth[name] = self.loops
        self.checked.discard(name)
        self.parameters.discard(name)
        self.saved.pop(name, None)

    def knows(self, name):
        """Whether a condition asked about the name before this point."""
        scope = self
        while scope is not None:
            if name in scope.checked:
                return True
            scope = scope.outer
        return False


def function_scope(node, outer, class_name, is_module, imports, clues):
    """The Scope of a FunctionDef: decorators, parameters, and what its body says about them."""
    scope = Scope(node.name.value, outer, class_name, is_module)
    for decorator in node.decorators:
        _decorate(scope, decorator.decorator, imports)
    scope.step = clues.backward or clues.computes
    scope.loss, scope.metric = clues.loss, clues.metric
    scope.scripted = scope.scripted or clues.scripted
    if outer is not None and outer.loss and not class_name:
        scope.loss, scope.metric = True, outer.metric
    parameters = node.params
    all_params = [*parameters.posonly_params, *parameters.params, *parameters.kwonly_params]
    forward = is_module and scope.name == "forward"
    for i, p in enumerate(all_params):
        if i == 0 and class_name and p.name.value in ("self", "cls", "ctx"):
            continue
        by_name = scope.loss or scope.step or forward
        known = clues.tensors | clues.arrays if by_name else clues.tensors
        letter = clues.helper and p.name.value in "kqrstuvw"  # a temperature as well as a target
        value = _parameter(p, known, by_name and not letter, imports)
        scope.bind(p.name.value, value)
        if value.tensor:
            scope.parameters.add(p.name.value)
    for p in (parameters.star_arg, parameters.star_kwarg):
        if isinstance(p, cst.Param):
            scope.bind(p.name.value, FOREIGN)
    return scope


def _decorate(scope, decorator, imports):
    call = decorator if isinstance(decorator, cst.Call) else None
    name = imports.resolve(call.func if call else decorator) or ""
    last = name.rsplit(".", 1)[-1]
    if last in ("no_grad", "inference_mode"):
        scope.no_grad += 1
    elif name in ("torch.jit.script", "torch.jit.script_if_tracing", "torch.jit.script_method"):
        scope.scripted = True
    elif last == "autocast":
        enter_autocast(scope, call, 1)
    elif last == "fp32_region" or (
        last == "custom_fwd" and call and any(a.keyword and a.keyword.value == "cast_inputs" for a in call.args)
    ):
        scope.wide += 1


def enter_autocast(scope, call, step):
    """autocast(enabled=False) is where arithmetic is wide on purpose."""
    for a in call.args if call else ():
        if a.keyword and a.keyword.value == "enabled" and dotted(a.value) == "False":
            scope.wide += step
            return
    scope.autocast += step


def _parameter(p, tensors, by_name, imports):
    name = p.name.value
    mask = "likely" if named_mask(name) else None
    annotation = cst.Module([]).code_for_node(p.annotation.annotation) if p.annotation else None
    if annotation is not None:
        if re.search(r"\bBoolTensor\b", annotation):
            return Value(tensor=True, mask="bool")
        if re.search(r"\b(List|list|Sequence|Tuple|tuple|Dict|dict|Callable|Iterable|Mapping)\b", annotation):
            return FOREIGN
        aliases = {name for name, full in imports.names.items() if full == "torch.Tensor"}
        if re.search(r"\w*Tensor\b", annotation) or aliases & set(re.findall(r"\w+", annotation)):
            return Value(tensor=True, mask=mask, integer=re.search(r"\b(Long|Int)Tensor\b", annotation) is not None)
        return Value(foreign=True, positive=True, node=p.default)
    default = p.default
    if default is not None and dotted(default) != "None":
        return Value(foreign=True, positive=number(default) != 0, node=default)
    if named_eps(name):
        return Value(foreign=True, positive=True)
    if name in tensors or (by_name and named_tensor(name)):
        return Value(tensor=True, mask=mask)
    return Value(tensor=False, mask=mask)


@dataclasses.dataclass(slots=True)
class Clues:
    """What a function's body shows, and what the file makes of it."""

    tensors: set  # names used as only tensors are
    arrays: set  # names used as tensors and arrays are
    backward: bool  # it calls .backward()
    computes: bool  # it calls a loss of torch's or ours
    returns_loss: bool
    loss: bool = False  # it is a loss, or part of one
    helper: bool = False  # it is part of one, not one itself
    metric: bool = False
    scripted: bool = False


def survey(module, imports):
    """({id of FunctionDef: Clues}, names of functions that losses call). What a loss calls is part of it."""
    functions = list(_functions(module, ""))
    clues = {id(node): _clues(node.body, imports) for _, node in functions}
    scripted = {
        dotted(n.args[0].value)
        for n in descendants(module)
        if isinstance(n, cst.Call) and n.args and imports.resolve(n.func) == "torch.jit.script"
    }
    by_name, todo, helpers = {}, [], set()
    for class_name, node in functions:
        by_name.setdefault((class_name, node.name.value), []).append((class_name, node))
        clue = clues[id(node)]
        clue.scripted = node.name.value in scripted
        clue.loss, clue.metric = _kind(node.name.value, class_name, clue)
        if clue.loss:
            todo.append((class_name, node))
    while todo:
        class_name, node = todo.pop()
        for key in _calls(node, class_name):
            for called in by_name.get(key, ()):
                clue, name = clues[id(called[1])], called[1].name.value
                helpers.add(name)
                if not (clue.loss or clue.backward or NO_PART_OF_A_LOSS.search(name)):
                    clue.loss = clue.helper = True
                    clue.metric = clues[id(node)].metric
                    todo.append(called)
    return clues, helpers


def _functions(node, class_name):
    """(name of the class or "", FunctionDef) of all functions, in order."""
    for child in children(node):
        if isinstance(child, cst.FunctionDef):
            yield class_name, child
            yield from _functions(child, "")
        elif isinstance(child, (cst.BaseStatement, cst.BaseSuite, cst.Else, cst.ExceptHandler, cst.Finally)):
            yield from _functions(child, child.name.value if isinstance(child, cst.ClassDef) else class_name)


def _kind(name, class_name, clue):
    """(is it a loss, by its class's name as a metric alone)"""
    plumbing = name.startswith("__") and name != "__call__" or name in ("extra_repr", "reset")
    if plumbing or clue.backward:
        return False, False
    in_class = bool(class_name and LOSS_CLASS.search(class_name))
    own_name = LOSS.search(name) is not None and not NOT_A_LOSS.search(name)
    metric = bool(class_name and METRIC_CLASS.search(class_name)) and not NO_PART_OF_A_LOSS.search(name)
    loss = own_name or in_class or clue.returns_loss
    return loss or metric, metric and not loss


def _calls(function, class_name):
    """What it calls for a result, by a name of this file or as a method of its own class."""
    nodes = list(descendants(function.body))
    statements = {id(n.value) for n in nodes if isinstance(n, cst.Expr)}
    for node in nodes:
        if isinstance(node, cst.Call) and id(node) not in statements:
            owner, _, name = (dotted(node.func) or "").rpartition(".")
            if owner in ("self", "cls"):
                yield class_name, name
            elif "." not in owner:
                yield owner, name


def _clues(body, imports):
    tensors, arrays, returned, backward, computes = set(), set(), set(), False, False
    todo = [body]
    while todo:
        node = todo.pop()
        if isinstance(node, NESTED):
            continue
        if isinstance(node, cst.Call):
            func = node.func
            computes = computes or _calls_loss(node, imports)
            if isinstance(func, cst.Attribute):
                backward = backward or (func.attr.value == "backward" and imports.resolve(func) is None)
                if isinstance(func.value, cst.Name):
                    if func.attr.value in TENSOR_METHODS:
                        tensors.add(func.value.value)
                    elif func.attr.value in ARRAY_METHODS:
                        arrays.add(func.value.value)
            op = operation(node, imports)
            if op and op.origin != "method" and isinstance(op.input, cst.Name):
                if op.name not in NO_TENSOR | {"tensor", "as_tensor", "from_numpy", "stack", "cat", "full"}:
                    if not _factory(op):
                        tensors.add(op.input.value)
        elif isinstance(node, cst.Attribute) and isinstance(node.value, cst.Name):
            if node.attr.value in TENSOR_ATTRIBUTES:
                tensors.add(node.value.value)
        elif isinstance(node, cst.Return) and node.value is not None:
            returned |= _names_of(node.value)
            if any(_calls_loss(n, imports) for n in descendants(node.value, stop=NESTED)):
                returned.add("loss")
        todo.extend(children(node))
    loss = any(re.search(r"(^|_)loss(_|$)", name) for name in returned)
    return Clues(tensors, arrays, backward, computes, loss)


def _names_of(expression):
    """The names in it, but for those of functions that are called."""
    nodes = list(descendants(expression, stop=NESTED))
    called = {id(n.func) for n in nodes if isinstance(n, cst.Call)}
    called |= {id(n.attr) for n in nodes if isinstance(n, cst.Attribute)}
    called |= {id(n.keyword) for n in nodes if isinstance(n, cst.Arg) and n.keyword}
    return {n.value for n in nodes if isinstance(n, cst.Name) and id(n) not in called}


def _calls_loss(node, imports):
    """F.mse_loss(...), F.cross_entropy(...), safeops.l1_loss(...)"""
    if not isinstance(node, cst.Call):
        return False
    full = imports.resolve(node.func) or ""
    name = full.rsplit(".", 1)[-1]
    return full.startswith(("torch.nn.functional.", "safeops.")) and (
        name.endswith(("_loss", "cross_entropy", "cross_entropy_with_logits")) or name == "kl_div"
    )


def _factory(op):
    return op.name in (
        "zeros ones empty rand randn arange linspace logspace eye randint randperm set_default_device tril_indices"
    ).split() or op.name.startswith(("set_", "get_", "is_", "_"))
