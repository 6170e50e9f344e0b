"""The CUDA kernels of the unary and binary functions, executed on CPU tensors, agree with their definitions in fp64."""

import math
from itertools import product

import pytest
import torch

from tests.kernels.cuda_sources import (
    BINARY,
    BITS,
    FLOATS,
    HALVES,
    UNARY,
    check_variant,
    garbage,
    identical,
    layouts,
    like,
    needs_compilers,
)
from tests.ops import definitions

pytestmark = [pytest.mark.slow, needs_compilers, pytest.mark.xdist_group("cuda_executed")]


def close(got, truth, ulps, operands=()):
    """Assert that `got` differs from the fp64 truth by at most `ulps` in the last place of got's dtype, and has inf and
    NaN where the truth has them."""
    info, expected = torch.finfo(got.dtype), truth.to(got.dtype)
    assert got.shape == truth.shape
    exponent = torch.frexp(truth.abs().clamp(min=info.tiny, max=info.max))[1] - 1
    room = ulps * info.eps * torch.ldexp(torch.ones_like(truth), exponent)
    good = ((got.double() - truth).abs() <= room) | (got == expected) | (got.isnan() & truth.isnan())
    # inf is right, too, where the truth moved up by the bound rounds to inf.
    good |= got == (truth * (1 + (ulps - 0.5) * info.eps / 2)).to(got.dtype)
    at = tuple((~good).nonzero()[0].tolist()) if not good.all() else ()
    of = [x[at] for x in operands]
    assert good.all(), f"{(~good).sum()} of {good.numel()}, at {at}: {got[at]} for {truth[at]}, of {of}"


def truth_of(name, operands, grad, dtype, **parameters):
    """Returns (value, gradients) of the op's definition in plain torch, on fp64 copies of the operands."""
    leaves = [x.double().requires_grad_() for x in operands]
    if name != "xlogy":
        parameters["out_dtype"] = dtype
    value = getattr(definitions, name)(*leaves, **parameters)
    return value.detach(), torch.autograd.grad(value, leaves, grad.double().expand(value.shape), materialize_grads=True)


def half_ulps(dtype):
    """Returns the bound in ulps. fp16 and bf16 results are an fp32 value rounded once: a little over 0.5. In fp32 and
    fp64 the executor calls the host's C library, which is not the GPU's: 8."""
    return 0.6 if dtype in HALVES else 8


INF, NAN = math.inf, math.nan
SOME = ("one", "tail", "padding", "expanded input", "transposed")  # at least one layout for each kernel


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", UNARY)
def test_unary(ops, name, dtype):
    function, backward = getattr(ops, f"_{name}"), getattr(ops, f"_{name}_backward")
    for layout, x, grad, variant in layouts(dtype, lambda shape, seed: garbage(shape, dtype, seed)):
        if torch.broadcast_shapes(x.shape, grad.shape) != x.shape or (name != "safe_exp" and layout not in SOME):
            continue
        grad = torch.where(grad.isinf(), 3, grad)  # else the definition's chain rule gives inf * 0 = NaN
        out = function(x)
        alone = ops.wide
        dx = backward(grad, x)
        both = check_variant(ops, variant, dtype != torch.float64)
        value, (slope,) = truth_of(name, [x], grad, dtype)
        assert variant != "flat" or x.numel() < 2048 or alone > 0 and both > 0, layout
        for got, truth in ((out, value), (dx, slope)):
            assert got.stride() == torch.empty_like(x).stride() and got.dtype == dtype
            close(got, truth, half_ulps(dtype), (x, grad.expand(x.shape)))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", [name for name in BINARY if name != "safe_div"])
