"""Reported failures that these ops answer: what the plain pattern still does in torch, and what safeops does."""

import math

import pytest
import torch
import torch.nn.functional as F

import safeops
from safeops._op import registry
from tests.contract.subjects import DEVICE

KERNELS = all(entry.cpu if DEVICE == "cpu" else entry.cuda for entry in registry.values())


def leaf(values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype, device=DEVICE, requires_grad=True)


def flags(*values):
    return torch.tensor(values, dtype=torch.bool, device=DEVICE)


def equal(got, want):
    return torch.allclose(got.detach().cpu().double(), torch.tensor(want, dtype=torch.float64), rtol=1e-4, atol=0)


# Values and gradients ------------------------------------------------------------------------------------------------
def test_pytorch_4132_division_by_zero_overwritten_later():
    x, divisor = leaf([1.0, 1.0]), torch.tensor([0.0, 1.0], device=DEVICE)
    plain = x / divisor
    plain[0] = 0
    assert torch.autograd.grad(plain.sum(), x)[0][0].isnan()
    ours = safeops.safe_div(x, divisor)
    assert equal(ours, [0, 1]) and equal(torch.autograd.grad(ours.sum(), x)[0], [0, 1])


def test_pytorch_94700_nan_to_num():
    x = leaf([1.0, 2.0])
    assert torch.autograd.grad((x * math.nan).nan_to_num(0).sum(), x)[0].isnan().all()
    # By masking before the arithmetic: the factor that is NaN is dropped, not the product.
    factor = torch.tensor([math.nan, 3.0], device=DEVICE)
    ours = x * safeops.masked_fill(factor, factor.isnan(), 0.0)
    assert equal(torch.autograd.grad(ours.sum(), x)[0], [0, 3])


def test_pytorch_67180_nansum():
    b, x = leaf(1.0), torch.tensor([1, 2, math.nan], device=DEVICE)
    assert torch.autograd.grad(torch.nansum(x * b), b)[0].isnan()
    keep = ~x.isnan()
    # As a weighted sum of b with the data as weights, kept where the data is: no product with NaN is ever formed.
    assert equal(torch.autograd.grad(safeops.masked_sum(b.expand(3), keep, weight=x), b)[0], 3)


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


@pytest.mark.parametrize("values, want", [([6e4, 6e4], 6e4), ([40.0] * 4096, 40.0)])
def test_pytorch_91597_44350_mean_of_half_overflows(values, want):
    x = torch.tensor(values, dtype=torch.float16, device=DEVICE)
    keep = torch.ones_like(x, dtype=torch.bool)
    plain = torch.masked.mean(x, mask=keep)
    if DEVICE == "cpu":
        assert plain.isinf()
    assert equal(safeops.masked_mean(x, keep), want)


def test_transformers_25938_mean_of_many_half_terms():
    torch.manual_seed(0)
    x = torch.randn(121_445, device=DEVICE).mul(3).half()
    terms = F.softplus(x.float()).half()
    assert (terms * torch.ones_like(terms)).cumsum(0)[-1].isinf()  # what a half sum holds
    want = terms.double().mean()
    assert abs(safeops.masked_mean(terms).double() / want - 1) < 1e-6
    assert abs(safeops.l1_loss(terms, torch.zeros_like(terms)).double() / want - 1) < 1e-6


def test_apex_1052_masked_fill_of_half_with_minus_1e9():
    x, fill = torch.zeros(3, dtype=torch.float16, device=DEVICE), flags(True, False, True)
    with pytest.raises(RuntimeError):
        x.masked_fill(fill, -1e9)
    assert equal(safeops.masked_fill(x, fill, -1e9), [-65504, 0, -65504])
    assert equal(safeops.masked_fill(x, fill, -math.inf), [-math.inf, 0, -math.inf])  # what was asked for


