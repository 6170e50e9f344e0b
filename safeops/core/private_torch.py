"""Every private name of torch that safeops uses, and what for: tests/test_private_torch.py shows that each still holds.

Functions are bound here, at import: a small call must not pay for looking them up.
"""

import operator
import types

import torch
import torch.utils.checkpoint

# `_current_level` of it is the depth of forward-mode AD, -1 outside: read where it is needed, a call costs 50 ns.
from torch.autograd import forward_ad as forward_ad
from torch.utils import _python_dispatch, _pytree

# ---- routes

transforms_active = torch._C._are_functorch_transforms_active  # True inside torch.func and vmap


def is_exporting():
    """torch.compiler.is_exporting(), which the Dynamo of torch 2.11 takes for True in every trace."""
    return torch.compiler._is_exporting_flag


def is_autocast_available(device_type):
    """torch.amp.is_autocast_available(), which the Dynamo of torch 2.11 cannot trace."""
    return torch._C._is_autocast_available(device_type)


is_autocast_available._dynamo_marked_constant = True  # Dynamo asks it while it traces, and keeps the answer


def has_static_value(x):
    """True if a trace takes the number x for a constant; otherwise it knows it by a symbol."""
    from torch.fx.experimental import symbolic_shapes  # imports sympy

    return symbolic_shapes.has_static_value(x)


def value_at_trace(x):
    """The value of a SymInt or SymFloat while a program is exported, read without binding the program to it."""
    return x.node.hint if x.node.has_hint() else None


# To set torch.backends.mkldnn.enabled, also where torch.testing has forbidden that; its context manager warns of TF32.
enable_onednn = torch._C._set_mkldnn_enabled

# ---- exported programs


def saved_by_name(cls):
    """Decorator of a NamedTuple of tensors: torch saves and loads it, and an exported program that returns one."""
    torch.serialization.add_safe_globals([cls])
    _pytree._register_namedtuple(cls, serialized_type_name=f"safeops.{cls.__name__}")
    return cls


# ---- ops

dispatcher_has = torch._C._dispatch_has_kernel_for_dispatch_key  # (op, key): a kernel was registered for just this key
OpOverload, OpOverloadPacket = torch._ops.OpOverload, torch._ops.OpOverloadPacket  # torch.ops.aten.add.Tensor and .add
direct = operator.attrgetter("_op")  # an overload without its Python layer
schema = operator.attrgetter("_schema")  # of an overload: what it reads, writes and returns
foreach_norm = torch._foreach_norm  # the norms of a list of tensors


def register_fake(lib, name, function):
    """torch.library.register_fake, without the source lines that it looks for: a tenth of `import safeops`."""
    handle = torch._library.simple_registry.singleton.find(f"{lib.ns}::{name}").fake_impl.register(
        function, "safeops", lib=lib
    )
    lib._registration_handles.append(handle)  # (what torch undoes when the library goes)


def direct_apply(function):
    """The `apply` of an autograd.Function without its Python layer, which only adds what functorch needs."""
    return super(torch.autograd.Function, function).apply


def save_directly(ctx, tensors):
    """save_for_backward, and set_materialize_grads(False), of a Function's context without their Python layer."""
    ctx.to_save, ctx.materialize_grads = tensors, False


# ---- autograd

keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph  # in a backward: whether another may follow
is_batched = torch._C._functorch.is_legacy_batchedtensor  # a gradient of torch.autograd.grad(is_grads_batched=True)

# ---- safe mode

is_tracing = torch._C._is_tracing  # torch.jit.trace is; torch.jit.is_tracing() costs twice as much
top_function_mode = torch.overrides._get_current_function_mode  # the innermost of this thread, or None
disable_dynamo = torch._disable_dynamo  # torch.compiler.disable, which imports Dynamo only when it is called
function_mode_stack = torch.overrides._get_current_function_mode_stack  # all of them, as a list

dispatch_modes = torch._C._len_torch_dispatch_stack  # how many there are in this thread
saved_dividend, saved_divisor = map(operator.attrgetter, ("_saved_self", "_saved_other"))  # of the node of a division


def assume_constant_result(function):
    """torch.compiler.assume_constant_result, without the import of Dynamo."""
    function._dynamo_marked_constant = True
    return function


def _inner_function(wrapper):
    """The cell with the function that a wrapper calls, by whatever name the wrapper was imported."""
    (cell,) = [x for x in wrapper.__closure__ if callable(x.cell_contents)]
    return cell


def step_function(optimizer):
    """The cell with the step of an optimizer's class, which torch's wrapper calls between the hooks. None where
    somebody has wrapped that one."""
    step = type(optimizer).step
    wrapper = isinstance(step, types.FunctionType) and step.__code__.co_freevars == ("func",)
    return step.__closure__[0] if wrapper else None


clipping_function = _inner_function(torch.nn.utils.clip_grad_norm_)
checkpoint_function = _inner_function(torch.utils.checkpoint.checkpoint)


def traced_frames():
    """In Dynamo's trace, the frames of the traced code (filename, lineno), outermost first; otherwise None."""
    from torch._guards import TracingContext

    return None if TracingContext.try_get() is None else TracingContext.extract_stack()


# ---- debugging: ops as they run

TorchDispatchMode = _python_dispatch.TorchDispatchMode  # all ops of a context come to its __torch_dispatch__
FakeTensor = torch._subclasses.FakeTensor  # a shape without values: a DTensor asks by them which layout a result has
disable_modes = _python_dispatch._disable_current_modes  # a context whose ops come to no mode
current_node = torch._C._current_autograd_node  # the node whose backward is running in this thread, or None
next_sequence = torch._C._autograd._get_sequence_nr  # the number that this thread's next node will get
sequence = operator.methodcaller("_sequence_nr")  # the number of a node
MAKES_GRADIENTS = "_make_grads"  # torch's functions, known by name in a stack: makes the 1 that backward begins with
RUNS_ENGINE = "_engine_run_backward"  # calls the autograd engine
STEPS_OPTIMIZER = "_maybe_opt_step"  # GradScaler's, reads whether the step is to be skipped

# ---- debugging: memory

base = operator.attrgetter("_base")  # the tensor that a view is of, or None
identity = operator.attrgetter("_cdata")  # of an untyped storage: its address, no other's while a weak reference lives
weak_reference = torch.UntypedStorage._weak_ref  # keeps the identity of a storage, not its bytes
free_weak_reference = torch.UntypedStorage._free_weak_ref
SAVED = "_saved_"  # how the attributes of a node begin that show what it has saved for backward


def version(x):
    """How many times a tensor, or a view of its memory, was written in place; inference tensors do not count."""
    return 0 if x.is_inference() else x._version


# ---- across ranks

flattened = operator.methodcaller("_flatten")  # a mesh of names as one of one dim, made once


def start_all_reduce(x, group):
    """The sum of x over a group: a tensor that is waited for at its first use."""
    from torch.distributed import _functional_collectives

    return _functional_collectives.all_reduce(x, "sum", group)


def awaited(x):
    """A tensor that `start_all_reduce` gave, when it is there; any other as it is."""
    return x.trigger_wait() if hasattr(x, "trigger_wait") else x


# ---- testing

tree_leaves, tree_map_only = _pytree.tree_leaves, _pytree.tree_map_only  # of nested lists, tuples and dicts
keep_busy = torch.cuda._sleep  # (clock cycles): the current CUDA stream, for so long


def counting_backend(name):
    """A torch.compile backend with a `frame_count` of the graphs it was given."""
    from torch._dynamo.testing import CompileCounterWithBackend  # (Dynamo takes seconds to import)

    return CompileCounterWithBackend(name)
