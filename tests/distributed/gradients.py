"""Cases of grad_norm and clip_grad_norm_ of DTensors, each compared with one process. Run by processes.py."""

import functools
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import safeops
from tests.distributed.processes import raises

ORDERS = (2.0, 1.0, 3.0, 0.5, float("inf"))
NAN, INF = float("nan"), float("inf")


def meshes():
    """Yields a mesh of one dim, then a mesh of two."""
    world = dist.get_world_size()
    yield init_device_mesh("cpu", (world,))
    yield init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))


def placements(mesh):
    """Returns the placements of a (5, 3) tensor on the mesh: even shards, uneven shards, copies."""
    kinds = Shard(0), Shard(1), Replicate()
    return [[kind] for kind in kinds] if mesh.ndim == 1 else [[a, b] for a in kinds for b in kinds]


def parameter(grad):
    p = torch.nn.Parameter(torch.zeros_like(grad))
    p.grad = grad
    return p


def close(got, want, tolerance=1e-12):
    assert type(got) is torch.Tensor and got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=tolerance, atol=0, equal_nan=True)


def compare(mesh, fulls, how, tolerance):
    """Compares the norms of all orders, and the clipped gradients, with one process's."""
    for ord in ORDERS:
        shared = [parameter(distribute_tensor(x.clone(), mesh, p)) for x, p in zip(fulls, how)]
        plain = [parameter(x.clone()) for x in fulls]
        close(safeops.grad_norm(shared, ord), safeops.grad_norm(plain, ord), tolerance)
        close(safeops.clip_grad_norm_(shared, 0.25, ord), safeops.clip_grad_norm_(plain, 0.25, ord), tolerance)
        for p, q in zip(shared, plain):
            assert isinstance(p.grad, DTensor)
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=max(tolerance, 1e-12), atol=0)


def sharded(dtype, tolerance):
    for mesh in meshes():
        torch.manual_seed(3)
        how = placements(mesh)
        fulls = [torch.randn(5, 3).to(dtype) for _ in how] + [torch.randn(1, 3).to(dtype)]  # the last has empty shards
        compare(mesh, fulls, [*how, [Shard(0)] * mesh.ndim], tolerance)
        for x, p in zip(fulls, how):  # one gradient at a time: in a sum, another could hide an error
            compare(mesh, [x], [p], tolerance)


def extreme():
    """Norms are right if they exceed half, or if their squares leave the range of the gradients' dtype."""
    mesh = next(meshes())
    for dtype, value in ((torch.float16, 6e4), (torch.float32, 1e30), (torch.float64, 1e200), (torch.float64, 1e-200)):
        full = torch.full((7, 3), value, dtype=dtype)
        for ord in ORDERS:
            shared = [parameter(distribute_tensor(full, mesh, [Shard(0)]))]
            close(safeops.grad_norm(shared, ord), safeops.grad_norm([parameter(full)], ord), 1e-6)


def partial():
    """Gradients with placements Partial("sum") and Partial("avg") must be added up before their norm; also 0-dim ones,
    and those with another mesh dim sharded."""
    rank = dist.get_rank()
    for mesh in meshes():
        place = mesh.get_coordinate()
        for reduce in ("sum", "avg"):
            for shape in ((5, 3), (1,), ()):
                local = torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape) * (rank + 1)
                rest = [Replicate(), Shard(0)] if shape else [Replicate()]
                for other in rest[: mesh.ndim]:
                    first = local + (place[0] if mesh.ndim == 1 or other.is_shard() else 0)
                    if mesh.ndim == 2 and other.is_replicate():  # equal copies along tp
                        first = torch.ones(shape) * (place[0] + 1)
                    how = [Partial(reduce), other][: mesh.ndim]
                    grad = DTensor.from_local(first.clone(), mesh, how, run_check=False)
                    want = safeops.grad_norm([parameter(grad.full_tensor())])
                    holder = Holder(grad)
                    close(safeops.grad_norm([holder]), want, 1e-6)
                    close(safeops.clip_grad_norm_([holder], 0.5), want, 1e-6)
                    close(safeops.grad_norm([holder]), torch.minimum(want, torch.tensor(0.5)), 1e-5)


def partial_half():
    """Partial terms that fit half, but whose sum does not, must be added wider."""
    mesh = next(meshes())
    term = torch.full((5, 3), 4e4, dtype=torch.float16)
    holder = Holder(DTensor.from_local(term, mesh, [Partial()], run_check=False))
    total = parameter(term.float() * dist.get_world_size())
    for ord in ORDERS:
        close(safeops.grad_norm([holder], ord), safeops.grad_norm([total], ord), 1e-6)


class Holder(torch.Tensor):
    """A tensor that takes any object as `grad`: a parameter refuses a gradient with another placement than its own."""

    def __new__(cls, grad):
        x = torch.Tensor._make_subclass(cls, torch.zeros(()), True)
        x.held = grad
        return x

    grad = property(lambda self: self.held)


