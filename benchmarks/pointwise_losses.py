"""The pointwise losses, mean over the kept elements: three reads forward; the same three and one write backward."""

import torch.nn.functional as F

import safeops

from .case import Case, data, keep_mask

# loss -> (its name in torch, one element's loss as users write it)
PATTERNS = {
    "mse_loss": (F.mse_loss, "((x - y) ** 2)[m].mean()", lambda x, y: (x - y) ** 2),
    "l1_loss": (F.l1_loss, "(x - y).abs()[m].mean()", lambda x, y: (x - y).abs()),
    "smooth_l1_loss": (
        F.smooth_l1_loss,
        "smooth_l1_loss(x, y, 'none')[m].mean()",
        lambda x, y: F.smooth_l1_loss(x, y, reduction="none"),
    ),
    "huber_loss": (
        F.huber_loss,
        "huber_loss(x, y, 'none')[m].mean()",
        lambda x, y: F.huber_loss(x, y, reduction="none"),
    ),
}


def builder(name):
    ours = getattr(safeops, name)
    torch_loss, text, element = PATTERNS[name]

    def build(n, dtype, device):
        s = dtype.itemsize
        target = data(n, dtype, device, 1, grad=False)
        mask = keep_mask(n, device)
        return Case(
            name,
            (data(n, dtype, device, 0),),
            forward_bytes=2 * s + 1,  # read x, y, mask
            backward_bytes=3 * s + 1,  # read x, y, mask; write dx (the difference is computed again, not saved)
            ours=lambda x: ours(x, target, mask=mask),
            eager={
                text: lambda x: element(x, target)[mask].mean(),
                f"{name}(x[m], y[m])": lambda x: torch_loss(x[mask], target[mask]),
            },
            compiled=lambda x: (element(x, target) * mask).sum() / mask.sum(),
        )

    return build


OPS = {name: builder(name) for name in PATTERNS}
