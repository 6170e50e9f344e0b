"""Reported failures that the masked reductions answer, and counts: what torch still does, and what safeops does."""

import math

import pytest
import torch
import torch.nn.functional as F

import safeops
from safeops.testing import DTYPES, no_synchronisation
from tests.contract.common import DEVICE, REDUCTIONS, each_route, equal, flags, grad_of, leaf, on, tensor

NAN = math.nan


def test_pytorch_67180_nansum():
    b, x = leaf(1.0), torch.tensor([1, 2, math.nan], device=DEVICE)
    assert torch.autograd.grad(torch.nansum(x * b), b)[0].isnan()
    keep = ~x.isnan()
    # A sum of b weighted by the data, kept where the data is not NaN: no product with NaN is ever computed.
    assert equal(torch.autograd.grad(safeops.masked_sum(b.expand(3), keep, weight=x), b)[0], 3)


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
    assert (terms * torch.ones_like(terms)).cumsum(0)[-1].isinf()  # torch's sum in half overflows
    want = terms.double().mean()
    assert abs(safeops.masked_mean(terms).double() / want - 1) < 1e-6
    assert abs(safeops.l1_loss(terms, torch.zeros_like(terms)).double() / want - 1) < 1e-6


def test_pytorch_12461_boolean_indexing_synchronises():
    x, keep = leaf([1.0, 2.0, 3.0]), flags(True, False, True)
    with pytest.raises((AssertionError, RuntimeError), match="synchroni"):
        with no_synchronisation(DEVICE):
            x[keep].mean()
    safeops.masked_mean(x, keep)
    with no_synchronisation(DEVICE):
        safeops.masked_mean(x, keep).backward()
    assert equal(x.grad, [0.5, 0, 0.5])


@pytest.mark.parametrize("name", REDUCTIONS)
def test_pytorch_23425_nothing_kept_is_zero_attached_to_the_graph(name):
    x, keep = leaf([math.nan, math.inf]), flags(False, False)
    assert torch.where(keep, x, 0).sum().div(keep.sum()).isnan()
    ours = getattr(safeops, name)(x, keep)
    assert ours == 0 and ours.requires_grad and equal(torch.autograd.grad(ours, x)[0], [0, 0])


@pytest.mark.parametrize("empty, want", [("zero", 0.0), ("nan", math.nan)])
def test_pytorch_70348_116349_every_target_ignored(empty, want):
    """The masked mean of row losses is 0 with gradient 0 if none is kept. (cross_entropy has tests of its own.)"""
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_pytorch_128557_92350_every_floating_dtype_on_plain_tensors(dtype):
    x = leaf([2.0, math.nan, 4.0], dtype)
    loss = safeops.masked_mean(x, flags(True, False, True))
    loss.backward()
    assert type(loss) is torch.Tensor and loss == 3 and equal(x.grad, [0.5, 0, 0.5])


@pytest.mark.parametrize("name", ["masked_std", "masked_var"])
def test_pytorch_4320_std_of_one_element(name):
    x = leaf([3.0])
    with pytest.warns(UserWarning, match="degrees of freedom"):
        plain = x.std()
    assert plain.isnan() and grad_of(plain, x).isnan()
    ours = getattr(safeops, name)(x)
    assert equal(ours, 0) and equal(grad_of(ours, x), [0])
    assert getattr(safeops, name)(x, empty="nan").isnan()
    with pytest.raises(ValueError, match="nothing is kept for 1 of 1"):
        getattr(safeops, name)(x, empty="raise")
    rows = leaf([[3.0, math.nan], [1.0, 3.0]])  # beside a row of two elements
    ours = getattr(safeops, name)(rows, rows.isfinite(), 1)
    want = {"masked_std": math.sqrt(2), "masked_var": 2.0}[name]
    assert equal(ours, [0, want]) and equal(grad_of(ours.sum(), rows)[0], [0, 0])


def test_root_of_the_variance_of_equal_elements():
    x = leaf([0.1, 0.1, 0.1])
    assert not grad_of(x.var().sqrt(), x).isfinite().any()
    assert equal(safeops.masked_std(x), 0) and equal(grad_of(safeops.masked_std(x), x), [0, 0, 0])
    weight = torch.tensor([0.3, 0.7, 1.1], device=DEVICE)
    assert equal(grad_of(safeops.masked_std(x, weight=weight, correction=0), x), [0, 0, 0])


def test_pytorch_2421_norm_by_hand_at_zero():
    x = leaf([0.0, 0.0])
    assert grad_of(x.pow(2).sum().sqrt(), x).isnan().all()
    for ours in (safeops.safe_norm(x), safeops.masked_norm(x), safeops.masked_rms(x)):
        assert equal(ours, 0) and equal(grad_of(ours, x), [0, 0])
    first = torch.autograd.grad(safeops.safe_norm(x), x, create_graph=True)[0]
    assert equal(grad_of(first.sum(), x), [0, 0])  # and the second derivative is 0


