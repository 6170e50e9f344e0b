"""Cases of debug.compare on several ranks, beside one rank with the whole batch. Run by processes.py."""

import copy
import functools
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from safeops.debug import compare, sketch
from safeops.debug.compare.capture import Capture
from safeops.debug.compare.comparison import Comparison
from safeops.debug.compare.run import Run, read
from tests.distributed.training import ddp

ROWS = 6  # of each rank's part of the batch: 6 x 5 numbers, so parts begin within a row of 64 of the projection


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.table, self.last = nn.Linear(5, 7), nn.Embedding(3, 7), nn.Linear(7, 3)
        self.loss = nn.MSELoss()

    def forward(self, x):
        places = self.table(torch.arange(3)).mean(0)  # (7,): no batch dim
        return self.loss(self.last((self.first(x) + places).tanh()), x[:, :3])


def network():
    torch.manual_seed(0)
    return Net()


def batch():
    """The whole batch, and this rank's part of it."""
    x = torch.randn(dist.get_world_size() * ROWS, 5, generator=torch.Generator().manual_seed(1))
    return x, x.chunk(dist.get_world_size())[dist.get_rank()]


def one_rank(net):
    capture = Capture(net).start()
    net(batch()[0]).backward()
    return Run("one", [entry for entry, _ in capture.stop().entries])


def of_file(net, step):
    """The Run of a file that all ranks write together."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    file = os.path.join(folder[0], "all.json")
    with sketch(net, file):
        step()
    dist.barrier()
    return read(file)


def compared(net, plant=lambda part: part):
    one = one_rank(network())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step():
        net(plant(batch()[1])).backward()
        optimizer.step()

    return Comparison(one, of_file(net, step))


def fsdp(net):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (net.first, net.last):
        fully_shard(layer, mesh=mesh)
    return (fully_shard(net, mesh=mesh),)


def agrees(wrap):
    net, *_ = wrap(network())
    result = compared(net)
    assert result.equal and result.ranks == (1, dist.get_world_size()), str(result)
    assert not (result.only_a or result.only_b or result.shapes), str(result)
    shapes = {(d.phase, d.module, d.path): d.a.shape for d in result.differences}
    assert shapes["forward", "first (Linear)", ""] == (dist.get_world_size() * ROWS, 7)
    assert shapes["backward", "table (Embedding)", ""] == (3, 7)  # the mean over the ranks
    parameters = {d.module for d in result.differences if d.phase == "parameters"}
    assert parameters == {"first (Linear)", "table (Embedding)", "last (Linear)"}


def one_ranks_data_differ(wrap):
    net, *_ = wrap(network())
    last = dist.get_world_size() - 1
    result = compared(net, lambda part: part + 0.1 if dist.get_rank() == last else part)
    assert result.forward.module == "first (Linear)", str(result)


def a_gradient_is_not_averaged(wrap):
    net, *_ = wrap(network())
    net.module.last.weight.register_hook(lambda gradient: gradient * 1.1)
    result = compared(net)
    assert result.forward is None and result.backward.module == "last (Linear)", str(result)
    assert result.backward.phase == "parameters"


def compare_meets():
    """compare() on all ranks: each has its own part, and all get the same result."""
    net, (_, part) = network(), batch()
    changed = copy.deepcopy(net)
    assert compare(net, net, part).equal
    if dist.get_rank() == dist.get_world_size() - 1:
        changed.last.bias.data += 0.1
    result = compare(net, changed, part)
    assert result.forward.module == "last (Linear)", str(result)


CASES = {
    "ddp agrees with one rank": functools.partial(agrees, ddp),
    "fsdp agrees with one rank": functools.partial(agrees, fsdp),
    "one rank's data differ": functools.partial(one_ranks_data_differ, ddp),
    "a gradient is not averaged": functools.partial(a_gradient_is_not_averaged, ddp),
    "compare meets": compare_meets,
}
