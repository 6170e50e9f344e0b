"""Cases of global_count, each beside the same batch in one process. Run by processes.py."""

import copy
import datetime
import functools
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import safeops
from safeops.distributed import global_count
from tests.distributed.processes import raises

ROWS, STEPS = 12, 3  # rows of a rank, micro-batches


def batch(world, dtype=torch.float32):
    """The whole batch, (world, STEPS, rows, 4). Kept: of rank 0 nearly all, of the last nothing, of others little."""
    g = torch.Generator().manual_seed(1)
    x, y, weight = (torch.randn(world, STEPS, ROWS, 4, generator=g, dtype=dtype) for _ in range(3))
    keep = torch.rand(world, STEPS, ROWS, 4, generator=g) < torch.tensor([0.9, 0.1, 0.3, 0.5])[:world, None, None, None]
    keep[-1] = False
    return x.masked_fill(~keep, torch.nan), y, weight.abs(), keep


def expect(got, want):
    torch.testing.assert_close(got, torch.as_tensor(want, dtype=got.dtype), rtol=0, atol=0)


def counts():
    rank, world = dist.get_rank(), dist.get_world_size()
    _, _, weight, keep = batch(world)
    mine = list(keep[rank])
    count = global_count(mine, averaged=False)
    assert type(count) is not torch.Tensor  # nobody has waited
    assert count.dtype == torch.float64 and count.shape == ()
    expect(count + 0, keep.sum().item())
    expect(global_count(keep[rank], averaged=False) + 0, keep.sum().item())
    expect(global_count(mine) + 0, keep.sum().item() / world)
    sums = global_count(mine, weight=list(weight[rank]), averaged=False)
    torch.testing.assert_close(sums + 0, weight.double()[keep].sum(), rtol=1e-14, atol=0)
    rows = global_count(keep[rank, 0, :, :1], weight=weight[rank, 0], averaged=False)
    want = weight.double()[:, 0][keep[:, 0, :, :1].expand(-1, -1, 4)].sum()
    torch.testing.assert_close(rows + 0, want, rtol=1e-14, atol=0)
    none = torch.zeros(0, dtype=torch.bool)
    expect(global_count(none) + 0, 0)
    expect(global_count(none if rank else torch.ones(5, dtype=torch.bool), averaged=False) + 0, 5)


def large():
    """Beyond 2^24, where fp32 has not every integer: by a mask that holds one byte."""
    n = 2**23 + 1 + dist.get_rank()
    total = sum(2**23 + 1 + r for r in range(dist.get_world_size()))
    count = global_count(torch.ones(1, dtype=torch.bool).expand(n), averaged=False)
    expect(count + 0, total)
    loss = safeops.mse_loss(torch.zeros(2, dtype=torch.float64), torch.ones(2), denominator=count)
    assert loss.item() == 2 / total


def by_mesh():
    """Copies along tp count once, parts of samples along cp all."""
    world, rank = dist.get_world_size(), dist.get_rank()
    if world == 2:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        keep = torch.ones(3, dtype=torch.bool)
        expect(global_count(keep, mesh=mesh, dims="dp") + 0, 3)
        expect(global_count(keep, mesh=mesh, dims=("tp",)) + 0, 3)
        expect(global_count(keep, mesh=mesh, averaged=False) + 0, 6)
        expect(global_count(keep, mesh=mesh["tp"], averaged=False) + 0, 6)
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = rank // 2, rank % 2
    keep = torch.arange(8) < (7 if dp else 1)
    for dims in ("dp", 0, -2, ["dp"]):
        expect(global_count(keep, mesh=mesh, dims=dims, averaged=False) + 0, 8)
    expect(global_count(keep, mesh=mesh, dims="dp") + 0, 4)
    expect(global_count(keep[tp::2], mesh=mesh, averaged=False) + 0, 8)
    expect(global_count(keep[tp::2], mesh=mesh, dims=("dp", "tp")) + 0, 2)
    cube = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
    for _ in range(2):  # the group of two dims is made once
        expect(global_count(keep, mesh=cube, dims=("cp", "dp"), averaged=False) + 0, 8)
    half = dist.new_group([0, 1])
    if rank < 2:
        expect(global_count(torch.ones(rank + 1, dtype=torch.bool), group=half) + 0, 1.5)
    else:
        raises(ValueError, f"global_count (rank {rank})", "group", call=lambda: global_count(keep, group=half))


