"""Private names of torch (safeops/core/private_torch.py): each exists in this torch, and does what we rely on."""

import contextlib
import functools
import re
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad

import safeops
from safeops.core import private_torch
from safeops.ops.classification.token_log_probs import TokenLogProbs

PRIVATE = re.compile(r"\btorch(\.\w+)*\._(?!_)\w+|(from|import) torch[\w.]*\._|\b\w+\._(version|base|cdata|schema)\b")


def test_they_are_all_in_one_module():
    results = []
    for path in Path(safeops.__file__).parent.rglob("*.py"):
        if path.name != "private_torch.py":
            for number, line in enumerate(path.read_text().splitlines(), 1):
                results += [f"{path}:{number}: {line}" for match in PRIVATE.finditer(line)]
    assert not results, "\n".join(results)


def test_the_rule_finds_them():
    for line in (
        "torch._C._f()",
        "torch.compiler._flag",
        "from torch._C import f",
        "import torch._dynamo",
        "x._version",
    ):
        assert PRIVATE.search(line), line
    assert not PRIVATE.search("from torch import nn; torch.nn.Module.__init__; import torchvision; self._run()")


# ---- routes


def test_transforms_active():
    seen = []
    note = lambda x: (seen.append(private_torch.transforms_active()), x.sum())[1]  # noqa: E731
    x = torch.ones(3)
    note(x)
    torch.func.grad(note)(x)
    torch.vmap(note)(x)
    torch.func.jvp(note, (x,), (x,))
    note(x)
    assert seen == [False, True, True, True, False]


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_depth_of_forward_mode(traced):
    def deep(x):
        return x + 1 if private_torch.forward_ad._current_level >= 0 else x - 1

    if traced:  # the graph must be guarded by the level
        torch.compiler.reset()
        deep = torch.compile(deep, backend="eager", fullgraph=True)
    x = torch.zeros(())
    assert deep(x) == -1
    with forward_ad.dual_level():
        assert deep(x) == 1
    assert deep(x) == -1


def test_transforms_are_known_to_a_trace():
    def value(x):
        return x * 10 if private_torch.transforms_active() else -x

    torch.compiler.reset()
    traced = torch.compile(lambda x: (value(x), torch.vmap(value)(x)), backend="eager", fullgraph=True)
    assert [y.tolist() for y in traced(torch.ones(2))] == [[-1, -1], [10, 10]]


def test_enable_onednn():
    was = torch.backends.mkldnn.enabled
    for wanted in (False, True, was):
        private_torch.enable_onednn(wanted)
        assert torch.backends.mkldnn.enabled == wanted


def test_is_exporting():
    class Module(torch.nn.Module):
        def forward(self, x):
            return x + 1 if private_torch.is_exporting() else x - 1

    x, module = torch.zeros(()), Module()
    torch.compiler.reset()
    assert torch.compile(module, backend="eager", fullgraph=True)(x) == module(x) == -1
    for strict in (True, False):
        assert torch.export.export(module, (x,), strict=strict).module()(x) == 1


def test_is_autocast_available():
    expected = {"cpu": True, "cuda": True, "meta": False}

    def answers(x):
        return x, {device: private_torch.is_autocast_available(device) for device in expected}

    torch.compiler.reset()
    traced = torch.compile(answers, backend="eager", fullgraph=True)
    assert answers(torch.ones(1))[1] == traced(torch.ones(1))[1] == expected


def test_has_static_value():
    seen = []

    def double(x, n):
        seen.append(private_torch.has_static_value(n))
        return x * 2 if private_torch.has_static_value(n) else x + n

    assert double(torch.ones(2), 3).tolist() == [2, 2]
    torch.compiler.reset()
    compiled = torch.compile(double, backend="eager", fullgraph=True, dynamic=True)
    assert [compiled(torch.ones(2), n).tolist() for n in (3, 5.5, 7.25)] == [[4, 4], [6.5, 6.5], [8.25, 8.25]]


