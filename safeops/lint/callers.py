"""What the functions of a file are given, where the file shows all who call them."""

import collections
import dataclasses
import re

import libcst as cst

from safeops.lint.reach import CALLED
from safeops.lint.syntax import descendants, dotted

# Of a Value: what holds where it does in every call.
FLAGS = ("wide", "double", "positive", "integer", "detached", "host")
DEMO = re.compile(r"_*(test|demo|example)(_|$)")
PLAIN = ("staticmethod", "classmethod")  # decorators that leave the arguments alone


@dataclasses.dataclass(slots=True)
class Given:
    """What every caller of a function does."""

    wide: bool  # it calls it with autocast off
    no_grad: bool  # it calls it without a graph
    flags: dict  # {name of a parameter: the flags that its Value has in every call}

    def __bool__(self):
        return self.wide or self.no_grad or any(self.flags.values())


class Callers:
    """Who calls the functions of a file."""

    def __init__(self, module, reach):
        self._calls = collections.defaultdict(list)  # id of a function -> its Calls
        self._functions = {id(node): (class_name, node) for class_name, node in reach.functions}
        resolved = collections.defaultdict(set)  # name -> the calls of that name that are understood
        for class_name, node in reach.functions:
            for call, (owner, function) in () if _demo(node) else reach.calls(node, class_name):
                resolved[_called_as(owner, function)].add(id(call))
                if function is not node:
                    self._calls[id(function)].append(call)
        nodes = [n for part in module.body if not _demo(part) for n in descendants(part)]
        mentioned = collections.Counter(n.value for n in nodes if isinstance(n, cst.Name))
        defined = collections.Counter(n.name.value for n in nodes if isinstance(n, (cst.FunctionDef, cst.ClassDef)))
        made, named = collections.Counter(map(_made, nodes)), collections.Counter(map(_named, nodes))
        self._known = {  # names of which every mention is understood: as a call, or as an object that is called
            name
            for name, calls in resolved.items()
            if mentioned[name] == defined[name] + (made[name] + named[name] if name in reach.classes else len(calls))
            and made[name] <= len(calls)
        }

    def given(self, walk):
        """{id of a function: Given}, by the Values of a walk."""
        found = {}
        for key, calls in self._calls.items():
            class_name, node = self._functions[key]
            plain = all(dotted(d.decorator) in PLAIN for d in node.decorators)
            if plain and _called_as(class_name, node) in self._known and all(id(c) in walk.called for c in calls):
                wide, no_grad = (all(flags) for flags in zip(*(walk.called[id(call)] for call in calls)))
                given = [_arguments(call, node, class_name) for call in calls]
                always = set() if None in given else set.intersection(*map(set, given))
                flags = {p: _flags([walk.value(arguments[p]) for arguments in given]) for p in always}
                found[key] = Given(wide, no_grad, flags)
        return {key: given for key, given in found.items() if given}


def _called_as(class_name, function):
    return class_name if function.name.value in CALLED else function.name.value


def _flags(values):
    return {flag for flag in FLAGS if all(getattr(v, flag) for v in values)}


def _arguments(call, function, class_name):
    """{name of a parameter: the expression it is given}; None where a `*` hides it."""
    if any(a.star for a in call.args):
        return None
    names = [p.name.value for p in (*function.params.posonly_params, *function.params.params)]
    static = any(dotted(d.decorator) == "staticmethod" for d in function.decorators)
    names = names[1:] if class_name and not static else names
    by_name = {a.keyword.value: a.value for a in call.args if a.keyword}
    return {**dict(zip(names, [a.value for a in call.args if not a.keyword])), **by_name}


def _made(node):
    """The class of `loss = Loss()` and `Loss()(x)`."""
    call = node.value if isinstance(node, cst.Assign) else node.func if isinstance(node, cst.Call) else None
    return dotted(call.func) if isinstance(call, cst.Call) else None


def _named(node):
    """The class of `super(Loss, self)`."""
    of_super = isinstance(node, cst.Call) and dotted(node.func) == "super" and node.args
    return dotted(node.args[0].value) if of_super else None


def _demo(part):
    """`def test_loss():`, `if __name__ == "__main__":`, which say nothing of what a training gives."""
    if isinstance(part, cst.FunctionDef):
        return DEMO.match(part.name.value) is not None
    return isinstance(part, cst.If) and any(getattr(n, "value", "") == "__name__" for n in descendants(part.test))
