"""The losses without reduction, and the gradients of all losses, agree with fp64."""

import pytest
import torch
import triton
import triton.language as tl
from safeops.kernels.losses.log_ratio import log_ratio, log_ratio_backward
from safeops.kernels.losses.pointwise_loss import pointwise_loss
from safeops.kernels.losses.quantiles_loss import quantiles_loss, quantiles_loss_backward

from safeops.core.op import registry
from tests.kernels.interpreted.truth import (
    BF16,
    F16,
    F32,
    F64,
    LAYOUTS,
    LOSSES,
    Loss,
    build,
    close,
    fill,
    kept,
    launchers,
    total,
    weights,
)

NAN, INF = float("nan"), float("inf")


def check_backward(name, layout, dtypes=(F32, F32, F32), out=(F32, F32), mean=True, backward=None):
    loss = LOSSES[name]
    backward = backward or loss.backward
    x, y, mask, weight = build(layout, *dtypes)
    operands = loss.operands(x, y)
    outs = (*out, out[1])[: loss.count]
    keep = kept(x.shape, mask, weight)
    if mean:  # all elements share one upstream gradient, read with strides 0
        grad, denominator = torch.tensor(1.5), torch.tensor(37.0, dtype=F64)
        c = torch.tensor(1.5 / 37.0, dtype=F64)
    else:  # each element has an upstream gradient: NaN where the mask is False
        grad, denominator = fill(x.shape, F32, 6), None
        grad[~keep] = NAN
        c = grad.double()
    needs = [True] * loss.count
    result = backward(grad, denominator, *operands, mask, weight, *loss.parameters, *needs, *outs)
    slopes, sizes = loss.truth(*operands)[1:], loss.sizes(*operands)[1:]
    for gradient, like, dtype, slope, size in zip(result, operands, outs, slopes, sizes, strict=True):
        assert gradient.dtype == dtype and gradient.stride() == torch.empty_like(like).stride()
        by = c * weights(x.shape, weight)
        close(gradient, torch.where(keep, by * slope, 0), by * torch.maximum(size, slope.abs()), dtype)
        assert not gradient[~keep].any()


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_backward_in_every_layout(layout, mean):
    check_backward("mse_loss", layout, mean=mean)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    "dtypes, out",
    [
        ((F16, F16, F32), (F16, F16)),
        ((BF16, F32, F16), (BF16, F32)),
        ((BF16, BF16, BF16), (F32, F32)),
        ((F64, F64, F64), (F64, F64)),
        ((F32, F64, F32), (F64, F64)),
    ],
)
def test_backward_in_every_dtype(name, dtypes, out):
    check_backward(name, "channel mask", dtypes, out)
    check_backward(name, "odd", dtypes, out, mean=False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_not_reduced(layout):
    x, y, mask, weight = build(layout)
    loss = LOSSES["huber_loss"]
    value, used = loss.forward(x, y, mask, weight, None, 0, *loss.parameters, False, None)
    expected = torch.where(kept(x.shape, mask, weight), weights(x.shape, weight) * loss.truth(x, y)[0], 0)
    assert used.shape == (0,) and used.dtype == F64 and value.stride() == torch.empty_like(x).stride()
    close(value, expected)


def test_broadcast_operands():
    """The kernels' gradients have the broadcast shape; the caller sums them to the operand's shape."""
    x, y, mask = fill((6, 1, 40), F32, 1), fill((5, 40), F32, 2), fill((5, 1), F32, 3) > -1
    forward, backward = launchers("mse_loss")
    d = x.double() - y.double()
    keep = mask.expand(6, 5, 40)
    close(forward(x, y, mask, None, None, 0, False, None)[0], torch.where(keep, d * d, 0))
    value, used = forward(x, y, mask, None, None, 2, False, None)
    close(value, torch.where(keep, d * d, 0).sum())
    dx, dy = backward(torch.tensor(2.0).expand(6, 5, 40), None, x, y, mask, None, False, True, F32, F64)
    assert dx.shape == (0,) and dx.dtype == F32
    close(dy, torch.where(keep, -4 * d, 0), dtype=F64)


def test_expanded_target_and_gradient():
    x, target = fill((8, 48), F32, 1), torch.tensor(0.25).expand(8, 48)
    _, backward = launchers("l1_loss")
    for grad in (torch.tensor(3.0).expand(8, 48), fill((8, 1), F32, 2).expand(8, 48), fill((48, 8), F32, 2).t()):
        dx, dy = backward(grad, None, x, target, None, None, True, True, F32, F32)
        expected = grad.double() * torch.sign(x.double() - 0.25)
        close(dx, expected)
        close(dy, -expected)


@pytest.mark.parametrize("name", LOSSES)
def test_nan_and_inf_that_are_kept(name):
    loss = LOSSES[name]
    parameters = loss.parameters
    x = torch.tensor([NAN, INF, -INF, 1.0, 0.0, 2.0])
    y = torch.tensor([0.0, 0.0, 0.0, NAN, 0.0, -1.0])
    operands, many = loss.operands(x, y), loss.count
    one = torch.tensor(1.0)
    value = loss.forward(*operands, None, None, None, 0, *parameters, False, None)[0]
    slopes = loss.backward(one, None, *operands, None, None, *parameters, *[True] * many, *[F32] * many)
    truths, sizes = loss.truth(*operands), loss.sizes(*operands)
    for result, expected, size in zip((value, *slopes), truths, sizes):  # operands include x = y (pytorch#96813)
        if loss.record.fields.get("several_terms"):  # inf or NaN, depending on the order of the terms
            result, expected = (t + torch.where(t.isfinite(), 0, NAN) for t in (result, expected))
        close(result, expected, torch.maximum(size, expected.abs()))
    assert value[[0, 3]].isnan().all()
    assert loss.forward(*operands, None, None, None, 1, *parameters, False, None)[0].isnan()
    masked = x.isfinite() & y.isfinite()
    value, _ = loss.forward(*operands, masked, None, None, 2, *parameters, False, None)
    alone, _ = loss.forward(*(t[masked] for t in operands), None, None, None, 2, *parameters, False, None)
    torch.testing.assert_close(value, alone)


@pytest.mark.parametrize("alpha", [0.25, -1.0])
@pytest.mark.parametrize("gamma", [0.0, 0.01, 0.5, 2.0, 2.5])
def test_every_power_of_the_focal_loss(gamma, alpha):
    """The focal loss is right for every gamma; gamma = 2 has its own kernel. Some logits are large, some lie where a
    power of 1 - p loses digits by its exponent, and some where 1 - p is subnormal."""
    loss = Loss("sigmoid_focal_loss", {"alpha": alpha, "gamma": gamma})
    large = torch.tensor([1e30, -1e30])
    near, far = torch.cat([torch.linspace(-20, 20, 321), large]), torch.tensor([90.0, 102.0, -90.0, -102.0])
    for x, more in ((near, 1), (far, 2e4)):
        x, y = (t.reshape(-1) for t in torch.meshgrid(x, torch.tensor([0.0, 1e-4, 0.3, 1.0]), indexing="ij"))
        value = loss.forward(x, y, None, None, None, 0, alpha, gamma, False, None)[0]
        one = torch.tensor(1.0)
        result = value, *loss.backward(one, None, x, y, None, None, alpha, gamma, True, True, F32, F32)
        for got, want, size in zip(result, loss.truth(x, y), loss.sizes(x, y), strict=True):
            close(got, want, more * torch.maximum(size, want.abs()))


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
def test_the_cross_entropy_of_every_half(dtype):
    """binary_cross_entropy is right for all fp16 and bf16 numbers, and in fp32 and fp64 close to 0, 1 and 1/2. A
    probability outside [0, 1] gives NaN."""
    loss = LOSSES["binary_cross_entropy"]
    if dtype.itemsize == 2:
        x = torch.cat([torch.arange(2**15), torch.arange(-(2**15), 0, 97)]).to(torch.int16).view(dtype)
        if dtype == BF16:
            x = x[(x == 0) | ~(x.abs() < torch.finfo(dtype).tiny)]  # the interpreter reads subnormal bf16 wrongly
    else:
        ends = torch.logspace(-46, -0.3, 500, dtype=dtype)
        x = torch.cat([ends, 1 - ends, 0.5 + ends, -ends, 1 + ends, torch.linspace(-0.1, 1.1, 500, dtype=dtype)])
    y, defined = torch.tensor([0.0, 0.3, 1.0], dtype=dtype).repeat(len(x))[: len(x)], (x >= 0) & (x <= 1)
    value = loss.forward(x, y, None, None, None, 0, False, None)[0]
    dx, dy = loss.backward(torch.tensor(1.0), None, x, y, None, None, True, True, *[value.dtype] * 2)
    pair = x[defined], y[defined]
    for got, want, size in zip((value, dx, dy), loss.truth(*pair), loss.sizes(*pair), strict=True):
        close(got[defined], want, torch.maximum(size, want.abs()), value.dtype)
    assert value[~defined].isnan().all() and dy[~defined].isnan().all()


@pytest.mark.parametrize("dtype", [F32, F64])
def test_the_divergence_of_sums_at_both_ends(dtype):
    """js_div is right where the operands' sum is near the largest number, or so small that only the absolute error
    counts."""
    loss, info = LOSSES["js_div"], torch.finfo(dtype)
    sums, part = (
        torch.tensor([0.9 * info.max, info.tiny * 8, info.tiny, info.tiny / 8, 0.0], dtype=dtype),
        torch.rand(64, 1),
    )
    x, y = (sums * part.to(dtype)).reshape(-1), (sums * (1 - part.to(dtype))).reshape(-1)
    value = loss.forward(x, y, None, None, None, 0, False, None)[0]
    small, large = (2.0**-64, 2.0**64) if dtype == F32 else (2.0**-1000, 2.0**1000)
    scale = torch.tensor([large, small], dtype=F64)[(x + y > 1).long()]  # keeps the definition's digits
    want = loss.truth(x.double() * scale, y.double() * scale)[0] / scale
    torch.testing.assert_close(value.double(), want, rtol=3e-6 if dtype == F32 else 1e-13, atol=info.tiny)


def test_a_third_operand_that_is_broadcast_or_not_given():
    x, y, w = fill((6, 40), F16, 1), torch.rand(6, 40), fill((40,), F32, 3).abs()
    forward, backward = launchers("binary_cross_entropy_with_logits")
    for z in (w, None):
        leaves = [t.double().requires_grad_() for t in (x, y, torch.ones(40) if z is None else z)]
        definition = LOSSES["binary_cross_entropy_with_logits"].record.definition
        truth = definition(*leaves[:2], pos_weight=leaves[2], reduction="none")
        close(forward(x, y, z, None, None, None, 0, False, None)[0], truth.detach())
        close(forward(x, y, z, None, None, None, 2, False, None)[0], truth.detach().sum())
        result = backward(torch.tensor(2.0), None, x, y, z, None, None, True, True, z is not None, F32, None, None)
        wanted = torch.autograd.grad(2 * truth.sum(), leaves)
        for gradient, want in zip(result[:2], wanted):
            assert gradient.dtype == F32 and gradient.shape == x.shape
            close(gradient, want, want.abs() + 2)
        if z is None:
            assert result[2].shape == (0,)
        else:  # dy has the broadcast shape; the caller sums it
            close(result[2].sum(0), wanted[2], wanted[2].abs() + 6)


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
def test_several_quantiles_are_each_its_own(dtype):
    x, y, q = fill((40, 5), dtype, 1), fill((40, 1), dtype, 2), torch.tensor([0.0, 0.1, 0.5, 0.75, 1.0])
    x[0], x[1], x[2, 2], y[3] = INF, -INF, NAN, NAN
    one, out = torch.tensor(1.0), F64 if dtype == F64 else F32
    value, _ = quantiles_loss(x, y, q, None, None, None, 0, False, None)
    dx, dy, dq = quantiles_loss_backward(one, None, x, y, q, None, None, True, True, True, out, out, F32)
    record = registry["quantile_loss"].parts[0]
    leaves = [t.double().requires_grad_() for t in (x, y.expand(40, 5), q.expand(40, 5))]
    truth = record.definition(*leaves, None, None, None, 0, False, None)
    for got, want in zip((value, dx, dy, dq), (truth.detach(), *torch.autograd.grad(truth.sum(), leaves))):
        close(got, want, dtype=F32)
    outside = torch.tensor([-0.5, 1.5, NAN, 1.0, 0.0])
    assert quantiles_loss(x, y, outside, None, None, None, 0, False, None)[0][:, :3].isnan().all()


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
def test_the_difference_of_logarithms(dtype):
    x, y, mask = fill((40, 5), dtype, 1).abs(), fill((40, 5), dtype, 2).abs(), fill((40, 1), F32, 3) > -1
    x[0], x[1], x[2, 2], y[3], x[4] = INF, 0, NAN, NAN, y[4]
    value, _ = log_ratio(x, y, mask, None, None, 0, False, None)
    leaves = [t.double().requires_grad_() for t in (x, y)]
    truth = registry["silog_loss"].parts[0].definition(*leaves, mask, None, None, 0, False, None)
    close(value, truth.detach(), 1 + truth.detach().abs().nan_to_num(posinf=0))
    assert not value[4].any()
    gradients = log_ratio_backward(torch.tensor(2.0), None, x, y, mask, None, True, True, dtype, dtype)
    for gradient, want in zip(gradients, torch.autograd.grad(2 * truth.sum(), leaves)):
        close(gradient, torch.where(mask, want, 0), dtype=dtype)


def test_gradients_overflow_to_inf():
    x, y = torch.full((700,), 60000.0, dtype=F16), torch.zeros(700, dtype=F16)
    _, backward = launchers("mse_loss")
    dx, dy = backward(torch.tensor(1.0), None, x, y, None, None, True, True, F16, F16)
    assert (dx == INF).all() and (dy == -INF).all()


def test_nan_upstream_of_a_masked_element():
    x, y, mask = fill((64,), F32, 1), fill((64,), F32, 2), fill((64,), F32, 3) > 0
    _, backward = launchers("smooth_l1_loss")
    dx, dy = backward(torch.tensor(NAN), torch.tensor(0.0).double(), x, y, mask, None, 0.5, True, True, F32, F32)
    assert dx[mask].isnan().all() and (dx[~mask] == 0).all() and (dy[~mask] == 0).all()


@triton.jit
def exponential_value(x, y, a, b, c):
    return a * tl.exp(x) - b * x * y + c * y * y * y


@triton.jit
def exponential_slopes(x, y, a, b, c):
    return a * tl.exp(x) - b * y, 3 * c * y * y - b * x


@pytest.mark.parametrize("dtypes", [(F32, F32, F32), (BF16, F16, F32), (F64, F64, F64), (F32, F64, F32)])
@pytest.mark.parametrize("layout", ["odd", "channel mask", "transposed", "0-dim"])
def test_a_loss_that_is_no_function_of_the_difference(layout, dtypes):
    """A loss with two derivatives and several parameters has both right, computed together and alone."""
    forward, backward = pointwise_loss("exponential", exponential_value, slopes=exponential_slopes)
    parameters = (0.3, 1.7, 0.9)
    x, y, mask, weight = build(layout, *dtypes)
    keep, w, out = kept(x.shape, mask, weight), weights(x.shape, weight), F64 if F64 in dtypes else F32
    leaves = [torch.where(keep, t.double(), 0).requires_grad_() for t in (x, y)]
    a, b, c = parameters
    value = torch.where(keep, w * (a * leaves[0].exp() - b * leaves[0] * leaves[1] + c * leaves[1] ** 3), 0)
    grads = torch.autograd.grad(value.sum(), leaves)
    close(forward(x, y, mask, weight, None, 0, *parameters, False, None)[0], value.detach(), w.abs() * 90, out)
    got = forward(x, y, mask, weight, None, 2, *parameters, False, None)[0]
    close(got, value.detach().sum(), value.detach().abs().sum(), out)
    result = backward(torch.tensor(2.5), None, x, y, mask, weight, *parameters, True, True, out, out)
    for needs in ((True, False), (False, True)):
        alone = backward(torch.tensor(2.5), None, x, y, mask, weight, *parameters, *needs, out, out)
        assert torch.equal(alone[needs.index(True)], result[needs.index(True)])
    for gradient, truth in zip(result, grads):
        close(gradient, 2.5 * truth, w.abs() * 90, out)
        assert not gradient[~keep].any()


@triton.jit
def slightly_wrong(x, y):
    return (x - y) * (x - y) * 1.0001


def test_a_wrong_functor_is_caught():
    forward, backward = pointwise_loss("wrong", slightly_wrong, slightly_wrong)
    x, y, mask, weight = build("odd")
    expected, scale, *_ = total((x.double() - y.double()) ** 2, x.shape, mask, weight)
    with pytest.raises(AssertionError):
        close(forward(x, y, mask, weight, None, 2, False, None)[0], expected, scale)
    with pytest.raises(AssertionError):
        check_backward("mse_loss", "odd", backward=backward)


@pytest.mark.parametrize("name, parameters", [("quantile_loss", (1 - 1e-6,)), ("sigmoid_focal_loss", (1 - 1e-6, 2.0))])
def test_one_less_a_parameter_near_one_keeps_its_digits(name, parameters):
    """1 - parameter keeps its digits for a parameter near 1: in fp32, 1 - (1 - 1e-6) would be 5 % off."""
    loss = LOSSES[name]
    x, y = torch.tensor([0.75, 2.0]), torch.zeros(2)
    value, _ = loss.forward(x, y, None, None, None, 0, *parameters, False, None)
    grad, _ = loss.backward(torch.tensor(1.0), None, x, y, None, None, *parameters, True, False, F32, F32)
    x64 = x.double().requires_grad_()
    truth = registry[name].composite(x64, y.double(), None, None, None, 0, *parameters)
    assert torch.allclose(value.double(), truth, rtol=1e-6, atol=0)
    assert torch.allclose(grad.double(), torch.autograd.grad(truth.sum(), x64)[0], rtol=1e-6, atol=0)
