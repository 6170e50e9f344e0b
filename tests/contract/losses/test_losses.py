"""The pointwise losses: reported failures that they answer, and what each has of its own."""

import math

import pytest
import torch
import torch.nn.functional as F

import safeops
from safeops.core.op import registry
from safeops.ops.losses._pointwise import PointwiseLoss
from safeops.testing import no_synchronisation
from tests.contract.common import DEVICE, each_route, equal, flags, leaf, names, on, t
from tests.ops import RECORDS

KERNELS = all(op.runs_on(DEVICE) for op in registry.values())


def test_masked_loss_by_multiplication_keeps_the_nan():
    x, y, keep = leaf([1.0, 2.0]), torch.tensor([0.0, math.nan], device=DEVICE), flags(True, False)
    plain = (F.mse_loss(x, y, reduction="none") * keep).sum() / keep.sum()
    assert plain.isnan() and torch.autograd.grad(plain, x)[0][1].isnan()
    ours = safeops.mse_loss(x, y, mask=keep)
    assert equal(ours, 1) and equal(torch.autograd.grad(ours, x)[0], [2, 0])


def test_pytorch_96813_smooth_l1_with_beta_zero():
    x, y = leaf([0.0, 1.0, -3.0]), torch.tensor([0.0, 0.0, 0.0], device=DEVICE)
    ours = safeops.smooth_l1_loss(x, y, beta=0.0, reduction="sum")
    grad = torch.autograd.grad(ours, x)[0]
    assert equal(ours, 4) and equal(grad, [0, 1, -1])


@pytest.mark.parametrize("name", names(PointwiseLoss))
def test_liger_968_reduction_none_with_weights(name):
    torch.manual_seed(0)
    x, *rest = (to(torch.randn(4, 5)) for to in RECORDS[name].domain if to)
    rest = rest[: -1 if registry[name].optional else None]
    x, w, upstream = x.requires_grad_(), torch.rand(4, 5) + 0.5, torch.randn(4, 5)
    twin = RECORDS[name].fields["torch_equivalent"]
    want = torch.autograd.grad(twin(x, *rest, weight=w, reduction="none"), x, upstream)[0]
    x2 = x.detach().to(DEVICE).requires_grad_()
    rest = [t.to(DEVICE) for t in rest]
    ours = getattr(safeops, name)(x2, *rest, weight=w.to(DEVICE), reduction="none")
    torch.testing.assert_close(torch.autograd.grad(ours, x2, upstream.to(DEVICE))[0].cpu(), want)


def test_gradient_taken_in_the_forward_is_not_differentiated_silently():
    x, y = leaf([1.0, -2.0, 4.0]), torch.zeros(3, device=DEVICE)
    loss = safeops.huber_loss(x, y, delta=3.0, reduction="sum")
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    assert equal(first, [1, -2, 3])
    assert equal(torch.autograd.grad(first.square().sum(), x)[0], [2, -4, 0])


def test_a_backward_never_writes_the_incoming_gradient():
    x = leaf([1.0, 2.0])
    upstream = torch.tensor([1.0, math.nan], device=DEVICE)
    loss = safeops.mse_loss(x, torch.zeros(2, device=DEVICE), mask=flags(True, False), reduction="none")
    loss.backward(upstream)
    assert equal(upstream[0], 1) and upstream[1].isnan() and upstream._version == 0
    assert equal(x.grad, [2, 0])


def test_first_step_with_a_half_loss():
    torch.manual_seed(0)
    x = torch.randn(64, device=DEVICE).half().requires_grad_()
    target = torch.randn(64, device=DEVICE).half()
    assert (F.mse_loss(x, target) * 65536).isinf()
    loss = safeops.mse_loss(x, target)
    assert loss.dtype == torch.float32 and (loss * 65536).isfinite()
    grad = torch.autograd.grad(loss * 65536, x)[0]
    assert grad.dtype == torch.float16 and grad.isfinite().all() and grad.abs().max() > 1


