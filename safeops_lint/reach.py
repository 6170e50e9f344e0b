"""Finds the functions of a file that a function calls: by name, as methods of its own or a base class, or through
objects that it or its class made."""

import libcst as cst

from safeops_lint.syntax import children, descendants, dotted

CALLED = ("forward", "__call__")  # the methods that calling an object runs
LEARNED = ("Linear", "Conv", "Embedding", "Parameter", "LSTM", "GRU", "Attention", "Transformer", "from_pretrained")


class Reach:
    """The functions of a file by class and name; `called` returns the functions that one of them calls."""

    def __init__(self, module):
        self.functions = list(_functions(module, ""))
        self.classes = {n.name.value: n for n in descendants(module) if isinstance(n, cst.ClassDef)}
        self.named = {}  # (name of the class or "", name) -> [(class, FunctionDef)]
        for class_name, node in self.functions:
            self.named.setdefault((class_name, node.name.value), []).append((class_name, node))
        self._bases = {name: [dotted(b.value) for b in node.bases] for name, node in self.classes.items()}
        known = {*self.classes, *(name for owner, name in self.named if not owner)}
        self._made = {name: _made(node, "self.", known) for name, node in self.classes.items()}
        self._models = {name for name, node in self.classes.items() if _learns(node)}

    def called(self, function, class_name):
        """Returns [(class, FunctionDef)]: the functions of this file whose result a function uses. Models (classes that
        make layers with weights) are left out, since they are no part of a loss."""
        made = {**self._made.get(class_name, {}), **_made(function, "", self.classes)}
        nodes = list(descendants(function.body))
        statements = {id(n.value) for n in nodes if isinstance(n, cst.Expr)}
        calls = (n for n in nodes if isinstance(n, cst.Call) and id(n) not in statements)
        return [result for call in calls for result in self._called_by(call, class_name, made)]

    def _called_by(self, node, class_name, made):
        if isinstance(node.func, cst.Call):  # Loss()(x)
            return self._of(dotted(node.func.func), CALLED)
        if isinstance(node.func, cst.Attribute) and isinstance(node.func.value, cst.Call):  # Categorical(x).entropy()
            return self._of(dotted(node.func.value.func), [node.func.attr.value])
        name = dotted(node.func) or ""
        owner, _, last = name.rpartition(".")
        own = owner in ("self", "cls")
        result = list(self._methods(class_name, CALLED if name == "self" else [last] if own else []))
        if name in made:
            result += [*self._of(made[name], CALLED), *self.named.get(("", made[name]), ())]
        elif owner in made:
            result += self._of(made[owner], [last])
        elif "." not in owner and not own:
            result += self.named.get((owner, last), ())
        return result

    def _of(self, class_name, names):
        return self._methods(class_name, names) if class_name in self.classes and class_name not in self._models else ()

    def _methods(self, class_name, names):
        """Yield (class, FunctionDef) for methods of these names: the class's own or inherited one, and those of derived
        classes."""
        for name in names:
            owner = next((c for c in self._ancestors(class_name) if (c, name) in self.named), None)
            below = [c for c in self.classes if c != class_name and class_name in self._ancestors(c)]
            for c in {owner, *below}:
                yield from self.named.get((c, name), ())

    def _ancestors(self, class_name):
        """Returns the names of a class and of its direct and indirect bases in this file."""
        results = [class_name]
        for name in results:
            results += [b for b in self._bases.get(name, ()) if b in self.classes and b not in results]
        return results


def _made(node, prefix, known):
    """Returns {name: class or function of this file} for each `name = Class(...)` or `self.name = function` below a
    node, if the name begins with `prefix`. known: the classes and functions that count."""
    made = {}
    for n in descendants(node):
        if isinstance(n, cst.Assign) and isinstance(n.value, (cst.Call, cst.Name)):
            name, of = dotted(n.targets[0].target) or "", dotted(getattr(n.value, "func", n.value))
            if of in known and name.startswith(prefix):
                made[name] = of
    return made


def _learns(node):
    """True if a class makes layers with weights."""
    calls = (dotted(n.func) or "" for n in descendants(node) if isinstance(n, cst.Call))
    return any(word in name.rpartition(".")[2] for name in calls for word in LEARNED)


def _functions(node, class_name):
    """Yield (class name, FunctionDef) for all functions below a node, in order. The class name is "" outside of
    classes, and None in a class that holds no losses (a transform, a dataset, an optimizer)."""
    for child in children(node):
        if isinstance(child, cst.FunctionDef):
            yield class_name, child
            yield from _functions(child, "")
        elif isinstance(child, cst.ClassDef):
            bases = [dotted(base.value) or "" for base in child.bases]
            other = any(base.endswith(("Transform", "Dataset", "Optimizer")) for base in bases)
            yield from _functions(child, None if other else child.name.value)
        elif isinstance(child, (cst.BaseStatement, cst.BaseSuite, cst.Else, cst.ExceptHandler, cst.Finally)):
            yield from _functions(child, class_name)
