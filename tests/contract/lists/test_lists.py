"""The scans over lists of tensors: kernels against their definitions, definitions against numbers computed by hand.

They run on the device of SAFEOPS_TEST_DEVICE. Each test's name has its op: health, grad_norm or clip_grad_norm_.
"""

import math
import struct

import pytest
import torch

from safeops.core.op import registry
from safeops.testing.compare import assert_same_bits
from tests.contract.common import DEVICE
from tests.contract.lists.tensor_lists import FLOATS, expanded, finite, layouts, many, scans, values, writable

INF, NAN = math.inf, math.nan
each_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)
LONG = 300_001  # elements: a tensor that several threads share


def here(tensors):
    """Returns copies on the device with the same strides, also of expanded tensors."""
    moved = []
    for x in tensors:
        memory = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).to(DEVICE, copy=True)
        moved.append(memory.as_strided(x.shape, x.stride(), x.storage_offset()))
    return moved


def there(tensors):
    return [x.cpu() for x in tensors]


def zeros(rows):
    return torch.zeros(rows, 8, dtype=torch.int64, device=DEVICE)


def test_the_kernels_are_there():
    for name in ("health", "grad_norm", "clip_grad_norm_"):
        assert getattr(registry[name], torch.device(DEVICE).type), name


# ---- health


def test_health_of_known_values():
    x = torch.tensor([[1.0, NAN, 0.0, -0.0], [INF, -INF, -INF, 2.0**-14], [2.0**-15, -(2.0**-25), 2.0**-24, -3.5]])
    for dtype in FLOATS:
        tiny, zero = (0, 3) if dtype == torch.float16 else (1, 2)  # -(2^-25) rounds to 0 in fp16
        for function in (scans.health_, scans.health_definition):
            out = zeros(3)
            function(out, 1, here([x.to(dtype)]))
            largest = struct.unpack("<q", struct.pack("<d", 3.5))[0]
            small = 3 - (dtype == torch.float16)
            assert out[1].tolist() == [1, 1, 2, zero, small, tiny, largest, 11], dtype
            assert not out[0].any() and not out[2].any()


@each_dtype
def test_health_against_its_definition(dtype):
    for inputs in (layouts(dtype), expanded(dtype), many(dtype), [values(LONG, dtype=dtype)], []):
        got, want = zeros(len(inputs) + 2), torch.zeros(len(inputs) + 2, 8, dtype=torch.int64)
        scans.health_(got, 1, here(inputs))
        scans.health_definition(want, 1, inputs)
        assert torch.equal(got.cpu(), want), (got.cpu() - want).nonzero()


@each_dtype
def test_health_of_what_is_all_bad_or_all_zero(dtype):
    for value, column in ((NAN, 0), (INF, 1), (-INF, 2), (0.0, 3)):
        x = torch.full((LONG,), value, dtype=dtype, device=DEVICE)
        out = zeros(1)
        scans.health_(out, 0, [x])
        expected = [0] * 8
        expected[column] = LONG
        expected[7] = LONG if column < 3 else 0
        assert out[0].tolist() == expected


def test_pick_after_health_reads_the_operands_of_the_first_bad_element():
    x = torch.ones(3, 4, device=DEVICE)
    x[1, 2] = x[2, 0] = INF
    column = torch.tensor([[10], [20], [30]], device=DEVICE)
    operands = [x.double(), column, x[0] > 5, torch.tensor(2.5, dtype=torch.bfloat16, device=DEVICE), x]
    for health, pick in ((scans.health_, scans.pick_), (scans.health_definition, scans.pick_definition)):
        rows, out = zeros(2), torch.full((2, 4), -1.0, dtype=torch.float64, device=DEVICE)
        health(rows, 1, [x])
        pick(out, 0, rows, 0, operands, x.shape)  # health found no bad element (row 0 of rows is 0): row 0 of out stays
        pick(out, 1, rows, 1, operands, x.shape)
        assert out.tolist() == [[-1.0] * 4, [INF, 20.0, 0.0, 2.5]]


