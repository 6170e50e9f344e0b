"""The torch.library namespace: loads the built extensions, declares ops, attaches kernels.

Every op is declared here in three parts: its raw kernel ops (`_<op>`, `_<op>_backward`: no autograd of their own),
a Python function that picks the route, and `safeops::<op>`, which is that very function (CompositeImplicitAutograd),
so that calling `torch.ops.safeops.<op>` has the same autograd and autocast behaviour.
"""

import dataclasses
import importlib
import importlib.util
import os

import torch

from safeops import _torch, _verified
from safeops._check import undense
from safeops._symbolic import as_operand, symbolic

lib = torch.library.Library("safeops", "DEF")


def _load(name):
    """Import a built extension. Absent is a pure-Python install; present but broken is an error, never a fallback."""
    if importlib.util.find_spec(f"safeops.{name}") is None:
        return None
    return importlib.import_module(f"safeops.{name}")


# Registers the C++ kernels under CPU and CUDA. An impl may precede the schema it belongs to.
cpu_extension = _load("_C")
cuda_extension = _load("_cuda")
has_triton = importlib.util.find_spec("triton") is not None


class Calls:
    """How the kernel route is called: `raw(...)` without grad, `apply(...)` with."""

    def __init__(self, raw, apply):
        self.raw, self.apply = raw, apply


@dataclasses.dataclass
class Op:
    """What the routes and `safeops doctor` know of one public op."""

    name: str
    raw: tuple  # the raw op names, without namespace
    cuda_owner: str  # "C++/CUDA" or "Triton"
    forward: object = None  # the raw forward's overload
    function: type = None  # the autograd.Function around it; None where nothing is differentiable
    definition: object = None  # the composite, of the raw forward's arguments
    cpu: bool = False  # eager CPU tensors take the kernel
    cuda: bool = False  # eager CUDA tensors take the kernel
    verified: dict | None = None  # GPU, torch, date of the last passing GPU run

    def __post_init__(self):
        # The same two calls twice: as Dynamo traces them, and without their Python layers (a quarter of a small call).
        # _route.kernel has sent functorch, which those are for, to the composite.
        function = self.function
        self.traced = Calls(self._raw, self._apply)
        self.eager = Calls(_torch.direct(self.forward), function and _torch.direct_apply(function))
        schema = _torch.schema(self.forward)
        self.numbers = [i for i, x in enumerate(schema.arguments) if "float" in str(x.type)]  # at which places
        self.several = len(schema.returns) > 1
        self.cpu = all(has_kernel(name, "CPU") for name in self.raw)
        self.verified = _verified.record(self.name)
        # A kernel that no GPU has run is not the default.
        trusted = self.verified is not None or os.environ.get("SAFEOPS_UNVERIFIED") == "1"
        self.cuda = trusted and all(has_kernel(name, "CUDA") for name in self.raw)
        registry[self.name] = self

    def composite(self, *arguments):
        operands = [as_operand(x, arguments[0]) if i in self.numbers else x for i, x in enumerate(arguments)]
        return self.definition(*operands)

    # A raw op makes a constant of each number: where one is symbolic, Dynamo traces the definition.

    def _raw(self, *arguments):
        if not self._symbolic(arguments):
            return self.forward(*arguments)
        result = self.composite(*arguments)
        return (result,) if self.several and isinstance(result, torch.Tensor) else result

    def _apply(self, *arguments):
        return (self.composite if self._symbolic(arguments) else self.function.apply)(*arguments)

    def _symbolic(self, arguments):
        return any(i < len(arguments) and symbolic(arguments[i]) for i in self.numbers)


registry: dict[str, Op] = {}


def has_kernel(name, key):
    return _torch.dispatcher_has(f"safeops::{name}", key)


def declare_raw(name, schema, *, fake, composite=None, triton=None):
    """Declare `safeops::<name>` and return its overload, ready to call.

    fake: shapes, strides and dtypes of the result. composite: the definition, for devices without a kernel.
    triton: "module.function" inside safeops.kernels, imported at the first call.
    """
    lib.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"safeops::{name}", _one_device(name, fake), lib=lib)
    if composite is not None:
        lib.impl(name, _dense_only(name, composite), "CompositeExplicitAutograd")
    if triton is not None and has_triton:
        lib.impl(name, _Lazy(*triton.split(".")), "CUDA")
    return getattr(torch.ops.safeops, name).default


def document(function, arguments):
    """Put what a family's docstrings share in the place of {arguments}."""
    if function.__doc__:  # python -OO has none
        function.__doc__ = function.__doc__.replace("        {arguments}\n", arguments)


def like(x, shape, dtype):
    """An output in x's own memory order where x has the full shape, else contiguous: the kernels' rule."""
    return torch.empty_like(x, dtype=dtype) if x.shape == shape else x.new_empty(shape, dtype=dtype)


def _tensors(arguments):
    """The tensors among an op's arguments, and in the lists among them."""
    for x in arguments:
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from (y for y in x if isinstance(y, torch.Tensor))


def _one_device(name, fake):
    """A meta operand beside a real one comes here: its result would be real memory that nobody wrote."""

    def checked(*args, **kwargs):
        devices = {x.device for x in _tensors((*args, *kwargs.values()))}
        if len(devices) > 1:
            raise ValueError(f"{name}: operands on {' and '.join(sorted(map(str, devices)))}")
        return fake(*args, **kwargs)

    return checked


def _dense_only(name, composite):
    """CompositeExplicitAutograd also catches sparse and quantized tensors, which no definition here is meant for."""

    def dense(*args):
        for x in _tensors(args):
            if kind := undense(x):
                raise TypeError(f"{name}: needs dense tensors, got {kind}")
        return composite(*args)

    return dense


def declare_public(function, *schemas):
    """Register the public function itself as `safeops::<op>`, one schema an overload."""
    for schema in schemas:
        lib.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        lib.impl(schema[: schema.index("(")], function, "CompositeImplicitAutograd")


class _Lazy:
    """A launcher that imports Triton at its first call: `import safeops` must not pay for it."""

    def __init__(self, module, name):
        self.module, self.name, self.launch = module, name, None

    def __call__(self, *args, **kwargs):
        if self.launch is None:
            self.launch = getattr(importlib.import_module(f"safeops.kernels.{self.module}"), self.name)
        return self.launch(*args, **kwargs)
