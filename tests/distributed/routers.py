"""Cases of losses of routers whose tokens lie on several ranks, each compared with one process. Run by processes.py."""

import functools

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

import safeops
from tests.distributed.processes import raises

EXPERTS = 6


def tokens():
    """Returns (logits (4, 5, E), keep (4, 5), this rank's sequences). Ranks keep different numbers of tokens."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(4, 5, EXPERTS, generator=g, dtype=torch.float64)
    keep = torch.rand(4, 5, generator=g) > 0.3
    keep[:2] = keep[:2] & (torch.arange(5) < 3)
    rank, per = dist.get_rank(), 4 // dist.get_world_size()
    return torch.where(keep.unsqueeze(-1), x, torch.nan), keep, slice(per * rank, per * rank + per)


def compare(mine, of_all):
    """mine(x, keep): this rank's loss, whose gradients a data parallel wrapper would average."""
    x, keep, part = tokens()
    whole = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(of_all(whole, keep), whole)
    own = x[part].clone().requires_grad_()
    (got,) = torch.autograd.grad(mine(own, keep[part]), own)
    torch.testing.assert_close(got / dist.get_world_size(), want[part])


def balance(**options):
    return lambda x, keep: safeops.load_balancing_loss(x, top_k=2, mask=keep, **options)


def global_level():
    """The counts are those of all ranks, by one all-reduce; nothing else crosses them."""

    def mine(x, keep):
        denominator = safeops.distributed.global_count(keep)
        with CommDebugMode() as sent:
            loss = balance(level="global", group=dist.group.WORLD, denominator=denominator)(x, keep)
            loss.detach().clone()
        assert sent.get_total_counts() == 1
        return loss

    compare(mine, balance())


def sequences():
    """A sequence's counts are its own: only the number of sequences crosses the ranks."""

    def mine(x, keep):
        return balance(level="sequence", denominator=safeops.distributed.global_count(keep.any(-1)))(x, keep)

    compare(mine, balance(level="sequence"))


def micro_batches():
    """Each rank has two micro-batches, checkpointed; the step's load is counted in a pass before."""

    def mine(x, keep):
        denominator = safeops.distributed.global_count([keep[:1], keep[1:]])
        load = safeops.router_load(x, top_k=2, mask=keep, group=dist.group.WORLD).load
        one = balance(load=load, denominator=denominator)
        return sum(checkpoint(one, x[c], keep[c], use_reentrant=False) for c in (slice(0, 1), slice(1, None)))

    if dist.get_world_size() == 2:
        compare(mine, balance())


def checkpointed():
    """The repeated call has its all-reduce again, and the gradient of one process."""

    def mine(x, keep):
        denominator = safeops.distributed.global_count(keep)
        return checkpoint(balance(level="global", denominator=denominator), x, keep, use_reentrant=False)

    compare(mine, balance())


def loads():
    x, keep, part = tokens()
    got = safeops.router_load(x[part].float(), top_k=2, mask=keep[part], group=dist.group.WORLD)
    want = safeops.router_load(x.float(), top_k=2, mask=keep)
    assert torch.equal(got.load, want.load) and torch.equal(got.max_violation, want.max_violation)
    torch.testing.assert_close(got.importance, want.importance)
    own = safeops.router_load(x[part].float(), top_k=2, mask=keep[part])
    assert not torch.equal(own.load, want.load)


def a_rank_that_keeps_nothing():
    x, keep, part = tokens()
    keep = keep & (dist.get_rank() > 0)
    own = x[part].clone().requires_grad_()
    loss = balance(level="global", denominator=safeops.distributed.global_count(keep[part]))(own, keep[part])
    (grad,) = torch.autograd.grad(loss, own)
    assert loss.isfinite() and grad.isfinite().all() and grad.any() == (dist.get_rank() > 0)


def dtensors():
    """DTensors of tokens: the counts are of all ranks at each level, as those of one process."""
    x, keep, _ = tokens()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for level in ("batch", "sequence", "global"):
        whole = x.clone().requires_grad_()
        want = balance(level=level)(whole, keep)
        want.backward()
        shared = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
        got = balance(level=level)(shared, distribute_tensor(keep, mesh, [Shard(0)]))
        got.backward()
        assert isinstance(got, DTensor)
        torch.testing.assert_close(got.full_tensor(), want)
        torch.testing.assert_close(shared.grad.full_tensor(), whole.grad)


def errors():
    x = torch.randn(3, EXPERTS)
    shared = distribute_tensor(x, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])
    for call in (safeops.router_load, functools.partial(safeops.load_balancing_loss, level="global")):
        raises(TypeError, "logits must be no DTensor",
               call=functools.partial(call, shared, top_k=1, group=dist.group.WORLD))  # fmt: skip
    raises(TypeError, "load_balancing_loss", "group", "int",
           call=lambda: safeops.load_balancing_loss(x, top_k=1, level="global", group=3))  # fmt: skip


CASES = {f.__name__: f for f in (global_level, sequences, micro_batches, checkpointed, loads,
                                 a_rank_that_keeps_nothing, dtensors, errors)}  # fmt: skip