def test_a_scaled_gradient_that_overflows_is_inf_so_that_the_scaler_sees_it():
    x = leaf([300.0], torch.float16)
    grad = torch.autograd.grad(safeops.mse_loss(x, torch.zeros_like(x)) * 65536, x)[0]
    assert grad.isposinf().all()


@pytest.mark.parametrize("autocast", [torch.float16, torch.bfloat16])
def test_trl_6988_fp32_inputs_are_read_as_they_are_under_autocast(autocast):
    x, y = leaf([1.0001, 2.0]), torch.tensor([1.0, 2.0], device=DEVICE)
    outside = safeops.mse_loss(x, y)
    with torch.autocast(torch.device(DEVICE).type, dtype=autocast):
        inside = safeops.mse_loss(x, y)
        with_grad_inside = torch.autograd.grad(safeops.mse_loss(x, y), x)[0]
    assert inside.dtype == torch.float32 and torch.equal(inside, outside)
    assert torch.equal(torch.autograd.grad(inside, x)[0], with_grad_inside)
    assert outside > 0  # not computed in half, which rounds 1.0001 to 1


def test_piq_range_checks_synchronise_and_ours_do_not():
    x = leaf([0.1, 0.9])
    with pytest.raises((AssertionError, RuntimeError), match="synchroni"):
        with no_synchronisation(DEVICE):
            assert x.min() >= 0
    with no_synchronisation(DEVICE):
        safeops.huber_loss(x, torch.zeros_like(x), mask=x > 0.5, weight=x.detach())


def test_gradient_accumulation_with_a_denominator_is_exact():
    """The mean over two micro-batches with 3 and 1 kept elements is not the mean of their means."""
    x, y = leaf([1.0, 2.0, 3.0, 10.0]), torch.zeros(4, device=DEVICE)
    keep = flags(True, True, True, True)
    expected = torch.autograd.grad(safeops.mse_loss(x, y, mask=keep), x)[0]
    parts = [slice(0, 3), slice(3, 4)]
    plain = sum(F.mse_loss(x[p], y[p]) for p in parts) / 2
    assert not torch.allclose(torch.autograd.grad(plain, x)[0], expected)
    count = keep.sum().float()
    ours = sum(safeops.mse_loss(x[p], y[p], mask=keep[p], denominator=count) for p in parts)
    assert torch.equal(torch.autograd.grad(ours, x)[0], expected)


@pytest.mark.skipif(not KERNELS, reason="the composite would need 16 GiB")
@pytest.mark.parametrize("name", ["masked_mean", "mse_loss"])
def test_fla_1080_triton_1058_more_than_2_to_the_31_elements(name):
    """Offsets and counts must not be cut to int32. (The operands are expanded and need no memory.)"""
    shape = (3, 2**30)
    x = torch.tensor([[2.0], [4.0], [6.0]], dtype=torch.bfloat16, device=DEVICE).expand(shape)
    keep = flags(True, False, True)[:, None].expand(shape)
    if name == "masked_mean":
        assert safeops.masked_mean(x, keep) == 4
        assert torch.equal(safeops.masked_mean(x, keep, 1), torch.tensor([2.0, 0.0, 6.0], device=DEVICE))
    else:
        y = torch.zeros((), dtype=torch.bfloat16, device=DEVICE).expand(shape)
        assert safeops.mse_loss(x, y, mask=keep) == 20


@each_route
@pytest.mark.parametrize(
    "beta, at, upstream",
    [
        (1e30, 1e25, 1.0),
        (3e38, 1e38, 65536.0),
        (3.4e38, 3.3e38, 1.0),
        (2.0**-126, 2.0**-127, 1.0),  # the smallest beta that does not count as 0
        (1e-30, 5e-31, 1.0),
        (1e-36, 0.0, 65536.0),
        (1.3e-38, 1e-38, 1.0),
        (0.75, 0.5, 1e-30),
    ],
)
def test_the_parabola_of_an_extreme_beta(route, beta, at, upstream):
    op = on(route, "smooth_l1_loss")
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


