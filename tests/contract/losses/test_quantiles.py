"""quantile_loss of several quantiles at once, along the last dim, equals one call for each quantile."""

import math

import pytest
import torch

import safeops
from safeops.ops.losses.quantile_loss import _of_each
from tests.contract.common import DEVICE, each_route, equal, grad_of, on, t

NAN, INF = math.nan, math.inf
QUANTILES = [0.0, 0.1, 0.5, 0.75, 1.0]


def predictions(*shape, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=torch.float64).to(DEVICE, dtype)


def each(x, y, quantiles=QUANTILES, **options):
    """Returns the losses of one call per quantile, stacked, for x and y of shape (..., Q)."""
    columns = zip(x.unbind(-1), y.expand(x.shape).unbind(-1), quantiles)
    return torch.stack(
        [safeops.quantile_loss(a, b, quantile=q, reduction="none", **options) for a, b, q in columns], -1
    )


@each_route
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("last", [(), (1,), (5,)])
@pytest.mark.parametrize("kind", [list, tuple, torch.tensor])
def test_it_is_that_of_each_quantile(route, dtype, last, kind):
    x = predictions(4, 3, 5, dtype=dtype).requires_grad_()
    y = predictions(4, 3, *last, dtype=dtype, seed=1).requires_grad_()
    wide = dtype if dtype == torch.float64 else torch.float32
    quantile = torch.tensor(QUANTILES, dtype=wide, device=DEVICE) if kind is torch.tensor else kind(QUANTILES)
    loss = on(route, "quantile_loss")(x, y, quantile=quantile, reduction="none")
    x64, y64 = (z.detach().double().requires_grad_() for z in (x, y))
    truth = each(x64, y64 if last else y64.unsqueeze(-1))
    assert loss.dtype == wide and loss.shape == (4, 3, 5)
    torch.testing.assert_close(loss.double(), truth, rtol=1e-6, atol=1e-7)
    mean = on(route, "quantile_loss")(x, y, quantile=quantile)
    torch.testing.assert_close(mean.double(), truth.mean(), rtol=1e-6, atol=0)
    for got, want in zip(torch.autograd.grad(mean, (x, y)), torch.autograd.grad(truth.mean(), (x64, y64))):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol={2: 8e-3}.get(dtype.itemsize, 1e-6), atol=1e-7)


def test_half_of_pytorch_forecastings():
    x, y = predictions(4, 3, 3), predictions(4, 3, seed=1)
    quantiles = [0.1, 0.5, 0.9]
    errors = [y - x[..., i] for i in range(3)]
    theirs = torch.stack([2 * torch.max((q - 1) * e, q * e) for q, e in zip(quantiles, errors)], -1).mean()
    torch.testing.assert_close(safeops.quantile_loss(x, y, quantile=quantiles), theirs / 2)
    torch.testing.assert_close(safeops.nn.QuantileLoss(quantile=quantiles)(x, y), theirs / 2)


@each_route
def test_what_is_masked_does_not_exist_and_what_is_kept_shows(route):
    x, y = predictions(2, 5).requires_grad_(), predictions(2, seed=1)
    keep = torch.tensor([[True], [False]], device=DEVICE)
    weight = torch.tensor([1.0, 0.0, 2.0, 1.0, 1.0], dtype=torch.float64, device=DEVICE)
    loss = on(route, "quantile_loss")
    broken = x.detach().clone()
    broken[1], broken[0, 1] = NAN, INF
    broken.requires_grad_()
    options = {"mask": keep, "weight": weight, "quantile": QUANTILES}
    value = loss(broken, y, **options)
    assert torch.equal(value, loss(x, y, **options)) and value.isfinite()
    grad = grad_of(value, broken)
    assert (grad[1] == 0).all() and grad[0, 1] == 0 and grad.isfinite().all()
    assert loss(broken, y, quantile=QUANTILES).isnan()


@each_route
def test_a_factor_of_0_counts_nothing_and_no_share_is_nan(route):
    x = t(INF, -INF, INF, NAN, 1.0, grad=True)
    quantile = t(1.0, 0.0, 0.0, 1.0, 1.5)
    loss = on(route, "quantile_loss")(x, t(0.0), quantile=quantile, reduction="none")
    assert loss[:3].tolist() == [0, 0, INF] and loss[3:].isnan().all()
    assert grad_of(loss.sum(), x)[:3].tolist() == [0, 0, 1]


