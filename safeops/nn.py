"""Modules of the losses, as in torch.nn: the options in the constructor, the tensors in the call.

Each is made from the record of its function.
"""

import inspect
import types

import torch

import safeops
from safeops._op import registry


class _Loss(torch.nn.Module):
    op, function, defaults = None, None, {}

    def forward(self, input, target, *, mask=None, weight=None, denominator=None):
        options = {name: getattr(self, name) for name in self.defaults}
        return self.function(input, target, mask=mask, weight=weight, denominator=denominator, **options)

    def __prepare_scriptable__(self):
        raise TypeError(
            f"{type(self).__name__}: torch.jit.script does not take it; use torch.compile or torch.export, or call "
            f"torch.ops.safeops.{self.function.__name__}(input, target, ...) in the script"
        )

    def extra_repr(self):
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in self.defaults)


def _init(self, **options):
    super(_Loss, self).__init__()  # noqa: UP008  (each module has a copy of this function)
    name = type(self).__name__
    for key in options:
        if key not in self.defaults:
            raise TypeError(f"{name}.__init__() got an unexpected keyword argument {key!r}")
    options = self.defaults | options
    self.op.validate_options(name, *options.values())
    for key, value in options.items():
        setattr(self, key, value)


_DOC = """Module of `safeops.{function}`, which describes the arguments, shapes, dtypes and errors.

Args:
    {options}: the options, keyword-only.

Called with (input, target, *, mask=None, weight=None, denominator=None).

Example:
    >>> loss, x, y = safeops.nn.{module}(reduction="sum"), torch.tensor([0.5, 3.0]), torch.zeros(2)
    >>> torch.equal(loss(x, y), safeops.{function}(x, y, reduction="sum"))
    True
"""


def _module(op):
    defaults = {"reduction": "mean", "empty": "zero", **{x.name: x.default for x in op.parameters}}
    # A function of its own, whose name and signature are those of the class: Python says them in its errors.
    __init__ = types.FunctionType(_init.__code__, globals(), "__init__")
    __init__.__qualname__ = f"{op.module}.__init__"
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [inspect.Parameter(k, inspect.Parameter.KEYWORD_ONLY, default=v) for k, v in defaults.items()]
    __init__.__signature__ = inspect.Signature([this, *named])
    members = {
        "__doc__": _DOC.format(function=op.name, module=op.module, options=", ".join(defaults)),
        "__module__": __name__,
        "__init__": __init__,
        "op": op,
        "function": staticmethod(getattr(safeops, op.name)),
        "defaults": defaults,
    }
    return type(op.module, (_Loss,), members)


globals().update({op.module: _module(op) for op in registry.values() if op.module})
