"""The torch.library namespace: loads the built extensions, declares ops, attaches kernels.

Each op has raw ops (`safeops::_<op>`, `safeops::_<op>_backward`), which kernels implement and which have no autograd,
and `safeops::<op>`: the public function, registered as CompositeImplicitAutograd. So `torch.ops.safeops.<op>` has the
autograd and autocast behaviour of the public function.
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
    """Import a built extension. None if it is absent (a pure-Python install); one that does not load raises."""
    if importlib.util.find_spec(f"{NAME}.{name}") is None:
        return None
    return importlib.import_module(f"{NAME}.{name}")


# The import registers the C++ kernels for CPU and CUDA. They may be registered before their schemas are defined.
cpu_extension = _load("_C")
cuda_extension = _load("_cuda")
has_triton = importlib.util.find_spec("triton") is not None
launchers = {}  # {raw op: its Triton launcher}


def has_kernel(name, key):
    return private_torch.dispatcher_has(f"{NAME}::{name}", key)


def declare_raw(name, schema, *, fake, composite=None, triton=None):
    """Declare `safeops::<name>` and return its overload, ready to call.

    fake: returns empty results of the right shapes, strides and dtypes. composite: the definition, for devices without
    a kernel. triton: "family.file.function" inside safeops.kernels, imported at the first call. Each of the three gets
    all of the schema's arguments by position: default values stand in the schema alone.
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
            # (`name` calls `name`_launch, and has passed the Autograd key itself)
            lib.impl(f"{name}_launch", torch.library.fallthrough_kernel, "Autograd")
            cache_launches(launcher, op, lib, "CUDA")
    return op


def cache_launches(launcher, op, lib, key, **options):
    """Let the extension take a launcher's calls: it stores each launch, and repeats it without Python (csrc/launch)."""
    schema = private_torch.schema(op)
    name = f"{schema.name.partition('::')[2]}_launch"
    lib.impl(name, _held(launcher, len(schema.returns)), key, **options)
    cpu_extension.cache_launches(schema.name, "".join(_KINDS[str(x.type)] for x in schema.arguments), key)


# {type of an argument: its letter in csrc/launch/key.h}; a capital letter: the argument may be None
_KINDS = {"Tensor": "t", "Optional[Tensor]": "T", "List[int]": "l", "Optional[List[int]]": "L"}
_KINDS |= dict.fromkeys(("bool", "int", "float"), "n") | dict.fromkeys(("Optional[int]", "Optional[float]"), "N")

_errors = threading.local()


def _held(launcher, results):
    """Wrap a launcher for calls from C++. C++ passes on only an exception's text: it is held here for `raise_cause`."""

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
    """Raise the exception behind `error`, if libtorch's C boundary passed on only its text. A launcher's exception is
    the one that `_held` keeps. The allocator's is raised by allocating again. Otherwise return."""
    text, held = _errors.__dict__.pop("held", (None, None))
    if held is not None and text in str(error):
        raise held from None
    if missing := _NO_MEMORY.search(str(error)):
        count, device = int(missing[1]), torch.device(missing[2])
        try:
            torch.empty(count, dtype=torch.uint8, device=device)
        except RuntimeError as cause:
            raise cause from None
        if device.type == "cuda":  # the allocation works by now
            raise torch.OutOfMemoryError(missing[0]) from None


def defaults(op):
    return tuple(x.default_value for x in private_torch.schema(op).arguments)


def _completer(op):
    """A function that appends the defaults of trailing arguments, which the dispatcher leaves out of a call."""
    values = defaults(op)
    return lambda args: (*args, *values[len(args) :])


def document(function, arguments):
    """Replace {arguments} in a docstring by the family's shared text, and sort its arguments as in the signature."""
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
    """An empty output as the kernels allocate it: in x's memory order if x has the same shape, else contiguous."""
    return torch.empty_like(x, dtype=dtype) if x.shape == shape else x.new_empty(shape, dtype=dtype)


def only(needed, tensors):
    """Uninitialized gradients, one per tensor: like the tensor if it is needed, else without elements."""
    return tuple(torch.empty_like(x) if need else x.new_empty(0) for x, need in zip(tensors, needed))


def _tensors(arguments):
    """Yield the tensors among an op's arguments, and those in its lists and tuples."""
    for x in arguments:
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from (y for y in x if isinstance(y, torch.Tensor))


def _one_device(name, fake, complete):
    """Wrap `fake` to raise for operands on several devices. With a meta and a real operand the dispatcher calls `fake`,
    and its result would be real memory that no kernel writes."""

    def checked(*args):
        devices = {x.device for x in _tensors(args)}
        if len(devices) > 1:
            raise ValueError(f"{name}: operands on {' and '.join(sorted(map(str, devices)))}")
        return fake(*complete(args))

    return checked


def _dense_only(name, composite, complete):
    """Wrap a composite to refuse sparse and quantized tensors, which CompositeExplicitAutograd also receives."""

    def dense(*args):
        for x in _tensors(args):
            if kind := undense(x):
                raise TypeError(f"{name}: needs dense tensors, got {kind}")
        return composite(*complete(args))

    return dense


def declare_public(function, *schemas):
    """Register the public function as `safeops::<op>`, with one overload per schema."""
    for schema in schemas:
        lib.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        lib.impl(schema[: schema.index("(")], function, "CompositeImplicitAutograd")


class _Lazy:
    """A launcher that imports Triton at its first call, so that `import safeops` does not.

    It finds a Triton kernel by its name: triton="vectors.normalize.normalize" in `declare_raw` is the function
    `normalize` of kernels/vectors/normalize.py. (C++ kernels register themselves: csrc/<device>/<family>.)

    validate: raises if the op does not take the operands. The extension stores a launch by a key, which holds all that
    `validate` reads. So `validate` runs once per key, and a refused call is never stored (csrc/launch/README.md).
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
        """Record for the extension how the launch of this call depends on sizes and strides."""
        trace = importlib.import_module(f"{NAME}.kernels.engine.trace").trace
        trace(self.launch, self.complete(args), cpu_extension)
