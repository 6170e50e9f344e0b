"""Corners that the harness's samples do not reach: each was wrong once."""

import math

import pytest
import torch
import torch.autograd.forward_ad as fwAD

import safeops
from safeops._dtypes import overflows
from safeops._op import registry
from safeops.ops.selection._selection import summed_wide
from tests.contract.subjects import COMPILER, DEVICE, composite

INF, NAN = math.inf, math.nan
MASK = torch.tensor([True, False, True], device=DEVICE)
OPS = {
    "masked_fill": lambda x: safeops.masked_fill(x**2, MASK, 0.5).sum(),
    "safe_div": lambda x: safeops.safe_div(x, x + 2).sum(),
    "masked_sum": lambda x: safeops.masked_sum(x**2, MASK),
    "masked_mean": lambda x: safeops.masked_mean(x**2, MASK),
    "mse_loss": lambda x: safeops.mse_loss(x, torch.zeros_like(x), mask=MASK),
    "huber_loss": lambda x: safeops.huber_loss(x, torch.zeros_like(x), mask=MASK),
}


def t(*values, dtype=torch.float32, grad=False):
    return torch.tensor(values, dtype=dtype, device=DEVICE, requires_grad=grad)


@pytest.mark.parametrize("name", OPS)
def test_derivatives_inside_a_compiled_function(name):
    f, x = OPS[name], t(1.0, 2.0, 3.0)

    def dual(x):
        with fwAD.dual_level():
            return fwAD.unpack_dual(f(fwAD.make_dual(x, torch.ones_like(x)))).tangent

    for inner in (torch.func.grad(f), lambda x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1], dual):
        torch._dynamo.reset()
        compiled = torch.compile(inner, backend="aot_eager", fullgraph=True)(x)
        torch.testing.assert_close(compiled, inner(x))
        assert compiled.abs().sum() > 0


def test_division_gradients_whose_factors_overflow():
    def both(a, b, g):
        """db by the kernel and by the composite"""
        a, b, g = t(a), t(b, grad=True), t(g)
        return [torch.autograd.grad(safeops.safe_div(a, b), b, g, create_graph=c)[0].item() for c in (False, True)]

    assert both(1.0, 1e-20, 0.0) == [0, 0]  # a / b^2 overflows
    assert both(0.0, 1e-34, 65536.0) == [0, 0]  # g / b overflows
    for a, b, g in (
        (1.0, 1e-20, 1e-10),
        (2e-38, 2e-38, 0.5),
        (1e-30, 1e30, 1e30),
        (1e30, 1e10, 1e-30),
        (1.7e37, 0.19873, -6.7e-41),
    ):
        a64, b64, g64 = (torch.tensor(v, dtype=torch.float32).double() for v in (a, b, g))
        expected = -(g64 * a64 / b64 / b64).float().item()
        rel = 1e-6 if abs(g) > 1e-38 else 1e-4  # g / b is subnormal
        assert both(a, b, g) == pytest.approx([expected, expected], rel=rel, abs=0)


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


@pytest.mark.parametrize("weight", [1e-50, 1e-46, 1e300])
def test_an_fp64_weight_is_read_as_it_is(weight):
    weights = t(weight, weight, dtype=torch.float64)
    x = t(1.0, 3.0, grad=True)
    for f in (safeops.masked_mean, lambda x, weight: safeops.l1_loss(x, torch.zeros_like(x), weight=weight)):
        assert f(x, weight=weights).item() == 2
        assert f(x, weight=weights).dtype == torch.float32
        assert torch.autograd.grad(f(x, weight=weights), x)[0].tolist() == [0.5, 0.5]
    assert safeops.masked_sum(t(1.0, float("nan")), weight=t(1.0, weight, dtype=torch.float64)).isnan()
    assert safeops.l1_loss(t(1.0, 2.0), t(0.0, 0.0), weight=weights, reduction="none").dtype == torch.float32


def test_numbers_as_divisors():
    assert safeops.safe_div(t(1.0), 0.1, dtype=torch.float64).item() == 10
    assert safeops.safe_div(t(1.0, dtype=torch.float64), 0.1, dtype=torch.float32).item() == 10
    assert safeops.safe_div(t(3e38), 1e39).item() == pytest.approx(0.3)
    assert safeops.safe_div(t(1.0), True).item() == 1
    assert safeops.safe_div(torch.ones(2, dtype=torch.float16, device="meta"), 2.0).dtype == torch.float16


INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_saturate_whatever_the_value_is(dtype):
    """As a number and as a tensor of any dtype that holds it."""
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
    """A number is refused. To refuse a tensor would be to wait for it: it writes 0."""
    mask, x = torch.tensor([True, False], device=DEVICE), torch.tensor([1, 2], device=DEVICE).to(dtype)
    with pytest.raises(ValueError, match=f"masked_fill: value nan does not exist in {dtype}"):
        safeops.masked_fill(x, mask, float("nan"))
    assert safeops.masked_fill(x, mask, torch.tensor(float("nan"), device=DEVICE)).tolist() == [0, 2]


@pytest.mark.parametrize("route", ["kernel", "composite"])
@pytest.mark.parametrize("value, slope", [(INF, 3), (-INF, 3), (NAN, 3), (65504.0, 3), (65519.0, 3), (65520.0, 0),
                                          (-65520.0, 0), (1e30, 0)])  # fmt: skip
def test_only_a_finite_fill_value_saturates(route, value, slope):
    op = safeops.masked_fill if route == "kernel" else composite(safeops.masked_fill, "masked_fill")
    x, fill = t(1.0, 2.0, 3.0, 4.0, dtype=torch.float16), t(True, False, True, True, dtype=torch.bool)
    for create_graph in (False, True):
        v = torch.tensor(value, device=DEVICE, requires_grad=True)
        y = op(x, fill, v)
        (dv,) = torch.autograd.grad(y, v, torch.ones_like(y), create_graph=create_graph)
        assert dv == slope
        assert y[1] == 2 and (y[0].isfinite() or not math.isfinite(value))


@pytest.mark.skipif(DEVICE != "cpu", reason="needs a real and a meta tensor")
def test_raw_ops_refuse_a_meta_operand():
    x, meta = torch.ones(2, 3), torch.ones(2, 3, device="meta")
    raw = torch.ops.safeops
    for call in (
        lambda: raw._mse_loss(x, meta),
        lambda: raw._masked_sum(x, meta.bool()),
        lambda: raw._masked_fill(x, meta.bool(), None, 1.0),
        lambda: raw._safe_div(x, meta),
        lambda: raw._safe_div_backward(x, meta, x),
    ):
        with pytest.raises(ValueError, match="meta"):
            call()


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda x: safeops.huber_loss(x, x, delta=1e39), ValueError, "delta must be at most"),
        (lambda x: safeops.smooth_l1_loss(x, x, beta=1e39), ValueError, "beta must be at most"),
        (lambda x: safeops.mse_loss(x, x, denominator=True), TypeError, "denominator must be a number"),
        (lambda x: safeops.mse_loss(x, x, denominator=x[0] > 0), TypeError, "denominator must be a real"),
        (lambda x: safeops.safe_div(x, x.to(torch.float8_e4m3fn)), TypeError, "float8"),
        (lambda x: safeops.masked_fill(x, x > 0, x[0].to(torch.float8_e4m3fn)), TypeError, "float8"),
    ],
)
def test_refused(call, error, words):
    with pytest.raises(error, match=words):
        call(torch.ones(3, device=DEVICE))


def test_shapes_are_named_inside_a_trace_too():
    torch._dynamo.reset()
    for f in (safeops.safe_div, safeops.mse_loss):
        with pytest.raises(Exception, match=r"input \(3,\) and (other|target) \(4,\) do not broadcast"):
            torch.compile(f, backend="eager", fullgraph=True)(
                torch.ones(3, device=DEVICE), torch.ones(4, device=DEVICE)
            )


@pytest.mark.parametrize("route", ["kernel", "composite"])
@pytest.mark.parametrize(
    "beta, at, upstream",
    [
        (1e30, 1e25, 1.0),
        (3e38, 1e38, 65536.0),
        (3.4e38, 3.3e38, 1.0),
        (2.0**-126, 2.0**-127, 1.0),  # the smallest that is no 0
        (1e-30, 5e-31, 1.0),
        (1e-36, 0.0, 65536.0),
        (1.3e-38, 1e-38, 1.0),
        (0.75, 0.5, 1e-30),
    ],
)
def test_the_parabola_of_an_extreme_beta(route, beta, at, upstream):
    op = safeops.smooth_l1_loss if route == "kernel" else composite(safeops.smooth_l1_loss, "smooth_l1_loss")
    for dtype in (torch.float32, torch.float64):
        x = t(at, -at, dtype=dtype).requires_grad_()
        for create_graph in (False, True):
            loss = op(x, torch.zeros_like(x), beta=beta, reduction="none")
            assert loss.tolist() == pytest.approx([at / beta * at / 2] * 2, rel=1e-6, abs=1e-45)
            (dx,) = torch.autograd.grad(loss, x, torch.full_like(x, upstream), create_graph=create_graph)
            assert dx.tolist() == pytest.approx([upstream * at / beta, -upstream * at / beta], rel=1e-6, abs=0)


