"""plackett_luce_loss: the model's probabilities, scores far apart, lists of several lengths; the scan's derivatives."""

import itertools
import math

import pytest
import torch

import safeops
from safeops.ops.rankings._scan import log_cumsum_exp
from tests.contract.common import DEVICE, case, flags, grad_of, leaf, t
from tests.ops.operands import data
from tests.ops.rankings.plackett_luce import plackett_luce_loss, rankings

NAME = "plackett_luce_loss"


def test_probabilities_of_all_rankings_sum_to_one():
    scores = data(4).to(DEVICE)
    every = torch.tensor(list(itertools.permutations(range(4))), device=DEVICE)
    losses = safeops.plackett_luce_loss(scores.expand(24, 4), every, reduction="none")
    torch.testing.assert_close((-losses).exp().sum().item(), 1.0)
    best = scores.argsort(descending=True)
    assert torch.equal(every[losses.argmin()], best)


def test_two_items_are_a_pair():
    c, r = (data(6, seed=i).to(DEVICE) for i in range(2))
    got = safeops.plackett_luce_loss(torch.stack((c, r), -1), torch.tensor([0, 1], device=DEVICE).expand(6, 2))
    torch.testing.assert_close(got, safeops.reward_ranking_loss(c, r))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_scores_far_apart(dtype):
    """Scores whose exponentials under- and overflow must have the loss and gradient of fp64."""
    scores = leaf([[-9000.0, 0.0, 9000.0, 1.0, 8999.0], [0.0, 1e-4, -1e-4, 90.0, -90.0]], dtype)
    ranking = torch.tensor([[2, 4, 0, 3, 1], [0, 1, 2, 3, 4]], device=DEVICE)
    wide = scores.detach().double().requires_grad_()
    got = safeops.plackett_luce_loss(scores, ranking, reduction="none")
    want = plackett_luce_loss(wide, ranking, reduction="none")
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)
    grads = grad_of(got.sum(), scores).double(), grad_of(want.sum(), wide)
    torch.testing.assert_close(*grads, rtol=1e-3 if dtype == torch.float16 else 1e-6, atol=1e-6)


def test_lists_of_several_lengths():
    """-1 for no item and a mask of items must both give the loss of the shorter list, with garbage in the rest."""
    x = t(0.5, -1.0, 2.0)
    want = safeops.plackett_luce_loss(x, torch.tensor([2, 0, 1], device=DEVICE))
    longer = torch.tensor([0.5, math.nan, -1.0, 2.0, math.inf], device=DEVICE, requires_grad=True)
    keep, no = flags(True, False, True, True, False), torch.tensor([3, -1, 0, 2, -1], device=DEVICE)
    for ranking, mask in ((no, keep), (torch.tensor([4, 3, 0, 1, 2], device=DEVICE), keep), (no.int(), keep)):
        got = safeops.plackett_luce_loss(longer, ranking, mask=mask)
        torch.testing.assert_close(got, want)
        assert (grad_of(got, longer)[~keep] == 0).all()
    finite = t(0.5, 7.0, -1.0, 2.0, 8.0)
    torch.testing.assert_close(safeops.plackett_luce_loss(finite, no), want)


def test_a_row_without_items_has_no_loss():
    x, ranking = data(3, 4).to(DEVICE).requires_grad_(), rankings(3, 4).to(DEVICE)
    keep = flags(True, False, True).unsqueeze(-1)
    got = safeops.plackett_luce_loss(x, torch.where(keep, ranking, 99), mask=keep)
    torch.testing.assert_close(got, safeops.plackett_luce_loss(x[[0, 2]], ranking[[0, 2]]))
    for shape in ((0, 4), (3, 0), (0,)):
        nothing = torch.zeros(shape, device=DEVICE, requires_grad=True)
        loss = safeops.plackett_luce_loss(nothing, nothing.long())
        assert loss == 0 and grad_of(loss, nothing).shape == shape


def test_one_item_is_certain():
    x = leaf([[1e4], [-3.0]])
    loss = safeops.plackett_luce_loss(x, torch.zeros(2, 1, dtype=torch.uint8, device=DEVICE))
    assert loss == 0 and (grad_of(loss, x) == 0).all()


# ---- the scan


def by_matrix(x):
    """Returns the running logsumexp, from n^2 terms."""
    n = x.shape[-1]
    before = torch.ones(n, n, dtype=torch.bool, device=x.device).tril()
    return torch.where(before, x.unsqueeze(-2), -torch.inf).logsumexp(-1)


def test_derivatives_of_the_scan():
    """First and second derivatives, with upstream gradients of 0, of both signs, and by all of torch.func."""
    x, w = data(2, 6).to(DEVICE), torch.tensor([1.0, 0, 2, -1, 0, 3], dtype=torch.float64, device=DEVICE)
    leaves = x.requires_grad_(), w.requires_grad_()
    checks = {"check_fwd_over_rev": True, "check_rev_over_rev": True}
    assert torch.autograd.gradcheck(lambda x, w: log_cumsum_exp(x) * w, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda x, w: (log_cumsum_exp(x) * w).sum(), leaves, **checks)
    f, g = ((lambda x, scan=scan: (scan(x) * w).sum()) for scan in (log_cumsum_exp, by_matrix))
    for outer, inner in itertools.product((torch.func.jacrev, torch.func.jacfwd), repeat=2):
        with case(outer.__name__, inner.__name__):
            torch.testing.assert_close(outer(inner(f))(x), outer(inner(g))(x))


def test_the_scan_of_minus_infinity():
    """An element of -inf has gradient 0, also at the beginning, where torch.logcumsumexp has NaN."""
    x = leaf([-math.inf, -math.inf, 0.0, -math.inf, 1.0], torch.float64)
    y = log_cumsum_exp(x)
    assert torch.equal(y, x.logcumsumexp(-1))
    (dx,) = torch.autograd.grad(y[2:].sum(), x, create_graph=True)
    p = math.e / (1 + math.e)
    torch.testing.assert_close(dx, t(0.0, 0.0, 3 - p, 0.0, p, dtype=torch.float64))
    assert torch.autograd.grad(dx.square().sum(), x)[0].isfinite().all()


@pytest.mark.slow
def test_it_compiles_whole():
    compiled = torch.compile(safeops.plackett_luce_loss, backend="aot_eager", fullgraph=True, dynamic=True)
    for n, k in ((3, 4), (5, 7)):
        x, ranking = data(n, k).float().to(DEVICE).requires_grad_(), rankings(n, k).to(DEVICE)
        keep = data(n, k, seed=5).to(DEVICE) > -1
        results = [f(x, ranking, mask=keep) for f in (compiled, safeops.plackett_luce_loss)]
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*(grad_of(y, x) for y in results))