def nonfinite():
    """NaN or inf on one rank must decide for all ranks."""
    rank, mesh = dist.get_rank(), next(meshes())
    for bad in (NAN, INF):
        full = torch.ones(8, 3)
        full[-1, 0] = bad
        make = lambda full=full: [parameter(distribute_tensor(full.clone(), mesh, [Shard(0)]))]  # noqa: E731
        for ord in ORDERS:
            close(safeops.grad_norm(make(), ord), torch.tensor(bad), 0)
        skipped = make()
        close(safeops.clip_grad_norm_(skipped, 0.5, nonfinite="skip"), torch.tensor(bad), 0)
        torch.testing.assert_close(skipped[0].grad.full_tensor(), full, equal_nan=True)
        passed, plain = make(), [parameter(full.clone())]
        safeops.clip_grad_norm_(passed, 0.5)
        safeops.clip_grad_norm_(plain, 0.5)
        torch.testing.assert_close(passed[0].grad.full_tensor(), plain[0].grad, equal_nan=True)
        whose = "parameters[0]" if rank == dist.get_world_size() - 1 else "this rank"
        raised = make()
        call = functools.partial(safeops.clip_grad_norm_, raised, 0.5, nonfinite="raise")
        raises(ValueError, "clip_grad_norm_", whose, call=call)
        torch.testing.assert_close(raised[0].grad.full_tensor(), full, equal_nan=True)


def refused():
    mesh = next(meshes())
    both = [parameter(torch.ones(3)), parameter(distribute_tensor(torch.ones(5, 3), mesh, [Shard(0)]))]
    for name, more in (("grad_norm", ()), ("clip_grad_norm_", (1.0,))):
        call = functools.partial(getattr(safeops, name), both, *more)
        raises(TypeError, f"{name}: the gradient of parameters[1] is a DTensor", "parameters[0]", call=call)
    assert (both[0].grad == 1).all()
    first, rank = DeviceMesh("cpu", [0]), dist.get_rank()
    shard = parameter(DTensor.from_local(torch.ones(5 if rank == 0 else 0), first, [Shard(0)], run_check=False))
    if rank:
        call = functools.partial(safeops.grad_norm, [shard])
        raises(ValueError, f"grad_norm (rank {rank})", "this rank is not in it", call=call)


def several_meshes():
    """Gradients on two meshes of the same ranks and on a submesh must take one collective for each mesh, and no
    warning."""
    line, square = meshes()
    torch.manual_seed(5)
    a, b = torch.randn(5, 3), torch.randn(4, 4)
    shared = [
        parameter(distribute_tensor(a, line, [Shard(0)])),
        parameter(distribute_tensor(b, square, [Shard(1), Replicate()])),
        parameter(distribute_tensor(b, square["dp"], [Shard(0)])),
    ]
    with warnings.catch_warnings(), CommDebugMode() as wire:
        warnings.simplefilter("error")
        got = safeops.grad_norm(shared)
    assert wire.get_total_counts() == 3
    close(got, safeops.grad_norm([parameter(x) for x in (a, b, b.clone())]), 1e-6)


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 5))


def training(kind):
    """Clipping and step equal one process's, with gradients as FSDP2 and tensor parallelism leave them."""
    world = dist.get_world_size()
    reference, net = network(), network()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    if kind != "fsdp":
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        net = parallelize_module(net, mesh["tp"], plan)
    fully_shard(net, mesh=mesh["dp"])
    torch.manual_seed(1)
    x = torch.randn(2, 4, 6) * 30
    optimizers = [torch.optim.SGD(n.parameters(), 0.1) for n in (reference, net)]
    dp = mesh["dp"].get_local_rank()
    for _ in range(2):
        for n, optimizer, data in ((reference, optimizers[0], x.flatten(0, 1)), (net, optimizers[1], x[dp])):
            optimizer.zero_grad()
            n(data).square().mean().backward()
        want, got = safeops.clip_grad_norm_(reference, 0.5), safeops.clip_grad_norm_(net, 0.5)
        close(got, want, 1e-5)
        assert got > 0.5
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(net.parameters(), reference.parameters()):
        torch.testing.assert_close(p.full_tensor().detach(), q.detach(), rtol=1e-5, atol=1e-6)


CASES = {
    "sharded fp32": functools.partial(sharded, torch.float32, 1e-6),
    "sharded fp64": functools.partial(sharded, torch.float64, 1e-12),
    "extreme": extreme,
    "partial": partial,
    "partial half": partial_half,
    "nonfinite": nonfinite,
    "refused": refused,
    "several meshes": several_meshes,
    "fsdp": functools.partial(training, "fsdp"),
    "fsdp and tensor parallel": functools.partial(training, "both"),
}
