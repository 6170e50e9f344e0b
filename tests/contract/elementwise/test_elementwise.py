"""masked_fill, apply_where, and how results are rounded: reported failures, and corners that the samples miss."""

import math

import pytest
import torch

import safeops
from safeops.core.dtypes import overflows
from safeops.core.op import registry
from tests.contract.common import DEVICE, each_route, equal, flags, leaf, on, t
from tests.ops.record import COMPILER

INF, NAN = math.inf, math.nan
MASK = flags(True, False, True)


# ---- masked_fill


def test_pytorch_94700_nan_to_num():
    x = leaf([1.0, 2.0])
    assert torch.autograd.grad((x * math.nan).nan_to_num(0).sum(), x)[0].isnan().all()
    # The factor is masked before the product: the backward of x * factor multiplies by the factor, NaN or not.
    factor = torch.tensor([math.nan, 3.0], device=DEVICE)
    ours = x * safeops.masked_fill(factor, factor.isnan(), 0.0)
    assert equal(torch.autograd.grad(ours.sum(), x)[0], [0, 3])


def test_pytorch_23156_nan_row_through_a_linear_layer():
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 3).to(DEVICE)
    rows = torch.randn(3, 4, device=DEVICE)
    clean_rows, keep = rows.clone(), flags(True, False, True)
    rows[1] = math.nan
    masked_after = torch.where(keep[:, None], layer(rows), 0).square().sum()
    assert torch.autograd.grad(masked_after, layer.weight)[0].isnan().all()
    ours = safeops.mse_loss(layer(safeops.masked_fill(rows, ~keep[:, None], 0.0)), torch.zeros(3, 3, device=DEVICE),
                            mask=keep[:, None], reduction="sum")  # fmt: skip
    want = torch.autograd.grad(layer(clean_rows[keep]).square().sum(), layer.weight)[0]
    torch.testing.assert_close(torch.autograd.grad(ours, layer.weight)[0], want)


def test_apex_1052_masked_fill_of_half_with_minus_1e9():
    x, fill = torch.zeros(3, dtype=torch.float16, device=DEVICE), flags(True, False, True)
    with pytest.raises(RuntimeError):
        x.masked_fill(fill, -1e9)
    assert equal(safeops.masked_fill(x, fill, -1e9), [-65504, 0, -65504])
    assert equal(safeops.masked_fill(x, fill, -math.inf), [-math.inf, 0, -math.inf])  # a fill of -inf is kept


@pytest.mark.parametrize("name", ["masked_fill", "safe_div", "mse_loss"])
def test_flash_attention_355_stride_0_upstream_gradient(name):
    torch.manual_seed(0)
    x = torch.randn(8, 6, device=DEVICE, requires_grad=True)
    other, mask = torch.rand(8, 6, device=DEVICE) + 1, torch.rand(8, 6, device=DEVICE) > 0.5
    out = {
        "masked_fill": lambda: safeops.masked_fill(x, mask, 0.0),
        "safe_div": lambda: safeops.safe_div(x, other),
        "mse_loss": lambda: safeops.mse_loss(x, other, mask=mask, reduction="none"),
    }[name]()
    upstream = torch.tensor(2.0, device=DEVICE).expand(8, 6)
    (got,) = torch.autograd.grad(out, x, upstream, retain_graph=True)
    (want,) = torch.autograd.grad(out, x, upstream.contiguous(), retain_graph=True)
    (transposed,) = torch.autograd.grad(out, x, torch.full((6, 8), 2.0, device=DEVICE).T)
    assert torch.equal(got, want) and torch.equal(transposed, want)


def test_masked_fill_keeps_the_bits_of_what_it_keeps():
    bits = torch.tensor(
        [0x7FC01234, 0x7F800000, -0x80000000, 0x00000001], dtype=torch.int32
    )  # a NaN payload, inf, -0, subnormal
    x, fill = bits.view(torch.float32).to(DEVICE), torch.tensor([False] * 4 + [True] * 4, device=DEVICE)
    out = safeops.masked_fill(torch.cat([x, x]), fill, NAN)
    assert torch.equal(out[:4].cpu().view(torch.int32), bits)
    assert out[4:].isnan().all()


