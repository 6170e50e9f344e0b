"""Modules of the losses, as in torch.nn: the options in the constructor, the tensors in the call.

Each is made from the record of its function.
"""

import inspect

import torch

import safeops
from safeops._op import registry


class _Loss(torch.nn.Module):
    function, defaults = None, {}

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

    def __init__(self, **options):
        torch.nn.Module.__init__(self)
        for name in options:
            if name not in defaults:
                raise TypeError(f"{op.module}() got an unexpected keyword argument {name!r}")
        options = defaults | options
        op.validate_options(op.module, *options.values())
        vars(self).update(options)

    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    named = [this] + [inspect.Parameter(k, inspect.Parameter.KEYWORD_ONLY, default=v) for k, v in defaults.items()]
    __init__.__signature__ = inspect.Signature(named)
    __init__.__qualname__ = f"{op.module}.__init__"  # what Python says of a wrong number of arguments
    doc = _DOC.format(function=op.name, module=op.module, options=", ".join(defaults))
    members = {"function": staticmethod(getattr(safeops, op.name)), "defaults": defaults, "__init__": __init__}
    return type(op.module, (_Loss,), members | {"__doc__": doc, "__module__": __name__})


globals().update({op.module: _module(op) for op in registry.values() if op.module})
