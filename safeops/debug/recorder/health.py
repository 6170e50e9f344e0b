"""Is a step finite? One number a device says it: the largest magnitude of its losses and gradients.

On the CPU the answer is there at once. On another device it stays in a ring there and comes to the host by an
asynchronous copy, whose event is asked and never waited for.
"""

import math

import torch
import torch.distributed as dist

from safeops.core import check, private_torch
from safeops.core.dtypes import FLOATING
from safeops.core.group import group_of_mesh
from safeops.ops.lists.grad_norm import norm

IMMEDIATE = "cpu"  # the kind of device whose answers are there at once


def measured(tensors):
    """The largest magnitude of the tensors, as 0-dim fp64 tensors, one a device: inf or NaN if one holds any."""
    by_device = {}
    for x in tensors:
        x = private_torch.awaited(x.to_local()) if check.mesh(x) is not None else x
        x = x.detach()
        x = x.coalesce().values() if x.layout == torch.sparse_coo else x
        x = torch.view_as_real(x) if x.is_complex() else x
        if x.numel() and x.dtype in FLOATING and type(x) in (torch.Tensor, torch.nn.Parameter):
            by_device.setdefault(x.device, []).append(x)
    return [norm(tensors, math.inf) for tensors in by_device.values()]


def mesh_of(grads):
    """The device mesh of gradients that are shards, or None: then each rank's gradients are its own, or copies."""
    return next((mesh for mesh in map(check.mesh, grads) if mesh is not None), None)


class Flag:
    """The answer to: was the step not finite? known: True or False, or None while the answer is on its way.

    losses, grads: numbers of `measured`. mesh: of `mesh_of`. before: the device's flag of earlier steps that the host
    has not seen yet, or None. in_grads: True, where known, if it is in the gradients. by_grads: only they decide about
    the update, as each rank has the same averaged ones; on_device and `stops` say what they decide.
    """

    def __init__(self, losses, grads, mesh=None, before=None, by_grads=False):
        self.known = self.on_device = self.both = self.event = None
        self.in_grads, self.is_shared = False, mesh is not None
        self.late = []  # (tensor, its value before the update) for the host to put back, if the step was not finite
        device = next((number.device for number in (*grads, *losses) if number.device.type != IMMEDIATE), None)
        if device is None and mesh is not None and mesh.device_type != IMMEDIATE:
            device = torch.device(mesh.device_type)  # a rank whose shards are empty meets the others there, too
        self.by_grads = by_grads
        if device is None:
            self.in_grads = not _all_finite(grads)
            self.known = self.in_grads or not _all_finite(losses)
            if mesh is not None:
                self.known = _on_any_rank(self.known, mesh)
            return
        numbers = [number.to(device, non_blocking=True) for number in (*grads, *losses)]
        bad = torch.stack(numbers or [torch.zeros((), device=device)]) * 0 != 0  # inf * 0 is NaN
        both = torch.stack([bad[: len(grads)].any(), bad.any()]).float()  # (2,): in the gradients, anywhere
        if mesh is not None:
            dist.all_reduce(both, dist.ReduceOp.MAX, group=group_of_mesh("recorder", mesh))
        if before is not None:
            both = torch.maximum(both, before)
        self.both, self.on_device = both, both[0] if by_grads else both[1]
        self.host, self.event = _sent(both)

    @property
    def stops(self):
        """Where `known`: True if the update must not be made."""
        return self.in_grads if self.by_grads else self.known

    def ask(self, wait=False):
        """True, False, or None if the answer is not there yet and must not be waited for."""
        if self.known is None and (wait or self.event.query()):
            self.event.synchronize()
            self.in_grads, self.known = map(bool, self.host.tolist())
        return self.known


def _all_finite(numbers):
    return all(math.isfinite(number.item()) for number in numbers)


def _sent(x):
    """A copy of x on the host that is on its way, and the event that tells when it is there."""
    host, event = torch.empty(x.shape, pin_memory=True), torch.Event(device=x.device)
    host.copy_(x, non_blocking=True)
    event.record()
    return host, event


def _on_any_rank(bad, mesh):
    """True on each rank of the mesh if `bad` is on any: one collective of one number."""
    word = torch.tensor([float(bad)], device="cpu")
    dist.all_reduce(word, dist.ReduceOp.MAX, group=group_of_mesh("recorder", mesh))
    return bool(word)
