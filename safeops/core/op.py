"""One record per op, and what follows from it: the autograd Function, the call path, the composite, the public op.

A family is a subclass of `Op`, an op is an instance. The public function calls it with its own arguments: `prepare`
makes the raw op's operands of them, `route` decides who computes, and `validate` explains what went wrong.
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
    return namedtuple(kind, names)  # many ops have the same names, and each class is compiled from a text


def _places(fields, names):
    """Where the names are among the fields: side by side."""
    first = fields.index(names[0]) if names else 0
    assert fields[first : first + len(names)] == names, f"{names} are not side by side in {fields}"
    return slice(first, first + len(names))


class Public:
    """The record of a public function.

    module: the name of its class in safeops.nn, if it has one. buffers: the tensors that its constructor takes.
    example: the operands of a call, for its docstring.
    parts: other ops that the function calls.
    raw: its raw ops. owner: whose kernel runs on CUDA, "C++/CUDA" or "Triton".
    cpu: whether there is a kernel to take. cuda: the same of each CUDA device, by its index.
    """

    public_function = None  # `public` sets it; the lists' scans have none
    module, buffers, example = None, (), "torch.tensor([0.5, 3.0]), torch.zeros(2)"
    parts, raw, owner = (), (), None

    @property
    def family(self):
        """The folder that has its file: safeops/ops/<family>."""
        return (self.public_function or type(self)).__module__.split(".")[-2]

    def runs_on(self, device):
        """True if tensors of a device take the kernels."""
        device = torch.device(device)
        if device.type == "cuda":
            return self.cuda[torch.cuda.current_device() if device.index is None else device.index]
        return device.type == "cpu" and self.cpu

    def validate_buffer(self, name, key, x):
        """Raise where the constructor of a module does not take this tensor."""
        if x is not None:
            check.floating(name, key, x)

    def public(self, *schemas, arguments=""):
        """Decorator of the public function: registers it as `safeops::<op>`, one schema an overload.

        arguments: what the docstrings of a family share, in place of {arguments}.
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
        """parts: records. validate_options(name, reduction, empty, ...): checks what a module's constructor takes."""
        self.name, self.module, self.buffers, self.example = name, module, buffers, example
        self.parts, self.validate_options = parts, validate_options
        self.cpu = all(part.cpu for part in self.parts)
        registry[name] = self

    def runs_on(self, device):
        return all(part.runs_on(device) for part in self.parts)


class Op(Public):
    """The record of a public op, and its call path.

    The names are those of the raw forward op's operands, whose tensors come first, and of its results. A family, or an
    op, says:

    differentiable: the operands whose gradients the backward kernel computes.
    constant: the operands whose gradient only the composite has.
    sum_to: where operands broadcast, `sums.sum_to`, which sums a gradient of the full shape to that of its operand.
    linear: in how many of its first operands, at most two and of one dtype, the op is linear: backward reads that dtype
        and their shapes, no more.
    visible: how many of the raw forward's results the caller sees. The others are for backward.
    saved: the results that backward reads; None: all but the first. reads: the tensors that it reads; None: all but
        the linear ones.
    domain: a function of `core.domain` for each tensor, with which the checks make operands. None: all take any number.
    waits: whether the host reads a size of the results.
    keep: (results, tensors) -> what to save, where that depends: as many results as `saved` says (None may stand for
        one), then tensors.
    shards: what it is of DTensors, of safeops.distributed._dtensor: its name there. None: the composite.
    compiled: the device types whose kernel is kept under torch.compile. Elsewhere Inductor fuses the composite with
        its neighbours, which wins.
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
        """forward, backward, also: the raw ops. definition: the composite, of the raw forward's operands."""
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
        # (function, whether it is Dynamo's): without a gradient to record, and with one. Twice: as Dynamo traces them,
        # and without torch's Python layers, which are a quarter of a small call. The route has sent functorch, which
        # those layers are for, to the composite.
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
        """The op, of its public function's own arguments."""
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
        """The results of a call on DTensors: `safeops.distributed` puts its own here. takes: as `prepare` says."""
        raise NotImplementedError

    def operands(self, *operands):
        """The raw forward op's operands by name; trailing ones that are left out have their defaults."""
        return self.Operands(*operands, *self.defaults[len(operands) :])

    # ---- what a family says

    def prepare(self, *arguments):
        """(whether the kernel takes such arguments, the raw op's operands). Trailing defaults are left out: each
        operand costs a small call 50 ns."""
        raise NotImplementedError

    def validate(self, *arguments):
        """Raise where the public function does not take these arguments."""
        raise NotImplementedError

    def validate_operands(self, *operands):
        """`validate`, of the raw forward op's operands: what a launcher asks, which itself takes nearly anything."""
        self.validate(*operands)

    def gradients(self, grad, needs, operands, results):
        """Those of the differentiable operands, by the backward kernel; of broadcast ones before the sum.

        operands, results: NamedTuples, `Operands` and `Saved`, whose fields are the names in the raw forward's schema.
        needs: which of the operands want one.
        """
        raise NotImplementedError

    def composite_gradients(self, grad, needs, operands, results):
        """The results as a graph of their own, by the definition."""
        operands = list(operands)
        for i in range(self.linear):  # the derivative may be taken at 0
            zero = torch.zeros((), dtype=operands[i].dtype, device=grad.device)
            operands[i] = zero.expand(operands[i].shape).requires_grad_(needs[i])
        grads = differentiable_backward(self.differentiated, operands, grad)
        return [grads[i] for i in self.gradient_places]

    def differentiated(self, *operands):
        """The result that has a gradient, by the definition."""
        return self.definition(*operands)

    @staticmethod
    def save(ctx, tensors):
        """Save tensors for backward. In a direct call: `private_torch.save_directly`."""
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def named(kind, values):
        """values as a NamedTuple. In a direct call: `tuple.__new__`, which takes half the time."""
        return kind(*values)

    # ---- the other routes

    def composite(self, *operands):
        first, operands = operands[0], (*operands, *self.defaults[len(operands) :])
        return self.definition(*[as_operand(x, first) if i in self.numbers else x for i, x in enumerate(operands)])

    # A raw op makes a constant of each number: where one is symbolic, Dynamo traces the definition.

    def _trace_raw(self, *operands):
        return (self.composite if self._symbolic(operands) else self.forward)(*operands)

    def _trace_apply(self, *operands):
        return (self.composite if self._symbolic(operands) else self.function.apply)(*operands)

    def _symbolic(self, operands):
        return any(i < len(operands) and symbolic(operands[i]) for i in self.numbers)


class Inner(Op):
    """The record of an op of two tensors inside a composed function, whose kernels are CUDA's: on the CPU, and where
    the call is compiled, the definition is taken, whose parts have kernels.

    It bears the function's name, whose record takes its place in the registry: what fails is the function."""

    differentiable, compiled = ("input", "target"), ()

    def validate(self, *arguments):
        """The public function has."""
