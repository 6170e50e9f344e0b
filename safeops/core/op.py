"""`Op`: the record of an op. It makes the op's autograd Function, call path, composite and public torch.library op.

A family is a subclass of `Op`, an op is an instance. The public function passes its arguments to `Op.call`: `prepare`
turns them into operands of the raw op, `route` picks kernel or composite, and `validate` raises for bad arguments. The
raw op is the torch.library op that kernels implement. The definition computes the same results in plain torch ops; the
composite runs the definition.
"""

import copy
import functools
from collections import namedtuple

import torch

from safeops.core import availability, check, private_torch
from safeops.core.autograd import autograd_function
from safeops.core.foreign import sign
from safeops.core.library import declare_public, defaults, document, has_kernel, launchers, raise_cause
from safeops.core.route import by_composite, differentiable_backward, is_over_ranks, route
from safeops.core.symbolic import as_operand, symbolic

registry = {}  # every op by its public name


@functools.cache
def _named_tuple(kind, names):
    return namedtuple(kind, names)  # cached: it compiles source text, and many ops have the same names


def _places(fields, names):
    """The slice of `fields` that holds `names`, which must stand side by side."""
    first = fields.index(names[0]) if names else 0
    assert fields[first : first + len(names)] == names, f"{names} are not side by side in {fields}"
    return slice(first, first + len(names))


class Public:
    """The record of a public function.

    module: the name of its class in safeops.nn, if it has one. buffers: the tensors that the class's constructor takes.
    example: source text of a call's operands, for the class's docstring. result: such text that picks the loss.
    parts: records of other ops that the function calls.
    raw: names of its raw ops. owner: the language of its CUDA kernels, "C++/CUDA" or "Triton"; None: it has none.
    cpu: True if its CPU kernels run. cuda: {index of a CUDA device: True if its kernels run there}.
    """

    public_function = None  # `public` sets it; the scans of ops/lists have none
    module, buffers, example, result = None, (), "torch.tensor([0.5, 3.0]), torch.zeros(2)", ""
    parts, raw, owner = (), (), None

    @property
    def family(self):
        """The name of the folder of its file: safeops/ops/<family>."""
        return (self.public_function or type(self)).__module__.split(".")[-2]

    def runs_on(self, device):
        """True if a call with tensors on `device` runs the kernels."""
        device = torch.device(device)
        if device.type == "cuda":
            return self.cuda[torch.cuda.current_device() if device.index is None else device.index]
        return device.type == "cpu" and self.cpu

    def validate_buffer(self, name, key, x):
        """Raise if the constructor of module `name` does not take the tensor x as its argument `key`."""
        if x is not None:
            check.floating(name, key, x)

    def public(self, *schemas, arguments=""):
        """Decorator of the public function: registers it as `safeops::<op>`, with one overload per schema.

        arguments: the text that replaces {arguments} in the docstrings of a family.
        """

        def declare(function):
            sign(function)
            document(function, arguments)
            self.public_function = function
            declare_public(function, *(self.name + schema for schema in schemas))
            return function

        return declare


class Composed(Public):
    """The record of a function that calls other ops, its `parts`, and has no kernel or gradient of its own."""

    def __init__(self, name, *parts, module=None, buffers=(), example=Public.example, validate_options=None):
        """parts: records. validate_options(name, reduction, empty, ...): checks options of a module's constructor."""
        self.name, self.module, self.buffers, self.example = name, module, buffers, example
        self.parts, self.validate_options = parts, validate_options
        self.cpu = all(part.cpu for part in self.parts)
        registry[name] = self

    def runs_on(self, device):
        return all(part.runs_on(device) for part in self.parts)


