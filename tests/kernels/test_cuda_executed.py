"""The elementwise CUDA kernels run on CPU tensors, by their host code and an interpreter of nvcc's PTX
(tests/kernels/executed), and agree with plain torch.

They test indices, broadcasting, tails, mask shuffles, saturation and output layouts in each of the three variants, and
that nothing is read or written out of bounds. scripts/gpu_check.py tests what only a GPU can show.
"""

import pytest
import torch

from tests.contract.refusals import assert_all_refused
from tests.kernels.cuda_sources import (
    BINARY,
    BITS,
    FLOATS,
    ROOT,
    UNARY,
    check_variant,
    garbage,
    identical,
    layouts,
    like,
    needs_compilers,
)
from tests.kernels.executed import cuda, machine

REFUSED = ("masked_fill", *UNARY, *BINARY)
# xdist_group: one worker runs all these tests, and so compiles the sources once.
pytestmark = [pytest.mark.slow, needs_compilers, pytest.mark.xdist_group("cuda_executed")]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_masked_fill(ops, dtype):
    masks = lambda shape, seed: torch.rand(shape) < 0.4  # noqa: E731
    for name, x, mask, variant in layouts(dtype, masks):
        out = ops._masked_fill(x, mask, None, -1e9)
        variant = "general" if dtype == torch.float64 and "shifted" in name else variant  # fp64 has no shifted packets
        wide = check_variant(ops, variant, dtype != torch.float64)
        fill = max(-1e9, torch.finfo(dtype).min)
        shape = torch.broadcast_shapes(x.shape, mask.shape)
        expected = like(x, shape, dtype).copy_(torch.where(mask, torch.tensor(fill, dtype=dtype), x))
        identical(out, expected)
        if name == "tile":
            assert wide == 2048 * x.element_size() // 16 + 2048 // 16
        if variant == "rows" and dtype != torch.float64:
            assert wide > 0 or 0 in x.stride(), name
        # The value may be a 0-dim tensor of any dtype. A finite value beyond x's range becomes x's largest number.
        if name == "tail":
            for value_dtype in FLOATS:
                for number in (2.5, 7e4, -3.4e38, float("inf"), float("nan")):
                    value = torch.tensor(number, dtype=torch.float64).to(value_dtype)
                    info = torch.finfo(dtype)
                    wanted = value.double().clamp(info.min, info.max) if value.isfinite() else value
                    expected = like(x, shape, dtype).copy_(torch.where(mask, wanted.to(dtype), x))
                    identical(ops._masked_fill(x, mask, value), expected)
                    ops.host = value
                    identical(ops._masked_fill(x, mask, value), expected)
                    ops.host = None


def test_a_mask_that_is_aligned_at_its_first_row_alone(ops):
    for dtype in FLOATS:
        for mask in ((torch.rand(9, 65) < 0.4)[:, :64], (torch.rand(9, 72) < 0.4)[:, 1:65]):
            x = garbage((9, 64), dtype)
            identical(ops._masked_fill(x, mask, None, 2.0), torch.where(mask, torch.tensor(2.0, dtype=dtype), x))
            check_variant(ops, "general", True)


def test_masked_fill_copies_nan_payloads_and_reads_any_true_byte(ops):
    for dtype in FLOATS:
        bits = torch.full((1024 + 5,), -3, dtype=BITS[dtype.itemsize])  # a NaN with a payload
        mask = torch.zeros(1029, dtype=torch.uint8)
        mask[::3] = torch.tensor([1, 2, 128, 255], dtype=torch.uint8).repeat(86)[:343]
        out = ops._masked_fill(bits.view(dtype), mask.view(torch.bool), None, 1.0)
        expected = torch.where(mask != 0, torch.ones((), dtype=dtype).view(bits.dtype), bits)
        assert torch.equal(out.view(bits.dtype), expected), dtype


def slope_of_divisor(g, a, b):
    """Returns g a / b^2 in the kernel's order of operations."""
    q, slope = a / b, g / b
    limits = torch.finfo(q.dtype)
    other = q / b
    lost = (slope.abs() > limits.max) | ((slope.abs() < limits.tiny) & (g != 0) & (other.abs() <= limits.max))
    return torch.where(lost, g * other, slope * q)