@each_dtype
def test_pick_against_its_definition_health(dtype):
    for x in layouts(dtype):
        rows = torch.zeros(1, 8, dtype=torch.int64)
        scans.health_definition(rows, 0, [x])
        got, want = (torch.full((2, 4), 0.5, dtype=torch.float64) for _ in range(2))
        scans.pick_definition(want, 1, rows, 0, [x, x], x.shape)
        (mine,) = here([x])
        got = got.to(DEVICE)
        scans.pick_(got, 1, rows.to(DEVICE), 0, [mine, mine], x.shape)
        assert_same_bits("pick", got.cpu().nan_to_num(7), want.nan_to_num(7), "differs from the definition")


# ---- norm


def exact(tensors, ord):
    numbers = [abs(v) for x in tensors for v in x.double().reshape(-1).tolist()]
    if ord == INF:
        return max(numbers, default=0.0)
    return math.fsum(numbers) if ord == 1 else math.hypot(*numbers)


@each_dtype
@pytest.mark.parametrize("ord", [1, 2, INF], ids=str)
def test_grad_norm_kernel_and_definition(dtype, ord):
    for inputs in (layouts(dtype) + expanded(dtype), many(dtype), [values(LONG, dtype=dtype)]):
        inputs = finite(inputs)
        want = exact(inputs, ord)
        for got in (scans.norm(here(inputs), ord), scans.norm_definition(inputs, ord)):
            assert got.dtype == torch.float64 and got.shape == ()
            room = 1e-13 if ord == INF or dtype == torch.float64 else 1e-7  # the kernel may sum squares in fp32
            assert abs(got.item() - want) <= room * want


@pytest.mark.parametrize("ord", [0.5, 3.0, 50.0])
def test_grad_norm_of_other_orders(ord):
    inputs = finite(many(torch.float32))
    flat = torch.cat([x.double() for x in inputs])
    most = flat.abs().max()
    want = ((flat / most).abs() ** ord).sum() ** (1 / ord) * most
    assert torch.allclose(scans.norm(here(inputs), ord).cpu(), want, rtol=1e-12)


def test_grad_norm_at_the_ends_of_the_range():
    for dtype in FLOATS:
        info = torch.finfo(dtype)
        for size in (info.max, info.tiny, info.tiny * info.eps):
            x = torch.full((LONG,), size, dtype=dtype)
            for function in (scans.norm, scans.norm_definition):
                want = size * LONG**0.5
                got = function(here([x]), 2).item()
                assert got == want == INF or abs(got / want - 1) < 1e-7, (dtype, size)
    mixed = here([torch.tensor([3e200, 4e200, 1e-300, 7.0, 0.0], dtype=torch.float64), torch.ones(2)])
    assert abs(scans.norm(mixed, 2).item() / 5e200 - 1) < 1e-15


def test_grad_norm_shows_what_is_not_finite():
    good = finite(layouts(torch.float16))
    for ord in (1, 2, INF, 3):
        for bad, expected in ((NAN, NAN), (INF, INF), (-INF, INF)):
            got = scans.norm(here([*good, torch.tensor([1.0, bad, 2.0])]), ord).item()
            assert got == expected or (math.isnan(got) and math.isnan(expected)), (ord, bad)
        both = [torch.tensor([INF]), torch.tensor([NAN]), *good]
        assert math.isnan(scans.norm(here(both), ord).item()), ord


def test_grad_norm_does_not_depend_on_the_number_of_threads():
    inputs = [values(LONG, dtype=torch.float32, odd=0), *finite(many(torch.float32))]
    inputs, threads = here(inputs), torch.get_num_threads()
    try:
        results = []
        for n in (1, 2, 3, 2):
            torch.set_num_threads(n)
            results.append([scans.norm(inputs, ord).item() for ord in (1, 2)])
    finally:
        torch.set_num_threads(threads)
    assert all(r == results[0] for r in results)


# ---- scale


