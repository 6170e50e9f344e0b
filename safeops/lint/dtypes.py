"""Whether a value goes into an operation that raises for fp32 beside half: what a rewrite makes fp32 must not."""

import dataclasses

import libcst as cst
import torch

from safeops.lint.syntax import children, descendants, dotted, operation

# What raises for fp32 beside half.
STRICT = set(
    """matmul mm bmm mv dot vdot vecdot inner addmm addmv addbmm baddbmm tensordot einsum multi_dot chain_matmul linear
    bilinear prelu conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc cross lerp index_add
    index_copy index_put index_reduce put scatter scatter_add scatter_reduce masked_scatter binary_cross_entropy
    scaled_dot_product_attention multi_head_attention_forward grid_sample heaviside complex polar cartesian_prod
    meshgrid isclose allclose""".split()
)
# What does so where one of these is given: {name: position behind the input}.
STRICT_WITH = {
    **dict.fromkeys(("cross_entropy", "nll_loss"), {"weight": 1}),
    **dict.fromkeys(("layer_norm", "group_norm"), {"weight": 1, "bias": 2}),
    **dict.fromkeys(("batch_norm", "instance_norm"), {"running_mean": 0, "running_var": 1, "weight": 2, "bias": 3}),
    "embedding_bag": {"per_sample_weights": 7},
}
# Calls whose result has a dtype of its own, or that of their arguments.
OWN_DTYPE = set(
    """item tolist numpy argmax argmin argsort long int bool eq ne lt gt le ge isnan isinf isfinite size len numel dim
    range print isinstance""".split()
)
CASTS = {"half", "bfloat16", "type_as"}
DTYPES = (".dtype", "float16", ".half", ".bfloat16")
ADDS = set("append extend insert appendleft add update setdefault put".split())  # to a list, a set, a dict, a queue
LOGS = {"log", "log_dict"}  # methods of a module that are no layers


@dataclasses.dataclass(slots=True)
class Flow:
    """The names that an expression's value gets; none where it meets one dtype."""

    names: set
    parts: set  # ids of the nodes that give it its dtype
    given: set  # and the names among them

    def gets(self, node, names):
        return id(node) in self.parts or not names.isdisjoint(self.given)


class Dtypes:
    """Of a file: where its values go by way of assignments, lists, arguments and what its functions return.

    A name is a pair: (the outermost function that binds it, name), (None, name) of a global, (None, ".name") of an
    attribute. When a name has which value is not asked: what one of them may be counts.
    """

    def __init__(self, module, imports):
        self.imports = imports
        self.bound, self.functions = {}, {}
        nodes = list(_located(module))
        for node, unit, _ in nodes:
            if isinstance(node, cst.FunctionDef):
                self.functions.setdefault(node.name.value, []).append((unit, node.params))
                self.bound.setdefault(unit, set()).update(_rest(node.params))
            for target in [node.name] if isinstance(node, cst.Param) else _targets(node):
                if isinstance(target, (cst.Name, cst.Tuple, cst.List)):
                    names = {n.value for n in descendants(target) if isinstance(n, cst.Name)}
                    self.bound.setdefault(unit, set()).update(names)
        self.flows, self.sinks = [], []
        for node, unit, results in nodes:
            self._add(node, unit, results)

    def meet_in_one(self, node):
        """Whether an expression goes into an operation that raises for fp32 beside half.

        A layer (`self.proj(x)`) and a write through an index (`x[i] = v`) count too.
        """
        names, before = set(), None
        while names != before:
            before = set(names)
            names.update(*(f.names for f in self.flows if f.gets(node, names)))
        return any(f.gets(node, names) for f in self.sinks)

    def _name(self, unit, name):
        return (unit if name in self.bound.get(unit, ()) else None, name)

    def _flow(self, unit, expression, names=None):
        """An expression that names get; without `names` one that meets one dtype."""
        parts = [] if expression is None else list(_parts(expression))
        given = {self._name(unit, n.value) for n in parts if isinstance(n, cst.Name)}
        given |= {(None, f".{n.attr.value}") for n in parts if isinstance(n, cst.Attribute) and _own(n)}
        flow = Flow(names or set(), {id(n) for n in parts}, given)
        (self.sinks if names is None else self.flows).append(flow)

    def _add(self, node, unit, results):
        if isinstance(node, (cst.Return, cst.Yield)):
            self._flow(unit, node.value, results)
        for target in _targets(node):
            value = node.iter if isinstance(node, (cst.For, cst.CompFor)) else node.value
            self._flow(unit, value, self._holders(unit, target))
            if isinstance(node, cst.Assign) and isinstance(target, cst.Subscript) and not _copies(target):
                self._flow(unit, value)
        if isinstance(node, cst.Call):
            self._call(node, unit)
        elif isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.MatrixMultiply):
            self._flow(unit, node)

    def _call(self, node, unit):
        method = isinstance(node.func, cst.Attribute)
        name = node.func.attr.value if method else dotted(node.func)
        if method and name in ADDS:
            for a in node.args:
                self._flow(unit, a.value, self._holders(unit, node.func.value))
        known = self.functions.get(name, ()) if not method or _own(node.func) else ()
        for owner, parameters in known:
            for i, a in enumerate(node.args):
                self._flow(unit, a.value, {(owner, p) for p in _received(parameters, i, a, method)})
        layer = method and dotted(node.func.value) == "self" and not known and name not in LOGS
        op = operation(node, self.imports)
        given = STRICT_WITH.get(op.name, {}) if op is not None else {}
        extra = [op.arg(position, name) for name, position in given.items()]
        if op is not None and op.name in STRICT or any(n is not None and dotted(n) != "None" for n in extra):
            for n in (op.input, *op.args, *op.kwargs.values()):
                self._flow(unit, n)
        elif layer or any(a.star for a in node.args) and name in STRICT:
            for a in node.args:
                self._flow(unit, a.value)

    def _holders(self, unit, target):
        """The names that stand for what is assigned to a target, or for the list or dict that it is put into."""
        if isinstance(target, cst.Name):
            return {self._name(unit, target.value)}
        if isinstance(target, cst.Attribute):
            return {(None, f".{target.attr.value}")}
        if isinstance(target, cst.Call):
            return self._holders(unit, target.func.value) if isinstance(target.func, cst.Attribute) else set()
        if isinstance(target, (cst.Tuple, cst.List)):
            return {name for e in target.elements for name in self._holders(unit, e.value)}
        return self._holders(unit, target.value) if isinstance(target, (cst.Subscript, cst.StarredElement)) else set()


