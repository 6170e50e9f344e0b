"""Statistics are right where squares overflow, with outliers, and with weights of any size."""

import pytest
import torch
from safeops.kernels.reductions import masked_norm, statistic_backward

from tests.kernels.interpreted.statistic import backward, check, define, run
from tests.kernels.interpreted.truth import BF16, F16, F32, F64, close, fill

NAN, INF = float("nan"), float("inf")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns about garbage in rows that are not kept


@pytest.mark.parametrize("name", ["norm", "rms", "std"])
@pytest.mark.parametrize("dtype, size", [(F32, 1e30), (F32, 1e-30), (F32, 1e-40), (F64, 1e200), (F64, 1e-200)])
def test_squares_leave_the_range_where_the_result_does_not(name, dtype, size):
    base = fill((140,), F64, 1)
    base[:70] *= 1e-3
    x = (base * size).to(dtype)
    tiny = dtype == F32 and size == 1e-40  # subnormal numbers have few digits
    value, origin, scale = run(name, x)
    exact = x.double() / size
    leaf = exact.requires_grad_()
    expected = define(name, leaf)
    close(value.double() / size, expected.detach(), dtype=F16 if tiny else dtype)
    # g: the upstream gradient of a loss scaled by 65536, and by 1e-6
    (gradient,) = torch.autograd.grad(expected, leaf)
    for g in (65536.0, 1e-6):
        dx = backward(name, torch.tensor(g, dtype=dtype), x, origin, scale)
        close(dx.double(), gradient * g, gradient.abs().max() * g, F16 if tiny else dtype)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape, dim", [((300,), None), ((3, 100), [1]), ((100, 3), [0])])
@pytest.mark.parametrize("dtype, most", [(F32, 1.5e38), (F64, 1e306)])
def test_deviations_whose_sum_leaves_the_range(dtype, most, shape, dim, weighted):
    """The standard deviation is right where the sum of two deviations overflows."""
    unit = torch.where(torch.arange(300).reshape(shape) % 7 == 0, -1.0, 1.0).double()
    weight = torch.where(torch.arange(300).reshape(shape) % 5 == 0, 2.0, 1.0).to(dtype) if weighted else None
    leaf = unit.requires_grad_()
    expected = define("std", leaf, None, weight, dim or ())
    (gradient,) = torch.autograd.grad(expected.sum(), leaf)
    x = (unit.detach() * most).to(dtype)
    value, origin, scale = run("std", x, None, weight, dim)
    close(value.double() / most, expected.detach(), dtype=dtype)
    dx = backward("std", torch.ones_like(value), x, origin, scale, None, weight, dim)
    close(dx.double(), gradient, gradient.abs().max(), dtype)


def test_weights_beyond_fp32():
    x, weight = fill((64,), F32, 1), torch.full((64,), 1e35)
    close(run("rms", x, None, weight)[0], x.double().square().mean().sqrt())
    close(run("norm", x * 1e-20, None, weight)[0], (x.double().square().sum() * weight[0].double()).sqrt() * 1e-20)


@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64])
def test_a_negative_frequency_shows(dtype):
    x, weight = fill((3, 40), dtype, 1), torch.ones((3, 40), dtype=dtype)
    weight[0, 5], weight[1, 5] = -0.0, -1.0
    for name in ("var", "std"):
        value = run(name, x, None, weight, [1])[0]
        assert value.isnan().tolist() == [False, True, False]
        assert run(name, x, weight == 1, weight, [1])[0].isfinite().all()


def test_variance_does_not_lose_its_digits_to_the_mean():
    x = 1000 + fill((1500,), F64, 1).float()
    truth = x.double().var()
    ours, origin, scale = run("var", x)
    textbook = (x.square().mean() - x.mean().square()) * 1500 / 1499
    assert (ours - truth).abs() < 1e-6 * truth
    assert (textbook - truth).abs() > 1e3 * (ours - truth).abs()
    # The gradient keeps its digits, too: with a mean in fp32 it would be off by 3e-5.
    dx = backward("var", torch.tensor(1e3), x, origin, scale)
    close(dx, 2e3 * (x.double() - x.double().mean()) / 1499)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_variance_of_what_begins_late(dtype):
    """The variance is right for a column whose first elements are masked. Its pivot, the number that is subtracted from
    all elements first, comes from a later tile."""
    x = (3000 + 30 * fill((300, 16), F32, 1)).to(dtype)
    mask = torch.ones(300, 16, dtype=torch.bool)
    mask[:130, 3] = mask[:298, 7] = False
    x = torch.where(mask, x, NAN)
    check("var", x, mask, None, [0])
    check("var", x.T.contiguous(), mask.T.contiguous(), None, [1])


def test_variance_with_an_outlier_first():
    for dtype in (F32, F64):
        x = torch.cat([torch.tensor([1e6], dtype=F64), fill((700,), F64, 1)]).to(dtype)
        # The outlier is its lane's pivot, so the deviations of the lane's forty other elements are 1e6 and lose digits.
        close(run("var", x)[0], x.double().var(), 40 * x.double().var(), dtype=dtype)