def errors():
    rank, world = dist.get_rank(), dist.get_world_size()
    where, keep, call = f"global_count (rank {rank})", torch.ones(3, dtype=torch.bool), functools.partial
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    raises(TypeError, where, "masks[1]", "int64", call=call(global_count, [keep, torch.ones(3).long()]))
    raises(TypeError, where, "masks", "list", call=call(global_count, [[keep]]))
    raises(TypeError, where, "weight", "int64", call=call(global_count, keep, weight=torch.ones(3).long()))
    raises(TypeError, where, "averaged", "1", call=call(global_count, keep, averaged=1))
    raises(ValueError, where, "weight", "(3,)", "(2,)", call=call(global_count, keep, weight=torch.ones(2)))
    raises(ValueError, where, "2 tensors for 1 masks", call=call(global_count, keep, weight=[torch.ones(3)] * 2))
    raises(ValueError, where, "masks is empty", call=call(global_count, []))
    raises(ValueError, where, "group or mesh", call=call(global_count, keep, mesh=mesh, group=dist.group.WORLD))
    raises(ValueError, where, "dims", "mesh", call=call(global_count, keep, dims="dp"))
    for dims in ("tp", 1, True, ("dp", "dp"), ("dp", 0), ()):
        raises(ValueError, where, "dims", call=call(global_count, keep, mesh=mesh, dims=dims))
    whole = torch.distributed.tensor.distribute_tensor(keep, mesh, [torch.distributed.tensor.Replicate()])
    raises(TypeError, where, "masks", "DTensor", call=call(global_count, whole))
    gone = dist.new_group(list(range(world)))
    dist.barrier()  # a rank that destroys it early closes connections that another still makes
    dist.destroy_process_group(gone)
    raises((RuntimeError, ValueError), where, call=call(global_count, keep, group=gone))


def network(dtype):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.Tanh(), torch.nn.Linear(9, 4)).to(dtype)


def train(net, steps, sgd, finish=lambda i: None):
    """Two steps of `steps`, a list of (x, y, weight, keep, denominator). Masked-out NaNs are no input of the net."""
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        total = 0
        for i, (x, y, weight, keep, denominator) in enumerate(steps):
            finish(i)
            out = net(x.nan_to_num(0))
            loss = safeops.huber_loss(out, y, mask=keep, weight=weight, denominator=denominator)
            loss.backward()
            total += loss.detach()
        losses.append(total)
        optimizer.step()
    return losses


