"""si_sdr_loss: the paper's formula in fp64, estimates up to 120 dB, silence, signals of any size, padded samples."""

import math

import pytest
import torch

import safeops
from safeops.core import private_torch
from tests.contract.common import DEVICE, each_route, flags, on, t
from tests.contract.vectors.test_row_losses import each_reduction, vectors
from tests.ops.vectors.si_sdr_loss import si_sdr

NAME = "si_sdr_loss"
MOST = -20 * math.log10(4 * torch.finfo(torch.float32).eps)
each_zero_mean = pytest.mark.parametrize("zero_mean", [False, True])


def formula(x, s, zero_mean=False):
    x, s = (y.double() - y.double().mean(-1, keepdim=True) * zero_mean for y in (x, s))
    a = (x * s).sum(-1, keepdim=True) / s.square().sum(-1, keepdim=True)
    return -10 * ((a * s).square().sum(-1) / (a * s - x).square().sum(-1)).log10()


def estimate(decibels, *shape, dtype=torch.float32):
    """Returns (an estimate with an SI-SDR of about `decibels`, its target)."""
    s, noise = (x.detach() for x in vectors(*shape, dtype=dtype))
    x = 0.37 * (s + noise * 10 ** (-decibels / 20))
    return x.requires_grad_(), s.requires_grad_()


@each_route
@each_reduction
@each_zero_mean
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_formula(route, reduction, zero_mean, dtype):
    x, s = estimate(10, 3, 50, dtype=dtype)
    want = formula(x, s, zero_mean)
    want = want if reduction == "none" else getattr(torch, reduction)(want)
    got = on(route, NAME)(x, s, zero_mean=zero_mean, reduction=reduction)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    exact = dtype == torch.float64
    torch.testing.assert_close(got.double(), want, rtol=1e-12 if exact else 1e-5, atol=1e-12 if exact else 1e-5)
    rtol = max(2 * torch.finfo(dtype).eps, 1e-12 if exact else 1e-5)
    for d, e in zip(*(torch.autograd.grad(y.sum(), (x, s)) for y in (got, want))):
        torch.testing.assert_close(d, e, rtol=rtol, atol=rtol)


@each_route
@pytest.mark.parametrize(
    "decibels, digits", [(-60, 1e-3), (0, 1e-5), (20, 1e-4), (60, 1e-3), (80, 1e-2), (100, 0.05), (120, 0.5)]
)
def test_good_and_bad_estimates(route, decibels, digits):
    """The loss has the digits of the formula computed in fp64 from the same fp32 numbers."""
    x, s = estimate(decibels, 8, 4000)
    want = formula(x, s)
    got = on(route, NAME)(x, s, reduction="none")
    assert (got - want).abs().max() < digits
    for d, e in zip(*(torch.autograd.grad(y.sum(), (x, s)) for y in (got, want))):
        assert (d - e).norm() < max(digits, 1e-4) * e.norm()
    x, s = estimate(decibels, 8, 4000, dtype=torch.float64)
    torch.testing.assert_close(on(route, NAME)(x, s, reduction="none"), formula(x, s), rtol=1e-9, atol=1e-9)


@each_route
@pytest.mark.parametrize("factor", [1.0, 0.37, -2.9, 1e-30, 1e30])
def test_a_multiple_is_perfect(route, factor):
    s = vectors(4, 1000, count=1)[0].detach()
    x = (s * factor).requires_grad_()
    loss = on(route, NAME)(x, s, reduction="none")
    torch.testing.assert_close(loss, torch.full_like(loss, -MOST))
    assert not torch.autograd.grad(loss.sum(), x)[0].any()


@each_route
@each_zero_mean
def test_silence_and_orthogonal_signals(route, zero_mean):
    x = t([0.0] * 4, [1.0, -1.0, 2.0, -2.0], [0.0] * 4, [1.0, -1.0, 1.0, -1.0]).requires_grad_()
    s = t([1.0, 2.0, -3.0, 4.0], [0.0] * 4, [0.0] * 4, [1.0, 1.0, -1.0, -1.0]).requires_grad_()
    constant = 0.1 if zero_mean else 0.0  # an offset that zero_mean must remove
    loss = on(route, NAME)(x + constant, s + constant, zero_mean=zero_mean, reduction="none")
    torch.testing.assert_close(loss, torch.full_like(loss, MOST))
    assert not any(d.any() for d in torch.autograd.grad(loss.sum(), (x, s)))


@each_route
@each_zero_mean
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_signals_of_any_size(route, zero_mean, size):
    x, s = estimate(20, 3, 500)
    want = formula(x, s, zero_mean).float()
    (dwant,) = torch.autograd.grad(want.sum(), x)
    got = on(route, NAME)(x * size, s / size, zero_mean=zero_mean, reduction="none")
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), x)[0], dwant, rtol=1e-3, atol=1e-4)


@each_route
def test_half_samples_of_16_bits(route):
    x, s = ((y.detach() * 10000).clamp(-32768, 32767).half().requires_grad_() for y in estimate(30, 3, 500))
    got = on(route, NAME)(x, s, reduction="none")
    torch.testing.assert_close(got.double(), formula(x, s), rtol=1e-5, atol=1e-4)