@each_dtype
def test_kernel_and_definition_of_clip_grad_norm_(dtype):
    """The product is computed in fp32 (fp64 for fp64), and rounded once to the tensor's dtype."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for inputs in (layouts(dtype), many(dtype), [values(LONG, dtype=dtype)]):
        for factor in (torch.tensor(0.3), torch.tensor(1e-3, dtype=torch.float64), torch.tensor(-INF)):
            want = [(x.to(wide) * factor.to(wide)).to(dtype) for x in inputs]
            mine = here(inputs)
            scans.scale_(mine, factor.to(DEVICE))
            other = writable(inputs)
            scans.scale_definition(other, factor)
            for x, got, defined, expected in zip(inputs, there(mine), other, want):
                assert defined.stride() == x.stride()
                assert_same_bits("kernel", got.nan_to_num(7), expected.nan_to_num(7), "differs")
                assert_same_bits("definition", defined.nan_to_num(7), expected.nan_to_num(7), "differs")


def test_a_factor_of_one_writes_nothing_in_clip_grad_norm_():
    bits = torch.full((LONG,), 0x7D01, dtype=torch.int16, device=DEVICE)  # signaling NaN: any arithmetic makes it quiet
    scans.scale_([bits.view(torch.float16)], torch.ones((), device=DEVICE))
    assert (bits == 0x7D01).all()


@pytest.mark.skipif(DEVICE != "cpu", reason="tests/gpu has its own")
def test_more_than_2_31_elements_health_grad_norm():
    """Counts and sums of more than 2^31 elements are exact, not cut to int32. (Expanded tensors need no memory.)"""
    half = 2**30 + 2
    x = torch.tensor([0.0, INF], dtype=torch.float16).expand(half, 2).t()
    out = zeros(1)
    scans.health_(out, 0, [x])
    assert out[0].tolist() == [0, half, 0, half, 0, 0, 0, half]
    x = torch.full((1,), 2.0, dtype=torch.bfloat16).expand(2**31 + 2)
    assert scans.norm([x], 1) == 2.0 * (2**31 + 2)


# ---- the registered ops


def test_raw_ops_pass_opcheck_health_grad_norm_clip_grad_norm_():
    inputs = here(layouts(torch.float16) + layouts(torch.float32))
    rows, out = zeros(len(inputs)), torch.zeros(2, 4, dtype=torch.float64, device=DEVICE)
    torch.library.opcheck(scans._health_, (rows, 0, inputs))
    torch.library.opcheck(scans._pick_, (out, 1, rows, 0, inputs[:1], inputs[0].shape))
    torch.library.opcheck(scans._grad_norm, (finite(inputs), 2.0))  # no NaN: opcheck counts two NaN as different
    torch.library.opcheck(scans._scale_, (inputs, torch.tensor(0.5, device=DEVICE)))


def test_unusable_operands_are_refused_by_the_kernels():
    x, rows = torch.ones(3, device=DEVICE), zeros(4)
    out = torch.zeros(4, 4, dtype=torch.float64, device=DEVICE)
    for call, words in (
        (lambda: scans._health_(rows, 3, [x, x]), "rows 3 to 5 of 4"),
        (lambda: scans._health_(rows.int(), 0, [x]), "contiguous rows of 8 int64"),
        (lambda: scans._health_(rows, 0, [x.int()]), "must be float16"),
        (lambda: scans._pick_(out, 0, rows, 4, [x], [3]), "rows 4 to 5 of 4"),
        (lambda: scans._pick_(out, 0, rows, 0, [x], [4]), "does not broadcast"),
        (lambda: scans._pick_(out, 0, rows, 0, [x.cfloat()], [3]), "real tensors"),
        (lambda: scans._grad_norm([x], 3), "no kernel for order 3"),
        (lambda: scans._scale_([x.expand(2, 3)], x[0]), "share memory"),
        (lambda: scans._scale_([x], x), "one element"),
    ):
        with pytest.raises(RuntimeError, match=words):
            call()
