"""The findings of all ranks of a group: every rank learns of all, so that one of them can answer for all."""

import torch.distributed as dist

from safeops.core.group import is_running, objects


def check(function, group):
    """A group as the tools take it: None, or one that this rank is in."""
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
    """{rank: what it has}, on every rank of the group."""
    if group is None:
        return {None: item}
    return dict(sorted(objects(function, "what the ranks found could not be gathered", (dist.get_rank(), item), group)))


def everyone():
    """The group of all ranks, if they are several."""
    return dist.group.WORLD if is_running() and dist.get_world_size() > 1 else None


def rank():
    return dist.get_rank() if is_running() else None