def test_value_at_trace():
    seen = []

    class Module(torch.nn.Module):
        def forward(self, x):
            seen.extend(map(private_torch.value_at_trace, (x.shape[0], x.shape[0] / 4)))
            return x * x.shape[0]

    shapes = ({0: torch.export.Dim("n")},)
    program = torch.export.export(Module(), (torch.ones(6),), dynamic_shapes=shapes, strict=False)
    assert seen[:2] == [6, 1.5] and program.module()(torch.ones(2)).tolist() == [2, 2]


# ---- ops


def test_named_tuples_are_saved_by_their_names():
    spec = private_torch._pytree.tree_structure(TokenLogProbs(1, 2, 3))
    text = private_torch._pytree.treespec_dumps(spec)
    assert '"safeops.TokenLogProbs"' in text and private_torch._pytree.treespec_loads(text) == spec


def test_kernels_that_the_dispatcher_has():
    assert private_torch.dispatcher_has("aten::add.Tensor", "CompositeExplicitAutograd") is False
    assert private_torch.dispatcher_has("aten::add.out", "CPU") is True
    assert private_torch.dispatcher_has("aten::relu6", "CPU") is False
    assert private_torch.dispatcher_has("aten::relu6", "CompositeImplicitAutograd") is True


def test_overloads():
    overload = torch.ops.aten.add_.Tensor
    assert type(overload) is private_torch.OpOverload and type(torch.ops.aten.add_) is private_torch.OpOverloadPacket
    x = torch.ones(2)
    assert private_torch.direct(overload)(x, 2).tolist() == [3, 3] == x.tolist()
    schema = private_torch.schema(overload)
    assert schema.name == "aten::add_" and [a.name for a in schema.arguments] == ["self", "other", "alpha"]
    assert [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments] == [True, False, False]
    assert schema.returns[0].alias_info.is_write and not schema.arguments[0].is_out
    assert private_torch.schema(torch.ops.aten.add.out).arguments[-1].is_out


def test_a_fake_kernel_without_its_source_lines():
    lib = torch.library.Library("safeops_fake_test", "DEF")
    lib.define("twice(Tensor x) -> Tensor")
    private_torch.register_fake(lib, "twice", lambda x: x.new_empty(2 * x.shape[0]))
    with torch._subclasses.FakeTensorMode():
        assert torch.ops.safeops_fake_test.twice(torch.ones(3)).shape == (6,)
    assert torch.ops.safeops_fake_test.twice(torch.ones(3, device="meta")).shape == (6,)
    lib._destroy()
    entry = torch._library.simple_registry.singleton.find("safeops_fake_test::twice")
    assert entry.fake_impl.kernel is None


def test_apply_without_its_python_layer():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, times=2):
            ctx.times = times
            return x * times

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.times, None

    x = torch.ones(2, requires_grad=True)
    y = private_torch.direct_apply(Twice)(x)
    assert y.tolist() == [2, 2] and type(y.grad_fn).__name__ == "TwiceBackward"
    assert torch.autograd.grad(y.sum(), x)[0].tolist() == [2, 2]


def test_saving_without_its_python_layer():
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            private_torch.save_directly(ctx, (x, y))
            return x * y, y * 2

        @staticmethod
        def backward(ctx, grad, unused):
            assert unused is None
            x, y = ctx.saved_tensors
            return grad * y, grad * x

    x, y = torch.full((2,), 3.0, requires_grad=True), torch.full((2,), 5.0)
    out, _ = Product.apply(x, y)
    assert torch.autograd.grad(out.sum(), x, retain_graph=True)[0].tolist() == [5, 5]
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), x)


def test_foreach_norm():
    lists = [torch.tensor([3.0, 4.0]).half(), torch.full((2, 2), 2.0)]
    norms = private_torch.foreach_norm(lists, 2, dtype=torch.float64)
    assert [n.tolist() for n in norms] == [5, 4] and norms[0].dtype == torch.float64


# ---- autograd


def test_keeps_graph():
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x * 1
    y.register_hook(lambda g: seen.append(private_torch.keeps_graph()))
    y.sum().backward(retain_graph=True)
    torch.autograd.grad(y.sum(), x, create_graph=True)
    y.sum().backward()
    assert seen == [True, True, False]