def _located(module):
    """(node, the outermost function it is in, the names that its function's results have) of all nodes."""
    todo = [(module, None, set(), None)]
    while todo:
        node, unit, results, owner = todo.pop()
        if isinstance(node, cst.ClassDef):
            owner = node.name.value
        elif isinstance(node, cst.FunctionDef):
            name, unit = node.name.value, unit or id(node)
            results = {(None, f".{name}" if owner else name)}
            if name in ("forward", "__call__"):
                results.add((None, owner))  # what the class makes is called for it
            owner = None
        yield node, unit, results
        todo += [(child, unit, results, owner) for child in children(node)]


def _targets(node):
    if isinstance(node, cst.Assign):
        return [t.target for t in node.targets]
    kinds = (cst.AnnAssign, cst.AugAssign, cst.NamedExpr, cst.For, cst.CompFor)
    return [node.target] if isinstance(node, kinds) else []


def _parts(expression):
    """The parts of an expression that give it its dtype."""
    todo = [expression]
    while todo:
        node = todo.pop()
        yield node
        called = node.func if isinstance(node, cst.Call) else None
        name = called.attr.value if isinstance(called, cst.Attribute) else dotted(called)
        arguments = [a.value for a in node.args] if called is not None else []
        if name in CASTS or name == "to" and any((dotted(n) or "").endswith(DTYPES) for n in arguments):
            todo += arguments
        elif isinstance(node, (cst.Attribute, cst.Subscript)):
            todo += [node.value] if getattr(getattr(node, "attr", None), "value", "") not in ("shape", "device") else []
        elif called is not None and name not in OWN_DTYPE:
            todo += [called, *arguments]
        elif called is None and not isinstance(node, cst.Comparison):
            todo += children(node)


def _own(attribute):
    """Whether an attribute can be one of this file's classes: a tensor has `x.norm` itself."""
    return dotted(attribute.value) in ("self", "cls") or not hasattr(torch.Tensor, attribute.attr.value)


def _copies(target):
    """`x[0] = v`, `x[:, 1:] = v`: v is cast, unlike one that is written through a mask; of a dict nothing is asked."""
    parts = [getattr(e.slice, "value", e.slice) for e in target.slice]
    return all(isinstance(p, (cst.Integer, cst.SimpleString, cst.Slice, cst.Ellipsis)) for p in parts)


def _received(parameters, position, argument, method):
    """The names that a function of the file has for an argument."""
    if argument.keyword is not None:
        return {argument.keyword.value}
    names = [p.name.value for p in parameters.params]
    names = names[1:] if method and names[:1] in (["self"], ["cls"]) else names
    rest = _rest(parameters)
    return set(names + rest if argument.star else names[position : position + 1] or rest)


def _rest(parameters):
    return [parameters.star_arg.name.value] if isinstance(parameters.star_arg, cst.Param) else []
