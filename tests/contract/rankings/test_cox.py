"""cox_loss: loops over the events with many ties, published values, weights, batches without events."""

import math

import pytest
import torch

import safeops
from tests.contract.common import DEVICE, case, flags, grad_of, leaf, t
from tests.ops.operands import data, mask, weights

N = 40


def loops(risk, time, event, ties, weight=None):
    """Returns the sum over the events, one after the other, in fp64."""
    weight = [1.0] * len(risk) if weight is None else weight.tolist()
    time, total = time.tolist(), risk.new_zeros(())
    for moment in {time[i] for i in range(len(time)) if event[i]}:
        tied = [i for i in range(len(time)) if event[i] and time[i] == moment]
        at_risk = sum(weight[j] * risk[j].exp() for j in range(len(time)) if time[j] >= moment)
        dying, d = sum(weight[j] * risk[j].exp() for j in tied), len(tied)
        mean = sum(weight[j] for j in tied) / d
        for rank, i in enumerate(tied):
            if ties == "efron":
                total = total + mean * (at_risk - rank / d * dying).log() - weight[i] * risk[i]
            else:
                total = total + weight[i] * (at_risk.log() - risk[i])
    return total


def cohort(seed=1):
    """Returns risks, times of 6 values alone, events."""
    time = data(N, seed=seed + 1, low=0.0, high=6.0).long().to(DEVICE)
    return data(N, seed=seed).to(DEVICE).requires_grad_(), time, (data(N, seed=seed + 2) > -1).to(DEVICE)


@pytest.mark.parametrize("ties", ["breslow", "efron"])
def test_loops_over_the_events(ties):
    risk, time, event = cohort()
    keep, weight = mask(N).to(DEVICE), weights(N).to(DEVICE)
    for mask_, w in ((None, None), (keep, None), (keep, weight)):
        kept = keep if mask_ is not None else torch.ones_like(keep)
        of_kept = None if w is None else w[kept]
        want = loops(risk[kept], time[kept], event[kept], ties, of_kept)
        want = want / (event[kept].sum() if w is None else (w * event)[kept].sum())
        slopes = grad_of(want, risk)
        for dtype in (time.dtype, torch.float16, torch.float32):
            with case(dtype, w is not None):
                options = {"ties": ties, "mask": mask_, "weight": w}
                got = safeops.cox_loss(risk, time.to(dtype), event, **options)
                torch.testing.assert_close(got, want)
                torch.testing.assert_close(grad_of(got, risk), slopes)
                each = safeops.cox_loss(risk, time.to(dtype), event.to(dtype), reduction="none", **options)
                divisor = (event & kept).sum() if w is None else w[event & kept].sum()
                torch.testing.assert_close(each.sum() / divisor, want)
                assert (each[~(event & kept)] == 0).all()


def test_published_values():
    """The first test data of R's survival: sums over those at risk by hand, with x = 1 for three of six subjects."""
    x, time = t(1.0, 1, 1, 0, 0, 0), t(1.0, 1, 6, 6, 8, 9)
    event = flags(True, False, True, True, False, True)
    for b in (0.0, 0.5, -2.0):
        r, first = math.exp(b), 2 * b - math.log(3 * math.exp(b) + 3)
        want = {"breslow": first - 2 * math.log(r + 3), "efron": first - math.log(r + 3) - math.log((r + 5) / 2)}
        for ties, value in want.items():
            got = safeops.cox_loss(b * x, time, event, ties=ties, reduction="sum")
            assert math.isclose(got.item(), -value, rel_tol=1e-6)


@pytest.mark.parametrize("ties", ["breslow", "efron"])
def test_a_weight_of_two_is_two_subjects(ties):
    """With Breslow's ties a subject of weight 2 must count as two; with Efron's, where it has no tied event."""
    risk, time, event = cohort()
    if ties == "efron":
        time = torch.arange(N, device=DEVICE)
        event = event & (time % 3 > 0)
    double = torch.where(event, 1, 1 + time % 3) if ties == "efron" else 1 + torch.arange(N, device=DEVICE) % 3
    got = safeops.cox_loss(risk, time, event, weight=double.double(), ties=ties)
    repeated = (x.repeat_interleave(double, 0) for x in (risk, time, event))
    want = safeops.cox_loss(*repeated, ties=ties)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(grad_of(got, risk), grad_of(want, risk))


@pytest.mark.parametrize("ties", ["breslow", "efron"])
def test_a_batch_without_an_event(ties):
    risk = leaf([0.5, math.nan, -1.0], torch.float16)
    time, keep = t(1.0, math.nan, 1.0), flags(True, False, True)
    for event in (t(0, 1, 0), flags(False, True, False)):
        loss = safeops.cox_loss(risk, time, event, ties=ties, mask=keep)
        assert loss == 0 and (grad_of(loss, risk) == 0).all()
        assert safeops.cox_loss(risk, time, event, ties=ties, mask=keep, empty="nan").isnan()
    for n in (0, 1):
        x = torch.ones(n, device=DEVICE, requires_grad=True)
        loss = safeops.cox_loss(x, x.detach(), x.detach(), ties=ties)
        assert loss == 0 and (grad_of(loss, x) == 0).all()


@pytest.mark.parametrize("ties", ["breslow", "efron"])
def test_risks_far_apart(ties):
    """Hazards whose exponentials over- and underflow in fp32 must have the loss and gradient of fp64."""
    risk, time, event = cohort()
    wide = (risk.detach() * 300).requires_grad_()
    narrow = wide.detach().float().requires_grad_()
    got = safeops.cox_loss(narrow, time, event, ties=ties)
    want = safeops.cox_loss(wide, time, event, ties=ties)
    assert got.isfinite()
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=0)
    torch.testing.assert_close(grad_of(got, narrow).double(), grad_of(want, wide), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("ties", ["breslow", "efron"])
def test_it_compiles_whole(ties):
    def loss(risk, time, event):
        return safeops.cox_loss(risk, time, event, ties=ties)

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (7, N):
        risk, time, event = (x[:n] for x in cohort())
        results = compiled(risk, time, event), loss(risk, time, event)
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*(grad_of(r, risk) for r in results))
