"""Cases of a training step of a causal model under DDP, FSDP2, tensor, sequence and context parallelism, and pairs of
them: the loss and all gradients are those of one process with the whole batch.

The model has no attention, so that a cut sequence needs nothing of other ranks but the label after its last token.
"""

import copy
import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import safeops
from safeops.distributed import global_count, shift_labels
from safeops.integrations.transformers import ForCausalLMLoss
from tests.distributed import shifts

D, CLASSES, BATCH, TOKENS = 8, 24, 4, 16
DATA = "dp", "cp"  # the mesh dims along which ranks hold other tokens

TENSOR = {
    "embedding": RowwiseParallel(input_layouts=Replicate()),
    "block.0": ColwiseParallel(),
    "block.2": RowwiseParallel(),
    "head": ColwiseParallel(),
}
SEQUENCE = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "block.0": ColwiseParallel(input_layouts=Shard(1)),
    "block.2": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1)),
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, D)
        self.block = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, CLASSES, bias=False)

    def forward(self, tokens, loss_of):
        x = self.embedding(tokens)
        return loss_of(self.head, self.norm(x + self.block(x)))


def batch():
    """Returns (tokens, labels), (BATCH, TOKENS). Some parts of a sequence, and so some ranks, have no label."""
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(CLASSES, (BATCH, TOKENS), generator=g)
    labels = tokens.clone()
    labels[0, :11] = labels[1, 6:] = labels[3, :-3] = -100
    labels[2, 7] = -100
    return tokens, labels


# ---- losses of a rank: labels are cut as `cut`, names of mesh dims, says


def count_of(target, mesh, cut):
    return global_count(target != -100, mesh=mesh, dims=cut) if cut else (target != -100).sum().double()


def targets(labels, mesh, cut):
    return shift_labels(labels, mesh=mesh, dims="cp") if "cp" in cut else shift_labels(labels)


def cross_entropy(head, hidden, labels, mesh, cut):
    target = targets(labels, mesh, cut)
    return safeops.head_loss(head, hidden, target, denominator=count_of(target, mesh, cut))


def log_probs(head, hidden, labels, mesh, cut):
    target = targets(labels, mesh, cut)
    rows = safeops.head_loss(head, hidden, target, loss="token_log_probs")
    return (rows.log_prob.exp() - 0.1 * rows.entropy).sum() / float(count_of(target, mesh, cut))


def of_transformers(head, hidden, labels, mesh, cut):
    """ForCausalLMLoss counts the labels of all ranks that share the sequences, or gets the number of more ranks."""
    group, items = mesh["cp"] if "cp" in cut else None, None
    if "dp" in cut:
        items = count_of(targets(labels, mesh, cut), mesh, cut)
    return ForCausalLMLoss(head(hidden), labels, CLASSES, items, sequence_group=group)


# ---- cases


def check(sizes, loss, data="fsdp", plan=None):
    """sizes: {mesh dim: ranks}. data: how ranks with other tokens share a model: "ddp", "fsdp" or "hsdp"."""
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    cut = tuple(name for name in sizes if name in DATA)
    torch.manual_seed(0)
    single = Model().double()
    net, (tokens, labels) = copy.deepcopy(single), batch()
    want = single(tokens, functools.partial(loss, labels=labels, mesh=None, cut=()))
    want.backward()
    for name, dim in (("dp", 0), ("cp", 1)):
        if name in cut:
            tokens, labels = (x.chunk(mesh[name].size(), dim)[mesh.get_local_rank(name)] for x in (tokens, labels))
    if plan:
        parallelize_module(net, mesh["tp"], plan)
    model = wrapped(net, mesh, cut, data)
    got = model(tokens, functools.partial(loss, labels=labels, mesh=mesh, cut=cut))
    got.backward()
    value = got.detach().full_tensor() if hasattr(got, "full_tensor") else got.detach().clone()
    dist.all_reduce(value)  # (ranks along tp have copies of the same value)
    near = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)
    near(value / dist.get_world_size(), want.detach())
    for (name, p), q in zip(net.named_parameters(), single.parameters()):
        d = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        near(d, q.grad, msg=lambda text, name=name: f"{name}: {text}")


def wrapped(net, mesh, cut, data):
    if not cut:
        return net
    if data == "ddp":
        return DistributedDataParallel(net)
    if len(cut) == 2 and data == "fsdp":  # one mesh of both dims
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    else:
        mesh = mesh[cut]
    fully_shard(net.head, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def along(name, loss, *args):
    """A case of one mesh dim, of all ranks."""
    return lambda: check({name: dist.get_world_size()}, loss, *args)


def pair(first, second, loss, *args):
    """A case of two mesh dims; of two ranks the second dim has both."""
    return lambda: check({first: dist.get_world_size() // 2, second: 2}, loss, *args)


LAYOUTS = {
    "ddp": (along, "dp", "ddp"),
    "fsdp": (along, "dp", "fsdp"),
    "tp": (along, "tp", "fsdp", TENSOR),
    "sp": (along, "tp", "fsdp", SEQUENCE),
    "cp": (along, "cp", "ddp"),
    "cp of fsdp": (along, "cp", "fsdp"),
    "ddp and cp": (pair, "dp", "cp", "ddp"),
    "fsdp and cp": (pair, "dp", "cp", "fsdp"),
    "hsdp and cp": (pair, "dp", "cp", "hsdp"),
    "fsdp and tp": (pair, "dp", "tp", "fsdp", TENSOR),
    "fsdp and sp": (pair, "dp", "tp", "fsdp", SEQUENCE),
    "cp and tp": (pair, "cp", "tp", "fsdp", TENSOR),
    "cp and sp": (pair, "cp", "tp", "fsdp", SEQUENCE),
}


def cases():
    for name, (kind, *rest) in LAYOUTS.items():
        many = 1 if kind is along else 2
        losses = [cross_entropy, log_probs] + [of_transformers] * (len(rest) == many + 1)
        for loss in losses:
            yield f"{name}, {loss.__name__}", kind(*rest[:many], loss, *rest[many:])


def a_shift_of_each_rank_differs():
    """Without the group, a label at each cut is lost: the loss is another."""
    tokens, labels = batch()
    part = labels.chunk(dist.get_world_size(), 1)[dist.get_rank()]
    whole = (shift_labels(labels) != -100).sum()
    for group, is_right in ((dist.group.WORLD, True), (None, False)):
        count = (shift_labels(part, group) != -100).sum()
        dist.all_reduce(count)
        assert (count == whole) == is_right, (count, whole, group)


CASES = {**dict(cases()), "a shift of each rank differs": a_shift_of_each_rank_differs} | shifts.CASES
