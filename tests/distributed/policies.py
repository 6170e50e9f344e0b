"""Cases of policies on several ranks, each compared with the same batch on one. Run by processes.py."""

import torch
import torch.distributed as dist

import safeops
from safeops.distributed import global_count
from tests.distributed.processes import raises
from tests.ops.operands import data, mask
from tests.ops.policies.advantages import group_advantages


def mine(whole, count):
    """This rank's part: the ranks hold 3, 4, ... of the first `count` elements, the last one the rest."""
    rank, world = dist.get_rank(), dist.get_world_size()
    bounds = [0, *(min(count, 3 * r + r * (r - 1) // 2) for r in range(1, world)), count]
    return whole[bounds[rank] : bounds[rank + 1]]


def groups():
    """Groups must be whole though their rewards lie on ranks that hold different numbers of them."""
    rewards, keep, ids = data(12), mask(12), torch.arange(12) * 5 % 7 % 3 - 1
    group = dist.group.WORLD
    for options in ({}, {"scale": False, "leave_one_out": True}):
        for groups in (ids, 4):
            cut = mine(groups, 12) if isinstance(groups, torch.Tensor) else groups
            got = safeops.group_advantages(mine(rewards, 12), cut, mask=mine(keep, 12), process_group=group, **options)
            want = mine(group_advantages(rewards, groups, mask=keep, **options), 12)
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    equal = safeops.group_advantages(torch.full((2,), 0.1).half(), 2 * dist.get_world_size(), process_group=group)
    assert not equal.any() and equal.dtype == torch.float32


def wrong_groups():
    rank = dist.get_rank()
    rewards = torch.zeros(4)

    def call(size, **options):
        return lambda: safeops.group_advantages(rewards, size, process_group=dist.group.WORLD, **options)

    raises(ValueError, "group_advantages", "options", "rank", call=call(4, eps=float(rank)))
    raises(ValueError, "groups of 3 do not divide", "rewards", call=call(3))


def losses():
    """The sum of the ranks' gradients must be that of one process, whatever each rank keeps."""
    world = dist.get_world_size()
    x, old, a = data(12, 5), data(12, 5, seed=1), data(12, seed=2)
    keep = mask(12, 5)
    keep[:2] = False
    for reduction, counted in (("mean", keep), ("sequence_mean", keep.any(1))):
        leaf = x.clone().requires_grad_()
        count = global_count(mine(counted, 12), averaged=False)
        parts = [mine(t, 12) for t in (leaf, old, a)]
        loss = safeops.policy_loss(*parts, mask=mine(keep, 12), reduction=reduction, denominator=count).loss
        (grad,) = torch.autograd.grad(loss, leaf)
        dist.all_reduce(grad)
        leaf = x.clone().requires_grad_()
        want = safeops.policy_loss(leaf, old, a, mask=keep, reduction=reduction).loss
        torch.testing.assert_close(grad, torch.autograd.grad(want, leaf)[0], rtol=1e-12, atol=1e-15)
    assert world > 1


CASES = {case.__name__: case for case in (groups, wrong_groups, losses)}