def test_second_derivatives_of_batched_gradients_of_masked_fill():
    x = t(1.0, 2.0, 3.0, grad=True)
    for value in (lambda x: 0.0, lambda x: x[0]):
        second = []
        for fill in (safeops.masked_fill, torch.masked_fill):

            def f(x, fill=fill, value=value):
                return fill(x**3, MASK, value(x)) ** 2

            jacobian = torch.autograd.functional.jacobian(f, x, vectorize=True, create_graph=True)
            second += torch.autograd.grad(jacobian.pow(2).sum(), x)
        torch.testing.assert_close(*second)


INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_saturate_whatever_the_value_is(dtype):
    """A fill value beyond the integer dtype saturates, given as a number or as a tensor of any dtype that holds it."""
    mask = torch.tensor([True, False], device=DEVICE)
    x, info = torch.tensor([1, 2], device=DEVICE).to(dtype), torch.iinfo(dtype)
    numbers = [0, 1, -1, 127, 128, -129, 65536, 2**31, -(2**31) - 1, 2**53, 2**62, 2**63 - 1024, 2**63, 2**64 - 2048]
    numbers += [float(n) for n in numbers] + [2.75, -2.75, 1e30, -1e30, float("inf"), -float("inf")]
    for number in numbers:
        want = info.max if number >= info.max else info.min if number <= info.min else int(number)
        assert safeops.masked_fill(x, mask, number).tolist() == [want, 2], number
        for held in (torch.float64, *INTEGERS) if isinstance(number, int) else (torch.float64,):
            value = torch.tensor(float(number) if held.is_floating_point else 0, dtype=held, device=DEVICE)
            if not held.is_floating_point:
                if not torch.iinfo(held).min <= number <= torch.iinfo(held).max:
                    continue
                value = value.new_full((), number)
            assert safeops.masked_fill(x, mask, value).tolist() == [want, 2], (number, held)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_among_integers_there_is_no_nan(dtype):
    """A NaN fill number is refused. A NaN fill tensor writes 0: refusing it would wait for the device."""
    mask, x = torch.tensor([True, False], device=DEVICE), torch.tensor([1, 2], device=DEVICE).to(dtype)
    with pytest.raises(ValueError, match=f"masked_fill: value nan does not exist in {dtype}"):
        safeops.masked_fill(x, mask, float("nan"))
    assert safeops.masked_fill(x, mask, torch.tensor(float("nan"), device=DEVICE)).tolist() == [0, 2]


@each_route
@pytest.mark.parametrize("value, slope", [(INF, 3), (-INF, 3), (NAN, 3), (65504.0, 3), (65519.0, 3), (65520.0, 0),
                                          (-65520.0, 0), (1e30, 0)])  # fmt: skip
def test_only_a_finite_fill_value_saturates(route, value, slope):
    op = on(route, "masked_fill")
    x, fill = t(1.0, 2.0, 3.0, 4.0, dtype=torch.float16), t(True, False, True, True, dtype=torch.bool)
    for create_graph in (False, True):
        v = torch.tensor(value, device=DEVICE, requires_grad=True)
        y = op(x, fill, v)
        (dv,) = torch.autograd.grad(y, v, torch.ones_like(y), create_graph=create_graph)
        assert dv == slope
        assert y[1] == 2 and (y[0].isfinite() or not math.isfinite(value))