def test_is_batched():
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x * 1
    y.register_hook(lambda g: seen.append(private_torch.is_batched(g)))
    torch.autograd.grad(y, x, torch.ones(3, 2), retain_graph=True, is_grads_batched=True)
    torch.autograd.grad(y, x, torch.ones(2))
    assert seen == [True, False]


# ---- safe mode


def test_tensor_hooks():
    """Hooks of a leaf must be found, and be set again after they were taken off."""
    x, seen = torch.ones(2, requires_grad=True), []
    assert not private_torch.tensor_hooks(x)
    x.register_hook(lambda d: seen.append(d) or d * 2)
    hooks, x._backward_hooks = private_torch.tensor_hooks(x), None
    assert torch.autograd.grad(x.sum(), x)[0].tolist() == [1, 1] and not seen
    x._backward_hooks = hooks
    assert torch.autograd.grad(x.sum(), x)[0].tolist() == [2, 2] and len(seen) == 1


def test_saved_tensor_hooks():
    assert private_torch.saved_tensor_hooks(False) is None
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert private_torch.saved_tensor_hooks(False) is not None
    assert private_torch.saved_tensor_hooks(False) is None


def test_hooks_of_modules():
    module, handles = torch.nn.Linear(1, 1), []
    register = "forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"
    for name, kind in zip(private_torch.MODULE_HOOKS, register, strict=True):
        assert not getattr(module, name)
        handles.append(getattr(module, f"register_{kind}")(lambda *_: None))
        assert len(getattr(module, name)) == 1
    assert not private_torch.has_global_hooks()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert private_torch.has_global_hooks()
    handle.remove()


def test_caches_parametrizations():
    assert not private_torch.caches_parametrizations()
    with torch.nn.utils.parametrize.cached():
        assert private_torch.caches_parametrizations()


def test_casts_of_a_sharded_module():
    """tests/distributed/head.py has the rest: hooks that only cast, and a forward that casts nothing."""
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    key, policy = private_torch.NO_CASTS
    state = FSDPState()
    x = torch.ones(1)
    module = type("Sharded", (), {"_get_fsdp_state": lambda self: state})()
    pre, post = (private_torch.cast_hook(module, name) for name in private_torch.MODULE_HOOKS[:2])
    setattr(state, key, MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64))
    assert pre(module, (x,), {})[0][0].dtype == torch.bfloat16 and post(module, (x,), x).dtype == torch.float64
    setattr(state, key, policy)
    assert pre(module, (x,), {})[0][0].dtype == post(module, (x,), x).dtype == torch.float32


def test_step_function():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    cell = private_torch.step_function(optimizer)
    function = cell.cell_contents
    try:
        cell.cell_contents = lambda *args: args
        assert optimizer.step() == (optimizer,)
    finally:
        cell.cell_contents = function

    class Wrapped(torch.optim.SGD):
        pass

    wrapped = Wrapped([torch.nn.Parameter(torch.zeros(1))])
    Wrapped.step = functools.partialmethod(torch.optim.SGD.step)
    assert private_torch.step_function(wrapped) is None


def test_is_tracing():
    seen = []
    torch.jit.trace(lambda x: (seen.append(private_torch.is_tracing()), x + 1)[1], torch.ones(1), check_trace=False)
    assert seen == [True] and not private_torch.is_tracing()


def test_dispatch_modes():
    assert private_torch.dispatch_modes() == 0
    with private_torch.TorchDispatchMode():
        assert private_torch.dispatch_modes() == 1


def test_operands_of_a_division():
    a, b = torch.ones(2, requires_grad=True), torch.full((2,), 2.0)
    assert torch.equal(private_torch.saved_divisor((a / b).grad_fn), b)
    assert torch.equal(private_torch.saved_dividend((a / (a + b)).grad_fn), a)
    assert private_torch.saved_divisor((a / 3).grad_fn) == 3


