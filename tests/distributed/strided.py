"""Cases of tensor-parallel operands that FSDP2 has sharded again, each compared with one process.

Their shards are strided (`_StridedShard`). No local kernel takes them: torch's own ops run the plain definition.
Run by processes.py.
"""

import functools

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import safeops
from tests.callers.calls import CALLS
from tests.distributed.sharded import COVERED, laid_out, mesh, operands, tensors_of
from tests.distributed.vocabulary import operands as layer

ROWS = 8  # even shards: FSDP2 refuses uneven ones of a dim that is already sharded


class Holder(torch.nn.Module):
    def __init__(self, x):
        super().__init__()
        self.weight = torch.nn.Parameter(distribute_tensor(x, mesh(2)["tp"], [Shard(0)], src_data_rank=None))


def strided(x, grad=True):
    holder = fully_shard(Holder(x if x.is_floating_point() else x.double()), mesh=mesh(2)["dp"])
    p = holder.weight.detach()
    assert dist.get_world_size() < 4 or type(p.placements[0]).__name__ == "_StridedShard"
    shard = p.to_local().to(x.dtype)
    p = DTensor.from_local(shard, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())
    return p.requires_grad_(x.is_floating_point() and grad)


def compare(name, plain, shared, **options):
    """Compares values and gradients to 1e-12. plain: {name: tensor}; shared: {name: that tensor as a DTensor}."""
    call = functools.partial(getattr(safeops, name), **options)
    plain = {k: x.clone().requires_grad_(shared[k].requires_grad) for k, x in plain.items()}
    want, got = call(**plain), call(**shared)
    near = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
    near(got.full_tensor(), want)
    if not want.requires_grad:
        return
    upstream = torch.randn(want.shape, dtype=want.dtype, generator=torch.Generator().manual_seed(7))
    leaves = [k for k, x in plain.items() if x.requires_grad]
    wants = torch.autograd.grad(want, [plain[k] for k in leaves], upstream)
    everywhere = laid_out(upstream, got.device_mesh, [Replicate()] * got.device_mesh.ndim)
    for g, w in zip(torch.autograd.grad(got, [shared[k] for k in leaves], everywhere), wants):
        near(g.full_tensor(), w)


def every(kinds):
    """Compares the ops with one of `kinds` as the way to combine the ranks' parts, with a mask if they take one, and
    with a second operand in another layout."""
    for name in [name for name, how in COVERED.items() if how in kinds]:
        options = {k: x for k, x in CALLS[name].items() if not isinstance(x, (torch.Tensor, type(None)))}
        options |= {"value": 0.25} if name == "masked_fill" else {}
        keys = [k for k in tensors_of(name) if k not in options] + ["mask"] * ("mask" in CALLS[name])
        x = operands(name, (ROWS, 3), torch.float64, keys)
        if COVERED[name] == "rows":
            x = {"input": x["input"], "target": torch.arange(ROWS) % 3}
        along = [{"dim": 0}, {"dim": 1}] if "dim" in CALLS[name] or kinds & {"sum", "softmax"} else [{}]
        for dim in along:
            compare(name, x, {k: strided(t) for k, t in x.items()}, **options | dim)
        first, *_ = x
        mixed = {k: strided(t) if k == first else laid_out(t, mesh(2), [Shard(0), Replicate()]) for k, t in x.items()}
        compare(name, x, mixed, **options | along[0])


def vocabulary():
    """linear_cross_entropy gathers the weight along one mesh dim, and the weight's gradient has the weight's layout."""
    x = layer(torch.float64, rows=(4,), classes=ROWS)
    shared = {k: laid_out(t, mesh(2), [Replicate()] * 2) for k, t in x.items()}
    shared["linear_weight"] = strided(x["linear_weight"])
    shared["input"].requires_grad_()
    compare("linear_cross_entropy", x, shared)


CASES = {
    "elementwise": functools.partial(every, {"elementwise"}),
    "losses": functools.partial(every, {"loss"}),
    "rows": functools.partial(every, {"rows"}),
    "reductions": functools.partial(every, {"sum", "mean", "statistic", "count"}),
    "vectors": functools.partial(every, {"softmax", "normalize", "cosine"}),
    "vocabulary": vocabulary,
}
