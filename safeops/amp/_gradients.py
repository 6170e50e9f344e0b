"""Collect the gradients for grad_norm and clip_grad_norm_, and compute their norm.

For a DTensor each rank takes its own shard; of copies only the first counts. One collective for each mesh gathers the
norms of the ranks' parts, one fp64 number each: no rank holds a whole gradient, no square overflows, and all ranks get
the same bits.
"""

import torch
import torch.distributed as dist

from safeops.core import check
from safeops.core.dtypes import FLOATING, compute_dtype
from safeops.core.group import all_gather, group_of_mesh, here
from safeops.core.private_torch import awaited
from safeops.distributed._agreement import agree, is_asked
from safeops.ops.lists.grad_norm import norm, norm_definition


def gradients(function, parameters):
    """Returns (keys, gradients) of the parameters that have a gradient, each gradient once. A key is an index in the
    iterable, or a parameter's name in the module."""
    if isinstance(parameters, torch.nn.Module):
        items = parameters.named_parameters()
    elif isinstance(parameters, torch.Tensor):
        items = ((0, parameters),)
    else:
        try:
            items = enumerate(parameters)
        except TypeError:
            raise TypeError(
                f"{function}: parameters must be a module, a tensor or an iterable of tensors, got "
                f"{type(parameters).__name__}"
            ) from None
    keys, results, seen = [], [], set()
    for key, p in items:
        if not isinstance(p, torch.Tensor):
            raise TypeError(f"{function}: {named(key)} must be a tensor, got {type(p).__name__}")
        grad = p.grad
        if grad is None:
            if not (p.requires_grad or isinstance(p, torch.nn.Parameter)):
                raise TypeError(
                    f"{function}: {named(key)} has no gradient and requires none: pass the parameters, not their "
                    "gradients"
                )
        elif id(grad) not in seen:
            # a sparse tensor may store an element as several terms
            supported = type(grad) is torch.Tensor or check.mesh(grad) is not None
            if not supported or grad.layout != torch.strided:
                kind = f"of type {type(grad).__name__}" if not supported else grad.layout
                raise TypeError(
                    f"{function}: the gradient of {named(key)} must be a plain dense tensor or a DTensor, got one "
                    f"{kind}"
                )
            seen.add(id(grad))
            keys.append(key)
            results.append(grad)
    if other := {grad.dtype for grad in results}.difference(FLOATING):
        key, dtype = next((key, grad.dtype) for key, grad in zip(keys, results) if grad.dtype in other)
        raise TypeError(f"{function}: the gradient of {named(key)} must be floating point, got {dtype}")
    _check_distribution(function, keys, results)
    return keys, results


def _check_distribution(function, keys, grads):
    """Raise unless all gradients are DTensors, or none is: the ranks may hold copies or parts of a plain one."""
    plain = next((key for key, grad in zip(keys, grads) if check.mesh(grad) is None), None)
    other = next((key for key, grad in zip(keys, grads) if check.mesh(grad) is not None), None)
    if plain is not None and other is not None:
        raise TypeError(
            f"{function}: the gradient of {named(other)} is a DTensor, of {named(plain)} a plain tensor, which may be "
            "a copy of every rank's or another on each: make it a DTensor too (torch.distributed.tensor), "
            "or take the two kinds in two calls"
        )


def named(key):
    return f"parameters[{key}]" if isinstance(key, int) else key


def order(function, norm_type):
    if norm_type == "inf":
        norm_type = float("inf")
    check.number(function, "norm_type", norm_type, above=0)
    return float(norm_type)


def total_norm(all_grads, ord):
    """The norm of all gradients in fp64, on the device of the first."""
    meshes = {}
    for grad in all_grads:
        meshes.setdefault(check.mesh(grad), []).append(grad)
    norms = [_norm_on(mesh, grads, ord) for mesh, grads in meshes.items()]
    return together(norms, ord)


def together(norms, ord):
    """The norm of all parts from the norms of the parts, on the device of the first."""
    first, *others = norms
    return norm_definition([first, *(n.to(first.device) for n in others)], ord) if others else first


def _norm_on(mesh, grads, ord):
    """The norm of the gradients on one mesh, or of plain gradients (mesh None)."""
    if mesh is None:
        return together([norm(group, ord) for group in by_device(grads)], ord)
    group = group_of_mesh(here("grad_norm"), mesh)
    if is_asked():
        agree("grad_norm", [group], {"norm_type": ord, **{f"gradient {i}": grad for i, grad in enumerate(grads)}})
    parts = [part for part in map(_own_part, grads) if part is not None]
    device = held(grads[0]).device
    local_norm = norm(parts, ord) if parts else torch.zeros((), dtype=torch.float64, device=device)
    every = local_norm.new_empty(dist.get_world_size(group))
    try:
        all_gather(every, local_norm.reshape(1), group=group)
    except RuntimeError as error:
        raise RuntimeError(f"{here('grad_norm')}: the ranks' norms could not be gathered: {error}") from error
    return norm_definition([every], ord)


def _own_part(grad):
    """The part of a DTensor that this rank adds to the norm: its shard, or None if another rank adds a copy of it."""
    if any(p.is_partial() for p in grad.placements):
        from torch.distributed.tensor import Replicate, Shard  # (a slow import)

        # The norm of a sum does not follow from the norms of its terms. So first add up the terms, the ranks' partial
        # gradients: each rank for one shard of the sum.
        placement = Replicate() if grad.dim() == 0 else Shard(0)
        grad = grad.to(compute_dtype(grad.dtype)).redistribute(
            placements=[placement if p.is_partial() else p for p in grad.placements]
        )
    place = grad.device_mesh.get_coordinate()
    if place is None or any(p.is_replicate() and i for p, i in zip(grad.placements, place)):
        return None
    return held(grad)


def held(grad):
    """This rank's part of a gradient, not a copy of it."""
    return grad if check.mesh(grad) is None else awaited(grad.to_local())


def by_device(grads):
    groups = {}
    for grad in grads:
        groups.setdefault(grad.device, []).append(grad)
    return groups.values()


def narrowed(norm, grads):
    """The norm in the dtype that is returned: fp32, or fp64 if a gradient is fp64."""
    return norm.to(compute_dtype(*{grad.dtype for grad in grads}))