def test_clipping_function():
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad, (cell, torchs) = torch.ones(2), (private_torch.clipping_function, torch.nn.utils.clip_grad_norm_)
    function = cell.cell_contents
    try:
        cell.cell_contents = lambda *args: (args, torch.is_grad_enabled())
        assert torchs([weight], 1.0) == (([weight], 1.0), False)
    finally:
        cell.cell_contents = function
    assert torch.allclose(torchs([weight], 1.0), torch.tensor(2.0).sqrt())


def test_top_function_mode():
    class Mode(torch.overrides.TorchFunctionMode):
        pass

    assert private_torch.top_function_mode() is None
    with Mode(), Mode() as inner:
        assert private_torch.top_function_mode() is inner


@pytest.mark.parametrize("disabled", [False, True])
def test_disable_dynamo_and_traced_frames(disabled):
    seen = []

    @private_torch.assume_constant_result
    def note():
        frames = private_torch.traced_frames()
        seen.append(frames and [x.name for x in frames])

    def inner(x):
        note()
        return x + 1

    inner = private_torch.disable_dynamo(inner) if disabled else inner
    torch.compiler.reset()
    torch.compile(lambda x: inner(x * 2), backend="eager")(torch.ones(2))
    assert seen == [None] if disabled else seen[0][-1] == "inner"


# ---- debugging: ops as they run


