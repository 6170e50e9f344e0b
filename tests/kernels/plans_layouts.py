"""Plans of all kernels for small operands in every layout and dtype, and one plan of each functor.

test_triton_compiled.py checks them in addition to the large operands of test_triton_build.py.
"""

from itertools import product

import torch

from tests.kernels import plans_classification as classes
from tests.kernels import plans_regions as regions
from tests.kernels import plans_rows as rows
from tests.kernels import plans_statistics as statistics
from tests.kernels.plans_statistics import BF16, F64, STATISTICS, meta
from tests.kernels.test_triton_build import LOSSES, formulas, mapped, mse_loss, reduced

SHAPES = (16, 65), (1, 64), (5, 1030), (40, 304)
MODES = "COUNT", "VAR", "NORM", "LOGSUMEXP", "LARGEST", "ABSOLUTE_SUM"  # one statistic of each kind of state


def layouts():
    """Returns {name: plan}."""
    results = {}
    for shape, dtype in product(SHAPES, (BF16, F64)):
        for layout, strides in (("", None), (" transposed", (1, shape[0]))):
            x, mask = meta(shape, dtype, strides), meta(shape, torch.bool)
            plans = one_of_each(x, mask, MODES)
            results |= {f"{name}{layout} {shape} {str(dtype)[6:]}": plan for name, plan in plans}
    for dtype in (BF16, F64):  # an empty operand: its tile has one element
        nothing = meta((0, 0, 0, 0), dtype)
        results[f"sum of nothing {str(dtype)[6:]}"] = reduced(None, nothing, mean=False)
        results |= {f"{name} of nothing {str(dtype)[6:]}": statistics.forward(name, nothing) for name in MODES[1:]}
    return results


def one_of_each(x, mask, names):
    """Yields (name, plan) of each kernel that reduces, over all elements, columns and rows. names: the statistics."""
    for masked, keep in (("", None), (" masked", mask)):
        for axis, dims in (("", None), (" columns", [0]), (" rows", [1])):
            for name in names if masked else names[1:]:  # a count needs a mask
                of = None if name == "COUNT" else x
                yield f"{name}{axis}{masked}", statistics.forward(name, of, keep, dims=dims, shape=x.shape)
            yield f"mse{axis}{masked}", reduced(mse_loss.value, x, x, keep, dims=dims)
            yield f"weighted mse{axis}{masked}", reduced(mse_loss.value, x, x, keep, x, dims=dims)
            yield f"weighted VAR{axis}{masked}", statistics.forward("VAR", x, keep, x, dims=dims)
            yield f"linear_backward{axis}{masked}", statistics.backward(0, x, keep, dims=dims)
        yield f"mse_backward{masked}", mapped(mse_loss.slope, x, x, keep)
        for axis, dim in ((" columns", 0), (" rows", 1)):
            for op, number in (("softmax", rows.SOFTMAX), ("normalize", rows.NORMALIZE)):
                yield f"{op}{axis}{masked}", rows.forward(number, x, keep, dim)
                yield f"{op}_backward{axis}{masked}", rows.backward(number, x, keep, dim)
    for axis, dim in ((" columns", 0), (" rows", 1)):
        yield f"cosine{axis}", rows.cosines(x, x, dim)
        yield f"cosine_backward{axis}", rows.cosines_backward(x, x, dim)
    yield from rows_of(x)
    yield from regions_of(x)


def regions_of(x):
    """Yields the plans of the region losses: x (N, pixels) is expanded to three classes."""
    image, target, mask = regions.operands((x.shape[0], 3, x.shape[1]), x.dtype, masked=True)
    if not x.is_contiguous():
        image = meta(image.shape, x.dtype, (x.stride(0), x.numel(), x.stride(1)))
    for soft, other in (("", target), (" soft", torch.empty_like(image))):
        yield f"regions{soft}", regions.forward(image, other, mask, bool(soft))
        yield f"regions_backward{soft}", regions.backward(image, other, mask, bool(soft))


def rows_of(x):
    """Yields the plans of ops over rows of classes, and of distances between vectors."""
    for name, options in (
        ("", {}),
        (" smoothing", {"weight": True, "smooth": True}),
        (" shares", {"probabilities": True}),
    ):
        yield f"cross_entropy{name}", classes.forward(x, **options)
        yield f"cross_entropy_backward{name}", classes.backward(x, **options)
    yield "nll_loss", classes.picked(x)
    yield "nll_loss_backward", classes.picked_backward(x)
    for swap in (False, True):
        yield f"triplet {swap}", rows.triplets(x, swap)
        yield f"triplet_backward {swap}", rows.triplets_backward(x, swap)
    for power in (1, 2):
        yield f"multi_margin {power}", classes.margins(x, power)
        yield f"multi_margin_backward {power}", classes.margins(x, power, True)


def functors(dtype):
    """Returns {name: plan} of each functor and op."""
    x, mask = meta((64, 128), dtype), meta((64, 128), torch.bool)
    result = dict(rows_of(x))
    for module in (mse_loss, *LOSSES):
        for loss, (value, derivative) in formulas(module).items():
            result[loss] = reduced(value, x, x, mask)
            result[f"{loss}_backward"] = mapped(derivative, x, x, mask, both=True)
    for name in STATISTICS:
        result[name] = statistics.forward(name, None if name == "COUNT" else x, mask, shape=x.shape)
    for kind, slope in enumerate(statistics.statistic_backward.SLOPES):
        result[f"{slope.__name__}_backward"] = statistics.backward(kind, x, mask)
    for name, op in (("softmax", rows.SOFTMAX), ("log_softmax", rows.LOG_SOFTMAX), ("normalize", rows.NORMALIZE)):
        result[name], result[f"{name}_backward"] = rows.forward(op, x, mask), rows.backward(op, x, mask)
    result["cosine"], result["cosine_backward"] = rows.cosines(x, x), rows.cosines_backward(x, x)
    return result | dict(regions_of(x))
