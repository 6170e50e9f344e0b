"""Cases of training on several processes, with means by global_count, compared with one process with the whole batch.

The masks keep very unequal shares, on the last rank nothing; a step has three micro-batches. Run by processes.py.
"""

import functools
import re
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import safeops
from safeops.core.private_torch import counting_backend
from safeops.distributed import global_count

ROWS, STEPS = 12, 3  # rows per rank and micro-batch, micro-batches per step


def batch(world, dtype=torch.float32):
    """Returns the whole batch, (world, STEPS, rows, 4). Rank 0 keeps nearly all, the last rank nothing, others few."""
    g = torch.Generator().manual_seed(1)
    x, y, weight = (torch.randn(world, STEPS, ROWS, 4, generator=g, dtype=dtype) for _ in range(3))
    keep = torch.rand(world, STEPS, ROWS, 4, generator=g) < torch.tensor([0.9, 0.1, 0.3, 0.5])[:world, None, None, None]
    keep[-1] = False
    return x.masked_fill(~keep, torch.nan), y, weight.abs(), keep


def network(dtype):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)).to(dtype)


def loss_of(out, y, keep, weight, denominator):
    return safeops.smooth_l1_loss(out, y, mask=keep, weight=weight, denominator=denominator)


def train(net, steps, finish=lambda i: None, loss_of=loss_of):
    """Trains for two optimizer steps and returns their losses. steps: [(x, y, weight, keep, denominator)], the
    micro-batches of each. The net gets 0 for a masked NaN."""
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        total = 0
        for i, (x, y, weight, keep, denominator) in enumerate(steps):
            finish(i)
            loss = loss_of(net(x.nan_to_num(0)), y, keep, weight, denominator)
            loss.backward()
            total += loss.detach()
        losses.append(total)
        optimizer.step()
    return losses


def training(wrap, dtype, weighted, tolerance, loss_of=loss_of):
    """Ranks with three micro-batches per step must get the losses and parameters of one process with the whole
    batch."""
    reference, (net, finish, mesh) = network(dtype), wrap(network(dtype))
    rank, parts = dist.get_rank(), dist.get_world_size()
    if mesh is not None:
        rank, parts = mesh.get_local_rank("dp"), mesh.size(0)
    x, y, weight, keep = batch(parts, dtype)
    flat = [t.flatten(0, 2) for t in (x, y)] + [weight.flatten(0, 2) if weighted else None, keep.flatten(0, 2)]
    want = train(reference, [(*flat, None)])
    weights = weight[rank] if weighted else [None] * STEPS
    where = {} if mesh is None else {"mesh": mesh, "dims": "dp"}  # ranks along tp have copies
    count = global_count(list(keep[rank]), weight=list(weights) if weighted else None, **where)
    steps = [(x[rank, i], y[rank, i], weights[i], keep[rank, i], count) for i in range(STEPS)]
    for a, b in zip(train(net, steps, finish, loss_of), want):
        dist.all_reduce(a)
        torch.testing.assert_close(a / dist.get_world_size(), b, rtol=tolerance, atol=tolerance)
    for p, q in zip(net.parameters(), reference.parameters()):
        p = p.full_tensor() if hasattr(p, "full_tensor") else p
        torch.testing.assert_close(p.detach(), q.detach(), rtol=tolerance, atol=tolerance)


def compiled(dtype, tolerance):
    """A rank's loss must compile to one graph, which takes a count that has not arrived yet, and waits for it."""
    torch.compiler.reset()
    counter = counting_backend("aot_eager")
    training(ddp, dtype, False, tolerance, torch.compile(loss_of, backend=counter, fullgraph=True))
    assert counter.frame_count


def of_the_page():
    """The tensor parallel model of docs/distributed.md must have the loss and clipped gradients of one process."""
    page = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text()
    code = re.search(r"```python\n(.*?)```", page.split("## The loss of a tensor parallel model")[1], re.DOTALL)[1]
    parts = dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (parts, 2), mesh_dim_names=("dp", "tp"))
    g = torch.Generator().manual_seed(1)
    x, labels = torch.randn(parts, ROWS, 4, generator=g).double(), torch.randint(12, (parts, ROWS), generator=g)
    labels[0, 2:] = -100
    reference, model = (torch.nn.Sequential(*network(torch.float64), torch.nn.Linear(4, 12).double()) for _ in range(2))
    place = mesh.get_local_rank("dp")
    results = {"safeops": safeops, "mesh": mesh, "model": model, "inputs": x[place], "labels": labels[place]}
    exec(code, results)
    want = safeops.cross_entropy(reference(x.flatten(0, 1)), labels.flatten())
    want.backward()
    safeops.clip_grad_norm_(reference, 1.0)
    loss = results["loss"].full_tensor().detach()
    dist.all_reduce(loss)
    near = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
    near(loss / dist.get_world_size(), want.detach())
    for p, q in zip(model.parameters(), reference.parameters()):
        near(p.grad.full_tensor(), q.grad)


def ddp(net):
    return DistributedDataParallel(net), lambda i: None, None


def fsdp(net):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net, lambda i: net.set_requires_gradient_sync(i == STEPS - 1), None


def hsdp(net):
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(net, mesh=mesh), lambda i: None, None


def tensor_parallel(net, along_dp=lambda net, mesh: net):
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    net = parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return along_dp(net, mesh["dp"]), lambda i: None, mesh


def fsdp_of_tensor_parallel(net):
    return tensor_parallel(net, lambda net, mesh: fully_shard(net, mesh=mesh))


def per_rank_means_differ():
    """With means by each rank's own count, DDP ends with other parameters: global_count is needed."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y, _, keep = batch(world)
    reference, net = network(torch.float32), DistributedDataParallel(network(torch.float32))
    train(reference, [(*(t.flatten(0, 2) for t in (x, y)), None, keep.flatten(0, 2), None)])
    train(net, [(x[rank].flatten(0, 1), y[rank].flatten(0, 1), None, keep[rank].flatten(0, 1), None)])
    assert any((p - q).abs().max() > 1e-2 for p, q in zip(net.parameters(), reference.parameters()))


CASES = {
    "ddp fp32": functools.partial(training, ddp, torch.float32, False, 1e-6),
    "ddp fp64 weighted": functools.partial(training, ddp, torch.float64, True, 1e-12),
    "fsdp fp32 weighted": functools.partial(training, fsdp, torch.float32, True, 1e-6),
    "fsdp fp64": functools.partial(training, fsdp, torch.float64, False, 1e-12),
    "hsdp fp64": functools.partial(training, hsdp, torch.float64, False, 1e-12),
    "fsdp and tensor parallel fp64": functools.partial(training, fsdp_of_tensor_parallel, torch.float64, True, 1e-12),
    "fsdp and tensor parallel fp32": functools.partial(training, fsdp_of_tensor_parallel, torch.float32, False, 1e-6),
    "compiled fp64": functools.partial(compiled, torch.float64, 1e-12),
    "compiled fp32": functools.partial(compiled, torch.float32, 1e-6),
    "tensor parallel as on the page": of_the_page,
    "per-rank means differ": per_rank_means_differ,
}