def test_a_subnormal_beta_counts_as_zero():
    for x in (t(1.0), t(0.0), t(1e-44)):
        assert torch.equal(safeops.smooth_l1_loss(x, t(0.0), beta=1e-44), safeops.l1_loss(x, t(0.0)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_half_result_is_rounded_as_torch_rounds(dtype):
    """All upper halves of a float, and lower ones on both sides of each tie."""
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    for lower in (0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        x = (upper | lower).view(torch.float32)
        x = x[~(x.isfinite() & x.to(dtype).isinf())][:-3]  # those saturate; a tail
        got, want = safeops.safe_div(x.to(DEVICE), torch.ones((), device=DEVICE), dtype=dtype).cpu(), x.to(dtype)
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.view(torch.int16)[~want.isnan()], want.view(torch.int16)[~want.isnan()])


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000])
def test_any_nan_stays_one_in_bf16(bits):
    """Rounding adds to the bits: of a NaN it could make 0 or inf."""
    x = torch.ones(40, device=DEVICE)
    x[::3] = torch.tensor(bits, dtype=torch.int32, device=DEVICE).view(torch.float32)
    assert safeops.safe_sqrt(x, dtype=torch.bfloat16).isnan().equal(x.isnan())


def test_one_pick_of_each_line_has_its_own_gradient():
    x = torch.zeros(3, 5, 4, device=DEVICE, requires_grad=True)
    index = torch.tensor([[[0, 4, 2, 1]]] * 3, device=DEVICE)
    g = torch.arange(1.0, 13, device=DEVICE).view(3, 1, 4)
    (dx,) = torch.autograd.grad(safeops.safe_gather(x, 1, index), x, g)
    assert dx.equal(torch.zeros(3, 5, 4, device=DEVICE).scatter(1, index, g))


def test_a_power_of_0_has_no_slope_however_large_the_gradient():
    a, b = t(1.48773e-38, dtype=torch.float64), t(1.19e120, dtype=torch.float64, grad=True)
    (db,) = torch.autograd.grad(safeops.safe_pow(a, b), b, t(-5.6e307, dtype=torch.float64))
    assert db == 0


TWICE = {
    "xlogy": lambda p: safeops.xlogy(p, p),
    "safe_div": lambda p: safeops.safe_div(p, p),
    "cosine_similarity": lambda p: safeops.cosine_similarity(p, p),
    "mse_loss": lambda p: safeops.mse_loss(p, p.sin(), weight=p),
    "masked_mean": lambda p: safeops.masked_mean(p, p > 0.5, weight=p),
    "masked_scatter": lambda p: safeops.masked_scatter(p, p > 0.5, p),
}


@pytest.mark.parametrize("name", TWICE)
def test_one_tensor_as_two_operands_compiles(name):
    p = torch.rand(4, 8, device=DEVICE, requires_grad=True)
    torch._dynamo.reset()
    got = torch.compile(TWICE[name], backend="aot_eager", fullgraph=True)(p)
    want = TWICE[name](p)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), p), torch.autograd.grad(want.sum(), p))


def test_a_capacity_that_is_a_size_exports_without_a_bound():
    class Positive(torch.nn.Module):
        def forward(self, x):
            return safeops.masked_compact(x, x > 0, capacity=x.shape[0])

    shapes = ({0: torch.export.Dim("n")},)
    program = torch.export.export(Positive(), (torch.randn(8, device=DEVICE),), dynamic_shapes=shapes)
    x = torch.randn(100, device=DEVICE)
    for got, want in zip(program.module()(x), Positive()(x)):
        assert got.equal(want)


