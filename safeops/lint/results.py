"""What functions of the file return to their callers, and what is in the lists they make."""

import dataclasses

import libcst as cst

from safeops.lint.scope import Scope
from safeops.lint.survey import tensors_in
from safeops.lint.syntax import children, dotted
from safeops.lint.values import FOREIGN, NOTHING, Value

MANY = (cst.ListComp, cst.GeneratorExp)


class Results:
    """Mixed into Walk. A function with one `return` is known by its expression; its Values are those it has there."""

    def _Return(self, node):
        for child in children(node):
            self._child(child)
        self.scope.returned.append(node.value)
        self._event("Return", node)

    def _keep_result(self, name, class_name):
        returned = self.scope.returned
        self.results[class_name, name] = returned[0] if len(returned) == 1 else None

    def _result(self, call):
        """The expression that a call of this file's function or of an own method returned; None where unknown."""
        name = dotted(call.func) or "" if isinstance(call, cst.Call) else ""
        scope = self.scope
        while scope.outer is not None and scope.outer.name:  # a function within a method
            scope = scope.outer
        if name == "self":
            return self.results.get((scope.class_name, "forward"))
        own = name.startswith("self.")
        return self.results.get((scope.class_name if own else "", name.removeprefix("self.")))

    def _result_value(self, call):
        """As the caller has it: wide where what it gave was."""
        value = self.value(self._result(call))
        wide = value.wide or any(self.value(a.value).wide for a in call.args)
        return dataclasses.replace(value, owned=False, wide=wide, node=call) if value.tensor else NOTHING

    def _elements(self, node):
        """The expression of what is in a list that a comprehension made, here or behind a name; else None."""
        made = node if isinstance(node, MANY) else self.value(node).node
        return made.elt if isinstance(made, MANY) else None

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

    def _Lambda(self, node):
        outer, self.scope = self.scope, Scope("<lambda>", self.scope, is_module=self.scope.is_module)
        self.scope.loss, self.scope.step = outer.loss, outer.step
        computes = self.scope.loss or self.scope.step
        used = tensors_in(node.body, self.imports) if computes else ()
        for p in node.params.params:
            self.scope.bind(p.name.value, Value(tensor=p.name.value in used))
        self.evaluate(node.body)
        self.scope = outer
        return NOTHING
