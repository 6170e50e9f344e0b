"""The region losses, of images of four classes with class indices: two reads forward; the indices and one write
backward. The rival is the arithmetic of MONAI's losses, one-hot tensor and all."""

import torch

import safeops

from .case import Case, case, data

CLASSES = 4


def _monai(index, formula):
    def loss(x):
        target = torch.zeros_like(x).scatter_(1, index.unsqueeze(1), 1)
        dims = tuple(range(2, x.dim()))
        both, prediction, ground = ((target * x).sum(dims), x.sum(dims), target.sum(dims))
        return (1 - formula(both, prediction, ground)).mean()

    return loss


def region(name, text, formula):
    @case(name)
    def build(n, dtype, device):
        shape = (1, CLASSES, max(1, n // CLASSES))
        generator = torch.Generator(device).manual_seed(1)
        index = torch.randint(CLASSES, (1, shape[2]), generator=generator, device=device)
        x = data(shape[1] * shape[2], dtype, device, 0, shape=shape).detach().sigmoid().requires_grad_()
        ours, theirs = getattr(safeops, name), _monai(index, formula)
        s, read = dtype.itemsize, 8 / CLASSES  # bytes of an index for each element
        return Case(
            (x,),
            forward_bytes=s + read,  # read x, index
            backward_bytes=s + read,  # read index; write dx (of class indices, the slope does not depend on x)
            ours=lambda x: ours(x, index),
            eager={text: theirs},
            compiled=theirs,
        )


region("dice_loss", "MONAI's, with one_hot", lambda both, p, t: (2 * both + 1e-5) / (p + t + 1e-5))
region(
    "tversky_loss",
    "MONAI's, with one_hot",
    lambda both, p, t: (both + 1e-5) / (both + 0.5 * (p - both) + 0.5 * (t - both) + 1e-5),
)
