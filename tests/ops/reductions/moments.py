"""Variances, deviations, and logarithms of sums of exponentials."""

import torch

from safeops.testing import Bad, Sample
from tests.ops.bad_calls import NAN, X, must
from tests.ops.operands import HUGE, weights
from tests.ops.reductions.reduction import ZERO_ROWS, A, M, Masked, bad_parameters, filled, reduction, root, twin

INF = float("inf")


# ---- definitions


def masked_var(input, mask=None, dim=None, *, correction=1, keepdim=False, weight=None, empty="zero", power=1):
    if weight is not None:
        weight = torch.where(weight < 0, NAN, weight)
    m = Masked(input, mask, weight, dim, keepdim)
    mean = m.sum(m.w * m.x) / torch.where(m.count > 0, m.total, 1)
    if input.numel():  # equal elements must deviate by exactly 0, although the mean is rounded
        top = torch.where(m.keep, m.x, -INF).amax(m.axes, keepdim=True).detach()
        bottom = torch.where(m.keep, m.x, INF).amin(m.axes, keepdim=True).detach()
        mean = mean + torch.where(top == bottom, top - mean, 0).detach()
    squares = m.sum(m.w * torch.where(m.keep, m.x - mean, 0) ** 2)
    exists = (m.count > 0) & ~((m.total - correction <= 0) & ~squares.isnan())
    value = squares / torch.where(exists, m.total - correction, 1)
    return m.result(value if power == 1 else root(value), exists, empty)


def masked_std(input, *args, **kwargs):
    return masked_var(input, *args, **kwargs, power=0.5)


def masked_logsumexp(input, mask=None, dim=None, *, keepdim=False, weight=None, empty="zero"):
    m = Masked(input, mask, weight, dim, keepdim)
    top = m.extreme(m.x, True).detach()
    infinite = m.keep & (m.x == INF) & (top == INF)  # they alone share the gradient, by weight
    x = torch.where(infinite, 0, torch.where(top == INF, -INF, m.x))
    top, linear = torch.where(top.isfinite(), top, 0), torch.where(infinite, m.x, 0)
    total = m.sum(m.w * torch.where(m.keep, x - top, 0).exp())
    total = total * torch.where(total < 0, NAN, 1)  # NaN gradients, too
    top = top + m.sum(torch.where(infinite, m.w.detach(), 0) * linear) / total.detach()
    none = total == 0
    return m.result(torch.where(none, -INF, top + torch.where(none, 1, total).log()), m.count > 0, empty)


# ---- what users write


def _torch_var(x, mask, axes, keepdim, correction=1):
    if mask is None:
        return x.var(axes, correction=correction, keepdim=keepdim)
    n = mask.expand(x.shape).sum(axes, keepdim=True)
    mean = filled(x, mask, 0).sum(axes, keepdim=True) / n
    value = torch.where(mask, (x - mean).square(), 0).sum(axes, keepdim=True) / (n - correction)
    return value if keepdim else value.squeeze(axes)


def _torch_std(*args, **kwargs):
    return _torch_var(*args, **kwargs).sqrt()


# ---- tolerances


def deviation_terms(sample, outcome):
    """Sizes of the terms. Each element's deviation has the rounding error of the largest deviation in its group."""
    if not outcome.grads:
        return 0.0, {}
    x, ((key, grad),) = sample.args[0].detach(), outcome.grads.items()
    grad = grad.nan_to_num(0, 0, 0).abs()
    value = float((x.nan_to_num(0, 0, 0).abs() * grad).sum())
    dims = sample.kwargs.get("dim")
    return value, {key: grad.amax(dims if dims is not None else (), keepdim=True) if grad.numel() else grad}


def exponential_terms(sample, outcome):
    """Sizes of the terms. exp(x - origin) has a relative error of |x - origin| / 2 roundings."""
    x = sample.args[0].detach().nan_to_num(0, 0, 0)
    value = float(1 + x.abs().max()) if x.numel() else 0.0
    return value, {key: grad.abs() * value / 8 for key, grad in outcome.grads.items()}


# ---- records

LIGHT = torch.zeros(2, 5, dtype=torch.bool)  # one element per row, too few for correction=1
LIGHT[:, 0] = True


def _moment(definition, plain_torch):
    name = definition.__name__
    fractional = {"dim": 0, "correction": 1.5, "weight": weights(4, 6) + 2}
    reduction(
        definition,
        twin(plain_torch),
        heavy=2,
        extra=[
            Sample((A + 50, M), {"dim": 1, "correction": 0}, mask=1, name="population, mean far from 0"),
            Sample((A, M), fractional, mask=1, differentiable=(0,), name="correction that is no integer, weighted"),
            Sample((A, M), {"dim": 1, "correction": 3}, mask=1, name="rows with too few for the correction"),
            ZERO_ROWS,
        ],
        bad_calls=[
            *bad_parameters(name, "correction"),
            must(name, "correction", (X,), {"correction": HUGE}, ValueError),
            Bad((X, LIGHT, 1), {"empty": "raise"}, ValueError, (name, "empty", "raise", "2 of 2")),
        ],
        call={"correction": 0.5},
        terms=deviation_terms,
    )


_moment(masked_var, _torch_var)
_moment(masked_std, _torch_std)
FAR = Sample((A + 90, M), {"dim": 1}, mask=1, name="exponentials beyond fp16 and fp32")
reduction(masked_logsumexp, twin(lambda x, m, *rest: filled(x, m, -INF).logsumexp(*rest)), extra=[FAR, ZERO_ROWS])
