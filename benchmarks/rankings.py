"""Cases of losses of orders: pairs of answers, ranked lists, classes in an order, survival times. Each is
made of several ops, which pass tensors between them."""

import torch
import torch.nn.functional as F

import safeops

from .case import Case, case, data, keep_mask
from .shapes import tensor


def of_pairs(name, text, operands, ours, theirs):
    """Registers the case of a loss of `operands` tensors of n pairs, the first two of which are differentiated."""

    @case(name)
    def build(n, dtype, device):
        s, mask = dtype.itemsize, keep_mask(n, device)
        first = tuple(data(n, dtype, device, seed) for seed in range(2))
        rest = [data(n, dtype, device, 2 + seed, grad=False) for seed in range(operands - 2)]
        return Case(
            first,
            forward_bytes=operands * s + 1,  # read the operands, mask
            backward_bytes=(operands + 2) * s + 1,  # read them again; write the gradients of two
            ours=lambda c, r: ours(c, r, *rest, mask),
            eager={text: lambda c, r: theirs(*(x[mask] for x in (c, r, *rest))).mean()},
            compiled=lambda c, r: (theirs(c, r, *rest) * mask).sum() / mask.sum(),
            variant=True,
            counted=False,
        )


of_pairs(
    "preference_loss",
    "-F.logsigmoid(beta * ((c - r) - (rc - rr)))[m].mean()",
    4,
    lambda c, r, rc, rr, mask: safeops.preference_loss(c, r, rc, rr, mask=mask).loss,
    lambda c, r, rc, rr: -F.logsigmoid(0.1 * ((c - r) - (rc - rr))),
)
of_pairs(
    "reward_ranking_loss",
    "-F.logsigmoid(c - r)[m].mean()",
    2,
    lambda c, r, mask: safeops.reward_ranking_loss(c, r, mask=mask),
    lambda c, r: -F.logsigmoid(c - r),
)


@case("plackett_luce_loss")
def plackett_luce_loss(n, dtype, device):
    """Lists of 64 items. The pattern is ListMLE as ranking libraries have it."""
    shape, s = (max(1, n // 64), min(64, n)), dtype.itemsize
    x = tensor(n, dtype, device, 0, shape)
    ranking = tensor(n, torch.float32, device, 1, shape).detach().argsort(-1)

    def theirs(x):
        x = x.gather(-1, ranking)
        top = x.amax(-1, keepdim=True)
        later = (x - top).exp().flip(-1).cumsum(-1).flip(-1)
        return ((later + 1e-10).log() - (x - top)).sum(-1).mean()

    return Case(
        (x,),
        forward_bytes=s + 8,  # read the scores, the ranking
        backward_bytes=2 * s + 8,  # read both; write the gradient
        ours=lambda x: safeops.plackett_luce_loss(x, ranking),
        eager={"ListMLE": theirs},
        compiled=theirs,
        variant=True,
        counted=False,
    )


@case("ordinal_loss")
def ordinal_loss(n, dtype, device):
    """Rows of 16 questions. The pattern is that of CORAL's authors."""
    shape, s = (max(1, n // 16), min(16, n)), dtype.itemsize
    target = torch.arange(shape[0], device=device) % (shape[1] + 1)
    levels = (target[:, None] > torch.arange(shape[1], device=device)).to(dtype)

    def theirs(x):
        return -(F.logsigmoid(x) * levels + (F.logsigmoid(x) - x) * (1 - levels)).sum(1).mean()

    return Case(
        (tensor(n, dtype, device, 0, shape),),
        forward_bytes=s,  # read the logits
        backward_bytes=2 * s,  # read the logits; write the gradient
        ours=lambda x: safeops.ordinal_loss(x, target, kind="coral"),
        eager={"coral_loss(x, levels)": theirs},
        compiled=theirs,
        variant=True,
        counted=False,
    )


@case("cox_loss")
def cox_loss(n, dtype, device):
    """A cohort of n subjects. The pattern is that of pycox, which sorts too, and leaves ties as they come."""
    risk = data(n, dtype, device, 0)
    time, event = data(n, torch.float32, device, 1, grad=False), keep_mask(n, device, 0.5)

    def theirs(r):
        order = time.argsort(descending=True)
        r, e = r[order], event[order]
        return ((r.logcumsumexp(0) - r) * e).sum() / e.sum()

    return Case(
        (risk,),
        forward_bytes=dtype.itemsize + 5,  # read risk, time, event
        backward_bytes=2 * dtype.itemsize + 8,  # read risk and the order; write the gradient
        ours=lambda r: safeops.cox_loss(r, time, event),
        eager={"(r.logcumsumexp(0) - r)[e].mean() by falling time": theirs},
        compiled=theirs,
        variant=True,
        counted=False,
    )