@pytest.mark.parametrize("eps", [1e-8, 1e-10])
def test_perceptual_similarity_139_eps_is_zero_in_half(eps):
    x = leaf([0.0, 1.0], torch.float16)
    norm = torch.tensor([0.0, 1.0], dtype=torch.float16, device=DEVICE)
    assert (x / (norm + eps))[0].isnan()
    ours = safeops.safe_div(x, norm, eps=eps)
    assert equal(ours, [0, 1]) and equal(torch.autograd.grad(ours.sum(), x)[0], [0, 1])


def test_pylate_239_tiny_eps_is_resolved_in_fp32():
    x = torch.tensor([1e-4], dtype=torch.float16, device=DEVICE)
    # 5e-8 is not 0 beside a floor of 1e-8: it would be, were the floor half.
    other = torch.tensor([5.96e-8], dtype=torch.float16, device=DEVICE)
    assert equal(safeops.safe_div(x, other, eps=1e-8, dtype=torch.float32), [float(x) / float(other)])
    assert equal(safeops.safe_div(x, other, eps=1e-7), [0])


def test_monai_product_of_two_small_variances():
    cross = torch.tensor([2e-4], dtype=torch.float16, device=DEVICE)
    small = torch.tensor([1e-5], dtype=torch.float16, device=DEVICE)
    assert not (cross * cross / (small * small)).isfinite().all()
    ratio = safeops.safe_div(cross, small, dtype=torch.float32) ** 2
    assert abs(float(ratio) / (float(cross) / float(small)) ** 2 - 1) < 1e-6