@pytest.mark.parametrize("name", ["safe_gather", "safe_index_select", "masked_compact"])
def test_bools_are_filled_with_bools(name):
    x, outside = t(False, dtype=torch.bool), t(5, dtype=torch.int64)
    if name == "masked_compact":
        assert safeops.masked_compact(x, x, capacity=2, fill_value=True)[0].all()
    else:
        assert getattr(safeops, name)(x, 0, outside, fill_value=True).all()


class Cut(torch.autograd.Function):
    """Its input has no gradient: what made it is called without one."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


UPSTREAM = {
    "masked_fill": lambda x: safeops.masked_fill(x, MASK, x[0]),
    "safe_div": lambda x: safeops.safe_div(x, x),
    "safe_log": lambda x: safeops.safe_log(x),
    "xlogy": lambda x: safeops.xlogy(x, x),
    "masked_sum": lambda x: safeops.masked_sum(x, MASK),
    "masked_mean": lambda x: safeops.masked_mean(x, MASK),
    "masked_var": lambda x: safeops.masked_var(x, MASK),
    "masked_softmax": lambda x: safeops.masked_softmax(x, MASK),
    "normalize": lambda x: safeops.normalize(x),
    "cosine_similarity": lambda x: safeops.cosine_similarity(x, x),
    "mse_loss": lambda x: safeops.mse_loss(x, x, mask=MASK),
    "masked_compact": lambda x: safeops.masked_compact(x, MASK, capacity=2)[0],
    "masked_select": lambda x: safeops.masked_select(x, MASK),
    "masked_scatter": lambda x: safeops.masked_scatter(x, MASK, x),
    "safe_gather": lambda x: safeops.safe_gather(x, 0, MASK.long()),
    "safe_index_select": lambda x: safeops.safe_index_select(x, 0, MASK.long()),
}


@pytest.mark.parametrize("name", UPSTREAM)
def test_without_an_upstream_gradient_there_is_none(name):
    x = t(1.0, 2.0, 3.0, grad=True)
    (dx,) = torch.autograd.grad(Cut.apply(UPSTREAM[name](x)).sum(), x, allow_unused=True)
    assert dx is None
    (dx,) = torch.autograd.grad(Cut.apply(UPSTREAM[name](x)).sum() + x.sum(), x)
    assert dx.tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int64])
def test_sums_of_duplicates_are_wide_on_every_device(dtype):
    widest = {torch.int64: torch.int64, torch.float64: torch.float64}.get(dtype, torch.float32)
    assert summed_wide(torch.ones(2, dtype=dtype, device="meta")).dtype == widest
    assert summed_wide(torch.ones(2, dtype=dtype)).dtype == (dtype if dtype == torch.int64 else torch.float64)


@pytest.mark.parametrize("length", [70_000, 20_000, 5_000])
def test_rows_longer_than_a_block(length):
    """Where a thread takes less than a row; and with rows in several threads' parts."""
    x = torch.randn(7, length, device=DEVICE)
    rows = t(True, False, True, True, False, True, False, dtype=torch.bool)
    at, g = rows.nonzero().squeeze(1), torch.randn(4, length, device=DEVICE)
    zeros = torch.zeros_like(x)
    for call, want, slope in (
        (lambda x: safeops.masked_compact(x, rows, capacity=4)[0], x[rows], zeros.index_copy(0, at, g)),
        (lambda x: safeops.masked_compact(x, rows, capacity=3)[0], x[rows][:3], zeros.index_copy(0, at[:3], g[:3])),
        (lambda x: safeops.masked_select(x, rows[:, None]), x[rows].flatten(), zeros.index_copy(0, at, g)),
        (lambda x: safeops.safe_index_select(x, 0, at), x[rows], zeros.index_copy(0, at, g)),
        (lambda x: safeops.safe_gather(x, 0, at[:, None].expand(4, length)), x[rows], zeros.index_copy(0, at, g)),
    ):
        for threads in (1, 3):
            was = torch.get_num_threads()
            torch.set_num_threads(threads)
            try:
                leaf = x.clone().requires_grad_()
                y = call(leaf)
                (dx,) = torch.autograd.grad(y, leaf, g[: len(want)].view(y.shape) if y.dim() > 1 else g.flatten())
            finally:
                torch.set_num_threads(was)
            assert y.equal(want) and dx.equal(slope)


WIDTHS = [torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128]


