"""Gather the findings of all ranks of a group on every rank, so that one rank can report for all."""

import torch.distributed as dist

from safeops.core.group import is_running, objects


def check(function, group):
    """Raise ValueError unless `group` is None or a process group that this rank is in."""
    if group is None:
        return
    try:
        member = is_running() and dist.get_world_size(group) > 0
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"{function}: group: {error}") from error
    if not member:
        raise ValueError(
            f"{function}: group: {'this rank is not in it' if is_running() else 'there is no process group'}"
        )


def gather(function, item, group):
    """Return {rank: that rank's item} on every rank of the group; {None: item} without a group."""
    if group is None:
        return {None: item}
    return dict(sorted(objects(function, "what the ranks found could not be gathered", (dist.get_rank(), item), group)))


def everyone():
    """The group of all ranks, or None if there is only one."""
    return dist.group.WORLD if is_running() and dist.get_world_size() > 1 else None


def rank():
    return dist.get_rank() if is_running() else None
