"""Contests of clip_grad_norm_ on the gradients of a transformer that has 354M parameters."""

import torch

import safeops

from .contest import Contest, contests, pattern

UNCLIPPED = 1e30  # a max_norm above any gradient's norm


def transformer(width, layers, vocabulary):
    """Returns the shapes of a transformer's parameters."""
    block = [(width,)] * 2 + [(3 * width, width), (3 * width,), (width, width)] + [(width,)] * 3
    block += [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(vocabulary, width), (width, width), *block * layers, (width,), (width,)]


def clip(o, needed):
    """Makes the contest. needed: max_norm falls from call to call, so that each call has to scale; else no call
    writes."""
    parameters = []
    for seed, shape in enumerate(transformer(*o.size(1024, 24, 50304))):
        parameters.append(torch.nn.Parameter(torch.empty(shape, dtype=o.dtype, device=o.device)))
        parameters[-1].grad = o.normal(*shape, seed=seed)
    n = sum(p.numel() for p in parameters)
    state = {"bound": n**0.5 / 4 if needed else UNCLIPPED}  # the norm is about the square root of n

    def in_turn(function):
        def run(parameters, state):
            if needed:
                state["bound"] *= 0.997
            return function(parameters, state["bound"])

        return run

    def torch_s(foreach):
        clip_ = torch.nn.utils.clip_grad_norm_
        run = in_turn(lambda parameters, bound: clip_(parameters, bound, foreach=foreach))
        return pattern(run, backward=False, overwrites=True)

    def seen(norm, parameters, state):
        return torch.cat([norm.double().view(1), *(p.grad.double().flatten() for p in parameters[:4])])

    def definition(parameters, state):
        norm = torch.stack([p.grad.double().square().sum() for p in parameters]).sum().sqrt()
        bound = state["bound"] * (0.997 if needed else 1)
        factor = (bound / (norm + 1e-6)).clamp(max=1)
        return torch.cat([norm.view(1), *(p.grad.double().flatten() * factor for p in parameters[:4])])

    return Contest(
        (),
        (parameters, state),
        ours=in_turn(safeops.clip_grad_norm_),
        rivals={"torch foreach": torch_s(True), "torch, loop": torch_s(False)},
        definition=definition,
        bytes=((3 if needed else 1) * o.itemsize * n, None),  # read for the norm; if needed, read and write
        overwrites=True,
        backward=False,
        outcome=seen,
    )


contests(
    clip,
    {
        "clip_grad_norm_/bf16": ("bf16", True),
        "clip_grad_norm_/fp32": ("fp32", True),
        "clip_grad_norm_/bf16/unneeded": ("bf16", False),
    },
)
