"""The collectives of a call on DTensors, along some dims of their mesh. They only move partial results."""

import torch.distributed as dist

from safeops.core.group import all_gather, group_of_mesh, here, is_running
from safeops.distributed._layout import Uncovered


def add_up(function, part, mesh, dims):
    """Sum `part` over the ranks along the mesh's dims, in place."""
    if dims:
        _collective(function, "all-reduce", part, mesh, dims, lambda group: dist.all_reduce(part, group=group))
    return part


def gather(function, part, mesh, dims):
    """The tensors of all ranks along the mesh's dims: (ranks, *part.shape)."""

    def call(group):
        ranks = dist.get_world_size(group)
        result = part.new_empty((ranks * part.shape[0], *part.shape[1:]))
        all_gather(result, part.contiguous(), group=group)
        return result.view(ranks, *part.shape)

    return _collective(function, "all-gather", part, mesh, dims, call)


def _collective(function, kind, part, mesh, dims, call):
    if len(dims) > 1 and not mesh.mesh_dim_names and mesh.size() != dist.get_world_size():
        raise Uncovered  # torch makes no group of several dims without names
    try:
        return call(group_of_mesh(function, mesh, dims))
    except (RuntimeError, ValueError, AssertionError, KeyError) as error:  # (what torch raises without a group)
        if str(error).startswith(function):  # `agree` found that the ranks' calls differ
            raise
        where = here(function) if is_running() else f"{function} (at {tuple(mesh.get_coordinate())} of its mesh)"
        sent = f"{str(part.dtype).removeprefix('torch.')} {tuple(part.shape)}"
        raise RuntimeError(f"{where}: the {kind} of its partial results, here {sent}, failed: {error}") from error
