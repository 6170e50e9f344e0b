"""Cases of losses of orders: pairs of answers. Each is made of several ops, which pass tensors of the pairs."""

import torch.nn.functional as F

import safeops

from .case import Case, case, data, keep_mask


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
