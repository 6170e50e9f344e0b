"""Modules of the losses, as in torch.nn: the constructor takes the options, the call takes the tensors.

Each class is built from the record of its function.
"""

import inspect
import types

import torch

from safeops.core.foreign import by_name, unexpected, unexpected_option
from safeops.core.op import registry
from safeops.head.module import HeadLoss as HeadLoss

# optional tensors: the call takes them, unless a record names them as buffers of the module
TENSORS = (
    *("target", "negative_keys", "linear_bias", "mask", "weight", "row_weight", "denominator"),
    *("target_values", "target_indices", "target_weight", "target_bias", "support", "cu_seqlens", "reference_log_prob"),
    *("support_threshold", "expert_index", "load", "reference_chosen", "reference_rejected", "reference_point"),
)


class _Loss(torch.nn.Module):
    op, function, defaults, operands, tensors = None, None, {}, (), ()

    def forward(self, *operands, **tensors):
        name = type(self).__name__
        if len(operands) > len(self.operands):
            raise TypeError(
                f"{name} takes {', '.join(self.operands)} by position, got {len(operands)} tensors"
                f"{by_name(operands[len(self.operands)], inspect.signature(self.forward).parameters.values())}"
            )
        for key in tensors:
            if key in self.defaults:
                raise TypeError(f"{name}: {key} is an option: give it to the constructor")
            if key not in self.operands and key not in self.tensors:
                parameters = *self.operands, *self.tensors, *self.defaults
                raise TypeError(f"{name} {unexpected(key, tensors[key], parameters, self.function.__name__)}")
        options = {name: getattr(self, name) for name in self.defaults}
        return self.function(*operands, **tensors, **options)

    def __prepare_scriptable__(self):
        raise TypeError(
            f"{type(self).__name__}: torch.jit.script does not take it; use torch.compile or torch.export, or call "
            f"torch.ops.safeops.{self.function.__name__}(input, target, ...) in the script"
        )

    def extra_repr(self):
        return ", ".join(f"{x}={getattr(self, x)!r}" for x in self.defaults if x not in self.op.buffers)


def _init(self, **options):
    super(_Loss, self).__init__()  # noqa: UP008  (each module has a copy of this function)
    name = type(self).__name__
    for key in options:
        if key not in self.defaults:
            raise TypeError(f"{name}.__init__() {unexpected_option(key, options[key], self)}")
    options = self.defaults | options
    buffers = self.op.buffers
    self.op.validate_options(name, *(value for key, value in options.items() if key not in buffers))
    for key, value in options.items():
        if key in buffers:
            self.op.validate_buffer(name, key, value)
        is_tensor = key in buffers or isinstance(value, torch.Tensor)
        if is_tensor and not isinstance(value, torch.nn.Parameter):
            self.register_buffer(key, value)
        else:  # torch registers a Parameter by itself
            setattr(self, key, value)


_DOC = """Module of `safeops.{function}`, which describes the arguments, shapes, dtypes and errors.

Args:
    {options}: the options, keyword-only. A Parameter is trained with the
        module; any other tensor becomes a buffer of it.

Called with ({call}).

Example:
    >>> loss, operands = safeops.nn.{module}(reduction="sum"), ({example})
    >>> torch.equal(loss(*operands){result}, safeops.{function}(*operands, reduction="sum"){result})
    True
"""


def _signed(module, name, function, parameters):
    """A copy of a function with the name and signature of a module's method, for Python's errors and help."""
    copy = types.FunctionType(function.__code__, globals(), name)
    copy.__qualname__ = f"{module}.{name}"
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    copy.__signature__ = inspect.Signature([this, *parameters])
    return copy


def _module(op):
    function = op.public_function
    inputs, options = [], {"reduction": None, "empty": None}  # the options of all losses come first
    for x in inspect.signature(function).parameters.values():
        if x.default is x.empty or (x.name in TENSORS and x.name not in op.buffers):
            inputs.append(x.replace(kind=x.KEYWORD_ONLY) if x.name == "weight" else x)  # (two by position, as torch)
        else:
            options[x.name] = x.replace(kind=x.KEYWORD_ONLY)
    defaults = {name: x.default for name, x in options.items()}
    call = inspect.Signature(inputs)
    members = {
        "__doc__": _DOC.format(
            function=op.name,
            module=op.module,
            options=", ".join(defaults),
            call=str(call)[1:-1],
            example=op.example,
            result=op.result,
        ),
        "__module__": __name__,
        "__init__": _signed(op.module, "__init__", _init, options.values()),
        "forward": _signed(op.module, "forward", _Loss.forward, inputs),
        "op": op,
        "function": staticmethod(function),
        "defaults": defaults,
        "operands": tuple(x.name for x in inputs if x.kind is x.POSITIONAL_OR_KEYWORD),
        "tensors": tuple(x.name for x in inputs if x.kind is x.KEYWORD_ONLY),
    }
    return type(op.module, (_Loss,), members)


globals().update({op.module: _module(op) for op in registry.values() if op.module})
