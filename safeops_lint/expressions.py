"""The half of the walk that goes through expressions and infers their Values."""

import dataclasses

import libcst as cst

from safeops_lint.conditions import asked_about
from safeops_lint.syntax import Op, children, dotted, number, operation
from safeops_lint.tables import BATCHES, NO_TENSOR_ATTRIBUTES, PAIRS
from safeops_lint.values import FOREIGN, NOTHING, Value, dtype_of, named_eps, named_mask, named_tensor, of_op

PLAIN = ("None", "True", "False")  # a comparison with one of these gives no mask


class Expressions:
    """The part of Walk (walk.py) for expressions. `evaluate` goes through an expression from its operands to the whole,
    keeps the Value of each node, and calls the rules for that node."""

    def evaluate(self, node):
        handler = getattr(self, "_" + type(node).__name__, None)
        value = handler(node) if handler else self._generic(node)
        self._values[id(node)] = value
        self._event(type(node).__name__, node)
        return value

    def _generic(self, node):
        for child in children(node):
            self._child(child)
        return NOTHING

    def _Name(self, node):
        if self.imports.names.get(node.value):
            return FOREIGN
        return self.scope.get(node.value)

    def _constant(self, node):
        value = number(node)
        return Value(foreign=True, positive=value is not None and value != 0, node=node)

    _Integer = _Float = _SimpleString = _ConcatenatedString = _constant

    def _UnaryOperation(self, node):
        value = self.evaluate(node.expression)
        if isinstance(node.operator, cst.Not):
            return FOREIGN
        inverted = isinstance(node.operator, cst.BitInvert)
        if not value.tensor:
            if inverted and self.scope.loss and not value.foreign:  # in a loss, ~ is applied to masks only
                return Value(tensor=True, mask="likely", node=node)
            return dataclasses.replace(value, node=node) if value.foreign else value
        if inverted:
            op = Op("bitwise_not", node, node.expression, [], {}, "operator")
            return of_op(op, [value], self.imports)
        return dataclasses.replace(value, node=node, op=Op("neg", node, node.expression, [], {}, "operator"))

    def _BinaryOperation(self, node):
        left, right = self.evaluate(node.left), self.evaluate(node.right)
        op = operation(node, self.imports)
        if op is not None and (left.tensor or right.tensor) and not self._of_numpy(left, right):
            value = of_op(op, [left, right], self.imports, not self.scope.wide)
            self._values[id(node)] = value
            self._operation(op)
            return value
        if left.foreign and right.foreign:
            positive = left.positive and right.positive or isinstance(node.operator, cst.Add)
            return Value(foreign=True, positive=positive and not isinstance(node.operator, cst.Subtract), node=node)
        if isinstance(node.operator, cst.Add) and (left.positive or right.positive):
            return Value(positive=True)
        return NOTHING

    def _of_numpy(self, *values):
        """True if one of the values is an array of numpy, and the others count as tensors by their names alone."""
        calls = [v.node.func for v in values if v.foreign and isinstance(v.node, cst.Call)]
        arrays = any((self.imports.resolve(f) or "").startswith("numpy.") for f in calls)
        return arrays and all(v.op is None for v in values if v.tensor)

    def _Comparison(self, node):
        values = [self.evaluate(n) for n in (node.left, *(c.comparator for c in node.comparisons))]
        if any(isinstance(c.operator, (cst.Is, cst.IsNot, cst.In, cst.NotIn)) for c in node.comparisons):
            return FOREIGN
        plain = (cst.SimpleString, cst.Tuple, cst.List)
        if any(isinstance(c.comparator, plain) or dotted(c.comparator) in PLAIN for c in node.comparisons):
            return FOREIGN
        if not any(v.tensor for v in values) or self._of_numpy(values[0], values[-1]):
            return NOTHING
        host = all(v.host for v in values if v.tensor)
        return Value(tensor=True, mask="bool", node=node, host=host)

    def _Attribute(self, node):
        name = dotted(node)
        scope = self.scope
        while name and scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.outer
        full = self.imports.resolve(node)
        if full is not None:
            wide = dtype_of(node, self.imports) == "wide"
            return Value(foreign=True, positive=True, wide=wide, node=node)  # math.pi, torch.float32, np.float64
        base = self.evaluate(node.value)
        attribute = node.attr.value
        if named_eps(attribute):
            return Value(foreign=True, positive=True, node=node)
        if attribute in NO_TENSOR_ATTRIBUTES:
            return Value(foreign=True, positive=True, wide=base.wide, node=node)  # `y.to(x.dtype)` is as wide as x
        if base.tensor and attribute in ("T", "mT", "H", "mH", "data", "grad", "real", "imag"):
            wide = base.wide or attribute in ("real", "imag")  # complex tensors are hardly ever half
            return dataclasses.replace(base, wide=wide, detached=base.detached or attribute == "data", node=node)
        if base.op is not None and not base.tensor and base.op.name in PAIRS and attribute in ("values", "indices"):
            return self._of_pair(base, attribute == "indices", node)
        if attribute == "grad" and (self.scope.loss or self.scope.step):
            return Value(tensor=True, node=node)
        if named_mask(attribute):
            return Value(mask="likely")
        return NOTHING

    def _named(self, key):
        """True if `batch[key]` is a tensor, by the name `key`, in a loss or a training step."""
        return (self.scope.loss or self.scope.step) and len(key) > 1 and named_tensor(key)

    def _of_pair(self, base, second, node):
        """The Value of one part of `x.max(dim)`: its indices if `second`, else its values."""
        if second:
            return Value(tensor=True, integer=True, node=node)
        of = self.value(base.op.input)
        return Value(tensor=True, op=base.op, node=node, wide=of.wide, detached=of.detached)

    def _Subscript(self, node):
        self._subscript_parts(node)
        return self._subscript_value(node)

    def _subscript_parts(self, node):
        self.evaluate(node.value)
        for element in node.slice:
            for child in children(element.slice):
                self._child(child)

    def _subscript_value(self, node):
        base = self.value(node.value)
        key = node.slice[0].slice.value if isinstance(node.slice[0].slice, cst.Index) else None
        if isinstance(key, cst.SimpleString) and not base.tensor:
            name = key.evaluated_value
            batch = dotted(node.value) in BATCHES and isinstance(name, str) and self._named(name)
            return Value(tensor=True, mask="likely" if named_mask(name) else None, node=node) if batch else NOTHING
        if base.op is not None and not base.tensor and base.op.name in PAIRS and isinstance(key, cst.Integer):
            return self._of_pair(base, key.evaluated_value != 0, node)
        if base.foreign:
            return Value(foreign=True, positive=base.positive)
        if not base.tensor:
            return NOTHING
        index, op = None, base.op
        if len(node.slice) == 1 and isinstance(node.slice[0].slice, cst.Index):
            index = node.slice[0].slice.value
        advanced = index is not None and self.value(index).tensor
        if advanced:
            op = Op("index", node, node.value, [index], {}, "operator")
        positive = base.positive or advanced and self._asks(self.value(index).node, node.value)
        return dataclasses.replace(base, node=node, op=op, positive=positive)

    @staticmethod
    def _asks(mask, base):
        """True if the mask is a comparison of `base`, the tensor that it selects from, as in `x[x > 0]`."""
        if not isinstance(mask, cst.Comparison):
            return False
        sides = (mask.left, *(part.comparator for part in mask.comparisons))
        return any(side.deep_equals(base) for side in sides)

    def _IfExp(self, node):
        self._test(node.test)
        values = [self.evaluate(node.body), self.evaluate(node.orelse)]
        tensors = [v for v in values if v.tensor]
        asked = bool(asked_about(node.test))
        if not tensors:
            return Value(foreign=True, node=node) if all(v.foreign for v in values) else NOTHING
        return Value(
            tensor=True,
            mask=tensors[0].mask if len({v.mask for v in tensors}) == 1 else None,
            positive=asked or all(v.positive for v in tensors),
            op=tensors[0].op if len(tensors) == 1 else None,
            wide=any(v.wide for v in tensors),
            detached=all(v.detached for v in tensors),
        )

    def _comprehension(self, node):
        names = dict(self.scope.names)
        self._comp_for(node.for_in)
        for part in ("elt", "key", "value"):
            if hasattr(node, part):
                self.evaluate(getattr(node, part))
        self.scope.names = names
        return dataclasses.replace(FOREIGN, node=node)

    _ListComp = _GeneratorExp = _SetComp = _DictComp = _comprehension

    def _comp_for(self, node):
        self.evaluate(node.iter)
        self._bind_element(node.target, node.iter, node)
        for condition in node.ifs:
            self._test(condition.test)
        if node.inner_for_in is not None:
            self._comp_for(node.inner_for_in)
