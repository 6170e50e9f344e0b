"""Every private name of torch that safeops uses, and what for. tests/test_private_torch.py tests each of them.

Functions are bound here, at import: a small call must not pay for looking them up.
"""

import operator
import sys
import types

import torch
import torch.utils.checkpoint

# forward_ad._current_level: depth of forward-mode AD, -1 outside. Callers read it: a function would cost 50 ns a call.
from torch.autograd import forward_ad as forward_ad
from torch.utils import _python_dispatch, _pytree

# ---- routes

transforms_active = torch._C._are_functorch_transforms_active  # True inside torch.func and vmap


def dynamo_is_loaded():
    """False if nothing can have been compiled in this process. (Importing Dynamo takes seconds.)"""
    return "torch._dynamo" in sys.modules


def is_exporting():
    """torch.compiler.is_exporting(), which the Dynamo of torch 2.11 wrongly reads as True in every trace."""
    return torch.compiler._is_exporting_flag


def is_autocast_available(device_type):
    """torch.amp.is_autocast_available(), which the Dynamo of torch 2.11 cannot trace."""
    return torch._C._is_autocast_available(device_type)


is_autocast_available._dynamo_marked_constant = True  # Dynamo calls it while it traces: the result is a constant


def has_static_value(x):
    """True if the number x is a constant in a trace, False if it is symbolic."""
    from torch.fx.experimental import symbolic_shapes  # imports sympy

    return symbolic_shapes.has_static_value(x)


def value_at_trace(x):
    """The value of a SymInt or SymFloat during an export, or None. Reading it adds no guard to the program."""
    return x.node.hint if x.node.has_hint() else None


# Sets torch.backends.mkldnn.enabled, also where torch.testing forbids it. (torch's context manager warns about TF32.)
enable_onednn = torch._C._set_mkldnn_enabled

# ---- exported programs


def saved_by_name(cls):
    """Decorator of a NamedTuple of tensors: torch.load accepts it, and torch.export.save programs that return it."""
    torch.serialization.add_safe_globals([cls])
    _pytree._register_namedtuple(cls, serialized_type_name=f"safeops.{cls.__name__}")
    return cls


# ---- ops

dispatcher_has = torch._C._dispatch_has_kernel_for_dispatch_key  # (op, key): True if exactly this key has a kernel
OpOverload, OpOverloadPacket = torch._ops.OpOverload, torch._ops.OpOverloadPacket  # torch.ops.aten.add.Tensor and .add
direct = operator.attrgetter("_op")  # an overload without its Python layer
schema = operator.attrgetter("_schema")  # an overload's schema: what it reads, writes and returns
foreach_norm = torch._foreach_norm  # the norms of a list of tensors


def register_fake(lib, name, function):
    """torch.library.register_fake without its search for source lines, which took a tenth of `import safeops`."""
    handle = torch._library.simple_registry.singleton.find(f"{lib.ns}::{name}").fake_impl.register(
        function, "safeops", lib=lib
    )
    lib._registration_handles.append(handle)  # (torch undoes these registrations when it destroys the library)


def direct_apply(function):
    """The `apply` of an autograd.Function without its Python layer, which only adds what functorch needs."""
    return super(torch.autograd.Function, function).apply


def save_directly(ctx, tensors):
    """ctx.save_for_backward(*tensors) and ctx.set_materialize_grads(False) without their Python layer."""
    ctx.to_save, ctx.materialize_grads = tensors, False


# ---- autograd

keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph  # in a backward: True if the graph is retained
is_batched = torch._C._functorch.is_legacy_batchedtensor  # a gradient of torch.autograd.grad(is_grads_batched=True)
tensor_hooks = operator.attrgetter("_backward_hooks")  # of Tensor.register_hook; may be set, on a leaf
saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks  # (False): the innermost pair, or None

# ---- modules

# the tables {id: hook} of a module
MODULE_HOOKS = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
FSDP = "torch.distributed.fsdp"  # the package of fully_shard: the module of its hooks
has_global_hooks = torch.nn.modules.module._has_any_global_hook  # hooks of all modules


def caches_parametrizations():
    """True inside torch.nn.utils.parametrize.cached()."""
    return torch.nn.utils.parametrize._cache_enabled > 0


sharding_state = operator.methodcaller("_get_fsdp_state")  # of a module of fully_shard
# (attribute of that state, the mixed precision policy: a value with which the module's forward casts nothing)
NO_CASTS = "_mp_policy", types.SimpleNamespace(cast_forward_inputs=False, param_dtype=None, output_dtype=None)


def cast_hook(sharded, table):
    """The function by which fully_shard's hook, in a table of hooks, casts as its precision policy says; or None."""
    state = sharding_state(sharded)
    return {
        "_forward_pre_hooks": lambda module, args, kwargs: state._cast_forward_inputs(args, kwargs),
        "_forward_hooks": lambda module, args, output: state._cast_output_dtype(output),
    }.get(table)


def colwise_layout(module):
    """(mesh, placements that a plain input has) of an nn.Linear under torch's ColwiseParallel; None for any other, also
    for one with more hooks than those of ColwiseParallel and fully_shard."""
    style = sys.modules.get("torch.distributed.tensor.parallel.style")  # (importing it would take half a second)
    if style is None or not isinstance(module, torch.nn.Linear):
        return None
    hooks = [
        [f for f in getattr(module, table).values() if not str(getattr(f, "__module__", "")).startswith(FSDP)]
        for table in MODULE_HOOKS
    ]
    if [len(x) for x in hooks] != [1, 1, 0, 0]:
        return None
    before, after = (_closure(x[0]) for x in hooks[:2])
    functions = [getattr(x, "func", None) for x in (before.get("input_fn"), after.get("output_fn"))]
    if functions != [style.ColwiseParallel._prepare_input_fn, style.ColwiseParallel._prepare_output_fn]:
        return None
    return before["device_mesh"], before["input_fn"].args[0]


