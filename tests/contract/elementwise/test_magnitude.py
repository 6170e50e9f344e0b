"""magnitude: complex tensors, silence, extremes, infinite and NaN parts."""

import math

import pytest
import torch

import safeops
from tests.contract.common import DEVICE, each_route, equal, on, t

NAN, INF = math.nan, math.inf


def complex_numbers(*shape, dtype=torch.complex128):
    g = torch.Generator().manual_seed(0)
    z = torch.randn(shape, generator=g, dtype=torch.complex128).to(DEVICE, dtype)
    return z.requires_grad_()


@each_route
@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128])
def test_complex_numbers(route, dtype):
    z = complex_numbers(4, 5, dtype=dtype)
    exact = z.detach().to(torch.complex128).requires_grad_()
    got, want = on(route, "magnitude")(z), exact.abs()
    assert got.dtype == dtype.to_real()
    rtol = 2 * torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=0)
    (dgot,), (dwant,) = torch.autograd.grad(got.sum(), z), torch.autograd.grad(want.sum(), exact)
    assert dgot.dtype == dtype
    torch.testing.assert_close(dgot.to(torch.complex128), dwant, rtol=rtol, atol=rtol)


@each_route
def test_conjugates_and_layouts(route):
    z = complex_numbers(4, 5)
    for view in (lambda z: z.conj(), lambda z: z.mT, lambda z: z[:, ::2], lambda z: z[1, 2], lambda z: z[:0]):
        got, want = on(route, "magnitude")(view(z)), view(z).abs()
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(*(torch.autograd.grad(y.sum(), z)[0] for y in (got, want)))


def test_silence():
    """At 0 the gradient of sqrt(re^2 + im^2) is 0 / 0; magnitude's is 0, even under a NaN upstream gradient."""
    z = torch.zeros(3, dtype=torch.complex64, device=DEVICE, requires_grad=True)
    a, b = z.real, z.imag
    assert torch.autograd.grad((a * a + b * b).sqrt().sum(), z)[0].isnan().all()
    for up in (1.0, NAN, INF):
        (d,) = torch.autograd.grad(safeops.magnitude(z), z, torch.full((3,), up, device=DEVICE))
        assert (d == 0).all()
    x = torch.zeros(3, device=DEVICE, requires_grad=True)
    assert equal(torch.autograd.grad(safeops.magnitude(x, x).sum(), x)[0], [0, 0, 0])


@each_route
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_no_square_overflows_or_vanishes(route, dtype):
    top, least = torch.finfo(dtype).max / 8, torch.finfo(dtype).tiny * 4
    for size in (2.0 ** math.floor(math.log2(top)), 2.0 ** math.ceil(math.log2(least))):
        a, b = (torch.tensor([k * size], dtype=dtype, device=DEVICE, requires_grad=True) for k in (3.0, -4.0))
        r = on(route, "magnitude")(a, b)
        torch.testing.assert_close(
            r.double() / size,
            torch.full((1,), 5.0, dtype=torch.float64, device=DEVICE),
            rtol=2 * torch.finfo(dtype).eps,
            atol=0,
        )
        for d, want in zip(torch.autograd.grad(r.sum(), (a, b)), (0.6, -0.8)):
            torch.testing.assert_close(
                d.double(),
                torch.full((1,), want, dtype=torch.float64, device=DEVICE),
                rtol=2 * torch.finfo(dtype).eps,
                atol=0,
            )


@each_route
def test_infinite_and_unknown_parts(route):
    half = math.sqrt(0.5)
    for dtype in (torch.float32, torch.float64):
        a = t(INF, -INF, 2.0, INF, NAN, INF, 0.0).to(dtype).requires_grad_()
        b = t(1.0, 0.0, -INF, -INF, INF, NAN, NAN).to(dtype).requires_grad_()
        r = on(route, "magnitude")(a, b)
        assert r[:4].isinf().all() and r[4:].isnan().all()
        for d, want in zip(torch.autograd.grad(r.sum(), (a, b)), ([1, -1, 0, half], [0, 0, -1, -half])):
            torch.testing.assert_close(d[:4], t(*want).to(dtype))
            assert d[4:].isnan().all()


def test_derivatives_of_complex_numbers():
    z = complex_numbers(3)
    assert torch.autograd.gradcheck(safeops.magnitude, z, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(safeops.magnitude, z)
    compiled = torch.compile(safeops.magnitude, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(z), z.abs())
    torch.testing.assert_close(torch.func.vmap(safeops.magnitude)(z.detach()), z.detach().abs())
    torch.testing.assert_close(torch.ops.safeops.magnitude(z), z.abs())


def test_refused():
    z, x = torch.ones(3, dtype=torch.complex64, device=DEVICE), torch.ones(3, device=DEVICE)
    with pytest.raises(TypeError, match="magnitude: .*input.*real"):
        safeops.magnitude(z, x)
    with pytest.raises(TypeError, match="magnitude: other must be a tensor, got NoneType"):
        safeops.magnitude(x)


def test_autocast_gives_fp32():
    x = torch.full((3,), 300.0, device=DEVICE, dtype=torch.float16)
    assert safeops.magnitude(x, x).dtype == torch.float16
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert safeops.magnitude(x, x).dtype == torch.float32
