"""Parts that several families' definitions share: plain differentiable torch, without code of safeops."""

import torch

TINY = {torch.float64: torch.finfo(torch.float64).tiny}  # results of all other dtypes are computed in fp32


def floor(eps, out_dtype):
    """Returns `eps`; if it is None, the smallest normal number of the compute dtype."""
    return TINY.get(out_dtype, torch.finfo(torch.float32).tiny) if eps is None else eps


def absolute(d):
    """Returns |d|, with derivative NaN at NaN (torch.abs has 0) and 0 at 0."""
    return d * torch.where(d.isnan(), d, d.sign()).detach()


def saturated(value, dtype):
    """Clamps finite values to the range of dtype; a value that this changes gets gradient 0."""
    over = value.to(dtype).isinf() & value.isfinite()
    return torch.where(over, value.sign().detach() * torch.finfo(dtype).max, value)


def kept(shape, mask, weight):
    keep = torch.ones(shape, dtype=torch.bool, device=None if mask is None else mask.device)
    if weight is not None:
        keep = keep.to(weight.device)
        keep = keep & (weight != 0)  # a NaN weight is kept: it is not 0
    return keep if mask is None else keep & mask


def weighted(value, keep, weight):
    """Returns value * weight, 0 where not kept."""
    value = torch.where(keep, value, 0)
    return value if weight is None else value * torch.where(keep, weight, 0)


def reduce(mean, values, keep, weight, dim, keepdim, empty, divisor=None):
    """Returns the sum of values, which must be 0 where not kept. mean: it is divided by `divisor`, or by the (weighted)
    count if that is None."""
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


def reduced(terms, keep, weight, reduction, denominator, empty):
    """Returns the losses `terms`, weighted and reduced as the losses of all families are."""
    terms = weighted(terms, keep, weight)
    if reduction == "none":
        return terms
    return reduce(reduction == "mean", terms, keep, weight, None, False, empty, denominator)
