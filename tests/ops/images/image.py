"""Parts of the records of images: masks, sums and means, images, refused calls."""

import torch

from safeops.testing import Bad
from tests.ops.bad_calls import NAN, must
from tests.ops.operands import HUGE, data
from tests.ops.record import NOT_SAFE, Record

NO_GPU = "no kernel on CUDA: plain torch operations run there, which tests of kernels tell nothing about"
HERE = "tests/contract/images"
NO_ROUTE = f"what is made of its kernel's result are a few aten operations more: {HERE} watches it"
OF_IMAGES = {
    "weight_zero": "has no weight",
    "sizes": f"an image has at least four dims, and a window fits in: {HERE} has other sizes",
    "saved_bytes": f"a few numbers are saved: {HERE} counts",
    "peak_memory": f"a few numbers are made: {HERE} counts, where pixels are many",
}

OF_WHOLE = {"masked_upstream": "a result is of a whole image: what is masked out has no upstream gradient of its own"}


def keep_of(x, mask):
    keep = torch.ones(x.shape, dtype=torch.bool, device=x.device)
    return keep if mask is None else keep & mask


def reduced(terms, counted, reduction, denominator, empty):
    if reduction == "none":
        return terms
    count = counted.sum()
    divisor = 1 if reduction == "sum" else count if denominator is None else denominator
    value = terms.sum() / torch.where(count > 0, divisor, 1)
    return torch.where(count > 0, value, NAN if empty == "nan" else 0.0)


def by_image(values, exists, reduction, empty):
    values = torch.where(exists, values, NAN if reduction == "none" and empty == "nan" else 0.0)
    return reduced(values, exists, reduction, None, empty)


def images(*shape, seed):
    return data(*shape, seed=seed, low=0.0, high=1.0)


def pair(*shape, seed):
    x = images(*shape, seed=seed)
    return x, (x + data(*shape, seed=seed + 1, low=-0.3, high=0.3))


def plain_images(seed):
    return images(2, 1, 12, 13, seed=seed).float()


CALL = {"input": plain_images(1), "target": plain_images(2), "mask": torch.arange(13) % 5 != 2}


def bad_images(name, size=12):
    """Yields calls that every function of two images refuses: wrong images and data ranges, then wrong options."""
    x = torch.zeros(2, 3, size, size)
    yield Bad((None, x), {}, TypeError, (name, "input", "tensor", "NoneType"))
    yield Bad((x, 1.0), {}, TypeError, (name, "target", "tensor", "float"))
    yield Bad((x.long(), x), {}, TypeError, (name, "input", "floating", "torch.int64"))
    yield Bad((x, x.bool()), {}, TypeError, (name, "target", "floating", "torch.bool"))
    yield Bad((x, x[:1]), {}, ValueError, (name, "target", f"(1, 3, {size}, {size})", f"(2, 3, {size}, {size})"))
    yield Bad((x, x.to("meta")), {}, ValueError, (name, "target", "meta"))
    for value in (0.0, -1.0, NAN):
        yield Bad((x, x), {"data_range": value}, ValueError, (name, "data_range", str(value)))
    yield Bad((x, x), {"data_range": "1"}, TypeError, (name, "data_range", "str"))
    yield Bad((x, x), {"data_range": None}, TypeError, (name, "data_range", "NoneType"))
    yield must(name, "data_range", (x, x), {"data_range": HUGE}, ValueError)
    yield from bad_options(name, (x, x))


def bad_options(name, good):
    """Yields calls with masks and reductions that every function of images refuses. good: valid operands."""
    shape = tuple(good[0].shape)
    keep = torch.ones(shape, dtype=torch.bool)
    yield Bad(good, {"mask": torch.ones(shape)}, TypeError, (name, "mask", "bool", "torch.float32"))
    yield Bad(good, {"mask": [True]}, TypeError, (name, "mask", "tensor", "list"))
    yield Bad(good, {"mask": keep[:, :2]}, ValueError, (name, "mask", str((2, 2, *shape[2:])), str(shape), "broadcast"))
    yield Bad(good, {"mask": keep[None]}, ValueError, (name, "mask", str((1, *shape)), str(shape)))
    yield Bad(good, {"mask": keep.to("meta")}, ValueError, (name, "mask", "meta"))
    yield Bad(good, {"reduction": "average"}, ValueError, (name, "reduction", "average", "mean"))
    yield Bad(good, {"empty": "skip"}, ValueError, (name, "empty", "skip", "zero"))
    yield Bad(good, {"mask": ~keep, "empty": "raise"}, ValueError, (name, "empty", "raise"))


def record(name, definition, samples, bad_calls, call, gpu=NO_GPU, no_route=NO_ROUTE, **fields):
    skip = NOT_SAFE | OF_IMAGES | fields.pop("skip", {})
    Record(name, definition, samples, bad_calls=bad_calls, call=call, gpu=gpu, no_route=no_route, skip=skip,
           **fields)  # fmt: skip
