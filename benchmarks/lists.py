"""Cases of grad_norm and clip_grad_norm_ on lists of gradients, compared with the functions of torch.nn.utils.

The norm reads each gradient once. Clipping then reads and writes each gradient, unless the norm is small enough. Many
small tensors take time for calls, not for bytes: they are judged by the speed relative to torch's function.
"""

import itertools

import torch

import safeops

from .case import Case, case, data

SIZES = {  # n -> the sizes of the gradients, about n elements together
    "_small": lambda n: [64 * (1 + i % 16) for i in range(max(1, n >> 13))],
    "_layers": lambda n: [(1024, 4096, 1024 * 256, 1024 * 64)[i % 4] for i in range(max(1, n >> 16))],
    "_large": lambda n: [max(1, n // 4)] * 4,
}
UNCLIPPED = 1e30  # a max_norm above any gradient's norm


def norm(parameters):
    gradients = [p.grad for p in parameters]
    return lambda: safeops.grad_norm(parameters), lambda: torch.nn.utils.get_total_norm(gradients)


def clip(parameters):
    calls = itertools.count()
    start = safeops.grad_norm(parameters).item()

    def falling():
        """Returns a lower max_norm at each call, so that each call has to scale."""
        return start * 0.999 ** next(calls)

    return (
        lambda: safeops.clip_grad_norm_(parameters, falling()),
        lambda: torch.nn.utils.clip_grad_norm_(parameters, falling()),
    )


def clip_nothing(parameters):
    return (
        lambda: safeops.clip_grad_norm_(parameters, UNCLIPPED),
        lambda: torch.nn.utils.clip_grad_norm_(parameters, UNCLIPPED),
    )


def lists(name, sizes, pair, text, share):
    """Registers a case. pair: function of the parameters that returns (our call, torch's call). text: the source of
    torch's. share: bytes moved per byte of gradient."""

    @case(name)
    def builder(n, dtype, device):
        parameters = [torch.nn.Parameter(torch.zeros(m, dtype=dtype, device=device)) for m in sizes(n)]
        for i, p in enumerate(parameters):
            p.grad = data(p.numel(), dtype, device, i, grad=False)
        ours, theirs = pair(parameters)
        return Case(
            (),
            forward_bytes=share * dtype.itemsize,
            backward_bytes=None,
            ours=ours,
            eager={text: theirs},
            compiled=None,
            variant=True,
            aten=theirs,
            arithmetic=True,
            elements=sum(sizes(n)),
            counted=False,
        )


for _suffix, _sizes in SIZES.items():
    lists("grad_norm" + _suffix, _sizes, norm, "torch.nn.utils.get_total_norm", 1)
    lists("clip_grad_norm" + _suffix, _sizes, clip, "torch.nn.utils.clip_grad_norm_", 3)
    lists("clip_grad_norm_unneeded" + _suffix, _sizes, clip_nothing, "torch.nn.utils.clip_grad_norm_", 1)