@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
@pytest.mark.parametrize("columns", [2, 3, 8, 31, 32])
def test_many_short_lines(dtype, columns):
    """Of several lines in one loop; what a chunk ends in, and a line out of range, come by themselves."""
    x = torch.arange(1500 * columns, device=DEVICE).reshape(1500, columns).to(dtype)
    index = torch.randint(-1, columns + 1, (1500, columns), device=DEVICE)
    inside = (index >= 0) & (index < columns)
    for source in (x, x.t().contiguous().t()):
        for i in (index, index[:, 1:], index.int()):
            ok = inside[:, -i.shape[1] :]
            want = torch.where(ok, x.gather(1, torch.where(ok, i, 0).long()), 7)
            assert safeops.safe_gather(source, 1, i, fill_value=7).equal(want)
            if dtype == torch.float32:
                leaf = source.detach().requires_grad_()
                g = torch.randn(i.shape, device=DEVICE)
                (dx,) = torch.autograd.grad(safeops.safe_gather(leaf, 1, i), leaf, g)
                zeros = torch.zeros(x.shape, dtype=torch.float64, device=DEVICE)
                summed = zeros.scatter_add(1, torch.where(ok, i, 0).long(), torch.where(ok, g, 0).double())
                assert dx.equal(summed.float())


@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
def test_rows_whose_elements_lie_apart(dtype):
    x, rows = torch.arange(40 * 70, device=DEVICE).reshape(40, 70).to(dtype), t(3, 39, 40, 0, 3, dtype=torch.int64)
    for source in (x[:, ::2], x[:, ::3], x.t(), x[:, :1].expand(40, 70)):
        want = torch.cat([source, torch.full_like(source[:1], 9)])[rows.clamp(max=source.shape[0])]
        inside = torch.where(rows < source.shape[0], rows, source.shape[0])
        assert safeops.safe_index_select(source, 0, inside, fill_value=9).equal(want)


SELECTIONS = {
    "safe_gather": lambda x: safeops.safe_gather(x, 0, x.long()),
    "safe_index_select": lambda x: safeops.safe_index_select(x, 0, t(1, dtype=torch.int64)),
    "masked_select": lambda x: safeops.masked_select(x, x > 0),
    "masked_compact": lambda x: safeops.masked_compact(x, x > 0, capacity=1)[0],
    "masked_scatter": lambda x: safeops.masked_scatter(x, x > 0, t(1.0)),
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_as_many_dims_as_there_is_room_for(name):
    """A kernel may need a dim more than its operands have."""
    assert SELECTIONS[name](torch.ones([1] * 63, device=DEVICE)).numel() == 1
    try:
        assert SELECTIONS[name](torch.ones([1] * 64, device=DEVICE)).numel() == 1
    except (RuntimeError, ValueError) as error:
        assert "dim" in str(error)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_inductor_saturates_half(dtype, monkeypatch):
    """It keeps half in fp32, where nothing becomes infinite that half cannot hold."""
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
            safeops.safe_div(x.float() * 2.006, 1.0, dtype=dtype),  # fp32 holds it, bf16 does not
        )

    def outcome(f):
        results = f(x)
        return *results, *(torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for y in results)

    torch._dynamo.reset()
    for got, want in zip(outcome(torch.compile(ops)), outcome(ops), strict=True):
        torch.testing.assert_close(got, want, rtol=torch.finfo(dtype).eps, atol=0)


def test_numbers_around_the_largest_one_of_half():
    """What rounds to the largest number is no overflow; in fp64 the way leads through fp32."""
    for dtype, middle in ((torch.float16, 65520.0), (torch.bfloat16, 2.0**128 - 2.0**119)):
        for wide in (torch.float32, torch.float64):
            x = t(middle, math.nextafter(middle, 0), middle * (1 - 2.0**-24), middle * (1 - 2.0**-20), NAN, dtype=wide)
            assert torch.equal(overflows(x, dtype), x.to(dtype).isinf()) and overflows(-x, dtype)[0]


def test_an_empty_source_keeps_the_fills_sign_of_zero():
    out = safeops.safe_index_select(torch.zeros(2, 0), 1, torch.tensor([0, 7]), fill_value=-0.0)
    wanted = composite(safeops.safe_index_select, "safe_index_select")(
        torch.zeros(2, 0), 1, torch.tensor([0, 7]), fill_value=-0.0
    )
    assert out.signbit().all() and wanted.signbit().all()
