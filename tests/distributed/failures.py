"""Cases of collectives that fail: a rank does not call, has closed its connections, or has destroyed the group.

Each raises an error with the function and the rank, within the group's timeout. Run by processes.py.
"""

import datetime
import os
import signal
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import safeops
from safeops.distributed import global_count
from tests.distributed.processes import raises

SECONDS = 1  # a group's timeout: short, but enough for ranks to meet unless the machine is very busy


def group_and_mesh(seconds=SECONDS):
    group = dist.new_group(timeout=datetime.timedelta(seconds=seconds))
    dist.barrier()
    return group, DeviceMesh.from_group(group, "cpu")


def sharded(mesh, shape=(4, 6), dim=0, dtype=torch.float32):
    """Returns a DTensor made of each rank's part, ones of this shape, without a collective."""
    local = torch.rand(shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    return DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)


def replicated(mesh, x):
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False)


def classes(mesh):
    return replicated(mesh, torch.zeros(4, dtype=torch.int64))


CALLS = {
    "masked_mean": lambda x, mesh: safeops.masked_mean(x),
    "mse_loss": lambda x, mesh: safeops.mse_loss(x, x),
    "masked_var": lambda x, mesh: safeops.masked_var(x, dim=0),
    "masked_softmax": lambda x, mesh: safeops.masked_softmax(x, dim=0),
    "normalize": lambda x, mesh: safeops.normalize(x, dim=0),
    "cross_entropy": lambda x, mesh: safeops.cross_entropy(sharded(mesh, dim=1), classes(mesh)),
    "safe_div": lambda x, mesh: safeops.safe_div(x, sharded(mesh, dim=1, shape=(8, 3))),  # torch's own collective fails
}


def absent():
    """If only one rank calls, it must raise within the timeout."""
    for name in ("masked_mean", "masked_var", "masked_softmax", "cross_entropy", "safe_div"):
        call, (_, mesh) = CALLS[name], group_and_mesh()
        if dist.get_rank() == 0:
            x, began = sharded(mesh), time.monotonic()
            raises(RuntimeError, f"{name} (rank 0): ", call=lambda call=call, x=x, mesh=mesh: call(x, mesh))
            assert time.monotonic() - began < SECONDS + 20
        dist.barrier()


def absent_in_backward():
    safeops.masked_softmax(sharded(group_and_mesh(60)[1]), dim=0)  # a first call imports modules, which takes seconds
    _, mesh = group_and_mesh(3 * SECONDS)
    # A shape of its own: torch caches layouts by mesh and shape, and would return one with the previous case's group.
    x = sharded(mesh, (5, 7)).requires_grad_()
    y = safeops.masked_softmax(x, dim=0)
    if dist.get_rank() == 0:
        raises(RuntimeError, "masked_softmax (rank 0): the all-reduce", "float64", call=y.sum().backward)
        assert x.grad is None
    dist.barrier()


def gone():
    """If a rank has closed its connections, as a dead process has, the other must raise."""
    for name in ("masked_mean", "masked_var"):
        group, mesh = group_and_mesh(3 * SECONDS)
        x = sharded(mesh)
        CALLS[name](x, mesh)  # connects the ranks
        dist.barrier()
        if dist.get_rank() == 1:
            dist.destroy_process_group(group)
        dist.barrier()
        if dist.get_rank() == 0:
            raises(
                RuntimeError, f"{name} (rank 0): the all-", call=lambda name=name, x=x, mesh=mesh: CALLS[name](x, mesh)
            )


def destroyed():
    group, mesh = group_and_mesh()
    x, number = sharded(mesh), dist.get_rank()
    dist.barrier()  # destroying the group early would close connections that another rank still makes
    dist.destroy_process_group(group)
    for name in ("masked_mean", "masked_amax", "masked_softmax", "mse_loss"):
        raises(RuntimeError, f"{name} (rank {number})", call=lambda name=name: CALLS.get(name, amax)(x, mesh))


def amax(x, mesh):
    return safeops.masked_amax(x)


def gradients():
    """If the collective of the norm fails, no gradient may be written."""
    group, mesh = group_and_mesh()
    p = torch.nn.Parameter(sharded(mesh))
    p.grad = sharded(mesh) * 1e3
    before = p.grad.to_local().clone()
    if dist.get_rank() == 0:
        raises(RuntimeError, "grad_norm (rank 0)", "gathered", call=lambda: safeops.clip_grad_norm_([p], 1.0))
        raises(RuntimeError, "grad_norm (rank 0)", "gathered", call=lambda: safeops.grad_norm([p]))
        assert torch.equal(p.grad.to_local(), before)
    dist.barrier()


def empty_raise():
    """With empty="raise" the host waits for an all-reduce of what the ranks keep, and must raise if that fails."""
    rank, keep, x = dist.get_rank(), torch.ones(4, 6, dtype=torch.bool), torch.zeros(4, 6)
    group, mesh = group_and_mesh()
    if rank == 0:
        count = global_count(keep, group=group)
        loss = lambda: safeops.mse_loss(x, x + 1, mask=keep, denominator=count, empty="raise")  # noqa: E731
        raises(RuntimeError, "global_count (rank 0)", call=loss)
    dist.barrier()
    for name, call in (
        ("masked_mean", lambda x, keep: safeops.masked_mean(x, keep, empty="raise")),
        ("mse_loss", lambda x, keep: safeops.mse_loss(x, x, mask=keep, empty="raise")),
    ):
        _, mesh = group_and_mesh()
        if rank == 0:
            mask = DTensor.from_local(keep, mesh, [Shard(0)], run_check=False)
            raises(RuntimeError, f"{name} (rank 0)", call=lambda: call(sharded(mesh), mask))  # noqa: B023
        dist.barrier()


def killed(rank, store, path):
    """Runs in a process per rank. Rank 1 is killed between forward and backward; rank 0 writes the error it gets."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=30)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timeout)
    x = sharded(init_device_mesh("cpu", (2,))).requires_grad_()
    y = safeops.masked_softmax(x, dim=0)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    raises(RuntimeError, "masked_softmax (rank 0): the all-reduce", call=y.sum().backward)
    raises(RuntimeError, "masked_var (rank 0): the all-gather", call=lambda: safeops.masked_var(x, dim=0))
    path.write_text("named" if x.grad is None else "half-written")


CASES = {
    "absent": absent,
    "absent in backward": absent_in_backward,
    "gone": gone,
    "destroyed": destroyed,
    "gradients": gradients,
    "empty raise": empty_raise,
}
