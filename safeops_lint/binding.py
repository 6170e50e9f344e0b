"""Binds names: gives each name that an assignment, a loop or an unpacking sets its Value (values.py)."""

import dataclasses

import libcst as cst

from safeops_lint.syntax import Op, dotted, number, operation
from safeops_lint.tables import BATCHES, PAIRS, SOFT
from safeops_lint.values import FOREIGN, NOTHING, Value, named_eps, named_mask, named_tensor

GRADIENTS = "torch.autograd.grad"  # returns a tuple of tensors


class Binding:
    """The part of Walk (walk.py) that binds names."""

    def _bind(self, target, value, expression, statement):
        if isinstance(target, cst.Name):
            soft = value.op is not None and value.op.name in SOFT  # a weight, even if its name says mask
            named = not isinstance(expression, cst.Name) and named_mask(target.value)
            if value.tensor and value.mask is None and named and not soft:
                value = dataclasses.replace(value, mask="likely")
            if not (value.tensor or value.foreign or value.op) and named_eps(target.value):
                value = Value(positive=True)
            self.scope.bind(target.value, value)
        elif isinstance(target, (cst.Tuple, cst.List)):
            self._unpack(target.elements, value, expression, statement)
        elif isinstance(target, cst.StarredElement):
            self._bind(target.value, NOTHING, None, statement)
        elif isinstance(target, cst.Attribute):
            self.evaluate(target.value)
            if dotted(target):
                if not (value.tensor or value.foreign or value.op) and named_eps(target.attr.value):
                    value = dataclasses.replace(value, positive=True)  # self.eps = kwargs.get("eps", 1e-5)
                self.scope.bind(dotted(target), value)
                if self.scope.outer is not None and dotted(target).startswith("self."):
                    self.scope.outer.bind(dotted(target), value)  # so that other methods of the class see it, too
        elif isinstance(target, cst.Subscript):
            self._subscript_parts(target)
            self._values[id(target)] = self._subscript_value(target)
            if isinstance(statement, (cst.Assign, cst.AnnAssign)):
                self._event("store", (target, statement))
            masked = isinstance(target.value, cst.Name) and self.value(_index(target)).mask
            if masked and number(expression) is not None:
                self.scope.filled.add(target.value.value)
            zero = isinstance(expression, (cst.Integer, cst.Float)) and expression.evaluated_value == 0
            if isinstance(target.value, cst.Name) and not zero:  # b[b == 0] = 1 keeps b away from 0
                name, old = target.value.value, self.scope.get(target.value.value)
                if old.tensor:
                    new = dataclasses.replace(old, positive=True)
                    if number(expression) == float("-inf"):  # the name now holds what masked_fill would return
                        new.op = Op("masked_fill", target, target.value, [_index(target), expression], {}, "operator")
                    self.scope.names[name] = new

    def _For(self, node):
        self.evaluate(node.iter)
        self._bind_element(node.target, node.iter, node)
        self._loop(node)

    def _bind_element(self, target, iterated, statement):
        """Bind the names of a loop, `for target in iterated`. With `zip` and `enumerate`, each name gets elements of
        the operand at its position."""
        call = iterated if isinstance(iterated, cst.Call) else None
        name = dotted(call.func) if call is not None else None
        parts = [a.value for a in call.args if not a.keyword] if call is not None else []
        elements = getattr(target, "elements", ())
        if name == "enumerate" and parts and len(elements) == 2:
            self._bind(elements[0].value, FOREIGN, None, statement)
            self._bind_element(elements[1].value, parts[0], statement)
        elif name == "zip" and len(parts) == len(elements):
            for element, part in zip(elements, parts):
                self._bind_element(element.value, part, statement)
        else:
            listed = [self.value(e.value) for e in getattr(iterated, "elements", ())]
            tensor = self.value(iterated).tensor or bool(listed) and all(v.tensor for v in listed)
            self._bind_used(target, tensor, name != "range", statement)

    def _bind_used(self, target, tensor, may_be, statement):
        """Bind a name of a loop or a batch. It is a tensor if `tensor`, or if `may_be` and this function, a loss or a
        training step, uses the name as a tensor."""
        for part in getattr(target, "elements", ()):
            self._bind_used(part.value, tensor, may_be, statement)
        if isinstance(target, cst.Name):
            trains = may_be and (self.scope.loss or self.scope.step)
            used = target.value in self.scope.used or self.scope.step and named_tensor(target.value)
            mask = "likely" if named_mask(target.value) else None
            self._bind(target, Value(tensor=tensor or trains and used, mask=mask), None, statement)

    def _unpack(self, elements, value, expression, statement):
        parts = expression.elements if isinstance(expression, (cst.Tuple, cst.List)) else ()
        if len(parts) == len(elements) and not any(isinstance(p, cst.StarredElement) for p in parts):
            for target, part in zip(elements, parts):
                self._bind(target.value, self.value(part.value), part.value, statement)
            return
        op = operation(expression, self.imports) if expression is not None else None
        gradients = isinstance(expression, cst.Call) and self.imports.resolve(expression.func) == GRADIENTS
        known = op is not None and (op.origin != "method" or self.value(op.input).tensor)
        tensors = gradients or known and op.name in PAIRS | {"chunk", "split", "unbind", "tensor_split", "meshgrid"}
        each = Value(tensor=True) if tensors else FOREIGN if value.foreign else NOTHING
        if self.scope.step and isinstance(expression, cst.Name) and expression.value in BATCHES:  # x, y = batch
            for target in elements:
                self._bind_used(target.value, False, True, statement)
            return
        pair = tensors and not gradients and len(elements) == 2 and op.name in PAIRS
        for i, target in enumerate(elements):
            made = self._of_pair(Value(op=op), i == 1, expression) if pair else each
            self._bind(target.value, made, None, statement)


def _index(subscript):
    part = subscript.slice[0].slice
    return part.value if isinstance(part, cst.Index) else part