@each_route
@each_zero_mean
def test_padded_samples_do_not_exist(route, zero_mean):
    x, s = estimate(15, 4, 40)
    lengths = torch.tensor([40, 25, 0, 7], device=DEVICE)
    mask = torch.arange(40, device=DEVICE) < lengths[:, None]
    rows = (0, 1, 3)
    want = torch.stack([formula(x[i, : lengths[i]], s[i, : lengths[i]], zero_mean) for i in rows])
    dwant = torch.autograd.grad(want.mean(), (x, s))
    for garbage in (math.nan, math.inf, 3e38):
        dirty = [torch.where(mask, y.detach(), garbage).requires_grad_() for y in (x, s)]
        none = on(route, NAME)(*dirty, zero_mean=zero_mean, mask=mask, reduction="none")
        torch.testing.assert_close(none[[*rows]].double(), want, rtol=1e-5, atol=1e-4)
        assert none[2] == 0
        upstream = torch.where(lengths > 0, 1.0, math.nan)
        assert all((d[~mask] == 0).all() for d in torch.autograd.grad(none, dirty, upstream))
        mean = on(route, NAME)(*dirty, zero_mean=zero_mean, mask=mask)
        torch.testing.assert_close(mean.double(), want.mean(), rtol=1e-5, atol=1e-4)
        for d, e in zip(torch.autograd.grad(mean, dirty), dwant):
            assert (d[~mask] == 0).all()
            torch.testing.assert_close(d, e, rtol=1e-4, atol=1e-4)


@each_route
def test_the_weights_of_rows(route):
    x, s = estimate(15, 5, 40)
    with torch.no_grad():
        x[3] = math.nan
    weight = t(0.5, 2.0, 1.0, 0.0, 3.0).requires_grad_()
    keep = flags(True, False, True, True, True)
    counted = [0, 2, 4]
    losses = formula(x, s)[counted]
    want = (losses * weight[counted]).sum() / weight[counted].sum()
    got = on(route, NAME)(x, s, mask=keep[:, None], weight=weight)
    torch.testing.assert_close(got.double(), want.double(), rtol=1e-5, atol=1e-4)
    d, e = (torch.autograd.grad(y, weight)[0] for y in (got, want))
    torch.testing.assert_close(d[counted], e[counted], rtol=1e-4, atol=1e-4)
    assert not torch.autograd.grad(on(route, NAME)(x, s, weight=weight), x)[0][3].any()


@each_route
@each_zero_mean
def test_a_kept_nan_or_inf_shows(route, zero_mean):
    for i in range(2):
        for bad in (math.nan, math.inf):
            signals = [y.detach().clone() for y in estimate(15, 3, 8)]
            signals[i][1, 2] = bad
            signals[1 - i][1] *= 0  # the signal without the NaN is silent
            leaves = [y.requires_grad_() for y in signals]
            none = on(route, NAME)(*leaves, zero_mean=zero_mean, reduction="none")
            assert none.isnan().tolist() == [False, True, False]
            assert torch.autograd.grad(none.sum(), leaves[i])[0][1].isnan().any()


@each_route
@pytest.mark.parametrize("shape", [(4,), (0, 4), (3, 0), (1, 1), (2, 3, 7), (70, 130), (0,)], ids=str)
def test_sizes(route, shape):
    x, s = estimate(15, *shape)
    none = on(route, NAME)(x, s, reduction="none")
    assert none.shape == shape[:-1]
    if 0 in shape:
        assert not none.any() and on(route, NAME)(x, s) == 0 and on(route, NAME)(x, s, empty="nan").isnan()
    elif shape[-1] == 1:  # a single sample is a multiple of any other
        torch.testing.assert_close(none, torch.full_like(none, -MOST))
    else:
        torch.testing.assert_close(none.double(), formula(x, s), rtol=1e-5, atol=1e-4)
    assert all(d.isfinite().all() for d in torch.autograd.grad(none.sum(), (x, s)))


@each_zero_mean
def test_second_order_and_transforms(zero_mean):
    x, s = estimate(5, 3, 6, dtype=torch.float64)
    mask = torch.arange(6, device=DEVICE) < torch.tensor([6, 4, 5], device=DEVICE)[:, None]

    def loss(x, s):
        return safeops.si_sdr_loss(x, s, zero_mean=zero_mean, mask=mask)

    def each(x, s, mask):
        return safeops.si_sdr_loss(x, s, zero_mean=zero_mean, mask=mask)

    assert torch.autograd.gradcheck(loss, (x, s), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(loss, (x, s), check_fwd_over_rev=True)
    want = safeops.si_sdr_loss(x, s, zero_mean=zero_mean, mask=mask, reduction="none")
    torch.testing.assert_close(torch.vmap(each)(x, s, mask), want)


def test_the_truth_of_the_contract_is_the_formula():
    x, s = estimate(15, 3, 8, dtype=torch.float64)
    torch.testing.assert_close(si_sdr(x, s, True, torch.ones_like(x, dtype=torch.bool)), formula(x, s, True))


def test_modules():
    x, s = estimate(15, 3, 8)
    mask = torch.arange(8, device=DEVICE) < 5
    module = safeops.nn.SISDRLoss(reduction="sum", zero_mean=True)
    want = safeops.si_sdr_loss(x, s, zero_mean=True, mask=mask, reduction="sum")
    assert torch.equal(module(x, s, mask=mask), want) and "zero_mean=True" in repr(module)
    with pytest.raises(TypeError, match="^SISDRLoss: zero_mean must be"):
        safeops.nn.SISDRLoss(zero_mean=1)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic):
    torch._dynamo.reset()
    counter = private_torch.counting_backend("aot_eager")
    compiled = torch.compile(safeops.si_sdr_loss, backend=counter, dynamic=dynamic, fullgraph=True)
    for n in (9, 12, 15) if dynamic else (9,):
        x, s = estimate(15, n, 20)
        mask = torch.arange(20, device=DEVICE) < 12
        want, got = (f(x, s, zero_mean=True, mask=mask) for f in (safeops.si_sdr_loss, compiled))
        torch.testing.assert_close(got, want)
        for d, e in zip(*(torch.autograd.grad(y, (x, s)) for y in (got, want))):
            torch.testing.assert_close(d, e, rtol=1e-4, atol=1e-5)
    assert counter.frame_count <= 2