@pytest.mark.parametrize("name", ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"])
def test_liger_968_reduction_none_with_weights(name):
    torch.manual_seed(0)
    x, y, w = torch.randn(4, 5, requires_grad=True), torch.randn(4, 5), torch.rand(4, 5) + 0.5
    upstream = torch.randn(4, 5)
    want = torch.autograd.grad(getattr(F, name)(x, y, reduction="none") * w, x, upstream)[0]
    x2 = x.detach().to(DEVICE).requires_grad_()
    ours = getattr(safeops, name)(x2, y.to(DEVICE), weight=w.to(DEVICE), reduction="none")
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


# AMP -----------------------------------------------------------------------------------------------------------------
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
    assert outside > 0  # in half 1.0001 is 1


def test_pytorch_87979_forward_and_backward_in_the_same_arithmetic():
    x = leaf([1.0, 3.0], torch.bfloat16)
    other = torch.tensor([3.0, 7.0], dtype=torch.bfloat16, device=DEVICE)
    with torch.autocast(torch.device(DEVICE).type, dtype=torch.bfloat16):
        quotient = safeops.safe_div(x, other)
        assert quotient.dtype == torch.float32
    (grad,) = torch.autograd.grad(quotient.sum(), x)
    assert torch.equal(quotient, x.detach().float() / other.float())
    assert torch.equal(grad, (1 / other.float()).bfloat16())


# Memory, indexing, execution -----------------------------------------------------------------------------------------
def test_pytorch_12461_boolean_indexing_synchronises():
    from safeops.testing import no_synchronisation

    x, keep = leaf([1.0, 2.0, 3.0]), flags(True, False, True)
    with pytest.raises((AssertionError, RuntimeError), match="synchroni"):
        with no_synchronisation(DEVICE):
            x[keep].mean()
    safeops.masked_mean(x, keep)
    with no_synchronisation(DEVICE):
        safeops.masked_mean(x, keep).backward()
    assert equal(x.grad, [0.5, 0, 0.5])


def test_piq_range_checks_synchronise_and_ours_do_not():
    from safeops.testing import no_synchronisation

    x = leaf([0.1, 0.9])
    with pytest.raises((AssertionError, RuntimeError), match="synchroni"):
        with no_synchronisation(DEVICE):
            assert x.min() >= 0
    with no_synchronisation(DEVICE):
        safeops.huber_loss(x, torch.zeros_like(x), mask=x > 0.5, weight=x.detach())


@pytest.mark.parametrize("name", ["masked_sum", "masked_mean"])
def test_pytorch_23425_nothing_kept_is_zero_attached_to_the_graph(name):
    x, keep = leaf([math.nan, math.inf]), flags(False, False)
    assert torch.where(keep, x, 0).sum().div(keep.sum()).isnan()
    ours = getattr(safeops, name)(x, keep)
    assert ours == 0 and ours.requires_grad and equal(torch.autograd.grad(ours, x)[0], [0, 0])


@pytest.mark.parametrize("empty, want", [("zero", 0.0), ("nan", math.nan)])
def test_pytorch_70348_116349_every_target_ignored(empty, want):
    """The masked mean of a loss over no element at all; cross entropy itself comes with its own op."""
    scores, target = leaf([[1.0, 2.0]]), torch.tensor([-100], device=DEVICE)
    assert F.cross_entropy(scores, target, ignore_index=-100).isnan()
    per_row = F.cross_entropy(scores, target, ignore_index=-100, reduction="none")
    ours = safeops.masked_mean(per_row, target != -100, empty=empty)
    assert (
        ours.requires_grad
        and torch.equal(ours.detach().cpu(), torch.tensor(want))
        or (ours.isnan() and math.isnan(want))
    )
    if empty == "zero":
        assert equal(torch.autograd.grad(ours, scores)[0], [[0, 0]])


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_pytorch_128557_92350_every_floating_dtype_on_plain_tensors(dtype):
    x = leaf([2.0, math.nan, 4.0], dtype)
    loss = safeops.masked_mean(x, flags(True, False, True))
    loss.backward()
    assert type(loss) is torch.Tensor and loss == 3 and equal(x.grad, [0.5, 0, 0.5])


@pytest.mark.skipif(not KERNELS, reason="the composite would need 16 GiB")
@pytest.mark.parametrize("name", ["masked_mean", "mse_loss"])
def test_fla_1080_triton_1058_more_than_2_to_the_31_elements(name):
    """Offsets and counts beyond int32. The operands are expanded: they touch no memory."""
    shape = (3, 2**30)
    x = torch.tensor([[2.0], [4.0], [6.0]], dtype=torch.bfloat16, device=DEVICE).expand(shape)
    keep = flags(True, False, True)[:, None].expand(shape)
    if name == "masked_mean":
        assert safeops.masked_mean(x, keep) == 4
        assert torch.equal(safeops.masked_mean(x, keep, 1), torch.tensor([2.0, 0.0, 6.0], device=DEVICE))
    else:
        y = torch.zeros((), dtype=torch.bfloat16, device=DEVICE).expand(shape)
        assert safeops.mse_loss(x, y, mask=keep) == 20


def test_counts_are_exact_beyond_2_to_the_24():
    """fp32 counting stops at 2**24; the operand is expanded, so no memory is touched but one element."""
    n = 2**24 + 3
    x = torch.ones((), dtype=torch.float16, device=DEVICE).expand(n)
    sequential = torch.tensor(2.0**24) + 1
    assert sequential == 2**24  # what a float counter holds
    keep = torch.ones((), dtype=torch.bool, device=DEVICE).expand(n)
    assert safeops.masked_sum(x, keep, dtype=torch.float64) == n
    assert safeops.masked_mean(x, keep) == 1


def test_gradient_accumulation_with_a_denominator_is_exact():
    """The mean over two micro-batches of unequal kept counts is not the mean of their means."""
    x, y = leaf([1.0, 2.0, 3.0, 10.0]), torch.zeros(4, device=DEVICE)
    keep = flags(True, True, True, True)
    whole = torch.autograd.grad(safeops.mse_loss(x, y, mask=keep), x)[0]
    parts = [slice(0, 3), slice(3, 4)]
    plain = sum(F.mse_loss(x[p], y[p]) for p in parts) / 2
    assert not torch.allclose(torch.autograd.grad(plain, x)[0], whole)
    count = keep.sum().float()
    ours = sum(safeops.mse_loss(x[p], y[p], mask=keep[p], denominator=count) for p in parts)
    assert torch.equal(torch.autograd.grad(ours, x)[0], whole)
