"""The names that an assignment binds, and their values."""

import dataclasses
import re

import libcst as cst

from safeops_lint.syntax import Op, dotted, names_of, number, operation
from safeops_lint.tables import BATCHES, PAIRS
from safeops_lint.values import FOREIGN, NOTHING, Value, named_eps, named_mask, named_tensor

GRADIENTS = "torch.autograd.grad"  # a tuple of tensors
# Names that a training loop goes over, and wrappers of these.
LOADER = re.compile(r"(^|_)(data|dl)$|loaders?\d?$|(^|_)batches|dataset$|DataLoader", re.IGNORECASE)
ITERATES = {"enumerate", "tqdm", "trange", "track", "zip", "iter", "islice", "progress", "cycle"}


class Binding:
    """Mixed into Walk."""

    def _bind(self, target, value, expression, statement):
        if isinstance(target, cst.Name):
            if isinstance(expression, cst.Name):  # two names for one memory
                self._disown(expression)
                value = dataclasses.replace(value, owned=False)
            elif value.tensor and value.mask is None and named_mask(target.value) and not value.soft:
                value = dataclasses.replace(value, mask="likely")
            if not (value.tensor or value.foreign or value.op) and named_eps(target.value):
                value = Value(positive=True)
            elif not isinstance(expression, cst.Attribute) and self._used_as_tensor(target.value, value):
                value = dataclasses.replace(value, tensor=True, guessed=True)
            self.scope.bind(target.value, value)
        elif isinstance(target, (cst.Tuple, cst.List)):
            self._unpack(target.elements, value, expression, statement)
        elif isinstance(target, cst.StarredElement):
            self._bind(target.value, NOTHING, None, statement)
        elif isinstance(target, cst.Attribute):
            self.evaluate(target.value)
            if expression is not None:
                self._disown(expression)
            if dotted(target):
                value = dataclasses.replace(value, owned=False)
                if not (value.tensor or value.foreign or value.op) and named_eps(target.attr.value):
                    value.positive = True  # self.eps = kwargs.get("eps", 1e-5)
                self.scope.bind(dotted(target), value)
                if self.scope.outer is not None and dotted(target).startswith("self."):
                    self.scope.outer.bind(dotted(target), value)  # the other methods see it too
        elif isinstance(target, cst.Subscript):
            if expression is not None:
                self._disown(expression)
            self._subscript_parts(target)
            self._values[id(target)] = self._subscript_value(target)
            if isinstance(statement, (cst.Assign, cst.AnnAssign)):
                self._event("store", (target, statement))
            if (
                isinstance(target.value, cst.Name)
                and self.value(_index(target)).mask
                and number(expression) is not None
            ):
                self.scope.filled.add(target.value.value)
            zero = isinstance(expression, (cst.Integer, cst.Float)) and expression.evaluated_value == 0
            if isinstance(target.value, cst.Name) and not zero:  # b[b == 0] = 1 is a guard
                name, old = target.value.value, self.scope.get(target.value.value)
                if old.tensor:
                    new = dataclasses.replace(old, positive=True)
                    masks = [e.slice.value for e in target.slice if isinstance(e.slice, cst.Index)]
                    mask = next((n for n in masks if self.value(n).mask or len(target.slice) == 1), None)
                    if number(expression) == float("-inf") and mask is not None:  # as masked_fill
                        new.op = Op("masked_fill", target, target.value, [mask, expression], {}, "operator")
                    self.scope.names[name] = new

    def _used_as_tensor(self, name, value):
        """True if a loss goes on to use a name as only tensors are, of whose value nothing is known."""
        unknown = not (value.tensor or value.foreign or value.op or value.positive)
        return unknown and name in self.scope.surely

    def _For(self, node):
        self.evaluate(node.iter)
        self._bind_element(node.target, node.iter, node)
        if self.scope.step and LOADER.search(self._iterated(node.iter)):
            for name in names_of(node.target):
                if name in self.scope.used or named_tensor(name):
                    self.scope.bind(name, Value(tensor=True, mask="likely" if named_mask(name) else None))
        self._loop(node)

    def _iterated(self, node):
        """The iterable of a loop: the last name in it, behind `enumerate`, `tqdm` and the like."""
        while isinstance(node, cst.Call) and node.args and (dotted(node.func) or "").rpartition(".")[2] in ITERATES:
            node = node.args[0].value
        named = node.func if isinstance(node, cst.Call) else node
        return (dotted(named) or "").rpartition(".")[2]

    def _bind_element(self, target, iterated, statement):
        """The values of a loop's names: of `zip` and `enumerate`, each an element of its own."""
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
            if isinstance(target, cst.Name) and name != "range" and (self.scope.loss or self.scope.step):
                tensor = tensor or target.value in self.scope.used
            elif isinstance(target, cst.Name):
                tensor = tensor or target.value in self.scope.surely
            self._bind(target, Value(tensor=tensor), None, statement)

    def _unpack(self, elements, value, expression, statement):
        parts = expression.elements if isinstance(expression, (cst.Tuple, cst.List)) else ()
        if len(parts) == len(elements) and not any(isinstance(p, cst.StarredElement) for p in parts):
            for target, part in zip(elements, parts):
                self._bind(target.value, self.value(part.value), part.value, statement)
            return
        op = operation(expression, self.imports) if expression is not None else None
        gradients = isinstance(expression, cst.Call) and self.imports.resolve(expression.func) == GRADIENTS
        tensors = gradients or (
            op is not None
            and (op.origin != "method" or self.value(op.input).tensor)
            and op.name
            in ("chunk", "split", "unbind", "topk", "sort", "max", "min", "tensor_split", "meshgrid", "kthvalue")
        )
        each = Value(tensor=True) if tensors else FOREIGN if value.foreign else NOTHING
        each = self._gradient(expression) if gradients else each
        if self.scope.step and isinstance(expression, cst.Name) and expression.value in BATCHES:  # x, y = batch
            for target in elements:
                name = dotted(target.value) or ""
                self._bind(target.value, Value(tensor=name in self.scope.used or named_tensor(name)), None, statement)
            return
        pair = tensors and not gradients and len(elements) == 2 and op.name in PAIRS
        for i, target in enumerate(elements):
            made = self._of_pair(Value(op=op), i == 1, expression) if pair else each
            self._bind(target.value, made, None, statement)

    def _gradient(self, call):
        """The value of `torch.autograd.grad(y, x)`: half where x is known to be no more."""
        inputs = next((a.value for a in call.args if a.keyword and a.keyword.value == "inputs"), None)
        if inputs is None and len(call.args) > 1 and not call.args[1].keyword:
            inputs = call.args[1].value
        listed = [e.value for e in getattr(inputs, "elements", ())] or [inputs]
        return Value(tensor=True, wide=all(v.wide or not v.tensor for v in map(self.value, listed)), node=call)

    def _disown(self, node):
        if isinstance(node, cst.Name):
            value = self.scope.get(node.value)
            if value.owned:
                value.owned = False


def _index(subscript):
    part = subscript.slice[0].slice
    return part.value if isinstance(part, cst.Index) else part
