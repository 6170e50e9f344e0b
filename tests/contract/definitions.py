"""The ops of the slice once more, in plain differentiable torch: in float64 they are the truth. No code of safeops."""

import torch

TINY = {torch.float64: torch.finfo(torch.float64).tiny}  # of the compute dtype: fp32's for everything narrower


def kept(shape, mask, weight):
    keep = torch.ones(shape, dtype=torch.bool, device=None if mask is None else mask.device)
    if weight is not None:
        keep = keep.to(weight.device)
        keep = keep & (weight != 0)  # a NaN weight is kept
    return keep if mask is None else keep & mask


def saturated(value, dtype):
    """Finite values brought into the range of dtype, with gradient 0 where that changes them."""
    over = value.to(dtype).isinf() & value.isfinite()
    return torch.where(over, value.sign().detach() * torch.finfo(dtype).max, value)


def masked_fill(input, fill_mask, value, *, out_dtype=torch.float64):
    value = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64, device=input.device)
    return torch.where(fill_mask, saturated(value.to(input.dtype), out_dtype), input)


def safe_div(input, other, *, eps=None, fill_value=0.0, out_dtype=torch.float64):
    if not isinstance(other, torch.Tensor):
        other = torch.tensor(other, dtype=input.dtype, device=input.device)
    eps = TINY.get(out_dtype, torch.finfo(torch.float32).tiny) if eps is None else eps
    keep = ~((other.abs() < eps) | (other == 0))
    raw = (torch.where(keep, input, 0) / torch.where(keep, other, 1)).detach()
    # It rounds to inf from half a step above the largest number on: what the narrowing itself says.
    over = raw.to(out_dtype).isinf() & input.isfinite()
    fill = saturated(torch.tensor(fill_value, dtype=input.dtype, device=input.device), out_dtype)
    stand_in = torch.where(keep, raw.sign() * torch.finfo(out_dtype).max, fill)
    true = keep & ~over
    return torch.where(true, torch.where(true, input, 0) / torch.where(true, other, 1), stand_in)


def _reduce(mean, terms, keep, weight, dim, keepdim, empty, divisor=None):
    """terms are 0 where not kept."""
    if isinstance(dim, tuple) and not dim:
        dim = None
    axes = tuple(range(terms.dim())) if dim is None else dim
    total, count = terms.sum(axes, keepdim=keepdim), keep.sum(axes, keepdim=keepdim)
    if mean:
        if divisor is None:
            weights = None if weight is None else torch.where(keep, weight, 0).expand(terms.shape)
            divisor = count if weights is None else weights.sum(axes, keepdim=keepdim)
        total = total / torch.where(count > 0, divisor, 1)
    return torch.where(count > 0, total, float("nan") if empty == "nan" else 0.0)


def _terms(value, keep, weight):
    value = torch.where(keep, value, 0)
    return value if weight is None else value * torch.where(keep, weight, 0)


def masked_sum(input, mask=None, dim=None, *, keepdim=False, weight=None, empty="zero", mean=False):
    keep = kept(input.shape, mask, weight).to(input.device)
    return _reduce(mean, _terms(input, keep, weight), keep, weight, dim, keepdim, empty)


def masked_mean(input, mask=None, dim=None, *, keepdim=False, weight=None, empty="zero"):
    return masked_sum(input, mask, dim, keepdim=keepdim, weight=weight, empty=empty, mean=True)


def _abs(d):
    """|d| whose derivative at NaN is NaN (torch.abs has 0 there) and at 0 is 0."""
    return d * torch.where(d.isnan(), d, d.sign()).detach()


def _loss(value):
    def loss(input, target, *, mask=None, weight=None, reduction="mean", denominator=None, empty="zero", **parameters):
        x, y = torch.broadcast_tensors(input, target)
        keep = kept(x.shape, mask, weight).to(x.device)
        x, y = torch.where(keep, x, 0), torch.where(keep, y, 0)
        terms = _terms(value(x - y, **parameters), keep, weight)
        if reduction == "none":
            return terms
        return _reduce(reduction == "mean", terms, keep, weight, None, False, empty, denominator)

    return loss


@_loss
def mse_loss(d):
    return d * d


@_loss
def l1_loss(d):
    return _abs(d)


def _knee(d, at):
    """d^2 / 2 below `at`, at (|d| - at / 2) above: each side sees only what is its own, so nothing cancels."""
    a = _abs(d)
    inner = a < at
    quadratic = torch.where(inner, a, 0).square() / 2
    return torch.where(inner, quadratic, at * (torch.where(inner, 0, a) - at / 2))


@_loss
def smooth_l1_loss(d, beta=1.0):
    return _abs(d) if beta == 0 else _knee(d, beta) / beta


@_loss
def huber_loss(d, delta=1.0):
    return _knee(d, delta)