def test_binary(ops, name, dtype):
    function, backward = getattr(ops, f"_{name}"), getattr(ops, f"_{name}_backward")
    values = garbage
    if name == "safe_pow":

        def values(shape, dtype, seed=0):
            """Returns values whose fp32 powers do not underflow. Where they do, the exponent's gradient is 0 in fp32,
            but maybe not in the definition's fp64."""
            x = garbage(shape, dtype, seed)
            return torch.where(x.abs() < 1e-30, 0, torch.where(x.isinf() | (x == -1), 2, x))  # (-1)^nan: a boundary

    for layout, a, b, variant in layouts(dtype, lambda shape, seed: values(shape, dtype, seed), values):
        if name != "safe_pow" and layout not in SOME:
            continue
        if name == "safe_pow":
            b = (b.clamp(-4, 4) * 2).round() / 2 if layout == "padding" else b
        shape = torch.broadcast_shapes(a.shape, b.shape)
        grad = garbage(shape, dtype, 2)
        grad = torch.where(grad.isinf(), 3, grad)  # else the definition's chain rule gives inf * 0 = NaN
        out = function(a, b)
        wide = check_variant(ops, variant, dtype != torch.float64)
        assert wide > 0 or variant != "flat" or out.numel() < 2048
        value, slopes = truth_of(name, [a.expand(shape), b.expand(shape)], grad, dtype)
        da, db = backward(grad, a, b)
        for got, truth, operand in ((out, value, a), (da, slopes[0], a), (db, slopes[1], b)):
            assert got.stride() == like(operand, shape, dtype).stride() and got.dtype == dtype
            # 2000: in fp64 the truth b a^(b-1) has the rounding error of b - 1, too.
            close(got, truth, 2000 if name == "safe_pow" and dtype == torch.float64 else half_ulps(dtype))
        only_a, none = backward(grad, a, b, None, True, False)
        identical(only_a, da)
        assert none.shape == (0,)
        none, only_b = backward(grad, a, b, None, False, True)
        identical(only_b, db)


def patterns(dtype):
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", [*UNARY, *BINARY])
def test_every_half(ops, name, dtype):
    """An op is within 0.55 ulp for every fp16 and bf16 number, with gradients of all sizes. A second operand is a
    shuffle of all numbers, or one special number for all. The executor makes the GPU's approximate logarithm and power
    as inexact as the ISA allows."""
    x, info = patterns(dtype), torch.finfo(dtype)
    torch.manual_seed(0)
    shuffles = [x[torch.randperm(len(x))] for _ in range(6)]
    ends = torch.tensor(
        [0.0, -0.0, 1, -1, 2, 3, -3, 0.5, 2.5, 1 + info.eps, 1 - info.eps / 2, 255, 256, info.max, info.tiny,
         info.smallest_normal * info.eps, -info.max, math.inf, -math.inf, math.nan], dtype=dtype,
    )  # fmt: skip
    others = [*shuffles[:3], *(torch.full_like(x, end) for end in ends)] if name in BINARY else [None]
    for other, grad in product(others, [torch.ones_like(x), shuffles[3]]):
        grad = torch.where(grad.isfinite(), grad, -3)  # else the definition's chain rule gives inf * 0 = NaN
        operands = [x] if other is None else [x, other]
        if name == "safe_pow":  # the sign of a fractional power of -inf is unspecified
            operands[0] = torch.where((x == -math.inf) & (other != other.round()), 2, x)
        value, slopes = truth_of(name, operands, grad, dtype)
        got = getattr(ops, f"_{name}_backward")(grad, *operands)
        close(getattr(ops, f"_{name}")(*operands), value, 0.55, operands)
        if name == "safe_div":  # test_cuda_executed.py tests its gradients bit for bit
            continue
        for one, truth in zip([got] if other is None else got, slopes):
            close(one, truth, 0.55, [*operands, grad])


NUMBERS = [2, 0.5, 3, -1, 1, -0.5, 1.5, -1.5, 4, -4, 3.5, 1.7, -2.3, 7, 1e-30, -30, 2.0**23 - 1, 0, INF, -INF, NAN]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", BINARY)
def test_by_number(ops, name, dtype):
    """With a Python number as the second operand, which the kernel takes as a parameter, an op agrees with its
    definition for all fp16 and bf16 numbers and for random fp32 and fp64 numbers."""
    x = patterns(dtype) if dtype in HALVES else garbage((4173,), dtype)
    if name == "safe_pow":  # an underflow of a^(b-1) would show in a product with a huge gradient
        x = torch.where(x.abs() < {torch.bfloat16: 1e-30, torch.float32: 1e-5}.get(dtype, 0), 0, x)
    x = torch.where(x.isnan(), NAN, x)  # the host's C library gives NaN for signaling NaN to the power 0
    for number, values in product(NUMBERS, (x, x[:64].expand(3, 64), x[:99].reshape(9, 11).t()[1:])):
        fractional = name == "safe_pow" and number % 1 != 0
        values = torch.where(values.isinf() & (values < 0), 2, values) if fractional else values  # sign unspecified
        grad = garbage(values.shape, dtype, 2)
        grad = torch.where(grad.isfinite(), grad, 3)
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        value, (slope, _) = truth_of(name, [values, torch.full_like(values, number, dtype=compute)], grad, dtype)
        got = getattr(ops, f"_{name}")(values, None, None, 0.0, None, number)
        dx, none = getattr(ops, f"_{name}_backward")(grad, values, None, None, True, True, None, None, number)
        ulps = 2000 if name == "safe_pow" and dtype == torch.float64 else 0.55 if dtype in HALVES else 8
        close(got, value, ulps, [values])
        if name != "safe_div":  # its backward is the one for tensors, which test_cuda_executed.py tests
            close(dx, slope, ulps, [values, grad])
        assert none.shape == (0,)


