"""masked_fill, and apply_where, which is not in the registry, since it takes functions."""

import functools

import torch

import safeops
from safeops.core.dtypes import compute_dtype
from safeops.testing import Bad, Sample, Subject
from tests.ops.bad_calls import KEEP, X, bad_masks
from tests.ops.gpu import masked
from tests.ops.operands import data, mask, plain, plain_mask
from tests.ops.record import COMPOSITE, DEVICE, NO_SUM, NO_WEIGHT, ONE_OPERAND, Record
from tests.ops.truth import saturated

# ---- masked_fill


def masked_fill(input, fill_mask, value, *, out_dtype=torch.float64):
    value = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64, device=input.device)
    return torch.where(fill_mask, saturated(value.to(input.dtype), out_dtype), input)


def _fill(x, m, value, **options):
    return Sample((x, m, value), mask=1, mask_keeps=False, masked=(0,), **options)


VALUE = torch.tensor(-2.5, dtype=torch.float64)

Record(
    "masked_fill",
    masked_fill,
    [
        _fill(data(3, 5), mask(3, 5), 1.5, name="number", slow=True),
        _fill(data(3, 5), mask(3, 5), VALUE, name="differentiable value", slow=True),
        _fill(data(3, 5), mask(5), -1e9, name="mask broadcast, value beyond half"),
        _fill(data(5), mask(3, 5), float("-inf"), name="input broadcast, -inf", smooth=False),
        _fill(data(2, 3, 4, 5), mask(2, 1, 4, 5), 7.0, name="four dimensions"),
        _fill(data(2, 3, 4, 5), mask(3, 1, 1), VALUE, name="mask of few dimensions"),
    ],
    bad_calls=[
        *bad_masks("masked_fill", lambda m: ((X, m, 0.0), {}), "fill_mask"),
        Bad(([1.0], KEEP, 0.0), {}, TypeError, ("masked_fill", "input", "tensor", "list")),
        Bad((X, KEEP, "0"), {}, TypeError, ("masked_fill", "value", "str")),
        Bad((X, KEEP, None), {}, TypeError, ("masked_fill", "value", "NoneType")),
        Bad((X, KEEP, torch.zeros(1)), {}, ValueError, ("masked_fill", "value", "(1,)")),
        Bad((X, KEEP, torch.zeros((), device="meta")), {}, ValueError, ("masked_fill", "value", "meta")),
        Bad((X, KEEP, X[0, 0].to(torch.float8_e4m3fn)), {}, TypeError, ("masked_fill", "value", "float8")),
    ],
    call={"input": plain(), "fill_mask": plain_mask(), "value": torch.tensor(2.0)},
    kernel_call={"value": 2.0},
    gpu=masked("masked_fill", keyword="fill_mask", value=-3.0),
    dtype_rule="input",
    torch_equivalent=torch.Tensor.masked_fill,
    skip=NO_SUM | NO_WEIGHT | {"finite": "not a safe_ function: it writes what it is given"},
)


# ---- apply_where


def _wide(function):
    """Returns `function` computed in fp32 or fp64 and rounded once to its dtype: apply_where itself rounds nothing."""

    def call(*operands):
        dtype = functools.reduce(torch.promote_types, (x.dtype for x in operands))
        return function(*(x.to(compute_dtype(dtype)) for x in operands)).to(dtype)

    return call


def _two(condition, x, y):
    """Calls apply_where as an op of tensors: log(x y) where the condition holds, x y elsewhere."""
    return safeops.apply_where(condition, (x, y), _wide(lambda x, y: torch.log(x * y)), _wide(torch.mul))


def _two_definition(condition, x, y):
    a, b = torch.where(condition, x, 2.0), torch.where(condition, y, 3.0)
    return torch.where(condition, (a * b).log(), torch.where(condition, 2.0, x) * torch.where(condition, 3.0, y))


def _filled(condition, x):
    return safeops.apply_where(condition, x, _wide(torch.reciprocal), fill_value=-1.0)


def _filled_definition(condition, x):
    return torch.where(condition, 1 / torch.where(condition, x, 2.0), -1.0)


