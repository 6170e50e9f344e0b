"""Cases of routers' losses: 64 experts, of which each token has 8. They are made of several ops, which pass tensors
between them."""

import torch

import safeops

from .case import Case, case
from .shapes import tensor

EXPERTS, TOP_K = 64, 8


def of_router(name, text, ours, theirs, grad=True):
    """Registers the case of a function of the logits of n / 64 tokens."""

    @case(name)
    def build(n, dtype, device):
        s, shape = dtype.itemsize, (max(1, n // EXPERTS), min(EXPERTS, n))
        x, mask = tensor(n, dtype, device, 0, shape), torch.arange(shape[0], device=device) % 8 != 7
        return Case(
            (x if grad else x.detach(),),
            forward_bytes=s,  # read the logits
            backward_bytes=2 * s if grad else None,  # read them again; write their gradient
            ours=lambda x: ours(x, mask),
            eager={text: lambda x: theirs(x[mask])},
            compiled=lambda x: theirs(x),
            variant=True,
            counted=False,
        )


def choices(x):
    experts = torch.arange(x.shape[-1], device=x.device)
    return (x.topk(min(TOP_K, x.shape[-1])).indices.unsqueeze(-1) == experts).float().sum(1)


def balance(x):
    return x.shape[-1] * (choices(x).mean(0) * x.float().softmax(-1).mean(0)).sum()


def entropy(x):
    log_p = x.float().log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1).mean()


def load(x):
    return choices(x).sum(0) + x.float().softmax(-1).sum(0)


def top_k(x):
    return min(TOP_K, x.shape[-1])


of_router(
    "load_balancing_loss",
    "E * (f * p[m].mean(0)).sum()",
    lambda x, mask: safeops.load_balancing_loss(x, top_k=top_k(x), mask=mask),
    balance,
)
of_router(
    "router_z_loss",
    "torch.logsumexp(x[m], -1).square().mean()",
    lambda x, mask: safeops.router_z_loss(x, mask=mask),
    lambda x: torch.logsumexp(x.float(), -1).square().mean(),
)
of_router(
    "router_entropy",
    "-(p * log_p)[m].sum(-1).mean()",
    lambda x, mask: safeops.router_entropy(x, mask=mask),
    entropy,
)
of_router(
    "router_load",
    "one_hot(x[m].topk(k).indices).sum(0) + p[m].sum(0)",
    lambda x, mask: safeops.router_load(x, top_k=top_k(x), mask=mask).importance,
    load,
    grad=False,
)
