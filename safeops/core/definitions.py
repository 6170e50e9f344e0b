"""Functions that the definitions of several families share: masks, sums, elementwise functions, DTensor layouts."""

from math import prod

import torch

from safeops.core import check


def kept(mask, weight):
    """Bool: True where an element is kept, with `mask` True and `weight` not 0. None if both are None: all are kept."""
    if weight is None:
        return mask
    return weight != 0 if mask is None else mask & (weight != 0)


def selected(x, keep):
    """x where `keep` is True, else 0. None: all of x."""
    return x if keep is None else torch.where(keep, x, 0)


def count_kept(keep, input, dim, keepdim):
    """The number of kept elements in each result: int64, exact. If all are kept it follows from the shape, so that a
    compiled graph does not add up ones."""
    if keep is not None:
        return sum_over(keep, input, dim, keepdim)
    dims = {d % input.dim() for d in dim or range(input.dim())}
    shape = [1 if d in dims else size for d, size in enumerate(input.shape) if keepdim or d not in dims]
    return input.new_full(shape, prod([input.shape[d] for d in dims]), dtype=torch.int64)


def sum_over(x, input, dim, keepdim):
    return accumulate(x.expand(input.shape), dim, keepdim)


def accumulate(x, dim, keepdim=False):
    """x.sum(dim). On the CPU, fp32 is summed and returned in fp64: aten's fp32 error grows like the number of terms."""
    wide = torch.float64 if x.dtype == torch.float32 and x.device.type == "cpu" else None
    if x.dim() == 0:  # (under vmap, torch's forward mode cannot sum a 0-dim tensor)
        return x.unsqueeze(0).sum(0, dtype=wide)
    return x.sum(dim or None, keepdim=keepdim, dtype=wide)  # (a DTensor reads dim=() as no dim)


def absolute(d):
    """|d| with derivative sign(d): 0 at 0, and NaN where d is NaN (torch.abs has slope 0 there and hides the NaN)."""
    sign = torch.where(d.isnan(), d, d.sign()).detach()
    return d * sign


def product(a, b):
    """a b; where a is 0 and b is infinite, 0 with gradient 0."""
    infinite = (a == 0) & b.isinf()
    return torch.where(infinite, 0, a) * torch.where(infinite, 0, b)


def softplus(x):
    """log(1 + e^x), with derivative sigmoid(x)."""
    positive, negative = torch.where(x > 0, x, 0), torch.where(x > 0, 0, x)
    return torch.where(x > 0, positive + torch.log1p(torch.exp(-positive)), torch.log1p(torch.exp(negative)))


def sigmoid(x):
    """1 / (1 + e^-x). The last digit of torch.sigmoid depends on the number of threads on a CPU."""
    upper, lower = torch.exp(-torch.where(x > 0, x, 0)), torch.exp(torch.where(x > 0, 0, x))
    return torch.where(x > 0, 1 / (1 + upper), lower / (1 + lower))


def gathered(x, dims):
    """A DTensor x, gathered along `dims`, with partial sums added up. Any other tensor is returned unchanged."""
    if check.mesh(x) is None:
        return x
    from torch.distributed.tensor import Replicate  # (imports the whole of torch.distributed)

    return laid_out(x, [p if p.is_shard() and p.dim not in dims else Replicate() for p in x.placements])


def laid_out(x, placements):
    """A DTensor in another layout. A hook on the result sums its gradient over the ranks where x and the gradient are
    both partial (each rank holds a term): torch would average it if x is a partial average."""
    from torch.distributed.tensor import Replicate

    def added_up(grad):
        both = zip(grad.placements, x.placements)
        return grad.redistribute(placements=[Replicate() if p.is_partial() and q.is_partial() else p for p, q in both])

    y = x.redistribute(placements=placements)
    if y.requires_grad:
        y.register_hook(added_up)
    return y


def keepdim_shape(shape, dim):
    """The shape of a reduction with keepdim: `shape`, with size 1 at `dim`."""
    return [1 if d == dim % len(shape) else n for d, n in enumerate(shape)]
