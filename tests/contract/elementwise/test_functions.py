"""Reported failures that the unary and binary functions answer: what plain torch still does, and what safeops does."""

import math

import pytest
import torch

import safeops
from tests.contract.common import DEVICE, equal, flags, leaf, t


def gradient(out, *leaves):
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    return grads[0] if len(grads) == 1 else grads


def test_pytorch_68425_where_runs_the_branch_not_taken():
    a = leaf([100.0])
    plain = torch.where(a <= 0, torch.exp(a), 1 + a)
    assert gradient(plain, a).isnan().all()
    ours = safeops.apply_where(a <= 0, a, torch.exp, lambda a: 1 + a)
    assert equal(ours, [101]) and equal(gradient(ours, a), [1])
    ours = torch.where(a <= 0, safeops.safe_exp(a), 1 + a)  # safe_exp's slope never overflows
    assert equal(ours, [101]) and equal(gradient(ours, a), [1])


def test_pytorch_108618_log2_of_zero_not_taken():
    x = leaf([0.0, 2.0, 3.0])
    plain = torch.where(x > 2, torch.log2(x), 2 * x)
    assert gradient(plain, x)[0].isnan()
    ours = safeops.apply_where(x > 2, x, torch.log2, lambda x: 2 * x)
    assert equal(ours, [0, 4, math.log2(3)]) and equal(gradient(ours, x), [2, 2, 1 / (3 * math.log(2))])
    ours = torch.where(x > 2, safeops.safe_log(x) / math.log(2), 2 * x)
    assert equal(ours, [0, 4, math.log2(3)]) and equal(gradient(ours, x), [2, 2, 1 / (3 * math.log(2))])


def test_pytorch_17455_overwritten_log_exp():
    x = leaf([0.0, 100.0])
    plain = torch.log(torch.exp(x) + 1)
    plain[:] = 0
    assert gradient(plain, x)[1].isnan()
    ours = safeops.safe_log(safeops.safe_exp(x) + 1)
    assert ours.isfinite().all()
    ours[:] = 0
    assert equal(gradient(ours, x), [0, 0])


