"""The CUDA kernels' own sources, run on the CPU thread by thread (tests/kernels/emulate), against plain torch.

What this shows: indices, broadcasting, tails, mask shuffles, saturation and output layouts are right, in each of the
three variants. What it cannot show: anything about a GPU. That is scripts/gpu_check.py.
"""

import ctypes
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.ops import definitions

ROOT = Path(__file__).resolve().parents[2]
HALVES = [torch.float16, torch.bfloat16]
FLOATS = [*HALVES, torch.float32, torch.float64]
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# What the emulation runs: the sources on the elementwise loop.
SOURCES = [
    path
    for path in sorted((ROOT / "csrc/cuda").rglob("*.cu"))
    if re.search(r'#include "(loop|floating|unary|binary).cuh"', path.read_text())
]
UNARY = [path.stem for path in SOURCES if "SAFEOPS_UNARY(" in path.read_text()]
BINARY = [path.stem for path in SOURCES if "SAFEOPS_BINARY(" in path.read_text()]
HOST = [ROOT / "csrc/cuda/elementwise/unary.cpp", ROOT / "csrc/cuda/elementwise/binary.cpp"]

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation needs g++"),
    pytest.mark.xdist_group("cuda_emulated"),  # compiled once, by one worker
]


def compiled(sources, target):
    """A library of the sources, made for the host."""
    torch_dir = Path(torch.__file__).parent
    command = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", "-x", "c++", f"-I{ROOT}/tests/kernels/emulate"]
    command += [f"-I{ROOT}/csrc", "-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020b000000000000"]
    command += ["-isystem", f"{torch_dir}/include", "-include", f"{ROOT}/tests/kernels/emulate/cuda_runtime.h"]
    command += ["-", f"-L{torch_dir}/lib", "-ltorch", "-ltorch_cpu"]  # one unit: torch's headers are read once
    unit = "".join(f'#include "{path}"\n' for path in sources)
    result = subprocess.run([*command, "-o", str(target)], input=unit, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return target


def counter(target):
    """A function giving (16-byte loads, shuffles) since its last call."""
    library = ctypes.CDLL(str(target))

    def counts():
        wide, shuffles = ctypes.c_int64(), ctypes.c_int64()
        library.emulated_counts(ctypes.byref(wide), ctypes.byref(shuffles))
        return wide.value, shuffles.value

    counts.in_host = library.emulated_in_host  # the tensor of this data is a CPU's beside the others, which are CUDA's
    return counts


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """(ops, counts): the raw ops, and what counter() gives."""
    target = compiled([*SOURCES, *HOST], tmp_path_factory.mktemp("emulated") / "cuda_emulated.so")
    library = torch.library.Library("safeops_emulated", "FRAGMENT")
    library.define("_masked_fill(Tensor input, Tensor fill_mask, Tensor? value=None, float number=0.0) -> Tensor")
    for name in UNARY:
        library.define(
            f"_{name}(Tensor input, float? eps=None, float fill_value=0.0, ScalarType? dtype=None) -> Tensor"
        )
        library.define(f"_{name}_backward(Tensor grad, Tensor input, float? eps=None) -> Tensor")
    for name in BINARY:
        library.define(
            f"_{name}(Tensor input, Tensor other, float? eps=None, float fill_value=0.0, ScalarType? dtype=None) "
            "-> Tensor"
        )
        library.define(
            f"_{name}_backward(Tensor grad, Tensor input, Tensor other, float? eps=None, bool need_input=True, "
            "bool need_other=True, ScalarType? input_dtype=None, ScalarType? other_dtype=None) -> (Tensor, Tensor)"
        )
    torch.ops.load_library(str(target))
    counts = counter(target)
    yield torch.ops.safeops_emulated, counts
    library._destroy()


def identical(a, b):
    """Same shape, strides, dtype and bits, except that any NaN equals any NaN."""
    assert a.dtype == b.dtype and a.shape == b.shape, (a.dtype, b.dtype, a.shape, b.shape)
    assert a.stride() == b.stride(), (a.stride(), b.stride())
    bits = BITS[a.element_size()]
    same = (a.contiguous().view(bits) == b.contiguous().view(bits)) | (a.isnan() & b.isnan())
    assert same.all(), f"{(~same).sum()} of {same.numel()} differ, first at {(~same).nonzero()[0].tolist()}"


def like(x, shape, dtype):
    return torch.empty_like(x, dtype=dtype) if x.shape == shape else torch.empty(shape, dtype=dtype)


def garbage(shape, dtype, seed=0):
    """Random values with zeros, subnormals, huge values, inf and NaN among them."""
    torch.manual_seed(seed)
    x = torch.randn(shape, dtype=torch.float64)
    odd = torch.tensor([0.0, -0.0, 1e-7, 1e-40, 6e4, -3e38, float("inf"), -float("inf"), float("nan")], dtype=x.dtype)
    where = torch.rand(shape) < 0.3
    return torch.where(where, odd[torch.randint(len(odd), shape)], x).to(dtype)


def layouts(dtype, make, values=garbage):
    """(name, input, second operand, variant) for every way the loop can run. `make(shape, seed)` gives the second."""
    x = lambda *shape: values(shape, dtype)  # noqa: E731
    yield "one", x(1), make((1,), 1), "flat"
    yield "0-dim", x().reshape(()), make((), 1), "flat"
    yield "empty", x(0, 3), make((0, 3), 1), None
    yield "tile", x(4, 512), make((4, 512), 1), "flat"
    yield "tail", x(4096 + 77), make((4096 + 77,), 1), "flat"
    yield "permuted", x(8, 6, 64).permute(2, 0, 1), make((8, 6, 64), 1).permute(2, 0, 1), "flat"
    channels = x(2, 16, 6, 10).contiguous(memory_format=torch.channels_last)
    yield "channels_last", channels, make((2, 16, 6, 10), 1).contiguous(memory_format=torch.channels_last), "flat"
    yield "channels_last, plain second", channels, make((2, 16, 6, 10), 1), "general"
    yield "padding", x(3, 50, 64), make((3, 50, 1), 1), "rows"
    yield "scalar", x(7, 64), make((), 1), "rows"
    yield "heads", x(2, 3, 16, 64), make((2, 1, 16, 64), 1), "rows"
    yield "grown input", x(16, 64), make((3, 1, 64), 1), "rows"
    yield "expanded input", x(1, 64).expand(9, 64), make((9, 64), 1), "rows"
    yield "stride 0", x(1, 1).expand(20, 64), make((1, 1), 1).expand(20, 64), "rows"
    yield "odd rows", x(5, 33), make((5, 1), 1), "general"
    yield "aligned at its first row alone", x(9, 65)[:, :64], make((9, 64), 1), "general"
    yield "rows of an aligned pitch", x(9, 80)[:, :64], make((9, 80), 1)[:, :64], "rows"
    yield "shifted", x(4097)[1:], make((4097,), 1)[1:], "general"
    yield "transposed", x(37, 129).t(), make((129, 37), 1), "general"
    yield "step", x(300, 6)[::3, ::2], make((100, 3), 1), "general"
    yield "outer", x(31, 1), make((1, 45), 1), "general"
    yield "7 dims", x(2, 3, 2, 3, 2, 3, 2).permute(6, 0, 5, 1, 4, 2, 3), make((2, 1, 3, 1, 2, 1, 3), 1), "general"


def check_variant(counts, variant, wide_rows):
    wide, shuffles = counts()
    if variant in ("flat", "rows") and (variant == "flat" or wide_rows):
        return wide, shuffles
    assert wide == 0 and shuffles == 0, f"expected the general kernel, saw {wide} wide loads"
    return wide, shuffles


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_masked_fill(emulated, dtype):
    ops, counts = emulated
    masks = lambda shape, seed: torch.rand(shape) < 0.4  # noqa: E731
    for name, x, mask, variant in layouts(dtype, masks):
        counts()
        out = ops._masked_fill(x, mask, None, -1e9)
        wide, shuffles = check_variant(counts, variant, dtype != torch.float64)
        fill = max(-1e9, torch.finfo(dtype).min)
        shape = torch.broadcast_shapes(x.shape, mask.shape)
        expected = like(x, shape, dtype).copy_(torch.where(mask, torch.tensor(fill, dtype=dtype), x))
        identical(out, expected)
        if name == "tile":
            assert shuffles == 2048 * x.element_size() // 16 and wide == shuffles + 2048 // 16
        if variant == "rows" and dtype != torch.float64:
            assert wide > 0 or 0 in x.stride(), name
        # a 0-dim value of every dtype, saturated
        if name in ("tail", "padding", "outer"):
            for value_dtype in FLOATS:
                for number in (2.5, 7e4, -3.4e38, float("inf"), float("nan")):
                    value = torch.tensor(number, dtype=torch.float64).to(value_dtype)
                    info = torch.finfo(dtype)
                    wanted = value.double().clamp(info.min, info.max) if value.isfinite() else value
                    expected = like(x, shape, dtype).copy_(torch.where(mask, wanted.to(dtype), x))
                    identical(ops._masked_fill(x, mask, value), expected)
                    counts.in_host(ctypes.c_void_p(value.data_ptr()))
                    identical(ops._masked_fill(x, mask, value), expected)
                    counts.in_host(None)


def test_a_mask_that_is_aligned_at_its_first_row_alone(emulated):
    ops, counts = emulated
    for dtype in FLOATS:
        for mask in ((torch.rand(9, 65) < 0.4)[:, :64], (torch.rand(9, 72) < 0.4)[:, 1:65]):
            x = garbage((9, 64), dtype)
            counts()
            identical(ops._masked_fill(x, mask, None, 2.0), torch.where(mask, torch.tensor(2.0, dtype=dtype), x))
            check_variant(counts, "general", True)


def test_masked_fill_copies_nan_payloads_and_reads_any_true_byte(emulated):
    ops, _ = emulated
    for dtype in FLOATS:
        bits = torch.full((1024 + 5,), -3, dtype=BITS[dtype.itemsize])  # a NaN with a payload
        mask = torch.zeros(1029, dtype=torch.uint8)
        mask[::3] = torch.tensor([1, 2, 128, 255], dtype=torch.uint8).repeat(86)[:343]
        out = ops._masked_fill(bits.view(dtype), mask.view(torch.bool), None, 1.0)
        expected = torch.where(mask != 0, torch.ones((), dtype=dtype).view(bits.dtype), bits)
        assert torch.equal(out.view(bits.dtype), expected), dtype


def slope_of_divisor(g, a, b):
    """g a / b^2 as the kernel orders it."""
    q, slope = a / b, g / b
    limits = torch.finfo(q.dtype)
    other = q / b
    lost = (slope.abs() > limits.max) | ((slope.abs() < limits.tiny) & (g != 0) & (other.abs() <= limits.max))
    return torch.where(lost, g * other, slope * q)


def reference(a, b, eps, fill, dtype):
    """(result, kept and not saturated) in the compute dtype, by the rules and nothing else."""
    wide = torch.float64 in (a.dtype, b.dtype, dtype)
    compute = torch.float64 if wide else torch.float32
    a, b = a.to(compute), b.to(compute)
    keep = ~((b.abs() < torch.tensor(eps, dtype=compute)) | (b == 0))
    q = a / b
    y = q.to(dtype)
    over = y.isinf() & a.isfinite()
    largest = torch.tensor(torch.finfo(dtype).max, dtype=torch.float64)
    y = torch.where(over, largest.copysign(q.double()).to(dtype), y)
    if abs(fill) < float("inf"):
        fill = min(max(fill, torch.finfo(dtype).min), torch.finfo(dtype).max)
    return torch.where(keep, y, torch.tensor(fill, dtype=torch.float64).to(dtype)), keep & ~over, a, b


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_safe_div(emulated, dtype):
    ops, counts = emulated
    for name, x, y, variant in layouts(dtype, lambda shape, seed: garbage(shape, dtype, seed)):
        for eps, fill in ((0.0, 0.0), (0.01, -1e300)):
            counts()
            out = ops._safe_div(x, y, eps, fill, dtype)
            wide, _ = check_variant(counts, variant, dtype != torch.float64)
            value = reference(x, y, eps, fill, dtype)[0]
            identical(out, like(x, value.shape, dtype).copy_(value))
            if variant == "rows" and dtype != torch.float64 and 0 not in x.stride():
                assert wide > 0, name


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_safe_div_backward(emulated, dtype):
    ops, _ = emulated
    for _, x, y, _ in layouts(dtype, lambda shape, seed: garbage(shape, dtype, seed)):
        shape = torch.broadcast_shapes(x.shape, y.shape)
        for grad in (garbage(shape, dtype, 2), torch.ones((), dtype=dtype).expand(shape)):
            da, db = ops._safe_div_backward(grad, x, y, 0.01, True, True, dtype, dtype)
            _, live, a, b = reference(x, y, 0.01, 0.0, dtype)
            g = grad.to(a.dtype)
            identical(da, like(x, shape, dtype).copy_(torch.where(live, g / b, 0).to(dtype)))
            identical(db, like(y, shape, dtype).copy_(torch.where(live, -slope_of_divisor(g, a, b), 0).to(dtype)))
            only_a, none = ops._safe_div_backward(grad, x, y, 0.01, True, False, dtype, torch.float32)
            identical(only_a, da)
            assert none.shape == (0,) and none.dtype == torch.float32
            none, only_b = ops._safe_div_backward(grad, x, y, 0.01, False, True, dtype, dtype)
            identical(only_b, db)


@pytest.mark.parametrize("shape", [(4, 64), (5, 33)], ids=["packets", "general"])
def test_mixed_dtypes(emulated, shape):
    """Any mix of the four dtypes, each read as it is; up to fp32 in packets of eight."""
    ops, counts = emulated
    for i, first in enumerate(FLOATS):
        for second in FLOATS:
            for out_dtype in FLOATS:
                x, y = garbage(shape, first, i), garbage((shape[0], 1), second, 7)
                counts()
                out = ops._safe_div(x, y, 0.0, 1.0, out_dtype)
                wide, _ = counts()
                assert (wide > 0) == (shape == (4, 64) and torch.float64 not in (first, second, out_dtype))
                value, live, a, b = reference(x, y, 0.0, 1.0, out_dtype)
                identical(out, value)
                grad = garbage(shape, out_dtype, 9)
                da, db = ops._safe_div_backward(grad, x, y, 0.0, True, True, second, first)
                # the compute type also widens for a requested output
                g = grad.to(a.dtype)
                identical(da, torch.where(live, g / b, 0).to(second))
                identical(db, torch.where(live, -slope_of_divisor(g, a, b), 0).to(first))


@pytest.mark.parametrize("compute", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
def test_saturation_begins_exactly_where_rounding_overflows(emulated, compute, dtype):
    ops, _ = emulated
    largest = torch.tensor(torch.finfo(dtype).max, dtype=torch.float64)
    step = 2.0 ** {torch.float16: 5, torch.bfloat16: 120, torch.float32: 104}[dtype]
    narrow = 2.0 ** {torch.float16: -8, torch.bfloat16: 104, torch.float32: 104}[dtype]  # the fp32 step there
    at = [largest + step / 2 + k * narrow / 4 for k in range(-6, 7)] + [largest, largest + step, largest - step]
    edge = torch.stack([torch.stack(at)] + [torch.nextafter(torch.stack(at), x) for x in (largest * 0, largest * 2)])
    a = edge.flatten().to(compute)
    a = torch.cat([a, -a])
    b = torch.ones_like(a)
    value, live, _, _ = reference(a, b, 0.0, 0.0, dtype)
    assert 0 < live.sum() < live.numel() or (compute, dtype) == (torch.float32, torch.float32)
    identical(ops._safe_div(a, b, 0.0, 0.0, dtype), value)
    da, _ = ops._safe_div_backward(b.to(dtype), a, b, 0.0, True, False, compute, compute)
    assert torch.equal(da != 0, live)


# ---- the unary and binary functions, against their definitions in fp64


def close(got, truth, ulps):
    """Within `ulps` of the fp64 truth, in the spacing of got's dtype; inf and NaN where the truth has them."""
    info, expected = torch.finfo(got.dtype), truth.to(got.dtype)
    assert got.shape == truth.shape
    exponent = torch.frexp(truth.abs().clamp(min=info.tiny, max=info.max))[1] - 1
    room = ulps * info.eps * torch.ldexp(torch.ones_like(truth), exponent)
    good = ((got.double() - truth).abs() <= room) | (got == expected) | (got.isnan() & truth.isnan())
    at = tuple((~good).nonzero()[0].tolist()) if not good.all() else ()
    assert good.all(), f"{(~good).sum()} of {good.numel()}, at {at}: {got[at]} for {truth[at]}"


def truth_of(name, operands, grad, dtype, **parameters):
    """(value, gradients) of the definition on fp64 copies."""
    leaves = [x.double().requires_grad_() for x in operands]
    if name != "xlogy":
        parameters["out_dtype"] = dtype
    value = getattr(definitions, name)(*leaves, **parameters)
    return value.detach(), torch.autograd.grad(value, leaves, grad.double().expand(value.shape), materialize_grads=True)


def half_ulps(dtype):
    """Half results are the fp32 value rounded once. The rest is the C library's, not the GPU's: not much is asked."""
    return 0.6 if dtype in HALVES else 8


SOME = ("one", "tail", "padding", "expanded input", "transposed")  # a layout for each kernel


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", UNARY)
def test_unary(emulated, name, dtype):
    ops, counts = emulated
    function, backward = getattr(ops, f"_{name}"), getattr(ops, f"_{name}_backward")
    for layout, x, grad, variant in layouts(dtype, lambda shape, seed: garbage(shape, dtype, seed)):
        if torch.broadcast_shapes(x.shape, grad.shape) != x.shape or (name != "safe_exp" and layout not in SOME):
            continue
        grad = torch.where(grad.isinf(), 3, grad)  # fp64's own chain rule makes NaN of it
        counts()
        out = function(x)
        alone = counts()[0]
        dx = backward(grad, x)
        both = counts()[0]
        value, (slope,) = truth_of(name, [x], grad, dtype)
        if variant == "flat" and x.numel() >= 2048:
            assert alone > 0 and both > 0, layout
        if variant == "general" or (variant == "rows" and dtype == torch.float64):
            assert both == 0, layout
        for got, truth in ((out, value), (dx, slope)):
            assert got.stride() == torch.empty_like(x).stride() and got.dtype == dtype
            close(got, truth, half_ulps(dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", [name for name in BINARY if name != "safe_div"])
def test_binary(emulated, name, dtype):
    ops, counts = emulated
    function, backward = getattr(ops, f"_{name}"), getattr(ops, f"_{name}_backward")
    values = garbage
    if name == "safe_pow":

        def values(shape, dtype, seed=0):
            """A power that underflows has no gradient by its exponent in fp32, and may have one in fp64."""
            x = garbage(shape, dtype, seed)
            return torch.where(x.abs() < 1e-30, 0, torch.where(x.isinf() | (x == -1), 2, x))  # (-1)^nan: boundaries

    for layout, a, b, variant in layouts(dtype, lambda shape, seed: values(shape, dtype, seed), values):
        if name != "safe_pow" and layout not in SOME:
            continue
        if name == "safe_pow":
            b = (b.clamp(-4, 4) * 2).round() / 2 if layout == "padding" else b
        shape = torch.broadcast_shapes(a.shape, b.shape)
        grad = garbage(shape, dtype, 2)
        grad = torch.where(grad.isinf(), 3, grad)  # fp64's own chain rule makes NaN of it
        counts()
        out = function(a, b)
        wide, _ = check_variant(counts, variant, dtype != torch.float64)
        assert wide > 0 or variant != "flat" or out.numel() < 2048
        value, slopes = truth_of(name, [a.expand(shape), b.expand(shape)], grad, dtype)
        da, db = backward(grad, a, b)
        for got, truth, own in ((out, value, a), (da, slopes[0], a), (db, slopes[1], b)):
            assert got.stride() == like(own, shape, dtype).stride() and got.dtype == dtype
            # fp64's own b a^(b-1) carries the rounding of b - 1
            close(got, truth, 2000 if name == "safe_pow" and dtype == torch.float64 else half_ulps(dtype))
        only_a, none = backward(grad, a, b, None, True, False)
        identical(only_a, da)
        assert none.shape == (0,)
        none, only_b = backward(grad, a, b, None, False, True)
        identical(only_b, db)


@pytest.mark.parametrize("shape", [(4, 64), (5, 33)], ids=["packets", "general"])
def test_unary_dtypes(emulated, shape):
    """Any output dtype and any gradient's; up to fp32 in packets of eight."""
    ops, counts = emulated
    for first in FLOATS:
        for out_dtype in FLOATS:
            x, grad = garbage(shape, first, 3), garbage((shape[0], 1), out_dtype, 4)
            grad = torch.where(grad.isinf(), 3, grad)
            counts()
            out = ops._safe_exp(x, None, 0.0, out_dtype)
            wide, _ = counts()
            if first != out_dtype:
                assert (wide > 0) == (shape == (4, 64) and torch.float64 not in (first, out_dtype))
            value, (slope,) = truth_of("safe_exp", [x], grad, out_dtype)
            close(out, value, half_ulps(out_dtype))
            close(ops._safe_exp_backward(grad, x), slope, half_ulps(first))


@pytest.mark.parametrize("compute", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", ["safe_reciprocal", "safe_sqrt", "safe_rsqrt", "safe_exp", "safe_pow"])
def test_functions_saturate_where_rounding_overflows(emulated, name, dtype, compute):
    """Forward and backward agree with torch's rounding of the unrounded value, 400 neighbours around the edge."""
    ops, _ = emulated
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


INF, NAN = math.inf, math.nan
TINY, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
BOUNDARIES = {  # op: (operands..., gradient of ones...) in fp32; eps where one is named
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
def test_boundaries(emulated, name, compute):
    """fp32 operands and result, in fp32 and by way of an fp64 output's arithmetic where both have the same answer."""
    ops, _ = emulated
    count = 2 if name in BINARY else 1
    for eps, rows in BOUNDARIES[name].items():
        if compute == torch.float64:
            if eps is None and count == 1 and name in ("safe_reciprocal", "safe_log", "safe_rsqrt"):
                continue  # another floor
            rows = [row for row in rows if not any(abs(x) in (LARGEST, 1e-30) for x in row)]
        table = torch.tensor(rows, dtype=torch.float64)
        operands = [column.to(compute) for column in table[:, :count].unbind(1)]
        out = getattr(ops, f"_{name}")(*operands, eps, 0.0, compute)
        gradients = getattr(ops, f"_{name}_backward")(torch.ones_like(out), *operands, eps)
        gradients = [gradients] if count == 1 else gradients
        for got, expected in zip((out, *gradients), table[:, count:].unbind(1)):
            torch.testing.assert_close(got, expected.to(compute), rtol=1e-6, atol=0, equal_nan=True)
        # exactly 0 whatever the upstream gradient is
        # exactly 0 over a stand-in, whatever the upstream gradient is
        flat = torch.stack(gradients).eq(0).all(0) & (table[:, 0].abs() < INF)
        flat &= (name != "safe_pow") | (out != 0) | (table[:, count - 1] < 1)  # 0^2 has a slope, of 0
        for bad in (NAN, INF):
            again = getattr(ops, f"_{name}_backward")(torch.full_like(out, bad), *operands, eps)
            for got in [again] if count == 1 else again:
                assert (got[flat] == 0).all()


def test_unusable_operands_are_refused(emulated):
    ops, _ = emulated
    x, mask = torch.ones(4, 3), torch.ones(4, 3, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="fill_mask must be bool"):
        ops._masked_fill(x, mask.int(), None, 0.0)
    with pytest.raises(RuntimeError, match="do not broadcast"):
        ops._masked_fill(x, torch.ones(4, dtype=torch.bool), None, 0.0)
    with pytest.raises(RuntimeError, match="input must be float16"):
        ops._masked_fill(x.int(), mask, None, 0.0)
    with pytest.raises(RuntimeError, match="does not broadcast"):
        ops._safe_div_backward(torch.ones(2, 4, 3), x, x, 0.0, True, True, x.dtype, x.dtype)