def training(wrap, dtype, weighted, tolerance):
    """Three micro-batches a step, of which the last rank keeps nothing, as one process has it with the whole batch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y, weight, keep = batch(world, dtype)
    weights = weight if weighted else [None] * world
    whole, net = network(dtype), network(dtype)
    flat = [t.flatten(0, 2) for t in (x, y)] + [weight.flatten(0, 2) if weighted else None, keep.flatten(0, 2)]
    want = train(whole, [(*flat, None)], None)
    own = weights[rank] if weighted else [None] * STEPS
    count = global_count(list(keep[rank]), weight=list(own) if weighted else None)
    net, finish = wrap(net)
    got = train(net, [(x[rank, i], y[rank, i], own[i], keep[rank, i], count) for i in range(STEPS)], None, finish)
    for a, b in zip(got, want):
        dist.all_reduce(a)
        torch.testing.assert_close(a / world, b, rtol=tolerance, atol=tolerance)
    for p, q in zip(net.parameters(), whole.parameters()):
        p = p.full_tensor() if hasattr(p, "full_tensor") else p
        torch.testing.assert_close(p.detach(), q.detach(), rtol=tolerance, atol=tolerance)


def ddp(net):
    return DistributedDataParallel(net), lambda i: None


def fsdp(net):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net, lambda i: net.set_requires_gradient_sync(i == STEPS - 1)


def hsdp(net):
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(net, mesh=mesh), lambda i: None


def per_rank_means_differ():
    """What all this is for: with its own count on each rank, DDP does not get there."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y, _, keep = batch(world)
    whole, net = network(torch.float32), DistributedDataParallel(network(torch.float32))
    train(whole, [(*(t.flatten(0, 2) for t in (x, y)), None, keep.flatten(0, 2), None)], None)
    train(net, [(x[rank].flatten(0, 1), y[rank].flatten(0, 1), None, keep[rank].flatten(0, 1), None)], None)
    ours = copy.deepcopy(whole)
    assert any((p - q).abs().max() > 1e-2 for p, q in zip(net.parameters(), ours.parameters()))


def nothing_at_all():
    """A step that keeps nothing: 0, and gradients of 0."""
    net, _ = ddp(network(torch.float32))
    keep = torch.zeros(ROWS, 4, dtype=torch.bool)
    for empty in ("zero", "nan"):
        net.zero_grad()
        out = net(torch.ones(ROWS, 4))
        loss = safeops.mse_loss(out, out.detach() + 1, mask=keep, denominator=global_count(keep), empty=empty)
        loss.backward()
        assert loss.isnan() if empty == "nan" else loss == 0
        assert all((p.grad == 0).all() for p in net.parameters())
    call = functools.partial(safeops.mse_loss, out, out, mask=keep, denominator=global_count(keep), empty="raise")
    raises(ValueError, "nothing is kept", call=call)
    keep = keep | (dist.get_rank() == 0)
    for empty in ("zero", "nan", "raise"):  # the others have some
        loss = safeops.mse_loss(out, out + 1, mask=keep, denominator=global_count(keep), empty=empty)
        assert loss == (dist.get_world_size() if dist.get_rank() == 0 else 0)


def absent():
    """A rank that does not call: the others hear of it within the group's timeout, where they use the count."""
    rank = dist.get_rank()
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    if rank == 0:
        loss = functools.partial(safeops.mse_loss, torch.zeros(3), torch.ones(3))
        began = time.monotonic()
        count = global_count(torch.ones(3, dtype=torch.bool), group=group)
        raises(RuntimeError, "global_count (rank 0)", call=lambda: loss(denominator=count))
        assert time.monotonic() - began < 20
    dist.barrier()


def destroyed():
    """Last, for there is no other."""
    keep, rank = torch.ones(3, dtype=torch.bool), dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    dist.barrier()
    dist.destroy_process_group()
    assert rank >= 0
    raises(ValueError, "global_count", "mesh", call=functools.partial(global_count, keep, mesh=mesh))
    expect(global_count(keep), 3)


CASES = {
    "counts": counts,
    "large": large,
    "by mesh": by_mesh,
    "errors": errors,
    "ddp fp32": functools.partial(training, ddp, torch.float32, False, 1e-6),
    "ddp fp64 weighted": functools.partial(training, ddp, torch.float64, True, 1e-12),
    "fsdp fp32 weighted": functools.partial(training, fsdp, torch.float32, True, 1e-6),
    "fsdp fp64": functools.partial(training, fsdp, torch.float64, False, 1e-12),
    "hsdp fp64": functools.partial(training, hsdp, torch.float64, False, 1e-12),
    "per-rank means differ": per_rank_means_differ,
    "nothing at all": nothing_at_all,
    "absent": absent,
    "destroyed": destroyed,
}
