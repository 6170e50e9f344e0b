"""The torch.library namespace: loads the built extensions, declares ops, attaches kernels.

Of every op it has the raw kernel ops (`_<op>`, `_<op>_backward`: no autograd of their own), and
`safeops::<op>`, which is the public function itself (CompositeImplicitAutograd), so that calling
`torch.ops.safeops.<op>` has the same autograd and autocast behaviour.
"""

import importlib
import importlib.util
import inspect
import re
import threading

import torch

from safeops.core import NAME, private_torch
from safeops.core.check import undense

lib = torch.library.Library(NAME, "DEF")


def _load(name):
    """Import a built extension. Absent is a pure-Python install; present but broken is an error, never a fallback."""
    if importlib.util.find_spec(f"{NAME}.{name}") is None:
        return None
    return importlib.import_module(f"{NAME}.{name}")


# Registers the C++ kernels under CPU and CUDA. An impl may precede the schema it belongs to.
cpu_extension = _load("_C")
cuda_extension = _load("_cuda")
has_triton = importlib.util.find_spec("triton") is not None
launchers = {}  # of the raw ops that have one in Triton


def has_kernel(name, key):
    return private_torch.dispatcher_has(f"{NAME}::{name}", key)


def declare_raw(name, schema, *, fake, composite=None, triton=None):
    """Declare `safeops::<name>` and return its overload, ready to call.

    fake: shapes, strides and dtypes of the result. composite: the definition, for devices without a kernel.
    triton: "family.file.function" inside safeops.kernels, imported at the first call. Each of the three is called with
    all of the schema's arguments, by position: the defaults stand in the schema alone.
    """
    lib.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    op = getattr(getattr(torch.ops, NAME), name).default
    complete = _completer(op)
    private_torch.register_fake(lib, name, _one_device(name, fake, complete))
    if composite is not None:
        lib.impl(name, _dense_only(name, composite, complete), "CompositeExplicitAutograd")
    if triton is not None and has_triton:
        launcher = launchers[op] = _Lazy(*triton.rsplit(".", 1), defaults(op))
        if cpu_extension is None:
            lib.impl(name, launcher, "CUDA")
        else:
            lib.define(f"{name}_launch{schema}")
            lib.impl(f"{name}_launch", torch.library.fallthrough_kernel, "Autograd")  # `name` has been through it
            cache_launches(launcher, op, lib, "CUDA")
    return op


def cache_launches(launcher, op, lib, key, **options):
    """Put the extension before a launcher: what was launched once is launched again without Python (csrc/launch)."""
    schema = private_torch.schema(op)
    name = f"{schema.name.partition('::')[2]}_launch"
    lib.impl(name, _held(launcher, len(schema.returns)), key, **options)
    cpu_extension.cache_launches(schema.name, "".join(_KINDS[str(x.type)] for x in schema.arguments), key)


# The types of arguments as csrc/launch/key.h has them
_KINDS = {"Tensor": "t", "Optional[Tensor]": "T", "List[int]": "l", "Optional[List[int]]": "L"}
_KINDS |= dict.fromkeys(("bool", "int", "float"), "n") | dict.fromkeys(("Optional[int]", "Optional[float]"), "N")

_errors = threading.local()


def _held(launcher, results):
    """A launcher whose exceptions wait for `raise_cause`: to the extension, which calls it, passes their text alone."""

    def launch(*arguments):
        try:
            result = launcher(*arguments)
            if cpu_extension.wants_trace():
                launcher.trace(arguments)
            return result
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            _errors.held = text, error
            cpu_extension.fail(text)
            nothing = [torch.empty(0) for _ in range(results)]
            return nothing[0] if results == 1 else tuple(nothing)

    return launch


_NO_MEMORY = re.compile(r"safeops: no memory for (\d+) bytes on (\S+)")  # csrc/common/allocation.h


