"""Process groups: one that a call names, or one along some dims of a device mesh."""

import torch.distributed as dist

from safeops.core.private_torch import flattened

# torch 2.13 renamed all_gather_into_tensor and warns about the old name. Without torch.distributed there is neither.
all_gather = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


def is_running():
    return dist.is_available() and dist.is_initialized()


def here(function):
    """The function's name for an error, with this process's rank if torch.distributed runs."""
    return f"{function} (rank {dist.get_rank()})" if is_running() else function


def objects(function, failed, item, group):
    """The `item` of every rank of a group, in rank order. failed: the error's text if a rank does not answer."""
    result = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(result, item, group=group)
    except (RuntimeError, ValueError) as error:
        raise RuntimeError(f"{here(function)}: {failed}: {error}") from error
    return result


def group_of_mesh(function, mesh, dims=None):
    """This rank's process group along `dims` of the mesh (names or numbers, None: all); the other dims are fixed.

    A group along several dims that is not the whole world is made by torch at the first call and found at later ones.
    """
    if mesh.get_coordinate() is None:
        raise ValueError(f"{function}: mesh: this rank is not in it, {mesh}")
    names = mesh.mesh_dim_names or ()
    axes = range(mesh.ndim) if dims is None else dims if isinstance(dims, (tuple, list)) else (dims,)
    for d in axes:
        if not (d in names or isinstance(d, int) and not isinstance(d, bool) and -mesh.ndim <= d < mesh.ndim):
            raise ValueError(f"{function}: dims: {d!r} is none of the mesh, which has {names or range(mesh.ndim)}")
    places = sorted({names.index(d) if d in names else d % mesh.ndim for d in axes})
    if len(places) != len(axes) or not places:
        raise ValueError(f"{function}: dims must name each dim once, and one at least, got {dims!r}")
    if len(places) == 1:
        return mesh.get_group(places[0])
    if len(places) == mesh.ndim and mesh.size() == dist.get_world_size():
        return dist.group.WORLD
    if not names:
        raise ValueError(f"{function}: dims {dims!r} of the mesh need names (mesh_dim_names), it has none")
    return flattened(mesh[tuple(names[i] for i in places)]).get_group()


def ranks_of(name, group, mesh, dims):
    """Returns (group, its number of ranks). A call names a group, or a mesh and its dims, or neither: all ranks. (None,
    1) for a single process."""
    if mesh is None and dist.is_available() and isinstance(group, dist.DeviceMesh):
        group, mesh = None, group
    if group is not None and mesh is not None:
        raise ValueError(f"{name}: give group or mesh, not both")
    if dims is not None and mesh is None:
        raise ValueError(f"{name}: dims are those of a mesh: give it too")
    if group is None and mesh is None and not is_running():
        return None, 1
    if not is_running():
        raise ValueError(f"{name}: {'group' if mesh is None else 'mesh'}: there is no process group, or no longer")
    if mesh is not None:
        if not isinstance(mesh, dist.DeviceMesh):
            raise TypeError(f"{name}: mesh must be a DeviceMesh, got {type(mesh).__name__}")
        group = group_of_mesh(name, mesh, dims)
    elif group is None:
        group = dist.group.WORLD
    try:
        size = dist.get_world_size(group)
    except (AttributeError, TypeError) as error:
        raise TypeError(f"{name}: group must be a process group, got {type(group).__name__}") from error
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{name}: group: {error}") from error
    if size < 1:
        raise ValueError(f"{name}: group: this rank is not in it")
    return group, size
