"""The statistics once more, in plain differentiable torch: in float64 they are the truth. No code of safeops."""

import torch

from tests.contract.definitions import _abs, kept


class _Masked:
    """Everything at the full shape; x and w are 0 where not kept."""

    def __init__(self, input, mask, weight, dim, keepdim):
        self.axes = tuple(range(input.dim())) if dim is None or dim == () else dim
        self.keepdim = keepdim
        self.keep = kept(input.shape, mask, weight).to(input.device)
        self.x = torch.where(self.keep, input, 0)
        self.w = torch.where(self.keep, torch.ones_like(input) if weight is None else weight, 0)
        self.count, self.total = self.sum(self.keep.to(input.dtype)), self.sum(self.w)

    def sum(self, x):
        return x.sum(self.axes, keepdim=True)

    def result(self, value, exists, empty):
        value = torch.where(exists, value, float("nan") if empty == "nan" else 0.0)
        if self.keepdim:
            return value
        return value.squeeze(self.axes) if value.dim() else value

    def extreme(self, x, largest):
        """Ties share: x summed over the k largest elements that are equal, each over k."""
        if not x.numel():
            return self.sum(x)
        fill = -float("inf") if largest else float("inf")
        known = torch.where(self.keep, x, fill).detach()
        top = known.amax(self.axes, keepdim=True) if largest else known.amin(self.axes, keepdim=True)
        ties = self.keep & ((x == top) | (x.isnan() & top.isnan()))
        return self.sum(torch.where(ties, x / self.sum(ties.to(x.dtype)).clamp(min=1), 0))


def _root(square):
    return torch.where(square == 0, 0, torch.where(square == 0, 1, square).sqrt())


def masked_var(
    input, mask=None, dim=None, *, correction=1, keepdim=False, weight=None, empty="zero", root=False
):  # fmt: skip
    if weight is not None:
        weight = torch.where(weight < 0, float("nan"), weight)
    m = _Masked(input, mask, weight, dim, keepdim)
    mean = m.sum(m.w * m.x) / torch.where(m.count > 0, m.total, 1)
    if input.numel():  # equal elements deviate by nothing, however the mean is rounded
        top = torch.where(m.keep, m.x, -float("inf")).amax(m.axes, keepdim=True).detach()
        bottom = torch.where(m.keep, m.x, float("inf")).amin(m.axes, keepdim=True).detach()
        mean = mean + torch.where(top == bottom, top - mean, 0).detach()
    squares = m.sum(m.w * torch.where(m.keep, m.x - mean, 0) ** 2)
    exists = (m.count > 0) & ~((m.total - correction <= 0) & ~squares.isnan())
    value = squares / torch.where(exists, m.total - correction, 1)
    return m.result(_root(value) if root else value, exists, empty)


def masked_std(input, *args, **kwargs):
    return masked_var(input, *args, **kwargs, root=True)


def masked_amax(input, mask=None, dim=None, *, keepdim=False, weight=None, empty="zero", largest=True):
    m = _Masked(input, mask, weight, dim, keepdim)
    return m.result(m.extreme(m.x, largest), m.count > 0, empty)


def masked_amin(input, *args, **kwargs):
    return masked_amax(input, *args, **kwargs, largest=False)


def masked_norm(input, mask=None, dim=None, *, ord=2, keepdim=False, weight=None, empty="zero"):
    m = _Masked(input, mask, weight, dim, keepdim)
    a = _abs(m.x)
    if ord in (float("inf"), -float("inf")):
        value = m.extreme(a, ord > 0)
    elif ord == 2:
        value = _root(m.sum(m.w * m.x * m.x))
    elif ord == 1:
        value = m.sum(m.w * a)
    elif ord == 0:
        value = m.sum(m.w * torch.where(a.isnan(), a, (a != 0).to(a.dtype)))
    else:
        # 0 has gradient 0, and for ord < 0 it is infinitely far
        powers = torch.where(a == 0, 0 if ord > 0 else float("inf"), torch.where(a == 0, 1, a) ** ord)
        total = m.sum(torch.where(m.keep, m.w * powers, 0))
        none = (total == 0) | (total.isposinf() & (ord < 0))
        value = torch.where(none, 0, torch.where(none, 1, total) ** (1 / ord))
    return m.result(value, m.count > 0, empty)


def safe_norm(input, dim=None, *, ord=2, keepdim=False, mask=None):
    return masked_norm(input, mask, dim, ord=ord, keepdim=keepdim)


def masked_sum_of_squares(input, mask=None, dim=None, *, keepdim=False, weight=None, empty="zero"):
    m = _Masked(input, mask, weight, dim, keepdim)
    return m.result(m.sum(m.w * m.x * m.x), m.count > 0, empty)


def masked_rms(input, mask=None, dim=None, *, keepdim=False, weight=None, empty="zero"):
    m = _Masked(input, mask, weight, dim, keepdim)
    value = _root(m.sum(m.w * m.x * m.x) / torch.where(m.count > 0, m.total, 1))
    return m.result(value, m.count > 0, empty)


def masked_logsumexp(input, mask=None, dim=None, *, keepdim=False, weight=None, empty="zero"):
    m = _Masked(input, mask, weight, dim, keepdim)
    top = m.extreme(m.x, True).detach()
    top = torch.where(top.isfinite(), top, 0)
    total = m.sum(m.w * torch.where(m.keep, m.x - top, 0).exp())
    total = total * torch.where(total < 0, float("nan"), 1)  # gradients of a NaN are NaN
    none = total == 0
    return m.result(torch.where(none, -float("inf"), top + torch.where(none, 1, total).log()), m.count > 0, empty)


def masked_count(input, mask=None, dim=None, *, keepdim=False, weight=None):
    m = _Masked(input, mask, weight, dim, keepdim)
    return m.result(m.count, m.count > 0, "zero").long()
