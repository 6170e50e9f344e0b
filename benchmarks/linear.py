"""Cases of a last linear layer fused with its loss, with about n logits. Matrix products take most of the time, far
more than a copy of the bytes."""

import torch
import torch.nn.functional as F

import safeops

from .case import Case, case, data
from .classification import log_prob_and_entropy
from .shapes import LOGITS, tensor


def linear(name, pattern, theirs, ours):
    """Registers a case. theirs, ours: functions of (x, w, target). pattern: the text of theirs."""

    @case(name)
    def build(n, dtype, device):
        """n logits are made from vectors of 1024 features. The rival, a layer and a loss, keeps all logits in
        memory."""
        (rows, classes), width, s = LOGITS[""](n), 1024, dtype.itemsize
        x = tensor(n, dtype, device, 0, (rows, width))
        w = data(classes * width, dtype, device, 1, grad=False, shape=(classes, width)).mul_(0.05).requires_grad_()
        target = torch.randint(0, classes, (rows,), generator=torch.Generator(device).manual_seed(2), device=device)
        each = (1 + w.numel() / x.numel()) * s  # read x, w

        def bound(function):
            return lambda x, w: function(x, w, target)

        return Case(
            (x, w),
            forward_bytes=each,
            backward_bytes=2 * each,  # read x, w; write dx, dw
            ours=bound(ours),
            eager={pattern: bound(theirs)},  # not F.linear_cross_entropy, which refuses a second backward
            compiled=bound(theirs),
            variant=True,
            arithmetic=True,
            aten=bound(theirs),
        )


def _linear_token_log_probs(x, w, target):
    got = safeops.linear_token_log_probs(x, w, target)
    return got.log_prob + got.entropy


linear(
    "linear_cross_entropy",
    "F.cross_entropy(F.linear(x, w), y)",
    lambda x, w, target: F.cross_entropy(F.linear(x, w), target),
    safeops.linear_cross_entropy,
)
linear(
    "linear_token_log_probs",
    "F.linear(x, w).float().log_softmax(-1), gathered, and its entropy",
    lambda x, w, target: log_prob_and_entropy(F.linear(x, w).float().log_softmax(-1), target),
    _linear_token_log_probs,
)


@case("head_loss")
def head_loss(n, dtype, device):
    """A frozen layer with an adapter of rank 16. The rival keeps all its logits in memory, three times."""
    (rows, classes), width, rank, s = LOGITS[""](n), 1024, 16, dtype.itemsize
    x = tensor(n, dtype, device, 0, (rows, width))
    w = data(classes * width, dtype, device, 1, grad=False, shape=(classes, width)).mul_(0.05)
    a = data(rank * width, dtype, device, 2, grad=False, shape=(rank, width)).mul_(0.05).requires_grad_()
    b = data(classes * rank, dtype, device, 3, grad=False, shape=(classes, rank)).mul_(0.05).requires_grad_()
    target = torch.randint(0, classes, (rows,), generator=torch.Generator(device).manual_seed(4), device=device)

    def theirs(x, a, b):
        return F.cross_entropy(F.linear(x, w) + F.linear(F.linear(x, a), b), target)

    def ours(x, a, b):
        return safeops.head_loss(lambda x: F.linear(x, w) + F.linear(F.linear(x, a), b), x, target)

    each = (1 + (w.numel() + a.numel() + b.numel()) / x.numel()) * s  # read x, w, a, b
    return Case(
        (x, a, b),
        forward_bytes=each,
        backward_bytes=2 * each,
        ours=ours,
        eager={"F.cross_entropy(head(x), y)": theirs},
        compiled=theirs,
        counted=False,  # the head's tensors pass between its own ops
        variant=True,
        arithmetic=True,
        aten=theirs,
    )