@pytest.mark.skipif(not registry["mse_loss"].runs_on(DEVICE), reason="no kernels here")
@pytest.mark.parametrize("size, upstream, divisor", [(1e38, 1e-30, 1e30), (1e-30, 1e10, 1e-30)])
def test_what_fp32_does_not_hold_meets_an_operand_at_its_other_end(size, upstream, divisor):
    """The gradient fits fp32 although upstream / divisor, one of its factors, is 0 or inf in fp32."""
    x = t(size, -size / 2, grad=True)
    loss = safeops.mse_loss(x, torch.zeros_like(x), denominator=divisor)
    (dx,) = torch.autograd.grad(loss, x, torch.full_like(loss, upstream))
    assert dx.tolist() == pytest.approx([2 * size * upstream / divisor, -size * upstream / divisor], rel=1e-6)
    x = t(1.0, 2.0, grad=True)
    (dx,) = torch.autograd.grad(safeops.masked_mean(x, weight=t(1e30, 3e30)), x, t(1e-12).squeeze())
    assert dx.tolist() == pytest.approx([0.25e-12, 0.75e-12], rel=1e-6)


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


@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss", "huber_loss"])
def test_the_second_derivative_where_input_equals_target(name):
    x = torch.tensor([0.0, 0.5, 3.0], dtype=torch.float64, device=DEVICE, requires_grad=True)
    for function in (getattr(safeops, name), getattr(F, name)):
        (dx,) = torch.autograd.grad(function(x, torch.zeros_like(x), reduction="sum"), x, create_graph=True)
        (second,) = torch.autograd.grad(dx.sum(), x)
        assert second.tolist() == ([2, 2, 2] if name == "mse_loss" else [1, 1, 0]), function


BY_COUNT = sorted(name for name in names(PointwiseLoss) if getattr(registry[name], "by_count", False))


@each_route
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", BY_COUNT)
def test_where_a_weighted_mean_divides_by_the_count_a_weight_of_zero_counts(name, masked, route):
    """Weight 0 adds to the count, as in torch; its element is not read: a NaN reaches neither loss nor gradient."""
    op = on(route, name)
    x, y = torch.rand(3, 4, device=DEVICE), torch.rand(3, 4, device=DEVICE)
    weight = torch.tensor([0.0, 2.0, 0.5, 1.0], device=DEVICE)
    keep = torch.arange(12, device=DEVICE).reshape(3, 4) % 5 != 1 if masked else None
    dirty = torch.where(weight == 0, math.nan, x).requires_grad_()
    terms = op(x, y, weight=weight, mask=keep, reduction="none")
    mean = op(dirty, y, weight=weight, mask=keep)
    torch.testing.assert_close(mean, terms.sum() / (12 if keep is None else keep.sum()))
    (grad,) = torch.autograd.grad(mean, dirty)
    assert not grad[:, 0].any() and grad.isfinite().all() and grad[:, 1].any()
    torch.testing.assert_close(op(dirty, y, weight=weight, mask=keep, denominator=3.0), terms.sum() / 3)
    nothing = torch.zeros(3, 4, dtype=torch.bool, device=DEVICE)
    assert op(dirty, y, weight=weight, mask=nothing) == 0
    assert op(dirty, y, weight=weight, mask=nothing, empty="nan").isnan()
    assert op(dirty, y, weight=torch.zeros_like(weight), mask=keep, empty="nan") == 0
    with pytest.raises(ValueError, match=f"^{name}: .*nothing is kept"):
        op(dirty, y, weight=weight, mask=nothing, empty="raise")


def test_which_means_divide_by_the_count():
    assert BY_COUNT == ["binary_cross_entropy", "binary_cross_entropy_with_logits", "huber_loss"]
