"""The pointwise losses, mean over the kept elements: three reads forward; the same three and one write backward."""

import torch
import torch.nn.functional as F

import safeops

from .case import Case, case, data, keep_mask


def pointwise(name, text, element):
    """element: one element's loss as users write it, in `text`. Torch need not have one of this name."""

    @case(name)
    def builder(n, dtype, device):
        s = dtype.itemsize
        ours, theirs, aten = getattr(safeops, name), getattr(F, name, None), getattr(torch._C._nn, name, None)
        target = data(n, dtype, device, 1, grad=False)
        mask = keep_mask(n, device)
        return Case(
            (data(n, dtype, device, 0),),
            forward_bytes=2 * s + 1,  # read x, y, mask
            backward_bytes=3 * s + 1,  # read x, y, mask; write dx (the difference is computed again, not saved)
            ours=lambda x: ours(x, target, mask=mask),
            eager={text: lambda x: element(x, target)[mask].mean()}
            | ({f"{name}(x[m], y[m])": lambda x: theirs(x[mask], target[mask])} if theirs else {}),
            compiled=lambda x: (element(x, target) * mask).sum() / mask.sum(),
            aten=aten and (lambda x: aten(x, target)),
        )


pointwise("mse_loss", "((x - y) ** 2)[m].mean()", lambda x, y: (x - y) ** 2)
pointwise("l1_loss", "(x - y).abs()[m].mean()", lambda x, y: (x - y).abs())
for _loss in (F.smooth_l1_loss, F.huber_loss):
    pointwise(
        _loss.__name__,
        f"{_loss.__name__}(x, y, 'none')[m].mean()",
        lambda x, y, f=_loss: f(x, y, reduction="none"),
    )
pointwise("charbonnier_loss", "((x - y) ** 2 + 1e-6).sqrt()[m].mean()", lambda x, y: ((x - y) ** 2 + 1e-6).sqrt())
pointwise("log_cosh_loss", "(x - y).cosh().log()[m].mean()", lambda x, y: (x - y).cosh().log())