def test_pytorch_2421_norm_of_zero():
    x = leaf([0.0, 0.0])
    assert gradient(x.pow(2).sum().sqrt(), x).isnan().all()
    for norm in (lambda x: safeops.safe_sqrt(x.pow(2).sum()), lambda x: safeops.safe_pow(x.pow(2).sum(), 0.5)):
        assert equal(norm(x), 0) and equal(gradient(norm(x), x), [0, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_perceptual_similarity_69_zero_feature_vector(dtype):
    x = leaf([[0.0, 0.0], [0.5, 0.0]], dtype)
    plain = x / (x.pow(2).sum(1, keepdim=True).sqrt() + 1e-10)
    assert gradient(plain.sum(), x)[0].isnan().all()
    ours = x * safeops.safe_rsqrt(x.pow(2).sum(1, keepdim=True), eps=1e-10)
    assert ours.isfinite().all() and equal(ours, [[0, 0], [1, 0]])
    assert gradient(ours.sum(), x).isfinite().all()


def test_pytorch_37154_distance_of_equal_rows():
    x, y = leaf([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 2.0], [0.0, 0.0]], device=DEVICE)
    plain = (x - y).square().sum(1).sqrt()
    assert gradient(plain, x)[0].isnan().all()
    ours = safeops.safe_sqrt((x - y).square().sum(1))
    assert equal(ours, [0, 5]) and equal(gradient(ours, x), [[0, 0], [0.6, 0.8]])


def test_pytorch_93998_atan2_masked_afterwards():
    y, x = leaf([2.0, 0.0, 0.0, 0.0]), leaf([1.0, 0.0, 2.0, 3.0])
    keep = flags(True, False, True, True)
    plain = torch.where(keep, torch.atan2(y / x, x / x), 0)
    assert gradient(plain, y)[1].isnan()
    ours = safeops.safe_atan2(y, x)
    dy, dx = gradient(ours, y, x)
    assert equal(ours, [math.atan2(2, 1), 0, 0, 0])
    assert equal(dy, [0.2, 0, 0.5, 1 / 3]) and equal(dx, [-0.4, 0, 0, 0])


def test_atan2_at_the_origin_and_beside_it():
    y, x = leaf([0.0, 1e-30, 1e30]), leaf([-0.0, 1e-30, 1e30])
    plain = torch.atan2(y, x)
    assert equal(plain[:1], [math.pi])  # the origin has no angle
    assert not equal(gradient(plain, y)[1:], [0.5e30, 0.5e-30])  # x^2 + y^2 rounds to 0, or overflows
    ours = safeops.safe_atan2(y, x)
    assert equal(ours, [0, math.pi / 4, math.pi / 4]) and equal(gradient(ours, y), [0, 0.5e30, 0.5e-30])


def test_pytorch_8069_acos_at_the_bounds():
    x = leaf([-1.0, 1.0])
    assert equal(gradient(torch.acos(x), x), [-math.inf, -math.inf])
    ours = safeops.safe_acos(x)
    assert equal(ours, [math.pi, 0]) and equal(gradient(ours, x), [0, 0])
    just_outside = leaf([1.0000001, -1.0000001])
    assert torch.acos(just_outside).isnan().all()
    assert equal(safeops.safe_acos(just_outside), [0, math.pi])
    assert equal(safeops.safe_asin(just_outside), [math.pi / 2, -math.pi / 2])
    assert equal(gradient(safeops.safe_asin(just_outside), just_outside), [0, 0])


def test_kornia_4229_gradient_at_the_bound_of_a_clamp():
    x = leaf([0.25])
    plain = gradient(x.clamp(min=0.25), x)
    assert plain.item() in (0, 0.5, 1)  # torch's gradient at the bound depends on its version
    # At x = floor our gradient is the function's own; at the bounds -1 and 1 of acos it is 0.
    assert equal(gradient(safeops.safe_log(x, eps=0.25), x), [4])
    assert equal(gradient(safeops.safe_sqrt(x, eps=0.25), x), [1])
    assert equal(gradient(safeops.safe_rsqrt(x, eps=0.25), x), [-4])
    assert equal(gradient(safeops.safe_reciprocal(x, eps=0.25), x), [-16])
    one = leaf([1.0])
    assert equal(gradient(safeops.safe_acos(one), one), [0])


def test_pytorch_27134_power_of_zero_by_its_exponent():
    base, b = torch.tensor([0.0, 2.0], device=DEVICE), leaf(1.0)
    ours = safeops.safe_pow(base, b)
    assert equal(ours, [0, 2])
    rows = torch.autograd.grad(ours, b, torch.eye(2, device=DEVICE), is_grads_batched=True)[0]
    assert equal(rows, [0, 2 * math.log(2)])
    assert equal(gradient(safeops.safe_pow(base, b), b), 2 * math.log(2))
    both = leaf([0.0, -2.0]), leaf([0.0, 2.0])
    plain = gradient(torch.pow(*both), *both)[1]
    assert plain[1].isnan()  # d/db (-2)^b does not exist
    assert equal(gradient(safeops.safe_pow(*both), *both)[1], [0, 0])


def test_square_root_written_as_a_power():
    x = leaf([0.0, -1.0, 4.0])
    plain = x**0.5
    assert plain[1].isnan() and gradient(plain, x)[0].isinf()
    ours = safeops.safe_pow(x, 0.5)
    assert equal(ours, [0, 0, 2]) and equal(gradient(ours, x), [0, 0, 0.25])


def test_clamp_in_place_then_log():
    x = leaf([0.0, -20.0])
    plain = x.exp().clamp_(min=1e-6).log()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient(plain, x)
    ours = safeops.safe_log(x.exp(), eps=1e-6)
    assert torch.allclose(ours, torch.tensor([0.0, math.log(1e-6)], device=DEVICE))
    assert equal(gradient(ours, x), [1, 0])


@pytest.mark.parametrize("eps", [1e-8, 1e-10])
def test_perceptual_similarity_139_pylate_239_eps_is_zero_in_half(eps):
    x = leaf([0.0, 1.0], torch.float16)
    assert torch.log(x + eps)[0].isinf() and torch.rsqrt(x + eps)[0].isinf() and (1 / (x + eps))[0].isinf()
    log = safeops.safe_log(x, eps=eps)
    assert log.isfinite().all() and abs(float(log[0]) - math.log(eps)) < 0.01
    assert equal(gradient(log, x), [0, 1])
    assert equal(safeops.safe_rsqrt(x, eps=eps, dtype=torch.float32), [eps**-0.5, 1])
    assert safeops.safe_rsqrt(x, eps=eps).isfinite().all() and safeops.safe_reciprocal(x, eps=eps).isfinite().all()


def test_half_losses_of_a_small_probability():
    """The loss must stay finite: -log 0 is inf in half, and masking it by a product with 0 makes NaN."""
    p, keep = leaf([0.0, 0.5], torch.float16), flags(False, True)
    plain = (torch.log(p) * keep).sum()
    assert plain.isnan() and gradient(plain, p)[0].isnan()
    ours = (safeops.safe_log(p) * keep).sum()
    assert abs(float(ours) - math.log(0.5)) < 1e-3
    assert equal(gradient(ours, p), [0, 2])


def test_entropy_of_a_zero():
    p = leaf([0.0, 0.5])
    plain = p * p.log()
    assert plain[0].isnan() and gradient(plain, p)[0].isnan()
    assert gradient(torch.xlogy(p, p), p)[0].isnan()  # the value is right, its gradient is NaN
    ours = safeops.xlogy(p, p)
    assert equal(ours, [0, 0.5 * math.log(0.5)]) and equal(gradient(ours, p), [0, math.log(0.5) + 1])
    target, other = torch.tensor([0.0, 1.0], device=DEVICE), leaf([math.nan, 2.0])
    assert torch.xlogy(target, other)[0].isnan()
    ours = safeops.xlogy(target, other)
    assert equal(ours, [0, math.log(2)]) and equal(gradient(ours, other), [0, 0.5])


def test_pytorch_80770_xlogy_at_zero():
    x, y = leaf([0.0]), leaf([2.0])
    assert equal(gradient(torch.xlogy(x, y), x), [math.log(2)])  # torch's gradient is right here
    assert equal(gradient(safeops.xlogy(x, y), x), [math.log(2)]) and equal(gradient(safeops.xlogy(x, y), y), [0])


def test_exp_overflows_half():
    x = leaf([12.0, 1.0], torch.float16)
    plain = torch.exp(x)
    assert plain[0].isinf() and gradient(plain, x)[0].isinf()
    ours = safeops.safe_exp(x)
    assert ours[0] == 65504 and gradient(ours, x)[0] == 0
    variance = leaf([200.0])
    assert (torch.exp(variance) * 0).isnan()
    assert equal(safeops.safe_exp(variance) * 0, [0])


def test_autocast_gives_fp32_and_xlogy_what_it_is_given():
    x = torch.full((3,), 0.5, device=DEVICE, dtype=torch.float16)
    with torch.autocast(torch.device(DEVICE).type, dtype=torch.bfloat16):
        for name in ("reciprocal", "log", "sqrt", "rsqrt", "exp", "acos", "asin"):
            assert getattr(safeops, f"safe_{name}")(x).dtype == torch.float32
        assert safeops.safe_pow(x, 2).dtype == safeops.safe_pow(x, x).dtype == torch.float32
        assert safeops.safe_atan2(x, x).dtype == torch.float32
        assert safeops.xlogy(x, x).dtype == safeops.xlogy(x, 2).dtype == torch.float16
        assert safeops.safe_log(x.double()).dtype == torch.float64


def test_integers_are_read_as_the_default_dtype():
    x = torch.tensor([0, 1, 4], device=DEVICE)
    assert equal(safeops.safe_sqrt(x), [0, 1, 2]) and safeops.safe_sqrt(x).dtype == torch.float32
    assert equal(safeops.safe_pow(x, 0.5), [0, 1, 2]) and equal(safeops.safe_pow(x, -1)[1:], [1, 0.25])
    assert equal(safeops.xlogy(x, x), [0, 0, 4 * math.log(4)])
    assert equal(safeops.safe_exp(x > 1), [1, 1, math.e])
    assert safeops.safe_log(x, dtype=torch.float64).dtype == torch.float64
    assert equal(safeops.safe_pow(torch.tensor([1.5, 2.0], device=DEVICE), torch.tensor(2, device=DEVICE)), [2.25, 4])


def test_a_power_of_0_has_no_slope_however_large_the_gradient():
    a, b = t(1.48773e-38, dtype=torch.float64), t(1.19e120, dtype=torch.float64, grad=True)
    (db,) = torch.autograd.grad(safeops.safe_pow(a, b), b, t(-5.6e307, dtype=torch.float64))
    assert db == 0
