"""Cases of losses. Pointwise losses are a mean over the kept elements: forward reads input, target and mask; backward
reads them again and writes the gradient. Region losses get images of four classes, and class indices as target: forward
reads input and indices; backward reads the indices and writes the gradient."""

import torch
import torch.nn.functional as F

import safeops

from .case import Case, case, data, keep_mask, rival

CLASSES = 4
ELEMENTS = {}  # name -> (text, one element's loss as users write it)


def same(x):
    return x


def probability(x):
    return x.sigmoid()


def side(x):
    return x.sign()


def pointwise(name, text, element, domain=(same, same), arithmetic=False, rivals=()):
    """Registers a case. element: one element's loss as users write it. text: its source. torch.nn.functional need not
    have a function of this name.

    domain: for each operand, a function that maps any number to where the loss is defined. Only the first operand is
    differentiated. rivals: [(module, name, options)], libraries' functions of (x, y), which take no mask."""
    ELEMENTS[name] = text.replace("[m].mean()", ""), element

    @case(name)
    def builder(n, dtype, device):
        s = dtype.itemsize
        ours, theirs, aten = getattr(safeops, name), getattr(F, name, None), getattr(torch._C._nn, name, None)
        x, *rest = (to(data(n, dtype, device, seed, grad=False)) for seed, to in enumerate(domain))
        mask, wide = keep_mask(n, device), [t.float() for t in rest]  # wide: for aten, which runs in fp32
        images = [t.view(1, 1, -1) for t in rest]
        results = {f"{module}'s": rival(module, *which) for module, *which in rivals}
        return Case(
            (x.requires_grad_(),),
            forward_bytes=len(domain) * s + 1,  # read x, y, mask
            backward_bytes=(len(domain) + 1) * s + 1,  # read x, y, mask; write dx (nothing else is saved)
            ours=lambda x: ours(x, *rest, mask=mask),
            eager={text: lambda x: element(x, *rest)[mask].mean()}
            | ({f"{name}(x[m], y[m])": lambda x: theirs(x[mask], *(t[mask] for t in rest))} if theirs else {})
            | {text: lambda x, f=f: f(x.view(1, 1, -1), *images) for text, f in results.items() if f},
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
pointwise("quantile_loss", "max(d / 2, -d / 2)[m].mean()", lambda x, y: torch.maximum((x - y) / 2, (y - x) / 2))
pointwise("log_cosh_loss", "(x - y).cosh().log()[m].mean()", lambda x, y: (x - y).cosh().log())


def focal(x, y):
    p, bce = x.sigmoid(), F.binary_cross_entropy_with_logits(x, y, reduction="none")
    return (0.25 * y + 0.75 * (1 - y)) * bce * (1 - (p * y + (1 - p) * (1 - y))) ** 2


def jensen_shannon(x, y):
    m = (x + y) / 2
    return (x * (x / m).log() + y * (y / m).log()) / 2


def of_torch(name, *domain, arithmetic=True):
    """Registers a case whose pattern is torch's own function with reduction="none"."""
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
pointwise("sigmoid_focal_loss", "torchvision's formula[m].mean()", focal, (same, probability), rivals=[
    ("monai.losses", "FocalLoss", {"alpha": 0.25, "gamma": 2.0}),
    ("kornia.losses", "BinaryFocalLossWithLogits", {"alpha": 0.25, "gamma": 2.0, "reduction": "mean"}),
])  # fmt: skip
pointwise("gaussian_kl_div", "(-(1 + v - x ** 2 - v.exp()) / 2)[m].mean()",
          lambda x, v: -(1 + v - x**2 - v.exp()) / 2)  # fmt: skip
pointwise("js_div", "(p log(p / m) + q log(q / m))[m].mean()", jensen_shannon, (probability, probability))


def dice(both, prediction, ground):
    return (1 - (2 * both + 1e-5) / (prediction + ground + 1e-5)).mean()  # tversky_loss adds 2e-5, not 1e-5


def generalized_dice(both, prediction, ground):
    w = 1 / (ground * ground)
    return (1 - (2 * (w * both).sum(1) + 1e-5) / ((w * (prediction + ground)).sum(1) + 1e-5)).mean()


def region(name, rival_name, value=dice):
    @case(name)
    def build(n, dtype, device):
        size = max(1, n // CLASSES)
        generator = torch.Generator(device).manual_seed(1)
        index = torch.randint(CLASSES, (1, size), generator=generator, device=device)
        x = data(CLASSES * size, dtype, device, 0, shape=(1, CLASSES, size)).detach().sigmoid().requires_grad_()
        ours, monai = getattr(safeops, name), rival("monai.losses", rival_name, {"to_onehot_y": True})
        s, read = dtype.itemsize, 8 / CLASSES  # read: bytes of the indices per element of x

        def one_hot(x):
            target = torch.zeros_like(x).scatter_(1, index.unsqueeze(1), 1)
            return value((target * x).sum(2), x.sum(2), target.sum(2))

        return Case(
            (x,),
            forward_bytes=s + read,  # read x, index
            backward_bytes=s + read,  # read index; write dx (with class indices the gradient does not depend on x)
            ours=lambda x: ours(x, index),
            eager={"by one_hot": one_hot} | ({"monai's": lambda x: monai(x, index.unsqueeze(1))} if monai else {}),
            compiled=one_hot,
            counted=False,
        )


region("dice_loss", "DiceLoss")
region("tversky_loss", "TverskyLoss")
region("generalized_dice_loss", "GeneralizedDiceLoss", generalized_dice)


@case("silog_loss")
def silog(n, dtype, device):
    x, y = (data(n, dtype, device, seed, grad=False).abs() + 0.5 for seed in range(2))
    y = torch.where(keep_mask(n, device), y, 0)  # 0 means that there is no measurement

    def composed(x):
        keep = y > 0
        g = x[keep].float().log() - y[keep].float().log()
        return ((g**2).mean() - 0.85 * g.mean() ** 2).sqrt()

    def masked(x):
        keep = y > 0
        g = torch.where(keep, x, 1).float().log() - torch.where(keep, y, 1).float().log()
        mean = g.sum() / keep.sum()
        return ((g * g).sum() / keep.sum() - 0.85 * mean * mean).sqrt()

    return Case(
        (x.requires_grad_(),),
        forward_bytes=2 * dtype.itemsize,  # read x, y
        backward_bytes=3 * dtype.itemsize,  # read x, y; write dx
        ours=lambda x: safeops.silog_loss(x, y),
        eager={"(g ** 2).mean() - 0.85 g.mean() ** 2, g of x[y > 0]": composed},
        compiled=masked,
        counted=False,
    )
