"""psnr and total_variation."""

import math

import torch

import safeops
from safeops.testing import Bad, Sample
from tests.ops.gpu import Case, numbers
from tests.ops.gpu import keep as kept
from tests.ops.images.image import (
    CALL,
    OF_WHOLE,
    bad_images,
    bad_options,
    by_image,
    images,
    keep_of,
    record,
)
from tests.ops.operands import mask


def _psnr(input, target, *, mask=None, data_range=1.0, reduction="mean", empty="zero"):
    keep = keep_of(input, mask).flatten(1)
    count = keep.sum(1)
    error = torch.where(keep, (input - target).flatten(1), 0).square().sum(1) / count.clamp(min=1)
    equal = error == 0
    value = -10 * torch.log10(torch.where(equal, 1, error) / data_range**2)
    return by_image(torch.where(equal, math.inf, value), count > 0, reduction, empty)


def _image_samples(*operands, **options):
    """Yields samples. operands: for each operand a function (*shape, seed) -> tensor."""

    def sample(seed, *shape, name, slow=False, **arguments):
        return Sample(
            tuple(f(*shape, seed=seed + i) for i, f in enumerate(operands)), arguments | options, name=name, slow=slow
        )

    # All sizes differ: a trace with symbols would take two equal sizes for one symbol.
    yield sample(1, 2, 3, 5, 6, mask=mask(2, 1, 5, 6), name="masked", slow=True)
    yield sample(3, 3, 2, 4, 5, reduction="none", mask=mask(3, 2, 4, 5, seed=1), name="none")
    yield sample(5, 2, 1, 3, 4, 5, reduction="sum", name="volumes, sum")


record(
    "psnr",
    _psnr,
    _image_samples(images, images, data_range=2.5),
    [
        *bad_images("psnr"),
        Bad((torch.ones(()), torch.ones(())), {}, ValueError, ("psnr", "input", "(N, ...)", "()")),
    ],
    CALL | {"data_range": 1.5},
    "its kernels are those of mse_loss, which the tests on a GPU run",
    data=(0, 1),
    skip={"accumulation": "a logarithm's error is absolute: masked_rms, which it is made of, has it", **OF_WHOLE},
)


def _total_variation(input, *, mask=None, reduction="mean", empty="zero"):
    keep, total = keep_of(input, mask), 0
    for d in range(2, input.dim()):
        n = max(input.shape[d] - 1, 0)
        (a, here), (b, there) = ([t.narrow(d, i, n) for t in (input, keep)] for i in (0, min(n, 1)))
        pair = here & there
        step = torch.where(pair, b - a, 0)
        step = step * torch.where(step.isnan(), step, step.sign()).detach()
        total = total + step.flatten(1).sum(1)
    return by_image(total, keep.flatten(1).any(1), reduction, empty)


def _variation_case(n, dtype, seed):
    """Returns a GPU call on one image of n pixels, with at least two rows if n is even."""
    mask, rows = kept(n, seed), 64 if n % 64 == 0 else 2 - n % 2
    shape = 1, 1, rows, n // rows
    return Case(lambda x: safeops.total_variation(x.view(shape), mask=mask.view(shape)), (numbers(n, dtype, seed),))


_small = torch.zeros(2, 3, 4, 5)
record(
    "total_variation",
    _total_variation,
    _image_samples(images),
    [
        Bad((None,), {}, TypeError, ("total_variation", "input", "tensor", "NoneType")),
        Bad((_small.long(),), {}, TypeError, ("total_variation", "input", "floating", "torch.int64")),
        Bad((_small[0],), {}, ValueError, ("total_variation", "input", "(N, C, H, W)", "(3, 4, 5)")),
        *bad_options("total_variation", (_small,)),
    ],
    # few kept pixels: a test takes the sigmoid of the sum, which has no slope where the sum is large
    {"input": CALL["input"], "mask": torch.ones(12, 13, dtype=torch.bool).tril(-8)},
    gpu=_variation_case,
    no_route=None,
    skip={"mixed_dtypes": "one floating operand", "partial_gradients": "one floating operand", **OF_WHOLE},
)