def _closure(function):
    """{name: value} of the variables in a function's closure."""
    names = function.__code__.co_freevars if isinstance(function, types.FunctionType) else ()
    return {name: cell.cell_contents for name, cell in zip(names, function.__closure__ or ())} if names else {}


# ---- safe mode

is_tracing = torch._C._is_tracing  # True inside torch.jit.trace; torch.jit.is_tracing() costs twice as much
top_function_mode = torch.overrides._get_current_function_mode  # this thread's innermost TorchFunctionMode, or None
disable_dynamo = torch._disable_dynamo  # torch.compiler.disable, which imports Dynamo only when it is called
function_mode_stack = torch.overrides._get_current_function_mode_stack  # the thread's TorchFunctionModes

dispatch_modes = torch._C._len_torch_dispatch_stack  # the number of this thread's TorchDispatchModes
saved_dividend, saved_divisor = map(operator.attrgetter, ("_saved_self", "_saved_other"))  # of a division's node


def assume_constant_result(function):
    """torch.compiler.assume_constant_result, without the import of Dynamo."""
    function._dynamo_marked_constant = True
    return function


def _inner_function(wrapper):
    """The closure cell with the function that a wrapper calls. Setting it changes the wrapper for every importer."""
    (cell,) = [x for x in wrapper.__closure__ if callable(x.cell_contents)]
    return cell


def step_function(optimizer):
    """The closure cell with the `step` of an optimizer's class, which torch's wrapper calls between the hooks. None if
    another wrapper is around torch's."""
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

TorchDispatchMode = _python_dispatch.TorchDispatchMode  # a context: its __torch_dispatch__ receives every op
FakeTensor = torch._subclasses.FakeTensor  # a tensor without values: with it a DTensor finds a result's layout
disable_modes = _python_dispatch._disable_current_modes  # a context in which no mode receives ops
current_node = torch._C._current_autograd_node  # the node whose backward is running in this thread, or None
next_sequence = torch._C._autograd._get_sequence_nr  # the number that this thread's next node will get
sequence = operator.methodcaller("_sequence_nr")  # the number of a node
# Names of torch's Python functions, to find them in a stack
MAKES_GRADIENTS = "_make_grads"  # makes the gradient 1 that backward starts with
RUNS_ENGINE = "_engine_run_backward"  # calls the autograd engine
STEPS_OPTIMIZER = "_maybe_opt_step"  # GradScaler's: reads on the host whether to skip the step

# ---- debugging: memory

base = operator.attrgetter("_base")  # the tensor that this one is a view of, or None
identity = operator.attrgetter("_cdata")  # an untyped storage's address: unique while a weak reference to it lives
weak_reference = torch.UntypedStorage._weak_ref  # keeps the identity of a storage, not its bytes
free_weak_reference = torch.UntypedStorage._free_weak_ref
SAVED = "_saved_"  # the prefix of the attributes of an autograd node that hold what it saved


def version(x):
    """How many times a tensor or a view of its memory was written in place; 0 for inference tensors."""
    return 0 if x.is_inference() else x._version


# ---- across ranks

flattened = operator.methodcaller("_flatten")  # a mesh with named dims as a mesh of one dim, made once


def start_all_reduce(x, group):
    """Start the sum of x over a group. The returned tensor waits for it at its first use."""
    from torch.distributed import _functional_collectives

    return _functional_collectives.all_reduce(x, "sum", group)


def default_store():
    """The key-value store of torch.distributed, which all ranks reach."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def set_group_timeout(timeout):
    """Set how long a collective of the default group may take; return what it was."""
    from torch.distributed import distributed_c10d

    group = distributed_c10d.GroupMember.WORLD
    before = group._get_backend(group._device_types[0]).options._timeout
    distributed_c10d._set_pg_timeout(timeout, group)
    return before


def awaited(x):
    """Wait for a tensor from `start_all_reduce` and return its value; any other tensor as it is."""
    return x.trigger_wait() if hasattr(x, "trigger_wait") else x


# ---- debugging: compiled code


def compile_with_hooks(stack, limit=4096):
    """Until `stack`, an ExitStack, is closed, code that is compiled has guards on modules' hooks and eager's random
    numbers, and up to `limit` versions. Returns False where Dynamo, which takes seconds to import, is not loaded."""
    if "torch._dynamo" not in sys.modules:
        return False
    import torch._inductor.config as inductor

    limits = {name: limit for name in ("recompile_limit", "accumulated_recompile_limit")}
    stack.enter_context(torch._dynamo.config.patch(skip_nnmodule_hook_guards=False, **limits))
    stack.enter_context(inductor.patch(fallback_random=True))
    return True


def forget_compiled_code():
    """torch.compiler.reset(), which imports Dynamo where nothing can have been compiled so far."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


# ---- testing

tree_leaves, tree_map_only = _pytree.tree_leaves, _pytree.tree_map_only  # of nested lists, tuples and dicts
keep_busy = torch.cuda._sleep  # (clock cycles): keeps the current CUDA stream busy


def counting_backend(name):
    """A torch.compile backend whose `frame_count` counts the graphs that it compiled."""
    from torch._dynamo.testing import CompileCounterWithBackend  # (Dynamo takes seconds to import)

    return CompileCounterWithBackend(name)
