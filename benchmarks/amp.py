"""grad_norm and clip_grad_norm_ beside torch.nn.utils'.

They have no backward and take lists, so they have a table of their own. I/O: the norm reads each gradient, scaling
reads and writes it; nothing is written where no gradient has to be scaled.
"""

import itertools

LISTS = {  # name -> sizes of the gradients
    "2000 of 64 to 1024": [64 * (1 + i % 16) for i in range(2000)],
    "a transformer's 300": [(1024, 4096, 1024 * 256, 1024 * 64)[i % 4] for i in range(300)],
    "4 of 4M": [2**22] * 4,
}
UNCLIPPED = 1e30  # max_norm that no gradients exceed


def contenders(parameters, gradients):
    """{what: (ours, torch's, bytes per byte of gradient)}"""
    import torch

    import safeops

    clip = torch.nn.utils.clip_grad_norm_
    lower = itertools.count()
    start = safeops.grad_norm(parameters).item()

    def falling():
        """Lower at each call, so that each scales again."""
        return start * 0.999 ** next(lower)

    return {
        "norm": (lambda: safeops.grad_norm(parameters), lambda: torch.nn.utils.get_total_norm(gradients), 1),
        "clip, not needed": (
            lambda: safeops.clip_grad_norm_(parameters, UNCLIPPED),
            lambda: clip(parameters, UNCLIPPED),
            1,
        ),
        "clip": (lambda: safeops.clip_grad_norm_(parameters, falling()), lambda: clip(parameters, falling()), 3),
    }


def measure(dtypes: dict, device: str, rounds: int) -> list[dict]:
    """A record for each list, dtype and contender."""
    return [
        {"gradients": name, "dtype": short, **record}
        for short, dtype in dtypes.items()
        for name, sizes in LISTS.items()
        for record in compare(sizes, dtype, device, rounds)
    ]


def compare(sizes, dtype, device, rounds):
    import torch

    from .case import data
    from .timing import copy_of, interleave

    parameters = [torch.nn.Parameter(torch.zeros(n, dtype=dtype, device=device)) for n in sizes]
    for i, p in enumerate(parameters):
        p.grad = data(p.numel(), dtype, device, i, grad=False)
    gradients = [p.grad for p in parameters]
    total = sum(sizes) * dtype.itemsize
    for what, (ours, rival, share) in contenders(parameters, gradients).items():
        calls = {"ours": ours, "torch": rival, "copy": copy_of(total * share, device)}
        samples = interleave(calls, rounds, device)
        mine, theirs, copy = (samples[name].time() for name in calls)
        yield {
            "what": what,
            "milliseconds": {"ours": mine * 1e3, "torch": theirs * 1e3},
            "x_torch": theirs / mine,
            "of_floor": copy / mine,
            "undisturbed": {name: samples[name].share_clean() for name in calls},
        }
