"""The pointwise losses, mean over the kept elements: three reads forward; the same three and one write backward."""

import torch
import torch.nn.functional as F

import safeops

from .case import Case, case, data, keep_mask


def same(x):
    return x


def probability(x):
    return x.sigmoid()


def side(x):
    return x.sign()


def pointwise(name, text, element, domain=(same, same), arithmetic=False):
    """element: one element's loss as users write it, in `text`. Torch need not have one of this name.

    domain: what brings any number to where the loss is defined, for each operand; the third and more are not
    differentiated."""

    @case(name)
    def builder(n, dtype, device):
        s = dtype.itemsize
        ours, theirs, aten = getattr(safeops, name), getattr(F, name, None), getattr(torch._C._nn, name, None)
        x, *rest = (to(data(n, dtype, device, seed, grad=False)) for seed, to in enumerate(domain))
        mask, wide = keep_mask(n, device), [t.float() for t in rest]  # what is arithmetic stands beside fp32
        return Case(
            (x.requires_grad_(),),
            forward_bytes=len(domain) * s + 1,  # read x, y, mask
            backward_bytes=(len(domain) + 1) * s + 1,  # the same; write dx (nothing else is saved)
            ours=lambda x: ours(x, *rest, mask=mask),
            eager={text: lambda x: element(x, *rest)[mask].mean()}
            | ({f"{name}(x[m], y[m])": lambda x: theirs(x[mask], *(t[mask] for t in rest))} if theirs else {}),
            compiled=lambda x: (element(x, *rest) * mask).sum() / mask.sum(),
            aten=aten and (lambda x: aten(x, *(rest if x.dtype == dtype else wide))),
            arithmetic=arithmetic and aten is not None,
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


def focal(x, y):
    p, bce = x.sigmoid(), F.binary_cross_entropy_with_logits(x, y, reduction="none")
    return (0.25 * y + 0.75 * (1 - y)) * bce * (1 - (p * y + (1 - p) * (1 - y))) ** 2


def jensen_shannon(x, y):
    m = (x + y) / 2
    return (x * (x / m).log() + y * (y / m).log()) / 2


def of_torch(name, *domain, arithmetic=True):
    """torch's own, not reduced."""
    pointwise(name, f"{name}(x, y, 'none')[m].mean()", lambda *x: getattr(F, name)(*x, reduction="none"), domain,
              arithmetic)  # fmt: skip


of_torch("binary_cross_entropy", probability, probability)
of_torch("binary_cross_entropy_with_logits", same, probability)
of_torch("poisson_nll_loss", same, torch.abs)
of_torch("gaussian_nll_loss", same, same, torch.abs)
of_torch("kl_div", lambda x: -x.abs(), probability)
of_torch("soft_margin_loss", same, side)
of_torch("hinge_embedding_loss", same, side, arithmetic=False)
of_torch("margin_ranking_loss", same, same, side, arithmetic=False)
pointwise("sigmoid_focal_loss", "torchvision's formula[m].mean()", focal, (same, probability))
pointwise("js_div", "(p log(p / m) + q log(q / m))[m].mean()", jensen_shannon, (probability, probability))
