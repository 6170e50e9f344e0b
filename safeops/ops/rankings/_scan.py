"""log_cumsum_exp: the running logsumexp along the last dim, with right derivatives of any order.

torch.logcumsumexp has NaN for the gradient of a first -inf, and for the second derivative wherever the upstream
gradient is 0. With y_i = log sum_{k <= i} exp(x_k), and both sums computed from logarithms, which never overflow:

(1) dx_k = suffix(g)_k = sum_{i >= k} g_i exp(x_k - y_i), for an upstream gradient g
(2) dy_i = prefix(t)_i = sum_{k <= i} t_k exp(x_k - y_i), for a tangent t
(3) suffix and prefix are each other's transpose, so their derivatives are sums of both
"""

import torch
from torch.compiler import is_compiling

from safeops.core.private_torch import is_exporting


def log_cumsum_exp(x):
    if is_exporting():  # export keeps only the forward of an autograd Function
        return x.logcumsumexp(-1)
    return (_LogCumsumExp if is_compiling() else _WithTangent).apply(x)


def _signed(of_logarithms, z):
    """of_logarithms(log z) of a z >= 0, extended to any z: a part for each sign."""
    return of_logarithms(z.clamp(min=0).log()) - of_logarithms((-z).clamp(min=0).log())


def _suffix(g, x, y):
    def of_logarithms(log_g):
        terms = torch.where(log_g == float("-inf"), log_g, log_g - y)  # (y may be -inf, too)
        return (x + terms.flip(-1).logcumsumexp(-1).flip(-1)).exp()

    return _signed(of_logarithms, g)


def _prefix(t, x, y):
    def of_logarithms(log_t):
        total = (log_t + x).logcumsumexp(-1)
        return torch.where(total == float("-inf"), total, total - y).exp()

    return _signed(of_logarithms, t)


class _Function(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output)
        ctx.save_for_forward(*inputs, output)


class _Suffix(_Function):
    forward = staticmethod(_suffix)

    @staticmethod
    def backward(ctx, v):
        g, x, y, result = ctx.saved_tensors
        transposed = _Prefix.apply(v, x, y)
        return transposed, v * result, -g * transposed

    @staticmethod
    def jvp(ctx, dg, dx, dy):
        g, x, y, result = ctx.saved_tensors
        return _Suffix.apply(dg - g * dy, x, y) + dx * result


class _Prefix(_Function):
    forward = staticmethod(_prefix)

    @staticmethod
    def backward(ctx, v):
        t, x, y, result = ctx.saved_tensors
        transposed = _Suffix.apply(v, x, y)
        return transposed, t * transposed, -v * result

    @staticmethod
    def jvp(ctx, dt, dx, dy):
        t, x, y, result = ctx.saved_tensors
        return _Prefix.apply(dt + t * dx, x, y) - dy * result


class _LogCumsumExp(_Function):
    @staticmethod
    def forward(x):
        return x.logcumsumexp(-1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _Function.setup_context(ctx, inputs, output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, g):
        if g is None:
            return None
        x, y = ctx.saved_tensors
        # (a compiled backward is not differentiated)
        return _suffix(g, x, y) if is_compiling() else _Suffix.apply(g, x, y)


class _WithTangent(_LogCumsumExp):
    """`_LogCumsumExp` with a derivative for forward mode, which Dynamo does not accept."""

    @staticmethod
    def jvp(ctx, t):
        x, y = ctx.saved_tensors
        return _Prefix.apply(t, x, y)
