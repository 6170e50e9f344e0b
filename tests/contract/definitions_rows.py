"""The functions of rows once more, in plain differentiable torch: in float64 they are the truth. No code of safeops."""

import torch

from tests.contract.definitions import TINY


def _softmax(input, mask, dim):
    """(x - top, sum of exp(x - top), keep): top is a constant, and cancels."""
    keep = torch.ones_like(input, dtype=torch.bool) if mask is None else mask.expand(input.shape)
    if input.dim() and input.shape[dim] == 0:
        return input, input.sum(dim, keepdim=True), keep
    top = torch.where(keep, input.detach(), -torch.inf).amax(dim, keepdim=True)
    centred = torch.where(keep, input - top, 0)
    total = torch.where(keep, centred.exp(), 0).sum(dim, keepdim=True)
    return centred, torch.where(keep.any(dim, keepdim=True), total, 1), keep


def masked_softmax(input, mask=None, dim=-1):
    centred, total, keep = _softmax(input, mask, dim)
    return torch.where(keep, torch.where(keep, centred, 0).exp() / total, 0)


def masked_log_softmax(input, mask=None, dim=-1):
    centred, total, keep = _softmax(input, mask, dim)
    return torch.where(keep, centred - total.log(), -torch.inf)


def _unit(x, dim, eps):
    """(x / max(|x|, eps), |x|); the norm is taken of x over its largest element."""
    if x.dim() and x.shape[dim] == 0:
        return x, x.sum(dim, keepdim=True)
    most = x.detach().abs().amax(dim, keepdim=True)
    zero, plain = most == 0, ~most.isfinite()
    most = torch.where(zero | plain, 1, most)
    small = torch.where(zero, 1, x / most)  # the root has no derivative at 0
    norm = torch.where(zero, 0, small.square().sum(dim, keepdim=True).sqrt() * most)
    divisor = torch.where(norm <= eps, eps, norm)
    return torch.where(zero, 0, torch.where(zero, 0, x) / torch.where(zero, 1, divisor)), norm.detach()


def _floor(eps, out_dtype):
    return TINY.get(out_dtype, torch.finfo(torch.float32).tiny) if eps is None else eps


def normalize(input, dim=-1, *, eps=None, out_dtype=torch.float64):
    return _unit(input, dim, _floor(eps, out_dtype))[0]


def cosine_similarity(x1, x2, dim=-1, *, eps=None, out_dtype=torch.float64):
    x1, x2 = torch.broadcast_tensors(x1, x2)
    (y1, norm1), (y2, norm2) = (_unit(x, dim, _floor(eps, out_dtype)) for x in (x1, x2))
    # A zero vector has no angle, unless there is a NaN or inf to show.
    none = ((norm1 == 0) & norm2.isfinite()) | ((norm2 == 0) & norm1.isfinite())
    return (torch.where(none, 0, y1) * torch.where(none, 0, y2)).sum(dim)