@pytest.mark.parametrize("dtype, far, light", [(F32, 1e4, 1e-10), (F64, 1e8, 1e-20)])
@pytest.mark.parametrize("shape, dim, lights", [
    ((3, 1), 0, [0]), ((32,), 0, [0]), ((7, 33), 1, [1]), ((300, 5), 0, [0, -1]), ((5, 300), 1, range(100)),
    ((2, 2200), 1, range(1024)),  # more tiles than one accumulator takes; a split may have outliers only
])  # fmt: skip
def test_an_element_far_away_of_little_weight(dtype, far, light, shape, dim, lights):
    """An outlier of little weight that comes first costs no digits: as the pivot, the number that is subtracted first,
    it would cost the other elements' digits."""
    x, weight = fill(shape, dtype, 1), torch.ones(shape, dtype=dtype)
    for place in lights:
        x.select(dim, place).fill_(far), weight.select(dim, place).fill_(light)
    leaf = x.double().requires_grad_()
    expected = define("var", leaf, None, weight, [dim], correction=0)
    value, origin, scale = run("var", x, None, weight, [dim], parameter=0.0)
    close(value, expected.detach())  # the tolerance of fp32: in fp64, too, 1e8 costs digits
    (gradient,) = torch.autograd.grad(expected.sum(), leaf)
    dx = backward("var", torch.ones_like(value), x, origin, scale, None, weight, [dim])
    close(dx, gradient, gradient.abs().max() * 2)


def test_weights_that_grow_and_shrink():
    """Sums keep their digits where each next element is much heavier or lighter, so that the pivot moves."""
    steps = torch.arange(400, dtype=F64)
    for exponent in (steps / 4 - 50, 50 - steps / 4, (steps * 0.7).sin() * 30):
        weight, x = torch.exp2(exponent).float(), fill((400,), F32, 1)
        x = torch.where(weight < 1e-6, x * 1e3, x) + 100
        for dim, shape in (([0], (400,)), ([0], (80, 5))):
            check("var", x.view(shape), None, weight.view(shape), dim)


@pytest.mark.parametrize("dtype, number", [(F32, 0.1), (F32, 1e30), (F64, 0.1), (F64, -3.0)])
def test_equal_elements_have_deviation_and_gradient_zero(dtype, number):
    x = torch.full((5, 100), number, dtype=dtype)
    mask = fill((5, 100), F32, 1) > 0
    value, origin, scale = run("std", x, mask, None, [1])
    assert not value.any() and not scale.any()
    assert not backward("std", torch.ones(5), x, origin, scale, mask, None, [1]).any()
    zero = torch.zeros(40)
    value, origin, scale = run("norm", zero)  # pytorch#2421
    assert value == 0 and not backward("norm", torch.tensor(1.0), zero, origin, scale).any()


def test_logits_of_any_size():
    x = torch.tensor([[1e4, 1e4 - 1, -1e4], [-1e38, -1e38, -3e38], [3e38, 1.0, 2.0]])
    value, origin, scale = run("logsumexp", x, None, None, [1])
    close(value, x.double().logsumexp(1))
    dx = backward("logsumexp", torch.ones(3), x, origin, scale, None, None, [1])
    near = [0, 2]  # row 1: -1e38 + log 2 = -1e38 even in fp64, so the gradient is 1, as torch's
    close(dx[near], x.double().softmax(1)[near], torch.ones(()))


@pytest.mark.parametrize("name", ["norm", "rms", "std"])
@pytest.mark.parametrize("size", [1e-309, 1e-318, 1e-200, 4e307])
def test_norms_at_the_ends_of_fp64(name, size):
    """A norm's gradient, of size 1, is right where the norm or 1 / norm overflows fp64."""
    x = torch.tensor([3.0, 4.0], dtype=F64) * size
    unit = (x / size).requires_grad_()
    _, origin, scale = run(name, x)
    (gradient,) = torch.autograd.grad(define(name, unit), unit)
    for upstream in (1.0, 1e300, 1e-300):
        dx = backward(name, torch.tensor(upstream, dtype=F64), x, origin, scale)
        close(dx, gradient * upstream, dtype=F64)


@pytest.mark.parametrize("dtype, out", [(F32, F32), (F64, F64), (F32, F16)])
@pytest.mark.parametrize("order", [1.0, 2.0, INF])
def test_safe_norm_saturates(order, dtype, out):
    """safe_norm of finite elements saturates at the dtype's largest number; an infinite element gives inf."""
    if order == INF and out != F16:
        return  # the largest magnitude fits the dtype, so nothing saturates
    f = masked_norm.safe_norm
    x = torch.ones(4, 90, dtype=dtype)
    x[:3] = torch.finfo(dtype).max / 2 if out != F16 else 1e5
    x[1, 7], x[2, 7] = INF, NAN
    value, origin, scale = f(x, None, None, [1], dtype=out, parameter=order)
    norm = 90 ** (0 if order == INF else 1 / order)
    close(value, torch.tensor([torch.finfo(out).max, INF, NAN, norm], dtype=F64), dtype=out)
    dx = statistic_backward.statistic_backward(
        torch.ones(4, dtype=out), x, origin, scale, None, None, {1.0: 3, 2.0: 0, INF: 4}[order], [1]
    )
    assert not dx[0].any() and dx[3].all() and dx[3].isfinite().all()