def test_pytorch_37154_distance_of_equal_rows():
    a = leaf([[1.0, 2.0], [3.0, 4.0]])
    b = torch.tensor([[1.0, 2.0], [0.0, 0.0]], device=DEVICE)
    assert grad_of((a - b).square().sum(1).sqrt().sum(), a)[0].isnan().all()
    ours = safeops.safe_norm(a - b, dim=1)
    assert equal(ours, [0, 5]) and equal(grad_of(ours.sum(), a), [[0, 0], [0.6, 0.8]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_perceptual_similarity_69_monai_8412_zero_feature_vector(dtype):
    """The gradient must not be NaN where channels are divided by their norm, which is 0 for a pixel without
    features."""
    features = leaf([[0.0, 3.0], [0.0, 4.0]], dtype)  # (C, pixels)
    plain = features / (features.square().sum(0, keepdim=True).sqrt() + 1e-10)
    assert grad_of(plain.sum(), features)[:, 0].isnan().all()
    if dtype == torch.float16:
        assert plain[:, 0].isnan().all()  # the usual eps, 1e-10, rounds to 0 in half
    norm = safeops.safe_norm(features, 0, keepdim=True)
    ours = safeops.safe_div(features, norm, dtype=torch.float32)
    assert equal(ours, [[0, 0.6], [0, 0.8]])
    grad = grad_of(ours.sum(), features)
    assert grad.isfinite().all() and equal(grad[:, 0], [0, 0])


def test_lpips_half_64_channels_of_40():
    features = torch.full((64, 1), 40.0, dtype=torch.float16, device=DEVICE)
    norm = features.square().sum(0, keepdim=True).sqrt()
    assert norm.isinf().all() and equal(features[0] / norm[0], [0])
    ours = safeops.safe_norm(features, 0, keepdim=True)
    assert equal(ours, [[320]]) and equal(safeops.safe_div(features, ours)[0], [0.125])


def test_torch_masked_var_of_half():
    torch.manual_seed(0)
    x = torch.randn(100_000, device=DEVICE).half()
    keep = torch.ones_like(x, dtype=torch.bool)
    assert torch.masked.var(x, mask=keep).isnan()
    want = x.double().var()
    assert abs(float(safeops.masked_var(x, keep)) / float(want) - 1) < 1e-6


def test_squares_of_half_overflow():
    x = torch.tensor([300.0, 400.0], dtype=torch.float16, device=DEVICE)
    assert x.square().sum().isinf()
    assert equal(safeops.masked_sum_of_squares(x), 250_000) and equal(safeops.masked_rms(x), math.sqrt(125_000))


@pytest.mark.parametrize("name, fill, want", [("masked_amax", -math.inf, 0.0), ("masked_logsumexp", -math.inf, 0.0),
                                              ("masked_amin", math.inf, 0.0)])  # fmt: skip
def test_a_fully_masked_row_is_no_infinity(name, fill, want):
    x, keep = leaf([[1.0, 2.0], [math.nan, math.inf]]), flags([True, True], [False, False])
    function = {"masked_amax": torch.amax, "masked_amin": torch.amin, "masked_logsumexp": torch.logsumexp}[name]
    plain = function(x.masked_fill(~keep, fill), 1)
    assert plain[1] == fill
    ours = getattr(safeops, name)(x, keep, 1)
    assert equal(ours[0], float(plain[0].detach())) and equal(ours[1], want)
    grad = grad_of(ours.sum(), x)
    assert equal(grad[1], [0, 0]) and equal(grad[0], grad_of(function(x[:1], 1).sum(), x)[0].tolist())


def test_a_maximum_that_hides_nan():
    x = leaf([1.0, math.nan, 3.0])
    assert safeops.masked_amax(x).isnan() and safeops.masked_amin(x).isnan()
    assert safeops.masked_norm(x, ord=math.inf).isnan()
    assert safeops.masked_amax(x, x.isfinite()) == 3


@pytest.mark.parametrize("name", REDUCTIONS)
def test_boolean_indexing_synchronises_and_a_statistic_does_not(name):
    x, keep = leaf([1.0, 2.0, 3.0]), flags(True, False, True)
    with pytest.raises((AssertionError, RuntimeError), match="synchroni"):
        with no_synchronisation(DEVICE):
            x[keep].amax()
    getattr(safeops, name)(x, keep)
    with no_synchronisation(DEVICE):
        getattr(safeops, name)(x, keep).backward()
    assert x.grad.isfinite().all() and x.grad[1] == 0


# ---- counts


def test_counts_are_exact_beyond_2_to_the_24():
    """Counts must not be fp32, where 2**24 + 1 is 2**24. (The operand is expanded and needs no memory.)"""
    n = 2**24 + 3
    x = torch.ones((), dtype=torch.float16, device=DEVICE).expand(n)
    sequential = torch.tensor(2.0**24) + 1
    assert sequential == 2**24  # the last count of an fp32 counter
    keep = torch.ones((), dtype=torch.bool, device=DEVICE).expand(n)
    assert safeops.masked_sum(x, keep, dtype=torch.float64) == n
    assert safeops.masked_mean(x, keep) == 1


def test_counts_are_exact_beyond_2_to_the_24_and_in_every_group():
    n = 2**24 + 3
    x = torch.zeros((), device=DEVICE).expand(n)
    keep = torch.ones((), dtype=torch.bool, device=DEVICE).expand(n)
    assert torch.tensor(2.0**24) + 1 == 2**24  # the last count of an fp32 counter
    assert safeops.masked_count(x, keep) == n and safeops.masked_count(x) == n
    assert torch.equal(safeops.masked_count(x.expand(2, n), keep, 1), torch.tensor([n, n], device=DEVICE))
    # rms and var divide by the count: a rounded count would show.
    ones = torch.ones((), device=DEVICE, dtype=torch.float64).expand(n)
    assert safeops.masked_rms(ones, keep) == 1 and safeops.masked_var(ones, keep) == 0


@each_route
@pytest.mark.parametrize("columns", [1, 3, 8, 16, 64, 300, 1100])
@pytest.mark.parametrize("rows", [255, 256, 500, 1021, 5000])
def test_counters_of_a_byte_are_emptied_in_time(route, rows, columns):
    """Kernels count in bytes, which must be added up before 255 overflows: a mean of ones would show a lost count."""
    if rows * columns > 2**20:
        pytest.skip("more of the same")
    x = torch.ones(rows, columns, device=DEVICE)
    keep = x > 0
    for dim, laid, mask in ((0, x, keep), (1, x.t(), keep.t()), (1, x.t().contiguous(), keep.t().contiguous())):
        assert (on(route, "masked_count")(laid, mask, dim) == rows).all()
        for name, want in (("masked_sum", rows), ("masked_mean", 1), ("masked_rms", 1), ("masked_var", 0)):
            assert (on(route, name)(laid, mask, dim) == want).all(), (name, dim)
            assert (on(route, name)(laid, dim=dim, weight=x[0, 0]) == want).all(), (name, dim, "weighted")
        leaf = laid.detach().requires_grad_()
        ties = grad_of(on(route, "masked_amax")(leaf, mask, dim).sum(), leaf)
        assert (ties == torch.tensor(1 / rows)).all(), dim


@each_route
def test_counts(route):
    f = on(route, "masked_count")
    x = torch.zeros(2, 3, device=DEVICE, dtype=torch.int64)
    keep, weight = tensor([True, False, True], torch.bool), tensor([[0.0, 1.0, NAN], [2.0, -1.0, -0.0]])
    assert f(x) == 6 and f(x, keep) == 4 and f(x).dtype == torch.int64
    assert f(x, keep, 1).tolist() == [2, 2] and f(x, keep, 0, keepdim=True).tolist() == [[2, 0, 2]]
    assert f(x, weight=weight, dim=1).tolist() == [2, 2] and f(x, keep, weight=weight) == 2
    assert f(x[:0], keep) == 0 and f(x[:0], dim=0).tolist() == [0, 0, 0]
    y = torch.zeros(2, 3, device=DEVICE, requires_grad=True)
    assert not f(y, keep).requires_grad
    for dtype in (torch.int32, *DTYPES):
        counts = f(x, keep, 0, dtype=dtype)
        assert counts.dtype == dtype and counts.tolist() == [2, 0, 2]
    counts = f(x, keep, 0, dtype=torch.float32, empty="nan")
    assert counts[1].isnan() and counts[::2].tolist() == [2, 2]
    assert f(x, keep, 1, empty="raise").tolist() == [2, 2]
    with pytest.raises(ValueError, match="masked_count.*nothing is kept for 1 of 3 results"):
        f(x, keep, 0, empty="raise")


@each_route
def test_the_true_elements_of_a_mask_are_counted(route):
    f = on(route, "masked_count")
    m, keep = tensor([[True, False, True], [True, True, False]], torch.bool), tensor([True, False, True], torch.bool)
    assert f(m) == 4 and f(m, m) == 4 and f(m).dtype == torch.int64
    assert f(m, dim=0).tolist() == [2, 1, 1] and f(m, dim=-1, keepdim=True).tolist() == [[2], [2]]
    assert f(m.t(), dim=1).tolist() == [2, 1, 1] and f(m[:, :1].expand(2, 5), dim=1).tolist() == [5, 5]
    assert f(m[0, 0]) == 1 and f(m[:0]) == 0 and f(m[:, :0], dim=1).tolist() == [0, 0]
    assert f(m, keep) == 3 and f(m, keep, 1).tolist() == [2, 1] and f(m, keep[0]) == 4
    assert f(m, weight=tensor([0.0, 1.0, NAN])) == 2 and f(m, keep, weight=tensor([0.0, 1.0, NAN])) == 1
    assert f(m, dim=1, dtype=torch.float16).tolist() == [2, 2]
    assert f(m & ~m, empty="nan", dtype=torch.float32).isnan()
    with pytest.raises(ValueError, match="masked_count.*nothing is kept"):
        f(m & ~m, empty="raise")
    assert torch.ops.safeops.masked_count(m) == 4 and torch.ops.safeops.masked_count(m, keep, 1).tolist() == [2, 1]
