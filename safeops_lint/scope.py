"""Facts about a function: whether it computes a loss, runs under autocast, keeps a graph; the Values of its names."""

import re

import libcst as cst

from safeops_lint.syntax import dotted, number
from safeops_lint.values import FOREIGN, NOTHING, Value, dtype_of, named_eps, named_mask, named_tensor

WIDE = re.compile(r"(^|_)(fp|f|float)(32|64)(_|$)")  # decorators: `force_fp32`, `fp32_region`, `f64_math`
NUMBERS = re.compile(r"\b(float|int|bool|str|ndarray)\b")  # in a return annotation


class Scope:
    """The scope of one function, class or module. Names are looked up in it first, then in `outer`, the scope around
    it."""

    def __init__(self, name="", outer=None, class_name="", is_module=False):
        self.name, self.outer, self.class_name, self.is_module = name, outer, class_name, is_module
        self.names = {}
        self.checked = set()  # names that a condition asked about
        self.loss = self.step = self.metric = False  # a loss; a training step; a metric, which may have no graph
        self.arguments = set()  # names of the function's arguments
        self.helper = False  # the function is part of a loss, not a loss itself
        self.parameters = set()  # arguments that have not been reassigned: the caller's tensors
        self.saved = {}  # name -> the operation that saved it for backward
        self.filled = set()  # names that were filled with a number through a mask: name[mask] = 0
        self.returned = []  # the expressions that the function returns
        self.used = set()  # names that the body uses as tensors, or as arrays
        self.no_grad = self.autocast = self.wide = self.loops = 0  # > 0 inside such a context, or a loop
        self.on_cpu = False  # autocast is on the CPU, where it casts what it refuses on CUDA
        self.rare = 0  # > 0 inside a branch that runs once, or on demand
        self.for_host = False  # annotated to return numbers: the caller wants them on the host
        self.scripted = outer is not None and outer.scripted  # torch.jit.script may compile it: no calls of safeops
        if outer is not None:
            self.no_grad, self.autocast, self.wide = outer.no_grad, outer.autocast, outer.wide
            self.on_cpu = outer.on_cpu

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
        self.checked.discard(name)
        self.parameters.discard(name)
        self.filled.discard(name)
        self.saved.pop(name, None)

    def knows(self, name):
        """True if a condition asked about the value of this name before this point."""
        scope = self
        while scope is not None:
            if name in scope.checked:
                return True
            scope = scope.outer
        return False


def function_scope(node, outer, class_name, is_module, imports, clues):
    """Returns the Scope of a FunctionDef, from its decorators, its parameters, and its Clues (survey.py)."""
    scope = Scope(node.name.value, outer, class_name, is_module)
    for decorator in node.decorators:
        _decorate(scope, decorator.decorator, imports)
    scope.step = clues.backward or clues.computes
    scope.loss, scope.metric, scope.helper = clues.loss, clues.metric, clues.helper
    scope.used = clues.tensors | clues.arrays
    returns = cst.Module([]).code_for_node(node.returns.annotation) if node.returns else ""
    scope.for_host = bool(NUMBERS.search(returns)) and "Tensor" not in returns
    if outer is not None and outer.loss and not class_name:
        scope.loss, scope.metric = True, outer.metric
    parameters = node.params
    all_params = [*parameters.posonly_params, *parameters.params, *parameters.kwonly_params]
    forward = is_module and scope.name == "forward"
    for i, p in enumerate(all_params):
        if i == 0 and class_name and p.name.value in ("self", "cls", "ctx"):
            continue
        by_name = scope.loss or scope.step or forward
        known = scope.used if by_name else clues.tensors
        value = _parameter(p, known, by_name, imports)
        if p.name.value in clues.masks and value.tensor and value.mask is None and not named_tensor(p.name.value):
            value.mask = "likely"
        scope.bind(p.name.value, value)
        scope.arguments.add(p.name.value)
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
    elif last == "autocast":
        enter_autocast(scope, call, 1)
    elif WIDE.search(last) or _casts_to(call, imports) == "wide":
        scope.wide += 1


def _casts_to(call, imports):
    """The dtype to which `custom_fwd(cast_inputs=torch.float32)` casts arguments, in the words of `dtype_of`; or
    None."""
    given = call.args if call else ()
    return next((dtype_of(a.value, imports) for a in given if a.keyword and a.keyword.value == "cast_inputs"), None)


def enter_autocast(scope, call, step):
    """Enter an autocast context. autocast(enabled=False) counts as wide: the code means to compute in fp32."""
    given = call.args if call else ()
    if any(a.keyword and a.keyword.value == "enabled" and dotted(a.value) == "False" for a in given):
        scope.wide += step
    else:
        scope.autocast += step
        scope.on_cpu = any(getattr(a.value, "raw_value", "") == "cpu" for a in given)
        scope.wide = 0


def _parameter(p, tensors, by_name, imports):
    name = p.name.value
    mask = "likely" if named_mask(name) else None
    annotation = cst.Module([]).code_for_node(p.annotation.annotation) if p.annotation else None
    if annotation is not None:
        if re.search(r"\bBoolTensor\b", annotation):
            return Value(tensor=True, mask="bool")
        if re.search(r"\b(List|list|Sequence|Tuple|tuple|Dict|dict|Callable|Iterable|Mapping)\b", annotation):
            return FOREIGN
        if re.search(r"\w*Tensor\b", annotation):
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
