"""The unary and binary functions as subjects."""

import functools

import torch

import safeops
from safeops._dtypes import compute_dtype
from safeops.testing import Sample, Subject
from tests.contract import definitions_unary_binary as definitions
from tests.contract.bad_calls_unary_binary import BAD_CALLS
from tests.contract.subjects import COMPOSITE, DEVICE, NO_SUM, data, mask, subject

NO_MASK = {
    c: "has no mask: what a stand-in hides is in test_stand_ins_unary_binary"
    for c in ("masked_garbage", "masked_upstream", "masked_garbage_transforms", "nothing_kept", "weight_zero")
}
ONE_OPERAND = {c: "one operand" for c in ("mixed_dtypes", "partial_gradients")}

# op -> (lowest, highest) of a smooth sample, options of a floor, what users write
UNARY = {
    "safe_reciprocal": (0.25, 3.0, {"eps": 1.0, "fill_value": -7.0}, torch.reciprocal),
    "safe_log": (0.25, 3.0, {"eps": 0.5}, torch.log),
    "safe_sqrt": (0.0625, 3.0, {"eps": 0.5}, torch.sqrt),
    "safe_rsqrt": (0.25, 3.0, {"eps": 0.5}, torch.rsqrt),
    "safe_exp": (-3.0, 3.0, None, torch.exp),
    "safe_acos": (-0.75, 0.75, None, torch.acos),
    "safe_asin": (-0.75, 0.75, None, torch.asin),
}
# What no value of a smooth sample is: stand-ins of every op, and numbers that saturate some of them.
HURTS = [0.0, -0.0, -1.0, 1.0, 1e-7, -2e-7, 6e-5, 3e4, -3e4, 12.0, 0.25, -1.5, 0.999, -0.999, 2.0]


def unary():
    for name, (low, high, floor, plain) in UNARY.items():
        hurts = torch.tensor(HURTS, dtype=torch.float64).reshape(3, 5)
        samples = [
            Sample((data(3, 5, low=low, high=high),), name="plain", slow=True),
            Sample((hurts,), name="stand-ins", smooth=False, slow=True),
            Sample((data(2, 3, 4, 5, low=low, high=high),), name="four dimensions"),
        ]
        if floor is not None:
            samples.append(Sample((data(3, 5, low=-1.0, high=high),), floor, name="floor", smooth=False))
        yield subject(
            name,
            samples,
            definitions=definitions,
            bad_calls=BAD_CALLS,
            dtype_rule="safe",
            dtype_argument=name not in ("safe_acos", "safe_asin"),
            finite=True,
            torch_equivalent=lambda x, plain=plain, **_: plain(x),
            skip=NO_SUM | NO_MASK | ONE_OPERAND,
        )


def binary():
    base, other = data(3, 5, seed=1, low=0.5), data(3, 5, seed=2, low=0.5)
    signed = torch.tensor([-2.0, -0.5, 0.0, 3.0, -1.25], dtype=torch.float64)
    exponents = torch.tensor([[2.0], [3.0], [-1.0]], dtype=torch.float64)
    hurts = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 2.0, 250.0, -3e4], dtype=torch.float64)
    grid = torch.cartesian_prod(hurts, hurts).unbind(-1)
    exponent_only = {"differentiable": (0,)}
    yield subject(
        "safe_pow",
        [
            Sample((base, other), name="plain", slow=True),
            Sample(grid, name="stand-ins", smooth=False, slow=True),
            Sample((base,), {"exponent": 2.5}, name="number"),
            Sample((base,), {"exponent": -1.0}, name="negative number"),
            Sample((signed,), {"exponent": 3.0}, name="negative bases", smooth=False),
            Sample((signed, exponents), name="both broadcast", smooth=False),
            Sample((data(3, 5, seed=3), torch.full((3, 1), 2.0, dtype=torch.float64)), name="squares", **exponent_only),
            Sample((data(5, seed=4, low=0.5), data(3, 5, seed=5)), name="base broadcast"),
            Sample((data(2, 3, 4, 5, low=0.5), data(2, 3, 4, 5, seed=4)), name="four dimensions"),
        ],
        definitions=definitions,
        bad_calls=BAD_CALLS,
        dtype_rule="safe",
        dtype_argument=True,
        finite=True,
        torch_equivalent=lambda input, exponent, **_: input**exponent,
        skip=NO_SUM | NO_MASK,
    )
    points = data(3, 5, seed=6), data(3, 5, seed=7, low=0.5)
    yield subject(
        "safe_atan2",
        [
            Sample(points, name="plain", slow=True),
            Sample(grid, name="stand-ins", smooth=False, slow=True),
            Sample((data(3, 5, seed=8), data(3, 1, seed=9, low=0.5)), name="x broadcast"),
            Sample((data(5, seed=8), data(3, 5, seed=9, low=0.5)), name="y broadcast"),
            Sample((data(2, 3, 4, 5), data(2, 3, 4, 5, seed=4, low=0.5)), name="four dimensions"),
            Sample((data(3, 5, seed=6) * 0.02, data(3, 5, seed=7, low=0.5) * 0.02), name="near the origin"),
        ],
        definitions=definitions,
        bad_calls=BAD_CALLS,
        dtype_rule="safe",
        finite=True,
        torch_equivalent=torch.atan2,
        skip=NO_SUM | NO_MASK,
    )
    holes = torch.where(mask(3, 5, seed=3), data(3, 5, seed=1), 0.0)
    yield subject(
        "xlogy",
        [
            Sample((data(3, 5), data(3, 5, seed=1, low=0.25)), name="plain", slow=True),
            Sample((holes, torch.where(holes == 0, -1.0, 2.0)), name="zeros", smooth=False, slow=True),
            Sample((data(3, 5),), {"other": 2.5}, name="number"),
            Sample((data(3, 5), data(3, 1, seed=2, low=0.25)), name="second broadcast"),
            Sample((data(5), data(3, 5, seed=2, low=0.25)), name="first broadcast"),
            Sample((data(2, 3, 4, 5), data(2, 3, 4, 5, seed=4, low=0.25)), name="four dimensions"),
            Sample(grid, name="where torch has -inf and nan", smooth=False, differentiable=()),
        ],
        definitions=definitions,
        bad_calls=BAD_CALLS,
        dtype_rule="elementwise",
        torch_equivalent=torch.xlogy,
        skip=NO_SUM | NO_MASK | {"finite": "not a safe_ function: it follows torch"},
    )


