"""Cases of divergences between a student's logits and a teacher's. Only the student needs gradients."""

import math

import torch.nn.functional as F

import safeops

from .case import Case, case, data
from .shapes import LOGITS


def kl(x, y):
    return F.kl_div(x.float().log_softmax(-1), y.float().log_softmax(-1), reduction="batchmean", log_target=True)


def js(x, y):
    u, v = y.float().log_softmax(-1), x.float().log_softmax(-1)
    m = u.logaddexp(v) - math.log(2)
    return sum(F.kl_div(m, log_p, reduction="batchmean", log_target=True) for log_p in (u, v)) / 2


def tv(x, y):
    return (x.float().softmax(-1) - y.float().softmax(-1)).abs().sum(-1).mean() / 2


PATTERNS = {
    "kl_div_with_logits": ("F.kl_div of both log_softmax, in float", kl),
    "reverse_kl_div_with_logits": ("F.kl_div of both log_softmax, in float", lambda x, y: kl(y, x)),
    "js_div_with_logits": ("F.kl_div of both log_softmax from their mixture, in float", js),
    "tv_with_logits": ("the difference of both softmax, in float", tv),
}


def divergence(name, eager, theirs):
    @case(name)
    def build(n, dtype, device):
        rows, classes = shape = LOGITS[""](n)
        student, teacher = (data(rows * classes, dtype, device, i, grad=not i, shape=shape) for i in range(2))
        function, s = getattr(safeops, name), dtype.itemsize
        return Case(
            (student,),
            forward_bytes=2 * s,  # read x, y
            backward_bytes=3 * s,  # read x, y; write dx
            ours=lambda x: function(x, teacher),
            eager={eager: lambda x: theirs(x, teacher)},
            compiled=lambda x: theirs(x, teacher),
            aten=lambda x: F.kl_div(x, teacher, reduction="sum", log_target=True),
            arithmetic=True,
        )


for _name, _pattern in PATTERNS.items():
    divergence(_name, *_pattern)


def linear_divergence(name, eager, theirs):
    @case(name)
    def build(n, dtype, device):
        """Student and teacher have n logits each, made by a layer from vectors of 1024 features. Matrix products take
        most of the time, so the speed is judged relative to the student's layer alone (F.linear)."""
        (rows, classes), width, s = LOGITS[""](n), 1024, dtype.itemsize
        x, y = (data(rows * width, dtype, device, i, grad=not i, shape=(rows, width)) for i in range(2))
        w, v = (data(classes * width, dtype, device, 2 + i, grad=False, shape=(classes, width)) for i in range(2))
        w.mul_(0.05).requires_grad_(), v.mul_(0.05)
        function, each = getattr(safeops, name), (1 + w.numel() / x.numel()) * s

        def pattern(x, w):
            return theirs(F.linear(x, w), F.linear(y, v))

        return Case(
            (x, w),
            forward_bytes=2 * each,  # read both layers
            backward_bytes=3 * each,  # read them; write dx, dw
            ours=lambda x, w: function(x, w, y, v),
            eager={f"{eager}, of both layers": pattern},
            compiled=pattern,
            variant=True,
            arithmetic=True,
            aten=lambda x, w: F.linear(x, w).sum(),
        )


for _name, _pattern in PATTERNS.items():
    linear_divergence("linear_" + _name.removesuffix("_with_logits"), *_pattern)