def _subjects():
    skip = NO_SUM | NO_WEIGHT
    skip |= {"finite": "not a safe_ function", "routes": "there is one route", "errors": "in test_bad_calls"}
    skip |= dict.fromkeys(("direct", "opcheck", "opcheck_traced"), "no dispatcher op takes functions")
    skip |= {"saved_bytes": COMPOSITE, "peak_memory": COMPOSITE}
    fields = {"dtype_rule": "elementwise", "device": DEVICE}
    x, y = data(3, 5, seed=1, low=0.5), data(3, 5, seed=2, low=0.5)
    where = {"mask": 0, "mask_keeps": True}
    yield Subject(
        _filled,
        _filled_definition,
        [
            Sample((mask(3, 5), x), name="a number elsewhere", masked=(1,), slow=True, **where),
            Sample((mask(3, 1), x), name="condition broadcast", masked=(1,), **where),
        ],
        torch_equivalent=lambda m, x: torch.where(m, 1 / x, -1.0),
        name="apply_where (fill_value)",
        skip=skip | ONE_OPERAND,
        **fields,
    )
    seen = "nothing is dropped: what f1 does not see, f2 sees"
    masks = "masked_garbage", "masked_upstream", "masked_garbage_transforms", "nothing_kept"
    yield Subject(
        _two,
        _two_definition,
        [
            Sample((mask(3, 5), x, y), name="two operands", slow=True, **where),
            # differentiable: y alone, as torch sums a broadcast half operand's gradient in half
            Sample((mask(3, 1), data(5, low=0.5), y), name="broadcast", differentiable=(2,), **where),
        ],
        torch_equivalent=lambda m, x, y: torch.where(m, (x * y).log(), x * y),
        name="apply_where (f2)",
        skip=skip | dict.fromkeys(masks, seen),
        **fields,
    )


def _bad_where():
    def bad(args, kwargs, error, *words):
        return Bad(args, kwargs, error, ("apply_where", *words))

    zero, log = {"fill_value": 0}, torch.log
    yield bad((X, X, log), zero, TypeError, "condition", "bool", "torch.float32")
    yield bad(([True], X, log), zero, TypeError, "condition", "tensor", "list")
    yield bad((KEEP, 1.0, log), zero, TypeError, "args", "tensor", "float")
    yield bad((KEEP, (X, "x"), torch.add), zero, TypeError, "args[1]", "tensor", "str")
    yield bad((KEEP, (), torch.add), zero, ValueError, "args", "empty")
    yield bad((KEEP[:, :3], X, log), zero, ValueError, "condition", "args", "(2, 3)", "(2, 5)")
    yield bad((KEEP, X.to("meta"), log), zero, ValueError, "args", "meta")
    yield bad((KEEP, X, log), {}, ValueError, "f2", "fill_value", "neither")
    yield bad((KEEP, X, log, log), zero, ValueError, "f2", "fill_value", "both")
    yield bad((KEEP, X, 1.0), zero, TypeError, "f1", "function", "float")
    yield bad((KEEP, X, log, 1.0), {}, TypeError, "f2", "function", "float")
    yield bad((KEEP, X, log), {"fill_value": "0"}, TypeError, "fill_value", "str")
    yield bad((KEEP, X, log), {"fill_value": torch.ones(3)}, ValueError, "fill_value", "(3,)", "(2, 5)")
    yield bad((KEEP, X, torch.sum), zero, ValueError, "f1", "()", "(2, 5)")
    yield bad((KEEP, X, lambda x: 1.0), zero, TypeError, "f1", "tensor", "float")
    yield bad((KEEP, X, log, lambda x: x[0]), {}, ValueError, "f2", "(5,)", "(2, 5)")


Record(
    "apply_where",
    _two_definition,
    "it has functions for arguments: two subjects of its own",
    bad_calls=_bad_where(),
    call={"condition": plain_mask(), "args": plain(), "f1": torch.log, "fill_value": torch.tensor(2.0)},
    gpu="plain torch operations",
    subjects=list(_subjects()),
)