# ---- rounding to half


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_half_result_is_rounded_as_torch_rounds(dtype):
    """Rounds as torch does: every upper half of an fp32 number, with lower bits on both sides of each tie."""
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    for lower in (0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        x = (upper | lower).view(torch.float32)
        x = x[~(x.isfinite() & x.to(dtype).isinf())][:-3]  # no overflow (it saturates); odd length: a tail
        got, want = safeops.safe_div(x.to(DEVICE), torch.ones((), device=DEVICE), dtype=dtype).cpu(), x.to(dtype)
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.view(torch.int16)[~want.isnan()], want.view(torch.int16)[~want.isnan()])


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000])
def test_any_nan_stays_one_in_bf16(bits):
    """A NaN must stay NaN: rounding to bf16 adds to the bits, and could carry a NaN's into those of 0 or inf."""
    x = torch.ones(40, device=DEVICE)
    x[::3] = torch.tensor(bits, dtype=torch.int32, device=DEVICE).view(torch.float32)
    assert safeops.safe_sqrt(x, dtype=torch.bfloat16).isnan().equal(x.isnan())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_inductor_saturates_half(dtype, monkeypatch):
    """Values beyond half must saturate when compiled: Inductor keeps half values in fp32, where they are finite."""
    if not COMPILER:
        pytest.skip("there is no compiler here, and Inductor needs one")
    for op in registry.values():
        monkeypatch.setattr(op, "cpu", False)
    large = torch.finfo(dtype).max / 2
    fill = torch.tensor(3e38 if dtype == torch.float16 else 1e300, dtype=torch.float64, device=DEVICE)
    x, quarter = t(large, -large, 2.0, dtype=dtype, grad=True), t(0.25, 0.25, 0.25, dtype=dtype)

    def ops(x):
        return (
            safeops.safe_pow(x, 3.0),
            safeops.safe_div(x, quarter),
            safeops.safe_exp(x),
            safeops.masked_fill(x, MASK, fill),
            safeops.safe_div(x.float() * 2.006, 1.0, dtype=dtype),  # fits fp32, but not bf16
        )

    def outcome(f):
        results = f(x)
        return *results, *(torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for y in results)

    torch._dynamo.reset()
    for got, want in zip(outcome(torch.compile(ops)), outcome(ops), strict=True):
        torch.testing.assert_close(got, want, rtol=torch.finfo(dtype).eps, atol=0)


def test_numbers_around_the_largest_one_of_half():
    """`overflows` says what rounding does: a value that rounds to half's largest number does not overflow."""
    for dtype, middle in ((torch.float16, 65520.0), (torch.bfloat16, 2.0**128 - 2.0**119)):
        for wide in (torch.float32, torch.float64):
            x = t(middle, math.nextafter(middle, 0), middle * (1 - 2.0**-24), middle * (1 - 2.0**-20), NAN, dtype=wide)
            assert torch.equal(overflows(x, dtype), x.to(dtype).isinf()) and overflows(-x, dtype)[0]


# ---- apply_where


def test_apply_where_shows_each_function_its_own():
    seen = {}

    def note(name):
        return lambda x, y: seen.setdefault(name, [x.tolist(), y.tolist()]) and x * 2

    x, y = torch.tensor([1.0, math.nan, 3.0], device=DEVICE), torch.tensor([[5], [7]], device=DEVICE)
    keep = flags(True, False, True)
    out = safeops.apply_where(keep, (x, y), note("f1"), note("f2"))
    assert seen["f1"] == [[[1, 1, 3], [1, 1, 3]], [[5, 1, 5], [7, 1, 7]]]
    assert seen["f2"][1] == [[1, 5, 1], [1, 7, 1]] and seen["f2"][0][0][0] == 1
    assert out[:, 0].tolist() == [2, 2] and out[:, 1].isnan().all()


def test_apply_where_dtypes():
    keep = flags(True, False)
    x = torch.tensor([1.0, 2.0], dtype=torch.float16, device=DEVICE)
    ours = safeops.apply_where(keep, x, lambda x: x, fill_value=-1e9)  # saturates, as in masked_fill
    assert ours.dtype == torch.float16 and ours.tolist() == [1, -65504]
    assert safeops.apply_where(keep, x, lambda x: x, fill_value=-math.inf).tolist() == [1, -math.inf]
    wide = safeops.apply_where(keep, x, lambda x: x, lambda x: x.double())
    assert wide.dtype == torch.float64 and wide.tolist() == [1, 2]
    flag = flags(True, True)
    assert safeops.apply_where(keep, flag, torch.logical_not, fill_value=True).tolist() == [False, True]
    n = torch.tensor([3, 0], device=DEVICE)
    assert safeops.apply_where(n != 0, n, lambda n: 6 // n, fill_value=0).tolist() == [2, 0]
    z = torch.tensor([1j, 0j], device=DEVICE)
    assert safeops.apply_where(z != 0, z, torch.reciprocal, fill_value=0).tolist() == [-1j, 0]


def test_apply_where_fill_tensor_has_a_gradient():
    x, fill = leaf([4.0, math.nan]), leaf([7.0])
    ours = safeops.apply_where(x > 0, x, torch.sqrt, fill_value=fill)
    dx, d_fill = torch.autograd.grad(ours.sum(), (x, fill))
    assert equal(ours, [2, 7]) and equal(dx, [0.25, 0]) and equal(d_fill, [1])
