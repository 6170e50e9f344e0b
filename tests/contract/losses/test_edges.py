"""The pointwise losses on a grid of edge values, kernel and composite beside the definition, and cases by hand."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import safeops
from safeops.core.op import registry
from safeops.ops.losses._pointwise import PointwiseLoss
from safeops.testing import Sample, Subject, run
from safeops.testing.compare import assert_right
from tests.contract.common import DEVICE, each_route, equal, grad_of, leaf, names, on, t
from tests.ops import RECORDS, definitions

NAN, INF = math.nan, math.inf
# No value has an exponential, or product of two values, that overflows fp32 but not fp64, which gives the truth.
EDGES = [NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 0.1, 3.0, -7.5, 1e-7, 30.0, -30.0, 1e18, -1e18]
NUMBERS = (0.0, 0.5, 2.0)  # values of a parameter, if in its range


def options(op):
    """Yields options: every choice of the flags, with the numbers that are in range."""
    ranges = [(p.name, *p.range(), p.kind) for p in op.parameters]
    values = [
        (False, True) if kind is bool else [x for x in NUMBERS if low <= x <= high] for _, low, high, kind in ranges
    ]
    for chosen in itertools.product(*values):
        yield dict(zip((name for name, *_ in ranges), chosen))


@each_route
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", names(PointwiseLoss))
def test_a_grid_of_edges(name, dtype, route):
    op, record = registry[name], RECORDS[name]
    edges = torch.tensor(EDGES, dtype=dtype, device=DEVICE)
    grid = torch.meshgrid(*[edges] * op.count, indexing="ij")
    tensors = [to(x.flatten()) for to, x in zip(record.domain, grid)]
    keys = list(range(op.count))
    for chosen in options(op):
        chosen["reduction"] = "none"
        operands = list(tensors)
        if op.optional:
            keys[-1] = op.names[-1]
            chosen[keys[-1]] = operands.pop()
        sample = Sample(tuple(operands), chosen, differentiable=tuple(keys))
        fields = {key: record.fields[key] for key in ("terms", "several_terms") if key in record.fields}
        subject = Subject(
            on(route, name), definitions.__dict__[name], [sample], data=tuple(keys), device=DEVICE, **fields
        )
        got = run(subject.op, sample, lambda value: torch.ones_like(value))
        assert_right(sample, got, subject.truth(sample, got.upstream), f"with {chosen}")


# ---- logits


MATCHED = [("binary_cross_entropy_with_logits", 0.0), ("sigmoid_focal_loss", 0.0), ("soft_margin_loss", -1.0)]


@each_route
@pytest.mark.parametrize("name, low", MATCHED)
def test_an_infinite_logit_that_matches_its_target_costs_nothing(name, low, route):
    x, y = leaf([INF, -INF]), t(1.0, low, grad=True)
    loss = on(route, name)(x, y, reduction="none")
    assert loss.tolist() == [0, 0]
    assert [g.tolist() for g in torch.autograd.grad(loss.sum(), (x, y))] == [[0, 0], [0, 0]]
    assert on(route, name)(x, t(low, 1.0), reduction="none").isposinf().all()


@each_route
def test_effdet_softplus_at_100(route):
    x = leaf([100.0, -100.0])
    assert torch.log1p(torch.exp(x)).isinf().any()
    loss = on(route, "binary_cross_entropy_with_logits")(x, t(0.0, 1.0), reduction="none")
    assert loss.tolist() == [100, 100] and grad_of(loss.sum(), x).tolist() == [1, -1]


# ---- probabilities


@each_route
def test_a_probability_of_exactly_0_or_1_keeps_value_and_gradient_finite(route):
    p, y = leaf([0.0, 1.0, 0.0, 1.0]), t(0.0, 1.0, 1.0, 0.0)
    loss = on(route, "binary_cross_entropy")(p, y, reduction="none")
    assert loss.tolist() == [0, 0, 100, 100]
    assert equal(grad_of(loss.sum(), p), [0, 0, -1e12, 1e12])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_pytorch_61098_probabilities_under_autocast(dtype):
    """Under autocast the loss must stay fp32. (torch's own loss raises under CUDA's autocast, not under the CPU's.)"""
    p, y = leaf([0.25, 0.5]), t(1.0, 0.0)
    outside = safeops.binary_cross_entropy(p, y)
    with torch.autocast(torch.device(DEVICE).type, dtype=dtype):
        inside = safeops.binary_cross_entropy(p, y)
        assert safeops.binary_cross_entropy(p.half(), y).dtype == torch.float32
    assert torch.equal(inside, outside) and inside.dtype == torch.float32


@pytest.mark.parametrize("gap", [1e-2, 1e-3, 1e-4])
def test_js_div_of_nearly_equal_probabilities_keeps_its_digits(gap):
    p = torch.linspace(0.1, 0.9, 50, device=DEVICE)
    q = p + gap * p  # rounded to fp32 before the truth is computed
    wide = p.double().requires_grad_(), q.double().requires_grad_()
    truth = definitions.js_div(*wide, reduction="none")
    p, q = p.requires_grad_(), q.detach().requires_grad_()
    loss = safeops.js_div(p, q, reduction="none")
    torch.testing.assert_close(loss.double(), truth, rtol=2e-6, atol=0)
    for got, want in zip(torch.autograd.grad(loss.sum(), (p, q)), torch.autograd.grad(truth.sum(), wide)):
        torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=0)


