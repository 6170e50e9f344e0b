"""Cases of global_count, each compared with the same batch in one process. Run by processes.py."""

import datetime
import functools
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

import safeops
from safeops.distributed import global_count
from tests.distributed.processes import raises
from tests.distributed.training import ROWS, batch, ddp, network


def expect(got, want):
    torch.testing.assert_close(got, torch.as_tensor(want, dtype=got.dtype), rtol=0, atol=0)


def counts():
    rank, world = dist.get_rank(), dist.get_world_size()
    _, _, weight, keep = batch(world)
    mine = list(keep[rank])
    with CommDebugMode() as wire:
        count = global_count(mine, averaged=False)
    assert wire.get_total_counts() == 1 and count.nbytes == 8
    assert type(count) is not torch.Tensor  # the count has not been waited for
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
    """Counts beyond 2^24 must be exact, where fp32 lacks integers. (The mask is one expanded byte.)"""
    n = 2**23 + 1 + dist.get_rank()
    total = sum(2**23 + 1 + r for r in range(dist.get_world_size()))
    count = global_count(torch.ones(1, dtype=torch.bool).expand(n), averaged=False)
    expect(count + 0, total)
    loss = safeops.mse_loss(torch.zeros(2, dtype=torch.float64), torch.ones(2), denominator=count)
    assert loss.item() == 2 / total


def by_mesh():
    """Copies of the batch along tp must count once; parts of its samples along cp must be added up."""
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
    for _ in range(2):  # the second time, the group of two mesh dims exists
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
    replicated = torch.distributed.tensor.distribute_tensor(keep, mesh, [torch.distributed.tensor.Replicate()])
    raises(TypeError, where, "masks", "DTensor", call=call(global_count, replicated))
    gone = dist.new_group(list(range(world)))
    dist.barrier()  # destroying the group early would close connections that another rank still makes
    dist.destroy_process_group(gone)
    raises((RuntimeError, ValueError), where, call=call(global_count, keep, group=gone))


def nothing_at_all():
    """If a step keeps nothing anywhere, the loss is 0 and so are the gradients."""
    net, *_ = ddp(network(torch.float32))
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
    out = out.detach().zero_()
    for empty in ("zero", "nan", "raise"):  # other ranks keep some
        loss = safeops.mse_loss(out, out + 1, mask=keep, denominator=global_count(keep), empty=empty)
        assert loss == (dist.get_world_size() if dist.get_rank() == 0 else 0)


def absent():
    """If one rank does not call, the others must raise when they use the count, within the group's timeout."""
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
    """Without a group a mesh must be an error, and a plain count the process's own. (The last case: it destroys the
    group.)"""
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
    "nothing at all": nothing_at_all,
    "absent": absent,
    "destroyed": destroyed,
}