class Ops(private_torch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert type(func) is private_torch.OpOverload
        node = private_torch.current_node()
        self.seen.append((private_torch.schema(func).name, node and (node.name(), private_torch.sequence(node))))
        return func(*args, **(kwargs or {}))


def test_modes_nodes_and_their_numbers():
    x = torch.ones(2, requires_grad=True)
    with Ops() as mode:
        first = private_torch.next_sequence()
        y = x.exp()
        second = private_torch.next_sequence()
        with private_torch.disable_modes():
            y.detach().sin()
        y.backward(torch.ones(2))
    assert first == private_torch.sequence(y.grad_fn) < second
    assert mode.seen[0] == ("aten::exp", None) and ("aten::mul", ("ExpBackward0", first)) in mode.seen
    assert "aten::sin" not in [name for name, _ in mode.seen]
    assert private_torch.current_node() is None


def test_torchs_functions_in_a_stack():
    assert callable(getattr(torch.autograd, private_torch.MAKES_GRADIENTS))
    assert callable(getattr(torch.autograd.graph, private_torch.RUNS_ENGINE))
    assert callable(getattr(torch.amp.GradScaler, private_torch.STEPS_OPTIMIZER))


# ---- debugging: memory


def test_versions_and_bases():
    x = torch.zeros(4)
    view = x[1:]
    assert private_torch.base(view) is x and private_torch.base(x) is None
    before = private_torch.version(x)
    view.add_(1)
    assert private_torch.version(x) == private_torch.version(view) == before + 1
    with torch.inference_mode():
        assert private_torch.version(torch.zeros(2).add_(1)) == 0


def test_identity_of_memory():
    x = torch.zeros(4)
    address, weak = private_torch.identity(x.untyped_storage()), private_torch.weak_reference(x.untyped_storage())
    assert private_torch.identity(x[1:].untyped_storage()) == address
    del x
    others = [torch.zeros(4) for _ in range(64)]  # if the memory were free, one of these would get its address
    assert address not in [private_torch.identity(y.untyped_storage()) for y in others]
    private_torch.free_weak_reference(weak)


def test_what_a_node_has_saved():
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    saved = [name for name in dir(type(y.grad_fn)) if name.startswith(private_torch.SAVED)]
    assert saved == ["_saved_result"] and y.grad_fn._saved_result.data_ptr() == y.data_ptr()
    y.sum().backward()
    with pytest.raises(RuntimeError):
        y.grad_fn._saved_result  # noqa: B018


# ---- across ranks


@pytest.fixture
def alone():
    """Makes a process group with this process alone."""
    dist = pytest.importorskip("torch.distributed")
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("needs gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist
    dist.destroy_process_group()


def test_an_all_reduce_that_nobody_waits_for(alone):
    x = torch.tensor(3.0)
    for group in (alone.group.WORLD, alone.new_group([0])):
        sum = private_torch.start_all_reduce(x, group)
        assert type(sum) is not torch.Tensor and sum.dtype == x.dtype
        assert type(private_torch.awaited(sum)) is torch.Tensor and private_torch.awaited(sum) == 3
        assert type(sum + 1) is torch.Tensor and sum + 1 == 4
    assert private_torch.awaited(x) is x


def test_several_dims_of_a_mesh_as_one(alone):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("a", "b", "c"))
    flat = [private_torch.flattened(mesh["a", "c"]) for _ in range(2)]
    assert flat[0].ndim == 1 and flat[0].get_group() is flat[1].get_group()


def test_the_layout_of_a_head_under_colwise_parallel(alone):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    layers = [torch.nn.Linear(2, 4) for _ in range(3)]
    assert private_torch.colwise_layout(layers[0]) is None
    parallelize_module(layers[0], mesh["tp"], ColwiseParallel(input_layouts=Shard(1)))
    parallelize_module(layers[1], mesh["tp"], RowwiseParallel())
    layers[2].register_forward_pre_hook(lambda module, args: None)
    layers[2].register_forward_hook(lambda module, args, output: None)
    assert private_torch.colwise_layout(layers[0]) == (mesh["tp"], (Shard(1),))
    assert [private_torch.colwise_layout(layer) for layer in layers[1:]] == [None, None]
    fully_shard(layers[0], mesh=mesh["dp"])  # (its own hooks are left out)
    assert private_torch.colwise_layout(layers[0]) == (mesh["tp"], (Shard(1),))
    layers[0].register_forward_hook(lambda module, args, output: None)
    assert private_torch.colwise_layout(layers[0]) is None


def test_a_layout_is_found_by_fake_tensors(alone):
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if any(issubclass(kind, private_torch.FakeTensor) for kind in types):
                seen.add(func)
                return func(*args, **(kwargs or {}))
            return NotImplemented if types and torch.Tensor not in types else func(*args, **(kwargs or {}))

    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    x = distribute_tensor(torch.ones(3, 5), mesh, [Shard(0)])
    with Watch():
        assert x.add_(1, alpha=0.25).full_tensor().eq(1.25).all()
    assert torch.ops.aten.add_.Tensor in seen


# ---- testing


def test_trees():
    tree = [torch.ones(1), {"a": (torch.zeros(1), 3)}]
    assert [type(leaf) for leaf in private_torch.tree_leaves(tree)] == [torch.Tensor, torch.Tensor, int]
    mapped = private_torch.tree_map_only(torch.Tensor, lambda t: t.item(), tree)
    assert mapped == [1.0, {"a": (0.0, 3)}]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_stream_is_kept_busy():
    torch.cuda.synchronize()
    private_torch.keep_busy(100_000_000)
    busy = torch.cuda.Event()
    busy.record()
    assert not busy.query()
    torch.cuda.synchronize()


def test_graphs_are_counted():
    torch.compiler.reset()
    counter = private_torch.counting_backend("eager")
    compiled = torch.compile(lambda x: x + 1, backend=counter, dynamic=False)
    for n in (2, 2, 3):
        compiled(torch.ones(n))
    assert counter.frame_count == 2


def test_hooks_of_compiled_modules_get_guards_for_a_while():
    torch.compiler.reset()  # loads Dynamo
    layer = torch.nn.Linear(2, 2)
    counter = private_torch.counting_backend("eager")
    compiled = torch.compile(lambda x: layer(x), backend=counter)
    with contextlib.ExitStack() as stack:
        assert private_torch.compile_with_hooks(stack)
        compiled(torch.ones(2))
        layer.register_forward_hook(lambda module, args, output: output * 0)
        assert compiled(torch.ones(2)).count_nonzero() == 0 and counter.frame_count == 2
    private_torch.forget_compiled_code()
    compiled(torch.ones(2))
    assert counter.frame_count == 3