def test_second_derivatives_and_those_of_the_quantiles():
    x, y = predictions(3, 4).requires_grad_(), predictions(3, 1, seed=1).requires_grad_()
    quantile = t(0.1, 0.3, 0.6, 0.9).double().requires_grad_()
    keep = predictions(3, 4, seed=2) > -0.5

    def loss(x, y, quantile):
        return safeops.quantile_loss(x, y, quantile=quantile, mask=keep)

    assert torch.autograd.gradcheck(loss, (x, y, quantile))
    assert torch.autograd.gradgradcheck(loss, (x, y, quantile))
    assert torch.autograd.gradcheck(loss, (x, y, quantile), check_forward_ad=True, check_backward_ad=False)


@pytest.mark.slow
def test_every_way_of_calling_it():
    x, y = predictions(3, 5, dtype=torch.float32), predictions(3, dtype=torch.float32, seed=1)
    want = safeops.quantile_loss(x, y, quantile=QUANTILES)
    compiled = torch.compile(lambda x, y: safeops.quantile_loss(x, y, quantile=QUANTILES), fullgraph=True)
    torch.testing.assert_close(compiled(x, y), want)
    for quantile in (QUANTILES, torch.tensor(QUANTILES, device=DEVICE)):
        equal(torch.ops.safeops.quantile_loss(x, y, quantile=quantile), want)
    rows = torch.func.vmap(lambda x, y: safeops.quantile_loss(x, y, quantile=QUANTILES))(x, y)
    torch.testing.assert_close(rows.mean(), want)
    by_count = safeops.quantile_loss(x, y, quantile=QUANTILES, reduction="mean", denominator=30.0)
    torch.testing.assert_close(by_count, want / 2)
    nothing = torch.zeros(3, 1, dtype=torch.bool, device=DEVICE)
    assert safeops.quantile_loss(x, y, quantile=QUANTILES, mask=nothing) == 0
    with pytest.raises(ValueError, match='quantile_loss: empty="raise"'):
        safeops.quantile_loss(x, y, quantile=QUANTILES, mask=nothing, empty="raise")
    assert safeops.quantile_loss(x[:0], y[:0], quantile=QUANTILES, reduction="sum") == 0


@pytest.mark.parametrize(
    "quantile, error, words",
    [
        ([0.1, 0.5], ValueError, "quantile must be a number, or one for each of input's last dim (2, 3), got 2"),
        ([], ValueError, "quantile must be a number, or one for each of input's last dim (2, 3), got 0"),
        ([0.1, 0.5, 1.5], ValueError, "quantile must be at most 1, got 1.5"),
        ([0.1, -0.5, 0.5], ValueError, "quantile must be at least 0, got -0.5"),
        ([0.1, NAN, 0.5], ValueError, "quantile must be at most 1, got nan"),
        ([0.1, "x", 0.5], TypeError, "quantile must be a number, got str"),
        (torch.tensor([1, 0, 0]), TypeError, "quantile must be a floating point tensor"),
        (torch.ones(1, 3), ValueError, "one for each of input's last dim (2, 3), got (1, 3)"),
        (torch.ones(3, device="meta"), ValueError, "quantile"),
    ],
)  # fmt: skip
def test_what_is_refused(quantile, error, words):
    x = torch.zeros(2, 3, device=DEVICE)
    with pytest.raises(error) as e:
        safeops.quantile_loss(x, x, quantile=quantile)
    assert str(e.value).startswith("quantile_loss: ") and words in str(e.value)


@pytest.mark.parametrize("shape", [(2, 2), (3,), (), (2, 1, 3), (1, 3)])
def test_targets_that_are_refused(shape):
    with pytest.raises(ValueError, match=r"quantile_loss: target .* must be \(2,\), \(2, 1\) or input's \(2, 3\)"):
        safeops.quantile_loss(torch.zeros(2, 3), torch.zeros(shape), quantile=[0.1, 0.5, 0.9])


def test_the_kernel_runs_unless_it_is_off():
    assert _of_each.cpu and _of_each.raw == ("_quantiles_loss", "_quantiles_loss_backward")


def test_quantiles_go_where_the_module_goes():
    module = safeops.nn.QuantileLoss(quantile=torch.tensor([0.25, 0.5])).to("meta")
    x = torch.zeros(3, 2, device="meta")
    assert module(x, x[:, 0]).device.type == "meta"


def test_a_quantile_that_changes_compiles_whole():
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, y, q: safeops.quantile_loss(x, y, quantile=q), fullgraph=True, backend="aot_eager"
    )
    x, y = torch.randn(6, 5, device=DEVICE), torch.randn(6, 5, device=DEVICE)
    for q in (0.5, 0.9, 0.1):
        torch.testing.assert_close(compiled(x, y, q), safeops.quantile_loss(x, y, quantile=q))