def _wide(function):
    """The function computed wide and rounded once: apply_where adds no rounding of its own, and takes none away."""

    def call(*operands):
        dtype = functools.reduce(torch.promote_types, (x.dtype for x in operands))
        return function(*(x.to(compute_dtype(dtype)) for x in operands)).to(dtype)

    return call


def apply_where(condition, x, y):
    """As an op of tensors: a logarithm where it is kept, a product elsewhere."""
    return safeops.apply_where(condition, (x, y), _wide(lambda x, y: torch.log(x * y)), _wide(torch.mul))


def apply_where_definition(condition, x, y):
    a, b = torch.where(condition, x, 2.0), torch.where(condition, y, 3.0)
    return torch.where(condition, (a * b).log(), torch.where(condition, 2.0, x) * torch.where(condition, 3.0, y))


def filled(condition, x):
    return safeops.apply_where(condition, x, _wide(torch.reciprocal), fill_value=-1.0)


def filled_definition(condition, x):
    return torch.where(condition, 1 / torch.where(condition, x, 2.0), -1.0)


def functions():
    skip = NO_SUM | {
        "finite": "not a safe_ function",
        "weight_zero": "has no weight",
        "direct": "no dispatcher op takes functions",
        "opcheck": "no dispatcher op takes functions",
        "routes": "there is one route",
        "errors": "in test_unary_binary",
        "saved_bytes": COMPOSITE,
        "peak_memory": COMPOSITE,
    }
    x, y = data(3, 5, seed=1, low=0.5), data(3, 5, seed=2, low=0.5)
    where = {"mask": 0, "mask_keeps": True}
    yield Subject(
        filled,
        filled_definition,
        [
            Sample((mask(3, 5), x), name="a number elsewhere", masked=(1,), slow=True, **where),
            Sample((mask(3, 1), x), name="condition broadcast", masked=(1,), **where),
        ],
        dtype_rule="elementwise",
        torch_equivalent=lambda m, x: torch.where(m, 1 / x, -1.0),
        device=DEVICE,
        name="apply_where (fill_value)",
        skip=skip | ONE_OPERAND,
    )
    yield Subject(
        apply_where,
        apply_where_definition,
        [
            Sample((mask(3, 5), x, y), name="two operands", slow=True, **where),
            # the gradient of a broadcast half operand is torch's: a sum of halves
            Sample((mask(3, 1), data(5, low=0.5), y), name="broadcast", differentiable=(2,), **where),
        ],
        dtype_rule="elementwise",
        torch_equivalent=lambda m, x, y: torch.where(m, (x * y).log(), x * y),
        device=DEVICE,
        name="apply_where (f2)",
        skip=skip
        | {
            c: "nothing is dropped: what f1 does not see, f2 sees"
            for c in ("masked_garbage", "masked_upstream", "masked_garbage_transforms", "nothing_kept")
        },
    )
