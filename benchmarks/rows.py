"""The functions of rows: softmax, normalize, cosine similarity, over rows of several lengths and over the channels of
images. The input is read once in each direction, the output written once."""

import torch
import torch.nn.functional as F

import safeops

from .case import ROW, Case, data, keep_mask

SIDE = 56  # pixels of an image's edge

# rows -> (shape, dim) of about n elements
SHAPES = {
    "": lambda n: ((max(1, n // ROW), ROW), -1),
    "_64": lambda n: ((n // 64, 64), -1),
    "_32768": lambda n: ((max(1, n // 32768), 32768), -1),
    "_channels": lambda n: ((max(1, n // (64 * SIDE * SIDE)), 64, SIDE, SIDE), 1),
}


def _tensor(n, dtype, device, seed, shape):
    count = torch.Size(shape).numel()
    return data(count, dtype, device, seed, grad=False).view(shape).requires_grad_()


def softmax(name, ours, function, suffix):
    def build(n, dtype, device):
        shape, dim = SHAPES[suffix](n)
        s = dtype.itemsize
        x = _tensor(n, dtype, device, 0, shape)
        mask = keep_mask(x.numel(), device).view(shape)

        def pattern(x):
            return function(x.masked_fill(~mask, float("-inf")), dim)

        return Case(
            name + suffix,
            (x,),
            forward_bytes=2 * s + 1,  # read x, mask; write y
            backward_bytes=3 * s + 1,  # read dy, x, mask; write dx
            ours=lambda x: ours(x, mask, dim),
            eager={f"{function.__name__}(x.masked_fill(~m, -inf))": pattern},
            compiled=pattern,
            variant=bool(suffix),
            bare=lambda x: function(x, dim),
        )

    return build


def plain_softmax(n, dtype, device):
    """Beside torch's own softmax, which has no mask: the same bytes."""
    shape, dim = SHAPES[""](n)
    s = dtype.itemsize
    return Case(
        "softmax_no_mask",
        (_tensor(n, dtype, device, 0, shape),),
        forward_bytes=2 * s,  # read x; write y
        backward_bytes=3 * s,  # read dy, x; write dx
        ours=lambda x: safeops.masked_softmax(x, dim=dim),
        eager={"x.softmax(-1)": lambda x: x.softmax(dim)},
        compiled=lambda x: x.softmax(dim),
        variant=True,
    )


def normalize(suffix):
    def build(n, dtype, device):
        shape, dim = SHAPES[suffix](n)
        s = dtype.itemsize
        return Case(
            "normalize" + suffix,
            (_tensor(n, dtype, device, 0, shape),),
            forward_bytes=2 * s,  # read x; write y
            backward_bytes=3 * s,  # read dy, x; write dx
            ours=lambda x: safeops.normalize(x, dim),
            eager={"F.normalize(x)": lambda x: F.normalize(x, dim=dim)},
            compiled=lambda x: F.normalize(x, dim=dim),
            variant=bool(suffix),
        )

    return build


def cosine_similarity(suffix):
    def build(n, dtype, device):
        shape, dim = SHAPES[suffix](n)
        s = dtype.itemsize
        return Case(
            "cosine_similarity" + suffix,
            (_tensor(n, dtype, device, 0, shape), _tensor(n, dtype, device, 1, shape)),
            forward_bytes=2 * s,  # read x1, x2
            backward_bytes=4 * s,  # read x1, x2; write dx1, dx2
            ours=lambda a, b: safeops.cosine_similarity(a, b, dim),
            eager={"F.cosine_similarity(a, b)": lambda a, b: F.cosine_similarity(a, b, dim=dim)},
            compiled=lambda a, b: F.cosine_similarity(a, b, dim=dim),
            variant=bool(suffix),
        )

    return build


OPS = {}
for _suffix in SHAPES:
    OPS["masked_softmax" + _suffix] = softmax("masked_softmax", safeops.masked_softmax, torch.softmax, _suffix)
    OPS["normalize" + _suffix] = normalize(_suffix)
    OPS["cosine_similarity" + _suffix] = cosine_similarity(_suffix)
OPS["masked_log_softmax"] = softmax("masked_log_softmax", safeops.masked_log_softmax, torch.log_softmax, "")
OPS["softmax_no_mask"] = plain_softmax
