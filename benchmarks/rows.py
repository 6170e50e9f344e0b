"""The functions of rows: softmax, normalize, cosine similarity, over rows of several lengths and over the channels of
images. The input is read once in each direction, the output written once."""

import torch
import torch.nn.functional as F

import safeops

from .case import ROW, Case, case, data, keep_mask

SIDE = 56  # pixels of an image's edge

# rows -> (shape, dim) of about n elements
SHAPES = {
    "": lambda n: ((max(1, n // ROW), min(ROW, n)), -1),
    "_64": lambda n: ((max(1, n // 64), 64), -1),
    "_32768": lambda n: ((max(1, n // 32768), 32768), -1),
    "_channels": lambda n: ((max(1, n // (64 * SIDE * SIDE)), 64, SIDE, SIDE), 1),
}


def _tensor(n, dtype, device, seed, shape):
    return data(torch.Size(shape).numel(), dtype, device, seed, shape=shape)


def softmax(name, function, suffix):
    @case(name + suffix)
    def build(n, dtype, device):
        shape, dim = SHAPES[suffix](n)
        s = dtype.itemsize
        ours = getattr(safeops, name)
        x = _tensor(n, dtype, device, 0, shape)
        mask = keep_mask(x.numel(), device).view(shape)

        def pattern(x):
            return function(x.masked_fill(~mask, float("-inf")), dim)

        return Case(
            (x,),
            forward_bytes=2 * s + 1,  # read x, mask; write y
            backward_bytes=3 * s + 1,  # read dy, x, mask; write dx
            ours=lambda x: ours(x, mask, dim),
            eager={f"{function.__name__}(x.masked_fill(~m, -inf))": pattern},
            compiled=pattern,
            variant=bool(suffix),
            aten=lambda x: function(x, dim),
            arithmetic=True,
        )


@case("softmax_no_mask")
def plain_softmax(n, dtype, device):
    """Beside torch's own softmax, which has no mask: the same bytes."""
    shape, dim = SHAPES[""](n)
    s = dtype.itemsize
    return Case(
        (_tensor(n, dtype, device, 0, shape),),
        forward_bytes=2 * s,  # read x; write y
        backward_bytes=3 * s,  # read dy, x; write dx
        ours=lambda x: safeops.masked_softmax(x, dim=dim),
        eager={"x.softmax(-1)": lambda x: x.softmax(dim)},
        compiled=lambda x: x.softmax(dim),
        variant=True,
    )


def normalize(suffix):
    @case("normalize" + suffix)
    def build(n, dtype, device):
        shape, dim = SHAPES[suffix](n)
        s = dtype.itemsize
        return Case(
            (_tensor(n, dtype, device, 0, shape),),
            forward_bytes=2 * s,  # read x; write y
            backward_bytes=3 * s,  # read dy, x; write dx
            ours=lambda x: safeops.normalize(x, dim),
            eager={"F.normalize(x)": lambda x: F.normalize(x, dim=dim)},
            compiled=lambda x: F.normalize(x, dim=dim),
            variant=bool(suffix),
            aten=lambda x: torch.softmax(x, dim),  # torch has no normalize in one op
        )


def cosine_similarity(suffix):
    @case("cosine_similarity" + suffix)
    def build(n, dtype, device):
        shape, dim = SHAPES[suffix](n)
        s = dtype.itemsize
        return Case(
            (_tensor(n, dtype, device, 0, shape), _tensor(n, dtype, device, 1, shape)),
            forward_bytes=2 * s,  # read x1, x2
            backward_bytes=4 * s,  # read x1, x2; write dx1, dx2
            ours=lambda a, b: safeops.cosine_similarity(a, b, dim),
            eager={"F.cosine_similarity(a, b)": lambda a, b: F.cosine_similarity(a, b, dim=dim)},
            compiled=lambda a, b: F.cosine_similarity(a, b, dim=dim),
            variant=bool(suffix),
            aten=lambda a, b: torch.cosine_similarity(a, b, dim),
        )


for _suffix in SHAPES:
    softmax("masked_softmax", torch.softmax, _suffix)
    normalize(_suffix)
    cosine_similarity(_suffix)
softmax("masked_log_softmax", torch.log_softmax, "")
