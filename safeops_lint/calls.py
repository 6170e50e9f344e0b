"""Infers the Value of a call: of an operation on tensors, a layer, a helper of a loss, or something else."""

import dataclasses

import libcst as cst

from safeops_lint.survey import DIMS
from safeops_lint.syntax import Op, dotted, operation
from safeops_lint.tables import NO_TENSOR, NO_TENSOR_METHODS, REDUCTIONS, SURE_METHODS
from safeops_lint.values import NOTHING, Value, of_op

# Methods that show a tensor in any function. Those of SURE_METHODS do so only in a loss or a training step.
CERTAIN = set("exp sqrt rsqrt log softmax log_softmax sigmoid tanh masked_fill unsqueeze softplus".split())
JOINS = {"cat", "concat", "concatenate", "hstack", "vstack", "stack"}
CASTS = {"float", "double", "half", "bfloat16", "long", "int", "type_as"}  # no array has these methods
MODELS = {"model", "net", "network", "criterion", "loss_fn", "encoder", "decoder"}  # called with tensors


class Calls:
    """The part of Walk (walk.py) that infers the Value of a call."""

    def _Call(self, node):
        op = operation(node, self.imports)
        full = self.imports.resolve(node.func)
        if full is None and isinstance(node.func, cst.Attribute):
            self.evaluate(node.func.value)
        elif full is None:
            self.evaluate(node.func)
        for a in node.args:
            self.evaluate(a.value)
        if op is not None:
            self._recognize(op)
        value = self._call_value(node, op, full)
        if op is not None and self._is_tensor_op(op):
            self._values[id(node)] = value
            self._operation(op)
            if op.inplace and isinstance(op.input, cst.Name):
                self.scope.bind(op.input.value, value)
        return value

    def _recognize(self, op):
        """Mark the operation's input as a tensor, if it is unknown so far and only tensors have this method
        (`net(x).log()`), or a function of torch takes it (`torch.log(a / b)`)."""
        value, name = self.value(op.input), op.name
        certain = op.origin == "method" and (name in CERTAIN or op.kwargs.keys() & DIMS)
        if op.origin == "method" and name in CASTS and isinstance(op.input, cst.Comparison):  # (distance < 4).float()
            self._values[id(op.input)] = Value(tensor=True, mask="bool", node=op.input)
        wanted = op.input is not None and (self.scope.loss or self.scope.step or certain)
        if not wanted or value.tensor or value.foreign or value.op is not None:
            return
        if op.origin == "method" and name == "log" and (op.args or op.kwargs):  # logger.log(...), not a tensor's log
            return
        if not (name in SURE_METHODS or certain or op.origin != "method" and name in REDUCTIONS):
            return
        method = op.origin == "method" and isinstance(op.input, (cst.Call, cst.Subscript))
        computed = isinstance(op.input, cst.BinaryOperation)
        if method or computed and (certain or self.names_in(op.input) & self.scope.arguments):
            made = operation(op.input, self.imports)  # f(x).clamp(min=1).log()
            given = [self.value(n) for n in (made.input, *made.args, *made.kwargs.values())] if made is not None else []
            known = of_op(made, given, self.imports) if given else value
            self._values[id(op.input)] = dataclasses.replace(known, tensor=True, node=op.input)

    def _is_tensor_op(self, op):
        if op.origin == "method":
            return self.value(op.input).tensor
        return op.name not in NO_TENSOR and (
            op.origin == "functional" or not op.name.startswith(("is_", "set_", "get_", "_"))
        )

    def _call_value(self, node, op, full):
        if full is not None and full.split(".")[0] in ("numpy", "math", "scipy", "cupy", "jax", "random", "os"):
            return Value(foreign=True, positive=True, node=node)
        if full is not None and full.startswith("torch.nn.") and full.rsplit(".", 1)[1][:1].isupper():
            return Value(node=node)  # a module, such as nn.BCELoss(): rules see by this node what is called later
        if full is not None and full.startswith("safeops.") and full.count(".") == 1:
            made = None
            if full == "safeops.masked_fill" and node.args:  # its Op is that of torch's masked_fill
                given = [a.value for a in node.args if not a.keyword]
                made = Op("masked_fill", node, node.args[0].value, given[1:], {}, "safeops")
            return Value(tensor=True, positive=True, op=made, node=node)
        if op is None or not self._is_tensor_op(op):
            name = full or dotted(node.func) or ""
            if name in ("len", "int", "float", "max", "min", "abs", "round", "range", "str", "list", "tuple", "bool"):
                return self._builtin(name, node)
            if op is not None and self.value(op.input).tensor:
                return Value(foreign=True, positive=True) if op.name in NO_TENSOR_METHODS else NOTHING
            tensors = any(self.value(a.value).tensor for a in node.args)
            layer = name.startswith("self.") and name.count(".") == 1 and self.scope.is_module
            model = name.rsplit(".", 1)[-1] in MODELS
            if model and (self.scope.step or self.scope.loss):
                tensors = True  # in a loss or a step, a model is called with tensors
            result = self._result(name, node)
            if result.tensor:
                return result
            helper = name.removeprefix("self.") in self.helpers  # a function of this file that a loss calls
            known = tensors and (layer or model or helper)
            cast = op is not None and op.name in ("float", "double", "to") and of_op(op, [NOTHING], self.imports).wide
            return Value(tensor=bool(known), node=node, wide=bool(self.scope.wide or cast))
        tuples = op.name == "nonzero" and "True" in (dotted(n) for n in op.kwargs.values())  # as_tuple=True
        if tuples or op.origin == "method" and op.name in NO_TENSOR_METHODS:
            return Value(foreign=True, positive=True)
        if op.name in ("max", "min", "median", "mode", "cummax", "cummin") and op.arg(0, "dim") is not None:
            if not self.value(op.arg(0, "dim", "other")).tensor:
                return Value(op=op, node=node)  # a pair of values and indices
        if op.origin != "method" and op.name in ("tensor", "scalar_tensor", "full", "as_tensor", "from_numpy"):
            host = op.name in ("tensor", "full") and "device" not in op.kwargs
            return Value(tensor=True, positive=True, constant=True, host=host, op=op, node=node)
        operands = [self.value(n) for n in (op.input, *op.args, *op.kwargs.values()) if n is not None]
        value = of_op(op, operands, self.imports, not self.scope.wide)
        if op.name in JOINS:
            parts = [e.value for e in getattr(op.input, "elements", ())]  # cat((a, b)), stack([f(x) for x in xs])
            joined = [self.value(n) for n in (parts or [getattr(op.input, "elt", None)]) if n is not None]
            value.detached |= bool(joined) and all(v.detached for v in joined)
            value.wide |= any(v.wide for v in joined)
        return value

    def _result(self, name, node):
        """The Value that a call of a function of this file, or of a method of this class, returns: the Value of its
        only return expression; NOTHING if it has several, or the expression is not known to be a tensor."""
        scope = self.scope
        while scope.outer is not None and scope.outer.name:  # from a nested function out to its method
            scope = scope.outer
        owner = scope.class_name if name == "self" or name.startswith("self.") else ""
        value = self.value(self.results.get((owner, "forward" if name == "self" else name.removeprefix("self."))))
        return dataclasses.replace(value, node=node) if value.tensor else NOTHING

    def _builtin(self, name, node):
        if name in ("max", "min", "abs", "round") and any(self.value(a.value).tensor for a in node.args):
            return NOTHING
        return Value(foreign=True, positive=True)
