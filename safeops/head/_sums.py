"""The gradients of all chunks: rows side by side for hidden, sums in fp32 for what every chunk uses."""

import torch
from torch.autograd.graph import get_gradient_edge

from safeops.core import check
from safeops.core.private_torch import tensor_hooks


class Sums:
    """hidden: (N, D) gradient, or None. shared: {id of a tensor: its gradient, in fp32 if there are several chunks}.
    by_row: {name of an operand: its gradient}."""

    def __init__(self, many):
        self.hidden, self.shared, self.by_row, self.many = None, {}, {}, many

    def add(self, tensor, d):
        if d is None:
            return
        total = self.shared.get(id(tensor))
        if total is not None:
            total.add_(d)
            return
        wide = torch.promote_types(d.dtype, torch.float32) if self.many else d.dtype
        # autograd may return one tensor for two inputs, or a view: what is added to must be nobody else's
        self.shared[id(tensor)] = d.to(wide, copy=True)

    def put(self, like, part, d):
        """The gradient of the rows of hidden in `part`."""
        if d is None:
            return
        if self.hidden is None:
            self.hidden = d if not self.many else torch.zeros_like(like, memory_format=torch.contiguous_format)
        if self.many:
            self.hidden[part] = d

    def put_operand(self, key, like, part, d):
        if d is not None:
            self.by_row.setdefault(key, torch.zeros_like(like))[part] = d


def pull(outputs, slopes, inputs):
    """Gradients of inputs, None where one is not used. Hooks of leaves (Tensor.register_hook) are left out: they are
    called with the whole gradient, once. The caller's own references to outputs are all that keeps them."""
    hooked = [(x, tensor_hooks(x)) for x in inputs if x.is_leaf and tensor_hooks(x)]
    for x, _ in hooked:
        x._backward_hooks = None
    try:
        return torch.autograd.grad(outputs, inputs, slopes, allow_unused=True)
    finally:
        for x, hooks in hooked:
            x._backward_hooks = hooks


def edge_of(x):
    """An output as `pull` takes it, so that the output's memory is free before its graph is pulled."""
    return get_gradient_edge(x)


def times(d, factor, dtype, last):
    """d times factor, a 0-dim tensor, rounded once to dtype; in place if no other backward can follow."""
    factor = factor.to(torch.promote_types(d.dtype, torch.float32)).reshape([1] * d.dim())
    if check.mesh(d) is not None and check.mesh(factor) is None:  # (torch warns where it does this itself)
        from torch.distributed.tensor import DTensor, Replicate

        factor = DTensor.from_local(factor, d.device_mesh, [Replicate()] * d.device_mesh.ndim, run_check=False)
    return d.mul_(factor) if last and d.dtype == dtype else (d * factor).to(dtype)