def raise_cause(error):
    """Raise what has happened in fact, if `error` is all that came of it through libtorch's C boundary: what a launcher
    has raised, or the allocator, which is asked once more for as many bytes."""
    text, held = _errors.__dict__.pop("held", (None, None))
    if held is not None and text in str(error):
        raise held from None
    if missing := _NO_MEMORY.search(str(error)):
        count, device = int(missing[1]), torch.device(missing[2])
        try:
            torch.empty(count, dtype=torch.uint8, device=device)
        except RuntimeError as cause:
            raise cause from None
        if device.type == "cuda":  # there is room by now
            raise torch.OutOfMemoryError(missing[0]) from None


def defaults(op):
    return tuple(x.default_value for x in private_torch.schema(op).arguments)


def _completer(op):
    """A function from the arguments that the dispatcher hands over, without trailing defaults, to all of them."""
    values = defaults(op)
    return lambda args: (*args, *values[len(args) :])


def document(function, arguments):
    """Put what a family's docstrings share in the place of {arguments}; all arguments in the order of the signature."""
    if function.__doc__:  # python -OO has none
        head, title, listed = function.__doc__.partition("    Args:\n")
        listed, blank, rest = listed.replace("        {arguments}\n", arguments).partition("\n\n")
        code = inspect.unwrap(function).__code__
        order = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        entries = re.findall(r" {8}(\w+):(.*\n(?: {9,}.*\n)*)", listed + "\n")
        entries.sort(key=lambda entry: order.index(entry[0]))
        listed = "".join(f"        {name}:{text}" for name, text in entries)
        function.__doc__ = head + title + listed + blank[1:] + rest


def like(x, shape, dtype):
    """An output in x's own memory order where x has the full shape, else contiguous: the kernels' rule."""
    return torch.empty_like(x, dtype=dtype) if x.shape == shape else x.new_empty(shape, dtype=dtype)


def only(needed, tensors):
    """Gradients of the tensors that need one, like them; an empty tensor for each of the others."""
    return tuple(torch.empty_like(x) if need else x.new_empty(0) for x, need in zip(tensors, needed))


def _tensors(arguments):
    """The tensors among an op's arguments, and in the lists among them."""
    for x in arguments:
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from (y for y in x if isinstance(y, torch.Tensor))


def _one_device(name, fake, complete):
    """A meta operand beside a real one comes here: its result would be real memory that nobody wrote."""

    def checked(*args):
        devices = {x.device for x in _tensors(args)}
        if len(devices) > 1:
            raise ValueError(f"{name}: operands on {' and '.join(sorted(map(str, devices)))}")
        return fake(*complete(args))

    return checked


def _dense_only(name, composite, complete):
    """CompositeExplicitAutograd also catches sparse and quantized tensors, which no definition here is meant for."""

    def dense(*args):
        for x in _tensors(args):
            if kind := undense(x):
                raise TypeError(f"{name}: needs dense tensors, got {kind}")
        return composite(*complete(args))

    return dense


def declare_public(function, *schemas):
    """Register the public function itself as `safeops::<op>`, one schema an overload."""
    for schema in schemas:
        lib.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        lib.impl(schema[: schema.index("(")], function, "CompositeImplicitAutograd")


class _Lazy:
    """A launcher that imports Triton at its first call: `import safeops` must not pay for it.

    Here alone the name of a kernel becomes the kernel: "vectors.normalize.normalize" of a raw op's declaration is the
    function `normalize` of kernels/vectors/normalize.py. (Kernels in C++ register themselves: csrc/<device>/<family>.)

    validate: raises where the op does not take the operands. Behind the extension this is asked once for each key: what
    was refused is never prepared, and the key has all that was asked about (csrc/launch/README.md).
    """

    def __init__(self, module, name, defaults):
        self.module, self.name, self.defaults, self.launch = module, name, defaults, None
        self.validate = lambda *operands: None

    def __call__(self, *args):
        if self.launch is None:
            self.launch = getattr(importlib.import_module(f"{NAME}.kernels.{self.module}"), self.name)
        args = self.complete(args)
        self.validate(*args)
        return self.launch(*args)

    def complete(self, args):
        return *args, *self.defaults[len(args) :]

    def trace(self, args):
        """Tell the extension how the launch of this call follows from sizes."""
        trace = importlib.import_module(f"{NAME}.kernels.engine.trace").trace
        trace(self.launch, self.complete(args), cpu_extension)