@pytest.mark.parametrize("gap", [0.3, 1e-2, 1e-4, 1e-6, 1e-20])
def test_gaussian_kl_div_near_the_prior_keeps_its_digits(gap):
    log_var = torch.linspace(-gap, gap, 50, device=DEVICE, requires_grad=True)
    loss = safeops.gaussian_kl_div(torch.zeros_like(log_var), log_var, reduction="none")
    d = log_var.detach().double()
    truth = sum(d**k / math.factorial(k) for k in range(2, 16)) / 2
    torch.testing.assert_close(loss.double(), truth, rtol=5e-7, atol=2e-45)
    torch.testing.assert_close(grad_of(loss.sum(), log_var).double(), torch.expm1(d) / 2, rtol=5e-7, atol=0)


@each_route
def test_gaussian_kl_div_of_a_variance_that_overflows_is_inf_and_so_is_its_gradient(route):
    mean, log_var = torch.zeros(10, device=DEVICE), t(88.8, 1000.0, INF, -INF, 0.0, NAN, -1e4, *[0.0] * 3, grad=True)
    loss = on(route, "gaussian_kl_div")(mean, log_var, reduction="none")
    assert loss[:4].tolist() == [INF] * 4 and loss[4] == 0 and loss[5].isnan() and loss[6] == 4999.5
    grad = grad_of(loss.sum(), log_var)
    assert grad[:3].tolist() == [INF] * 3 and grad[3] == grad[6] == -0.5 and grad[4] == 0 and grad[5].isnan()


def test_gaussian_kl_div_of_a_prior_is_that_of_torch():
    mean, log_var = torch.randn(4, 3, device=DEVICE), torch.randn(4, 3, device=DEVICE)
    prior = 0.5, -1.25
    scale = [(v / 2).exp() for v in (log_var, torch.tensor(prior[1]))]
    laws = torch.distributions.Normal(mean, scale[0]), torch.distributions.Normal(prior[0], scale[1])
    truth = torch.distributions.kl_divergence(*laws)
    loss = safeops.gaussian_kl_div(mean, log_var, prior_mean=prior[0], prior_log_var=prior[1], reduction="batchmean")
    torch.testing.assert_close(loss, truth.sum() / 4)
    moved = (mean - prior[0]) * math.exp(-prior[1] / 2), log_var - prior[1]  # the docs' way to tensor priors
    torch.testing.assert_close(safeops.gaussian_kl_div(*moved, reduction="none"), truth)
    with pytest.raises(TypeError, match="gaussian_kl_div: prior_mean must be a number, got Tensor"):
        safeops.gaussian_kl_div(mean, log_var, prior_mean=torch.zeros(3))


@each_route
@pytest.mark.parametrize("name", ["kl_div", "js_div"])
def test_what_does_not_happen_costs_nothing(name, route):
    q = t(0.5, 0.5, 0.0, grad=True)
    p = t(0.25, 0.75, 0.0, grad=True)
    loss = on(route, name)(q.log() if name == "kl_div" else q, p, reduction="none")
    assert loss[2] == 0 and loss.isfinite().all()
    assert grad_of(loss.sum(), p)[2] == 0


def test_batchmean_is_the_sum_over_the_first_dim():
    q, p = torch.rand(4, 3, device=DEVICE).log(), torch.rand(4, 3, device=DEVICE)
    ours = safeops.kl_div(q, p, reduction="batchmean")
    torch.testing.assert_close(ours, F.kl_div(q, p, reduction="batchmean"))
    assert safeops.js_div(p, p.flip(0), reduction="batchmean") == safeops.js_div(p, p.flip(0), denominator=4.0)
    module = safeops.nn.KLDivLoss(reduction="batchmean", log_target=True)
    torch.testing.assert_close(module(q, q + 0.5), F.kl_div(q, q + 0.5, reduction="batchmean", log_target=True))
    assert safeops.kl_div(q[0, 0], p[0, 0], reduction="batchmean").isfinite()


# ---- variances, differences


def test_a_rate_beyond_fp32_is_infinite():
    """e^88.8 is inf in fp32; a loop that fuses e^x's last product with a sum, unrounded, must still return inf."""
    x = t(88.8, 88.8, 88.8, 88.8, 88.8, 88.8, 88.8, 88.8, grad=True)
    loss = safeops.poisson_nll_loss(x, torch.ones_like(x), reduction="none")
    assert loss.isposinf().all() and grad_of(loss.sum(), x).isposinf().all()


