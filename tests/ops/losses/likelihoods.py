"""Losses of probabilities, logits and densities."""

import math

import torch
import torch.nn.functional as F

from tests.ops.losses.pointwise import pointwise


def _times(a, b):
    """Returns a b, but 0 where a is 0 and b is infinite."""
    nothing = (a == 0) & b.isinf()
    return torch.where(nothing, 0, a) * torch.where(nothing, 0, b)


def _softplus(x):
    return -F.logsigmoid(-x)


class _WithSlopes(torch.autograd.Function):
    """A loss with given derivatives: apply(loss, x, y, ..., d/dx, d/dy, ...) returns the loss."""

    generate_vmap_rule = True

    @staticmethod
    def forward(loss, *tensors):
        return loss.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.slopes = inputs[1 + len(inputs) // 2 :]
        ctx.save_for_forward(*ctx.slopes)
        ctx.save_for_backward(*ctx.slopes)

    @staticmethod
    def backward(ctx, grad):
        return None, *(grad * slope for slope in ctx.saved_tensors), *(None for _ in ctx.saved_tensors)

    @staticmethod
    def jvp(ctx, _, *tangents):
        moved = zip(tangents, ctx.saved_tensors)
        return sum(t * slope for t, slope in moved if t is not None)


def _with_slopes(loss, tensors, slopes):
    return _WithSlopes.apply(loss.detach(), *tensors, *slopes)


def _bce(x, y):
    """Returns binary cross entropy with torch's derivative, which is bounded where the loss is clamped."""
    hit, miss = x.log().clamp(min=-100), (-x).log1p().clamp(min=-100)
    slopes = (x - y) / (x * (1 - x)).clamp(min=1e-12), miss - hit
    return _with_slopes(-(y * hit + (1 - y) * miss), (x, y), slopes)


def _bce_sizes(x, y):
    hit, miss = x.log().clamp(min=-100).abs(), (-x).log1p().clamp(min=-100).abs()
    return y * hit + (1 - y) * miss, (x + y) / (x * (1 - x)).clamp(min=1e-12), hit + miss


def _with_logits(x, y, pos_weight=None):
    return _times(1 - y, _softplus(x)) + _times(y if pos_weight is None else y * pos_weight, _softplus(-x))


def _with_logits_sizes(x, y, w=None):
    w = torch.ones_like(x) if w is None else w
    p, q = x.sigmoid(), (-x).sigmoid()
    hit, miss = w * _softplus(-x), _softplus(x)
    return y * hit + (1 - y) * miss, (1 - y) * p + y * w * q, hit + miss + w, y * _softplus(-x)


def _focal(x, y, alpha=0.25, gamma=2.0):
    logit = torch.where(x.isinf(), x.detach(), x)
    missed = y * (-logit).sigmoid() + (1 - y) * logit.sigmoid()
    right = missed == 0
    power = torch.where(right, float(gamma == 0), torch.where(right, 1, missed) ** gamma)
    balance = alpha * y + (1 - alpha) * (1 - y) if alpha >= 0 else 1
    return balance * power * _with_logits(x, y)


def _focal_sizes(x, y, alpha=0.25, gamma=2.0):
    """Sizes of the terms. m^gamma, with m the probability missing to the label, has gamma times m's relative error."""
    p, q = x.sigmoid(), (-x).sigmoid()
    missed = y * q + (1 - y) * p
    power = torch.where(missed == 0, float(gamma == 0), missed**gamma)
    by = torch.where(missed == 0, 0, gamma * missed ** (gamma - 1))
    bce, more = _with_logits(x, y), 1 + gamma / 4
    return (
        power * bce * more,
        (power * ((1 - y) * p + y * q) + by * bce * p * q) * more,
        (power * bce + by * bce + power * (_softplus(-x) + _softplus(x))) * more,
    )


def _poisson(x, y, log_input=True, full=False, eps=1e-8):
    loss = x.exp() - _times(y, x) if log_input else x - _times(y, (x + eps).log())
    n = torch.where(y > 1, y, 1)
    return loss + torch.where(y > 1, n * n.log() - n + (2 * math.pi * n).log() / 2, 0) if full else loss


def _poisson_sizes(x, y, log_input=True, full=False, eps=1e-8):
    n = torch.where(y > 1, y, 1)
    more = n * n.log() + n if full else 0
    if log_input:
        return x.exp() + (y * x).abs() + more, x.exp() + y, x.abs() + more / n
    log = (x + eps).log().abs()
    return x + y * log + more, 1 + y / (x + eps), log + more / n


def _gaussian(x, y, var, full=False, eps=1e-6):
    """Returns the Gaussian NLL; the clamp of var at eps passes the gradient on unchanged, as in torch."""
    d, v = x - y, torch.where(var < 0, torch.nan, var.clamp(min=eps))
    loss = (v.log() + d * d / v) / 2 + (math.log(2 * math.pi) / 2 if full else 0)
    return _with_slopes(loss, (x, y, var), (d / v, -d / v, (1 - d * d / v) / v / 2))


def _gaussian_sizes(x, y, var, full=False, eps=1e-6):
    v, d = var.clamp(min=eps), (x - y).abs()
    return v.log().abs() + d * d / v + 1, d / v, d / v, (1 + d * d / v) / v


def _gaussian_kl(x, y, prior_mean=0.0, prior_log_var=0.0):
    """Returns (e^d - 1 - d + u^2) / 2; near the prior, where e^d - 1 - d would cancel, by a series in d."""
    d, u = y - prior_log_var, (x - prior_mean) * math.exp(-prior_log_var / 2)
    near = d.abs() < 0.125
    small, far = torch.where(near, d, 0), torch.where(near | (d == math.inf), 1, d)
    series = sum(small**k / math.factorial(k) for k in range(2, 16))
    excess = torch.where(near, series, torch.where(d == math.inf, d.exp(), torch.expm1(far) - far))
    return (excess + u * u) / 2


def _gaussian_kl_sizes(x, y, prior_mean=0.0, prior_log_var=0.0):
    """Sizes of the terms. e^d has a relative error of |d| roundings, so near the prior (d = 0) it adds none."""
    d, scale = y - prior_log_var, math.exp(-prior_log_var / 2)
    u, more = (x - prior_mean) * scale, 1 + d.abs() / 8
    return (_gaussian_kl(x, y, x, prior_log_var) * more + u * u).abs(), (u * scale).abs(), torch.expm1(d).abs() * more


def _usual_gaussian_kl(x, y, reduction, prior_mean=0.0, prior_log_var=0.0):
    d = y - prior_log_var
    return -0.5 * (1 + d - (x - prior_mean) ** 2 / math.exp(prior_log_var) - d.exp())


def _kl(x, y, log_target=False):
    if log_target:
        same = (x == y) & x.isinf()
        return _times(y.exp(), torch.where(same, 0, y) - torch.where(same, 0, x))
    log = torch.where(y == 0, 0, torch.where(y == 0, 1, y).log())
    return _times(y, log - x)


def _kl_sizes(x, y, log_target=False):
    e, log = (y.exp(), y) if log_target else (y, torch.where(y == 0, 1, y).log())
    part = log.abs() + x.abs()
    return e * part, e, e * (part + 1) if log_target else part + 1


def _js(x, y):
    """Returns the Jensen-Shannon terms, in one form for x near y and another elsewhere: neither cancels much there."""
    s, none = x + y, x + y == 0
    u = (x - y) / torch.where(none, 1, s)
    a = torch.where(u.abs() < 0.5, u.abs(), 0)
    near = torch.log1p(-a * a) + a * torch.log1p(2 * a / (1 - a))
    far = torch.xlogy(1 + u, 1 + u) + torch.xlogy(1 - u, 1 - u)
    loss = s / 4 * torch.where(u.abs() < 0.5, near, far)

    def slope(p, v):
        return torch.where(p == 0, 0, torch.where(v < -0.5, (2 * p / s).log(), v.log1p()) / 2)

    return _with_slopes(loss, (x, y), (slope(x, u), slope(y, -u)))


def _js_sizes(x, y):
    """Sizes of the composite's two terms. (The kernel is more exact: tests/contract/losses/test_edges.py checks it.)"""
    m = torch.where(x + y == 0, 1, (x + y) / 2)
    return torch.xlogy(x, x / m).abs() + torch.xlogy(y, y / m).abs(), torch.ones_like(x), torch.ones_like(x)


def _torchvision_focal(x, y, reduction, alpha=0.25, gamma=2.0):
    p, bce = x.sigmoid(), F.binary_cross_entropy_with_logits(x, y, reduction="none")
    p_t = p * y + (1 - p) * (1 - y)
    return (alpha * y + (1 - alpha) * (1 - y)) * bce * (1 - p_t) ** gamma


def _torch_js(x, y, reduction):
    m = (x + y) / 2
    return (x * (x / m).log() + y * (y / m).log()) / 2


pointwise(
    "binary_cross_entropy",
    _bce,
    F.binary_cross_entropy,
    sizes=_bce_sizes,
    several_terms=True,
)
pointwise(
    "binary_cross_entropy_with_logits",
    _with_logits,
    F.binary_cross_entropy_with_logits,
    sizes=_with_logits_sizes,
    several_terms=True,
)
pointwise(
    "sigmoid_focal_loss",
    _focal,
    _torchvision_focal,
    sizes=_focal_sizes,
    several_terms=True,
)
pointwise(
    "poisson_nll_loss",
    _poisson,
    F.poisson_nll_loss,
    sizes=_poisson_sizes,
    several_terms=True,
)
pointwise(
    "gaussian_nll_loss",
    _gaussian,
    F.gaussian_nll_loss,
    sizes=_gaussian_sizes,
    several_terms=True,
)
pointwise("gaussian_kl_div", _gaussian_kl, _usual_gaussian_kl, sizes=_gaussian_kl_sizes, several_terms=True)
pointwise(
    "kl_div",
    _kl,
    F.kl_div,
    sizes=_kl_sizes,
    several_terms=True,
)
pointwise("js_div", _js, _torch_js, sizes=_js_sizes, several_terms=True)