class Op(Public):
    """The record of a public op, and its call path.

    Operands and results have the names of the raw forward op's schema, where tensor operands come first. A family, or
    an op, sets these attributes:

    differentiable: the operands whose gradients the backward kernel computes.
    constant: the operands whose gradients only the composite computes.
    sum_to: `sums.sum_to` if operands broadcast: it sums a gradient of the full shape to its operand's shape.
    linear: how many of the first operands the op is linear in (0, 1 or 2; two have one dtype). Backward reads only
        their dtype and shapes, so they are not saved.
    visible: how many of the raw forward's results the caller sees. The rest is for backward.
    saved: the results that backward reads; None: all but the first. reads: the tensor operands that backward reads;
        None: all but the linear ones.
    domain: a function of `core.domain` per tensor, with which checks make operands. None: every number is allowed.
    waits: True if the host waits for a size of the results.
    keep: a function (results, tensor operands) -> the tensors to save, for an op where they depend on the call: as many
        results as `saved` names (None may replace one), then operands. None: `saved` and `reads` decide.
    shards: the name of the op's rule for DTensors in safeops.distributed._dtensor. None: DTensors run the composite.
    compiled: the device types whose kernel is kept under torch.compile. On others Inductor fuses the composite with
        its neighbours, which is faster.
    """

    owner = "Triton"
    differentiable = ("input",)
    constant = ()
    sum_to = None
    linear = 0
    visible = 1
    saved = None
    reads = None
    shards = None
    domain = None
    waits = False
    keep = None
    compiled = ("cpu",)
    by_composite = staticmethod(by_composite)

    def __init__(self, name, forward, backward=None, definition=None, also=()):
        """forward, backward, also: the raw ops. definition: a function of the raw forward's operands, in torch ops."""
        self.name, self.forward, self.backward, self.definition = name, forward, backward, definition
        schema = private_torch.schema(forward)
        self.raw = tuple(private_torch.schema(op).name.partition("::")[2] for op in (forward, backward, *also) if op)
        self.defaults = defaults(forward)
        self.returns = len(schema.returns)
        self.hides = self.returns > self.visible
        self.Operands = _named_tuple("Operands", tuple(x.name for x in schema.arguments))
        kinds = [str(x.type) for x in schema.arguments]
        self.numbers = tuple(i for i, kind in enumerate(kinds) if "float" in kind)
        self.tensors = sum("Tensor" in kind for kind in kinds)  # how many
        names, results = self.Operands._fields, tuple(x.name for x in schema.returns)
        self.gradient_places = tuple(map(names.index, self.differentiable))
        self.constant_places = _places(names, self.constant)
        self.saved_places = slice(1, None) if self.saved is None else _places(results, self.saved)
        self.read_places = slice(self.linear, self.tensors) if self.reads is None else _places(names, self.reads)
        self.Saved = _named_tuple("Saved", results[self.saved_places])
        if self.differentiable:
            assert all("Tensor" in kind for kind in kinds[: self.tensors]), f"{name}: the tensors must come first"
        # eager, traced: [pair for calls that record no gradient, pair for calls that do], with pairs (function, True if
        # Dynamo traces it). `eager` skips torch's Python layers, a quarter of a small call's time. Only functorch needs
        # them, and `route` sends functorch to the composite.
        direct = copy.copy(self)
        direct.forward, direct.backward = private_torch.direct(forward), backward and private_torch.direct(backward)
        direct.save, direct.named = private_torch.save_directly, tuple.__new__
        self.eager, self.traced = [(direct.forward, False)] * 2, [(self._trace_raw, True)] * 2
        if self.differentiable:
            self.function = autograd_function(self)
            self.eager[1] = private_torch.direct_apply(autograd_function(direct)), False
            self.traced[1] = self._trace_apply, True
        if forward in launchers:
            launchers[forward].validate = self.validate_operands
        self.cpu = availability.mode() != "off" and all(has_kernel(name, "CPU") for name in self.raw)
        self.cuda = availability.Devices(self)
        self.prepare = self.prepare  # bound once: each call finds it 45 ns sooner
        registry[name] = self

    def call(self, *arguments):
        """Run the op on the arguments of its public function."""
        try:
            takes, operands = self.prepare(*arguments)
            calls = route(self, operands) if takes else None
            if calls is not None:
                run, traced = calls
                if traced:
                    self.validate(*arguments)
                results = run(*operands)
                if self.hides and type(results) is tuple:
                    return results[0] if self.visible == 1 else results[: self.visible]
                return results
        except Exception as error:
            check.explain(self.validate, *arguments)
            raise_cause(error)
            raise
        self.validate(*arguments)
        if is_over_ranks(operands[: self.tensors]):
            return self.call_over_ranks(operands, takes)
        return self.composite(*operands)

    def call_over_ranks(self, operands, takes):
        """Run the op on DTensors; safeops.distributed replaces this method. takes: the first result of `prepare`."""
        raise NotImplementedError

    def operands(self, *operands):
        """The raw forward op's operands as a named tuple; trailing ones that are left out get their defaults."""
        return self.Operands(*operands, *self.defaults[len(operands) :])

    # ---- what a family implements

    def prepare(self, *arguments):
        """Returns (True if the kernel takes such arguments, the raw op's operands). Trailing defaults are left out:
        each operand costs a small call 50 ns."""
        raise NotImplementedError

    def validate(self, *arguments):
        """Raise if the public function does not take these arguments."""
        raise NotImplementedError

    def validate_operands(self, *operands):
        """`validate` for the raw forward op's operands. A Triton launcher calls it: it checks almost nothing itself."""
        self.validate(*operands)

    def gradients(self, grad, needs, operands, results):
        """The gradients of the differentiable operands, from the backward kernel. The gradient of a broadcast operand
        has the full shape: the caller sums it to the operand's shape.

        operands, results: named tuples `Operands` and `Saved`, with the field names of the raw forward's schema.
        needs: a bool per operand, True if its gradient is wanted.
        """
        raise NotImplementedError

    def composite_gradients(self, grad, needs, operands, results):
        """The results of `gradients` from the definition, with a graph: they can be differentiated again."""
        operands = list(operands)
        for i in range(self.linear):  # not saved, but a linear op has the same derivative at 0
            zero = torch.zeros((), dtype=operands[i].dtype, device=grad.device)
            operands[i] = zero.expand(operands[i].shape).requires_grad_(needs[i])
        grads = differentiable_backward(self.differentiated, operands, grad)
        return [grads[i] for i in self.gradient_places]

    def differentiated(self, *operands):
        """The differentiable result, from the definition."""
        return self.definition(*operands)

    @staticmethod
    def save(ctx, tensors):
        """Save tensors for backward. The eager route has `private_torch.save_directly` in its place."""
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def named(kind, values):
        """values as a NamedTuple. The eager route has `tuple.__new__` in its place, which takes half the time."""
        return kind(*values)

    # ---- the other routes

    def composite(self, *operands):
        first, operands = operands[0], (*operands, *self.defaults[len(operands) :])
        return self.definition(*[as_operand(x, first) if i in self.numbers else x for i, x in enumerate(operands)])

    # In a trace a raw op makes a constant of each number. So Dynamo traces the definition if a number is symbolic.

    def _trace_raw(self, *operands):
        return (self.composite if self._symbolic(operands) else self.forward)(*operands)

    def _trace_apply(self, *operands):
        return (self.composite if self._symbolic(operands) else self.function.apply)(*operands)

    def _symbolic(self, operands):
        return any(i < len(operands) and symbolic(operands[i]) for i in self.numbers)


class Inner(Op):
    """The record of an op that a composed function calls. It has CUDA kernels only: on the CPU, and under
    torch.compile, its definition runs, which calls ops that have kernels.

    It has the composed function's name, so that errors name the function; the function's record, created later, stays
    in the registry."""

    differentiable, compiled = ("input", "target"), ()

    def validate(self, *arguments):
        """Nothing to do: the public function has validated its arguments."""