@each_route
def test_a_variance_below_the_bound_counts_as_the_bound_and_keeps_its_gradient(route):
    x, y, var = t(1.0, 2.0), t(0.0, 0.0), t(0.0, 1e-9, grad=True)
    loss = on(route, "gaussian_nll_loss")(x, y, var, eps=0.5)
    torch.testing.assert_close(loss, F.gaussian_nll_loss(x, y, var, eps=0.5))
    torch.testing.assert_close(grad_of(loss, var), grad_of(F.gaussian_nll_loss(x, y, var, eps=0.5), var))
    var = t(-1.0, 1.0, grad=True)
    loss = on(route, "gaussian_nll_loss")(x, y, var, reduction="none")
    assert loss.isnan().tolist() == [True, False] and grad_of(loss.sum(), var).isnan().tolist() == [True, False]


def test_log_cosh_neither_overflows_nor_cancels():
    x = leaf([1e4, 1e-4])
    loss = safeops.log_cosh_loss(x, torch.zeros(2, device=DEVICE), reduction="none")
    assert equal(loss, [1e4 - math.log(2), 5e-9]) and equal(grad_of(loss.sum(), x), [1, 1e-4])


# ---- as torch


@each_route
@pytest.mark.parametrize("reduction", ["none", "mean", "sum", "batchmean"])
@pytest.mark.parametrize("name", [name for name in names(PointwiseLoss) if hasattr(F, name)])
def test_values_and_gradients_are_those_of_torch(name, reduction, route):
    """Value and gradients equal torch's, for every choice of the loss's own arguments and for every operand that has a
    gradient in torch."""
    op, record = registry[name], RECORDS[name]
    if reduction not in op.reductions:
        pytest.skip("has no such reduction")
    stopped = name in ("soft_margin_loss", "binary_cross_entropy_with_logits")  # in torch without gradient to y
    g = torch.Generator().manual_seed(0)
    for chosen in options(op):
        tensors = [to(torch.randn(6, 7, generator=g, dtype=torch.float64)).to(DEVICE) for to in record.domain]
        results = []
        for function in (on(route, name), getattr(F, name)):
            leaves = [x.clone().requires_grad_(i < op.count - stopped) for i, x in enumerate(tensors)]
            operands = leaves[:-1] if op.optional else leaves
            last = {op.names[-1]: leaves[-1]} if op.optional else {}
            loss = function(*operands, reduction=reduction, **last, **chosen)
            wanted = [x for x in leaves if x.requires_grad]
            results.append([loss, *torch.autograd.grad(loss.sum(), wanted, allow_unused=True)])
        for ours, theirs in zip(*results):
            theirs = torch.zeros_like(ours) if theirs is None else theirs
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("route", ["kernel", "composite"])
@pytest.mark.parametrize("alpha", [0.25, 0.0, -1.0])
@pytest.mark.parametrize("gamma", [1e-8, 0.01, 0.1, 0.5])
def test_a_small_power_of_a_subnormal_has_a_slope(route, alpha, gamma):
    """The slope must be right where the missing probability m = 1 - p of the label is subnormal: m^gamma fits fp32, but
    m^(gamma - 1), a factor of the slope, overflows."""
    x = torch.tensor([90.0, -90.0, 95.0, -95.0, 102.0, -102.0])
    y = torch.tensor([1.0, 0.0]).repeat(3)
    operands, wide = [[t.to(kind).requires_grad_() for t in (x, y)] for kind in (torch.float32, torch.float64)]
    options = {"gamma": gamma, "alpha": alpha, "reduction": "sum"}
    got = torch.autograd.grad(on(route, "sigmoid_focal_loss")(*operands, **options), operands)
    want = torch.autograd.grad(on("composite", "sigmoid_focal_loss")(*wide, **options), wide)
    torch.testing.assert_close(got[0].double(), want[0], rtol=1e-3, atol=1e-37)
    torch.testing.assert_close(got[1].double(), want[1], rtol=0.05, atol=1e-6)  # m is subnormal and has few digits


@each_route
@pytest.mark.parametrize("gamma", [0.5, 2.0, 5.0])
def test_the_largest_logits_have_their_slope(route, gamma):
    """sigmoid_focal_loss's slope is right at the largest logits: where p no longer changes, a factor of the slope may
    overflow, and 0 times it must be 0."""
    x = torch.tensor([1.0, -1.0], device=DEVICE).mul(torch.finfo(torch.float32).max).requires_grad_()
    y = torch.tensor([0.0, 1.0], device=DEVICE)
    loss = on(route, "sigmoid_focal_loss")(x, y, alpha=-1.0, gamma=gamma, reduction="sum")
    assert grad_of(loss, x).tolist() == [1.0, -1.0]
