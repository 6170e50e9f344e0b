"""Layouts of the DTensors in a call.

Operands that broadcast with each other get the result's layout. An operand in another layout, or a partial one, is
redistributed, as torch's own ops do.
"""

from math import prod

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from safeops.core.definitions import laid_out
from safeops.core.private_torch import awaited
from safeops.core.route import PLAIN


class Uncovered(Exception):
    """The call is left to the composite. Raised before any collective, and on all ranks alike."""


def layout(tensors):
    """Returns (mesh, shape, placements) of the result of operands that broadcast with each other."""
    distributed = [x for x in tensors if isinstance(x, DTensor)]
    if not distributed:  # only the denominator is a DTensor
        raise Uncovered
    mesh = distributed[0].device_mesh
    if any(x.device_mesh != mesh for x in distributed) or mesh.get_coordinate() is None:
        raise Uncovered
    shape, placements = torch.broadcast_shapes(*(x.shape for x in tensors)), []
    for i in range(mesh.ndim):
        for x in distributed:
            p = x.placements[i]
            if not (type(p) is Shard or p.is_replicate() or p.is_partial()):  # FSDP's strided shards, say
                raise Uncovered
            lead = len(shape) - x.dim()
            if p.is_shard() and x.shape[p.dim] == shape[lead + p.dim]:
                placements.append(Shard(lead + p.dim))
                break
        else:
            placements.append(Replicate())
    return mesh, shape, placements


def local(x, shape, placements):
    """This rank's part of an operand that broadcasts to `shape`, which has these placements."""
    if not isinstance(x, DTensor):
        if isinstance(x, torch.Tensor) and (x.dim() or type(x) not in PLAIN):
            raise Uncovered
        return x
    lead = len(shape) - x.dim()

    def of(p):
        there = p.is_shard() and p.dim >= lead and x.shape[p.dim - lead] == shape[p.dim]
        return Shard(p.dim - lead) if there else Replicate()

    wanted = tuple(map(of, placements))
    if x.placements != wanted:
        x = x.redistribute(placements=wanted)
    x = awaited(x.detach().to_local())
    if type(x) not in PLAIN:
        raise Uncovered
    return x


def for_composite(x):
    """x in a layout that torch's ops take. A partial x is added up (else `add_` raises and `gather` loses the rows). A
    dim of which some rank has nothing is gathered (else `amax` raises there, and the other ranks wait)."""
    if not isinstance(x, DTensor):
        return x

    def empty(dim):
        """True if some rank has nothing of a dim, which is cut into equal parts until nothing is left."""
        ranks = prod(x.device_mesh.size(i) for i, p in enumerate(x.placements) if p.is_shard(dim))
        return -(-x.shape[dim] // ranks) * (ranks - 1) >= x.shape[dim]

    placements = [Replicate() if p.is_partial() or p.is_shard() and empty(p.dim) else p for p in x.placements]
    return x if placements == list(x.placements) else laid_out(x, placements)


def shared(x, mesh, shape, placements, like=None):
    """The DTensor that has x as its part on this rank. like: an operand whose memory order the result has."""
    strides = torch.empty(shape, device="meta")
    if like is not None and like.shape == shape:
        strides = torch.empty_like(torch.empty_strided(shape, like.stride(), device="meta"))
    return DTensor.from_local(x, mesh, placements, run_check=False, shape=shape, stride=strides.stride())


def share_rows(result, mesh, shape, placements):
    """`shared` for a result (*rows) or (k, *rows), with k numbers for each row. shape, placements: of the rows."""
    more = result.dim() - len(shape)
    placements = [Shard(p.dim + more) if p.is_shard() else p for p in placements]
    return shared(result, mesh, torch.Size((*result.shape[:more], *shape)), placements)
