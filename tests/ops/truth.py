"""Parts of the definitions of several families: plain differentiable torch, and no code of safeops."""

import torch

TINY = {torch.float64: torch.finfo(torch.float64).tiny}  # of the compute dtype: fp32's for everything narrower


def floor(eps, out_dtype):
    """`eps`, by default the smallest normal number of the compute dtype."""
    return TINY.get(out_dtype, torch.finfo(torch.float32).tiny) if eps is None else eps


def absolute(d):
    """|d| whose derivative at NaN is NaN (torch.abs has 0 there) and at 0 is 0."""
    return d * torch.where(d.isnan(), d, d.sign()).detach()


def saturated(value, dtype):
    """Finite values brought into the range of dtype, with gradient 0 where that changes them."""
    over = value.to(dtype).isinf() & value.isfinite()
    return torch.where(over, value.sign().detach() * torch.finfo(dtype).max, value)


def kept(shape, mask, weight):
    keep = torch.ones(shape, dtype=torch.bool, device=None if mask is None else mask.device)
    if weight is not None:
        keep = keep.to(weight.device)
        keep = keep & (weight != 0)  # a NaN weight is kept
    return keep if mask is None else keep & mask


def weighted(value, keep, weight):
    """The values times their weights, 0 where not kept."""
    value = torch.where(keep, value, 0)
    return value if weight is None else value * torch.where(keep, weight, 0)


def reduce(mean, values, keep, weight, dim, keepdim, empty, divisor=None):
    """The sum of values that are 0 where not kept, or their mean."""
    if isinstance(dim, tuple) and not dim:
        dim = None
    axes = tuple(range(values.dim())) if dim is None else dim
    total, count = values.sum(axes, keepdim=keepdim), keep.sum(axes, keepdim=keepdim)
    if mean:
        if divisor is None:
            weights = None if weight is None else torch.where(keep, weight, 0).expand(values.shape)
            divisor = count if weights is None else weights.sum(axes, keepdim=keepdim)
        total = total / torch.where(count > 0, divisor, 1)
    return torch.where(count > 0, total, float("nan") if empty == "nan" else 0.0)