def reference(a, b, eps, fill, dtype):
    """Returns safe_div's (result, bool: True where the op neither fills nor saturates, a, b), from the op's rules. The
    returned a and b have the compute dtype."""
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
def test_safe_div(ops, dtype):
    for name, x, y, variant in layouts(dtype, lambda shape, seed: garbage(shape, dtype, seed)):
        for eps, fill in ((0.0, 0.0), (0.01, -1e300)):
            out = ops._safe_div(x, y, eps, fill, dtype)
            wide = check_variant(ops, variant, dtype != torch.float64)
            value = reference(x, y, eps, fill, dtype)[0]
            identical(out, like(x, value.shape, dtype).copy_(value))
            if variant == "rows" and dtype != torch.float64 and 0 not in x.stride():
                assert wide > 0, name


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_safe_div_backward(ops, dtype):
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


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_safe_div_by_a_divisor_with_a_floor(ops, dtype):
    """A negative eps is a floor: |b| < |eps| is replaced by +-|eps|, and the divisor has no slope there."""
    for _, x, y, _ in layouts(dtype, lambda shape, seed: garbage(shape, dtype, seed)):
        compute = torch.promote_types(dtype, torch.float32)
        least = torch.tensor(0.01, dtype=compute)
        b, small = y.to(compute), y.to(compute).abs() < least
        b = torch.where(small, torch.where(b < 0, -least, least), b)
        value, live, a, b = reference(x.to(compute), b, 0.0, 0.0, dtype)
        identical(ops._safe_div(x, y, -0.01, 0.0, dtype), like(x, value.shape, dtype).copy_(value))
        grad = garbage(value.shape, dtype, 2)
        da, db = ops._safe_div_backward(grad, x, y, -0.01, True, True, dtype, dtype)
        g = grad.to(compute)
        identical(da, like(x, value.shape, dtype).copy_(torch.where(live, g / b, 0).to(dtype)))
        slope = torch.where(live & ~small, -slope_of_divisor(g, a, b), 0)
        identical(db, like(y, value.shape, dtype).copy_(slope.to(dtype)))


@pytest.mark.parametrize("shape", [(4, 64), (5, 33)], ids=["packets", "general"])
def test_mixed_dtypes(ops, shape):
    """Operands and result may have any mix of the four dtypes. Without fp64 the kernel moves packets of eight
    elements."""
    for i, first in enumerate(FLOATS):
        for second in FLOATS:
            for out_dtype in FLOATS:
                x, y = garbage(shape, first, i), garbage((shape[0], 1), second, 7)
                out = ops._safe_div(x, y, 0.0, 1.0, out_dtype)
                packets = shape == (4, 64) and torch.float64 not in (first, second, out_dtype)
                check_variant(ops, "rows" if packets else "general")
                assert (ops.wide > 0) == packets
                value, live, a, b = reference(x, y, 0.0, 1.0, out_dtype)
                identical(out, value)
                grad = garbage(shape, out_dtype, 9)
                da, db = ops._safe_div_backward(grad, x, y, 0.0, True, True, second, first)
                # The reference's a has the compute dtype: fp64 if an operand or the output is fp64.
                g = grad.to(a.dtype)
                identical(da, torch.where(live, g / b, 0).to(second))
                identical(db, torch.where(live, -slope_of_divisor(g, a, b), 0).to(first))


@pytest.mark.parametrize("compute", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
def test_saturation_begins_exactly_where_rounding_overflows(ops, compute, dtype):
    largest = torch.tensor(torch.finfo(dtype).max, dtype=torch.float64)
    step = 2.0 ** {torch.float16: 5, torch.bfloat16: 120, torch.float32: 104}[dtype]
    narrow = 2.0 ** {torch.float16: -8, torch.bfloat16: 104, torch.float32: 104}[dtype]  # fp32's spacing at the limit
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


def test_unusable_operands_are_refused(ops):
    x, mask = torch.ones(4, 3), torch.ones(4, 3, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="fill_mask must be bool"):
        ops._masked_fill(x, mask.int(), None, 0.0)
    with pytest.raises(RuntimeError, match="do not broadcast"):
        ops._masked_fill(x, torch.ones(4, dtype=torch.bool), None, 0.0)
    with pytest.raises(RuntimeError, match="input must be float16"):
        ops._masked_fill(x.int(), mask, None, 0.0)
    with pytest.raises(RuntimeError, match="does not broadcast"):
        ops._safe_div_backward(torch.ones(2, 4, 3), x, x, 0.0, True, True, x.dtype, x.dtype)


def test_bad_calls(ops):
    assert_all_refused(ops, REFUSED)


FAULTS = [  # (old text, new text in the flat kernel, the fault that the executor must report)
    ("at < end; at", "at < plan.numel; at", "overwrites what another writes, unordered"),
    ("at < end; at", "at <= end; at", "out of bounds"),
    ("plan.base[kOut + i] - misalignment(i) + bytes", "plan.base[kOut + i] + bytes", "misaligned"),
]


@pytest.mark.parametrize(
    "old, new, words",
    [pytest.param(*f, id=f[-1], marks=[pytest.mark.exhaustive] if i else ()) for i, f in enumerate(FAULTS)],
)
def test_planted_faults_are_found(tmp_path, old, new, words):
    folder = ROOT / "csrc/cuda/elementwise"
    header = (folder / "loop.cuh").read_text()
    assert header.count(old) == 1
    (tmp_path / "loop.cuh").write_text(header.replace(old, new))
    for name in ("masked_fill.cu", "floating.cuh"):  # #include looks first beside the including file
        (tmp_path / name).write_text((folder / name).read_text())
    ops = cuda.ops(tmp_path / "masked_fill.cu")
    mask = torch.rand(5000) < 0.4
    with pytest.raises(machine.Fault, match=words):
        for n in (4096, 4100):
            ops._masked_fill(torch.randn(n + 3)[3:], mask[:n], None, 0.0)