@pytest.mark.parametrize("shape", [(4, 64), (5, 33)], ids=["packets", "general"])
def test_unary_dtypes(ops, shape):
    """Output and gradient may have any of the four dtypes. Without fp64 the kernel moves packets of eight elements."""
    for first in FLOATS:
        for out_dtype in FLOATS:
            x, grad = garbage(shape, first, 3), garbage((shape[0], 1), out_dtype, 4)
            grad = torch.where(grad.isinf(), 3, grad)
            out = ops._safe_exp(x, None, 0.0, out_dtype)
            if first != out_dtype:
                assert (ops.wide > 0) == (shape == (4, 64) and torch.float64 not in (first, out_dtype))
            value, (slope,) = truth_of("safe_exp", [x], grad, out_dtype)
            close(out, value, half_ulps(out_dtype))
            close(ops._safe_exp_backward(grad, x), slope, half_ulps(first))


@pytest.mark.parametrize("compute", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", ["safe_reciprocal", "safe_sqrt", "safe_rsqrt", "safe_exp", "safe_pow"])
def test_functions_saturate_where_rounding_overflows(ops, name, dtype, compute):
    """Forward and backward saturate exactly where torch's rounding of the unrounded value overflows, for 400 values on
    both sides of the limit."""
    limit = float(2 - torch.finfo(dtype).eps / 2) * 2.0 ** round(math.log2(torch.finfo(dtype).max) - 1)
    if name == "safe_sqrt" and compute == torch.float32 and dtype == torch.bfloat16:
        pytest.skip("no fp32 has so large a root")
    inverse = {
        "safe_reciprocal": 1 / limit,
        "safe_sqrt": limit**2,
        "safe_rsqrt": limit**-2,
        "safe_exp": math.log(limit),
        "safe_pow": math.sqrt(limit),
    }[name]
    if inverse < torch.finfo(compute).tiny:
        pytest.skip("below what the function takes")
    bits = BITS[compute.itemsize]
    steps = torch.arange(-200, 200).to(bits)
    if compute == torch.float64:
        steps = steps * 2**23
    x = (torch.tensor(inverse, dtype=compute).view(bits) + steps).view(compute)
    operands = (x, torch.full_like(x, 2.0)) if name == "safe_pow" else (x,)
    wide = getattr(ops, f"_{name}")(*operands)
    out = getattr(ops, f"_{name}")(*operands, None, 0.0, dtype)
    rounded = wide.to(dtype)
    over = rounded.isinf()
    assert 0 < over.sum() < over.numel()
    identical(out, torch.where(over, torch.finfo(dtype).max, rounded))
    grad = torch.ones_like(out)
    slope = getattr(ops, f"_{name}_backward")(grad, *operands)
    assert torch.equal((slope[0] if name == "safe_pow" else slope) == 0, over)


A, B = 2.0**-140, 2.0**-12  # A^B / A and B / A overflow fp32; the slope B A^(B-1) does not
TINY, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
# op: {eps, or None: [(operands..., result, gradients of the operands for an upstream gradient of 1...), ...]}, in fp32
BOUNDARIES = {
    "safe_reciprocal": {
        None: [(0.0, 0.0, 0.0), (-0.0, 0.0, 0.0), (TINY, 1 / TINY, -INF), (TINY / 2, 0.0, 0.0), (INF, 0.0, 0.0)],
        0.0: [(2.0**-130, LARGEST, 0.0), (-(2.0**-130), -LARGEST, 0.0), (0.0, 0.0, 0.0), (NAN, NAN, NAN)],
        0.5: [(0.5, 2.0, -4.0), (-0.5, -2.0, -4.0), (0.49, 0.0, 0.0)],
    },
    "safe_log": {
        None: [(0.0, math.log(TINY), 0.0), (-1.0, math.log(TINY), 0.0), (INF, INF, 0.0), (-INF, math.log(TINY), 0.0)],
        0.5: [(0.5, math.log(0.5), 2.0), (0.49, math.log(0.5), 0.0), (NAN, NAN, NAN), (1.0, 0.0, 1.0)],
    },
    "safe_sqrt": {
        None: [(0.0, 0.0, 0.0), (-0.0, 0.0, 0.0), (-2.0, 0.0, 0.0), (INF, INF, 0.0), (NAN, NAN, NAN), (4.0, 2.0, 0.25)],
        0.25: [(0.25, 0.5, 1.0), (0.16, 0.4, 0.0)],
        0.0: [(0.0, 0.0, 0.0), (2.0**-128, 2.0**-64, 2.0**63)],
    },
    "safe_rsqrt": {
        None: [(0.0, TINY**-0.5, 0.0), (-3.0, TINY**-0.5, 0.0), (INF, 0.0, 0.0), (NAN, NAN, NAN), (4.0, 0.5, -0.0625)],
        0.25: [(0.25, 2.0, -4.0), (0.2, 2.0, 0.0), (-INF, 2.0, 0.0)],
    },
    "safe_exp": {None: [(89.0, LARGEST, 0.0), (INF, INF, INF), (-INF, 0.0, 0.0), (NAN, NAN, NAN), (0.0, 1.0, 1.0)]},
    "safe_acos": {
        None: [(1.0, 0.0, 0.0), (-1.0, math.pi, 0.0), (2.0, 0.0, 0.0), (-INF, math.pi, 0.0), (NAN, NAN, NAN)],
    },
    "safe_acosh": {
        None: [(1.0, 0.0, 0.0), (0.5, 0.0, 0.0), (-INF, 0.0, 0.0), (INF, INF, 0.0), (NAN, NAN, NAN)],
    },
    "log1mexp": {
        None: [(0.0, math.log(TINY), 0.0), (1.0, math.log(TINY), 0.0), (INF, math.log(TINY), 0.0), (NAN, NAN, NAN)]
        + [(-INF, 0.0, 0.0), (-2 * TINY, math.log(2 * TINY), -0.5 / TINY)],
    },
    "safe_asin": {
        None: [(1.0, math.pi / 2, 0.0), (-1.0, -math.pi / 2, 0.0), (INF, math.pi / 2, 0.0), (NAN, NAN, NAN)],
    },
    "safe_pow": {
        None: [
            (-8.0, 0.5, 0.0, 0.0, 0.0),
            (0.0, -1.0, LARGEST, 0.0, 0.0),
            (-0.0, -1.0, -LARGEST, 0.0, 0.0),
            (0.0, 0.0, 1.0, 0.0, 0.0),
            (0.0, 0.5, 0.0, 0.0, 0.0),
            (0.0, 1.0, 0.0, 1.0, 0.0),
            (0.0, 2.0, 0.0, 0.0, 0.0),
            (2.0, 1.0, 2.0, 1.0, 2 * math.log(2)),
            (-2.0, 3.0, -8.0, 12.0, 0.0),
            (-2.0, 2.0, 4.0, -4.0, 0.0),
            (-2.0, -1.0, -0.5, -0.25, 0.0),
            (-1e20, 3.0, -LARGEST, 0.0, 0.0),
            (1e20, 2.0, LARGEST, 0.0, 0.0),
            (1e-30, 2.0, 0.0, 2e-30, 0.0),
            (2.0**-130, 2.0**-130, 1.0, 1.0, -130 * math.log(2)),
            (A, B, A**B, B * A ** (B - 1), A**B * math.log(A)),
            (NAN, 0.0, 1.0, 0.0, NAN),
            (NAN, 2.0, NAN, NAN, NAN),
            (1.0, NAN, 1.0, NAN, 0.0),
            (-1.0, NAN, NAN, NAN, 0.0),
            (INF, 2.0, INF, INF, INF),
            (-INF, 3.0, -INF, INF, 0.0),
        ]
    },
    "safe_atan2": {
        None: [
            *((y, x, 0.0, 0.0, 0.0) for y in (0.0, -0.0) for x in (0.0, -0.0)),
            (1.0, 0.0, math.pi / 2, 0.0, -1.0),
            (0.0, -1.0, math.pi, -1.0, 0.0),
            (3e38, 3e38, math.pi / 4, 0.5 / 3e38, -0.5 / 3e38),
            (1e-30, 1e-30, math.pi / 4, 5e29, -5e29),
            (INF, INF, math.pi / 4, 0.0, 0.0),
            (1.0, -INF, math.pi, 0.0, 0.0),
            (NAN, 0.0, NAN, NAN, NAN),
            (0.0, NAN, NAN, NAN, NAN),
            (INF, NAN, NAN, NAN, NAN),
        ]
    },
    "magnitude": {
        None: [
            *((a, b, 0.0, 0.0, 0.0) for a in (0.0, -0.0) for b in (0.0, -0.0)),
            (3.0, -4.0, 5.0, 0.6, -0.8),
            (0.0, -2.0, 2.0, 0.0, -1.0),
            (3e30, 4e30, 5e30, 0.6, 0.8),
            (3e-30, 4e-30, 5e-30, 0.6, 0.8),
            (-INF, 1.0, INF, -1.0, 0.0),
            (INF, -INF, INF, math.sqrt(0.5), -math.sqrt(0.5)),
            (NAN, 0.0, NAN, NAN, NAN),
            (0.0, NAN, NAN, NAN, NAN),
            (INF, NAN, NAN, NAN, NAN),
            (NAN, INF, NAN, NAN, NAN),
        ]
    },
    "xlogy": {
        None: [
            *((zero, y, 0.0, 0.0, 0.0) for zero in (0.0, -0.0) for y in (0.0, -1.0, NAN, INF)),
            *((zero, 4.0, 0.0, math.log(4), 0.0) for zero in (0.0, -0.0)),
            (2.0, 0.0, -INF, -INF, INF),
            (2.0, -1.0, NAN, NAN, -2.0),
            (2.0, 4.0, 2 * math.log(4), math.log(4), 0.5),
            (NAN, 1.0, NAN, 0.0, NAN),
        ]
    },
}


@pytest.mark.parametrize("compute", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", BOUNDARIES)
def test_boundaries(ops, name, compute):
    """At its boundaries an op gives the listed results and gradients for fp32 operands, computed in fp32 and (with an
    fp64 output) in fp64, where both have one answer."""
    count = 2 if name in BINARY else 1
    for eps, rows in BOUNDARIES[name].items():
        if compute == torch.float64:
            if eps is None and count == 1 and name in ("safe_reciprocal", "safe_log", "safe_rsqrt", "log1mexp"):
                continue  # in fp64 the floor is another number
            rows = [row for row in rows if not any(abs(x) in (LARGEST, 1e-30) for x in row)]
        table = torch.tensor(rows, dtype=torch.float64)
        operands = [column.to(compute) for column in table[:, :count].unbind(1)]
        out = getattr(ops, f"_{name}")(*operands, eps, 0.0, compute)
        gradients = getattr(ops, f"_{name}_backward")(torch.ones_like(out), *operands, eps)
        gradients = [gradients] if count == 1 else gradients
        for got, expected in zip((out, *gradients), table[:, count:].unbind(1)):
            torch.testing.assert_close(got, expected.to(compute), rtol=1e-6, atol=0, equal_nan=True)
        # The gradients are exactly 0 where the op replaces its value, whatever the upstream gradient.
        flat = torch.stack(gradients).eq(0).all(0) & (table[:, 0].abs() < INF)
        flat &= (name != "safe_pow") | (out != 0) | (table[:, count - 1] < 1)  # 0^2 is no replacement: its slope is 0
        for bad in (NAN, INF):
            again = getattr(ops, f"_{name}_backward")(torch.full_like(out, bad), *operands, eps)
            for got in [again] if count == 1 else again:
                assert (got[flat] == 0).all()
