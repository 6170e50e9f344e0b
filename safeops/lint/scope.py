"""What a function is: does it compute a loss, run under autocast, keep a graph, and which names are tensors in it."""

import re

import libcst as cst

from safeops.lint.syntax import children, descendants, dotted, number, operation
from safeops.lint.values import (
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
LOSS_CLASS = re.compile(r"(Loss|Losses|Criterion|Objective|Divergence|Penalty|Regulari[sz]er)(\d|[A-Z]|$)")
NOT_A_LOSS = re.compile(
    r"^(plot|log(?!_loss$)|print|get|set|make|build|create|test|save|load|register|update|parse)_|lossless", re.I
)
NESTED = (cst.FunctionDef, cst.ClassDef, cst.Lambda)


class Scope:
    """One function (or the module). Names are looked up here first, then where it was defined."""

    def __init__(self, name="", outer=None, class_name="", is_module=False):
        self.name, self.outer, self.class_name, self.is_module = name, outer, class_name, is_module
        self.names = {}
        self.depth = {}  # how many loops a name's assignment is in
        self.checked = set()  # names that a condition asked about
        self.loss = self.step = False
        self.no_grad = self.autocast = self.wide = self.loops = 0
        self.scripted = outer is not None and outer.scripted  # torch.jit.script knows torch's own functions alone
        if outer is not None:
            self.no_grad, self.autocast, self.wide = outer.no_grad, outer.autocast, outer.wide

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

    def knows(self, name):
        """Whether a condition asked about the name before this point."""
        scope = self
        while scope is not None:
            if name in scope.checked:
                return True
            scope = scope.outer
        return False


def function_scope(node, outer, class_name, is_module, imports):
    """The Scope of a FunctionDef: decorators, parameters, and what its body says about them."""
    scope = Scope(node.name.value, outer, class_name, is_module)
    for decorator in node.decorators:
        _decorate(scope, decorator.decorator, imports)
    clues = _clues(node.body, imports)
    scope.step = clues["backward"] or clues["computes"]
    in_class = bool(class_name and LOSS_CLASS.search(class_name))
    own_name = LOSS.search(scope.name) is not None and not NOT_A_LOSS.search(scope.name)
    plumbing = scope.name.startswith("__") and scope.name != "__call__" or scope.name in ("extra_repr", "reset")
    scope.loss = (own_name or in_class or clues["returns_loss"]) and not plumbing and not clues["backward"]
    if outer is not None and outer.loss and not class_name:
        scope.loss = True
    parameters = node.params
    all_params = [*parameters.posonly_params, *parameters.params, *parameters.kwonly_params]
    forward = is_module and scope.name == "forward"
    for i, p in enumerate(all_params):
        if i == 0 and class_name and p.name.value in ("self", "cls", "ctx"):
            continue
        scope.bind(p.name.value, _parameter(p, clues["tensors"], scope.loss or scope.step or forward))
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


def _parameter(p, tensors, by_name):
    name = p.name.value
    mask = "likely" if named_mask(name) else None
    annotation = cst.Module([]).code_for_node(p.annotation.annotation) if p.annotation else None
    if annotation is not None:
        if re.search(r"\bBoolTensor\b", annotation):
            return Value(tensor=True, mask="bool")
        if re.search(r"\b(List|list|Sequence|Tuple|tuple|Dict|dict|Callable|Iterable|Mapping)\b", annotation):
            return FOREIGN
        if re.search(r"\w*Tensor\b", annotation):
            return Value(tensor=True, mask=mask)
        return Value(foreign=True, positive=True, node=p.default)
    default = p.default
    if default is not None and dotted(default) != "None":
        return Value(foreign=True, positive=number(default) != 0, node=default)
    if named_eps(name):
        return Value(foreign=True, positive=True)
    if name in tensors or (by_name and named_tensor(name)):
        return Value(tensor=True, mask=mask)
    return Value(tensor=False, mask=mask)


def _clues(body, imports):
    """What a body shows: names used as only tensors are, a .backward(), a loss that is returned."""
    tensors, returned, backward, computes = set(), set(), False, False
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
                if isinstance(func.value, cst.Name) and func.attr.value in TENSOR_METHODS:
                    tensors.add(func.value.value)
            op = operation(node, imports)
            if op and op.origin != "method" and isinstance(op.input, cst.Name):
                if op.name not in NO_TENSOR | {"tensor", "as_tensor", "from_numpy", "stack", "cat", "full"}:
                    if not _factory(op):
                        tensors.add(op.input.value)
        elif isinstance(node, cst.Attribute) and isinstance(node.value, cst.Name):
            if node.attr.value in TENSOR_ATTRIBUTES:
                tensors.add(node.value.value)
        elif isinstance(node, cst.Return) and node.value is not None:
            if isinstance(node.value, cst.Name):
                returned.add(node.value.value)
            elif any(_calls_loss(n, imports) for n in descendants(node.value, stop=NESTED)):
                returned.add("loss")
        todo.extend(children(node))
    loss = any(re.search(r"(^|_)loss(_|$)", name) for name in returned)
    return {"tensors": tensors, "backward": backward, "returns_loss": loss, "computes": computes}


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
