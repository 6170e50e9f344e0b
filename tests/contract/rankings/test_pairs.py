"""preference_loss and reward_ranking_loss: the papers' numbers, unpaired answers, what is logged, trl's losses."""

import math
import types

import pytest
import torch
import torch.nn.functional as F

import safeops
from safeops.core.op import registry
from safeops.testing.compare import assert_close
from tests.contract.common import DEVICE, case, flags
from tests.ops.operands import data, mask
from tests.ops.rankings.pairs import log_probs, preference_loss

OF_REFERENCE, WITHOUT = ("dpo", "ipo", "kto"), ("orpo", "simpo", "cpo")
OBJECTIVES = (*OF_REFERENCE, *WITHOUT)


def answers(objective, *shape, seed=1):
    return [x.to(DEVICE) for x in log_probs(4 if objective in OF_REFERENCE else 2, *shape, seed=seed)]


def grads_of(value, leaves):
    return torch.autograd.grad(value, leaves)


def sigmoid(z):
    return 1 / (1 + math.exp(-z))


PAPERS = {  # of one pair, with beta = 0.5
    "dpo": lambda c, r, cr, rr: -math.log(sigmoid(0.5 * math.log(math.exp(c - cr) / math.exp(r - rr)))),
    "ipo": lambda c, r, cr, rr: (math.log(math.exp(c) * math.exp(rr) / (math.exp(r) * math.exp(cr))) - 1 / 1.0) ** 2,
    "orpo": lambda c, r: 0.5 * math.log(1 + (math.exp(r) / (1 - math.exp(r))) / (math.exp(c) / (1 - math.exp(c)))),
    "simpo": lambda c, r: -math.log(sigmoid(0.5 * c - 0.5 * r)),
    "cpo": lambda c, r: -math.log(math.exp(0.5 * c) / (math.exp(0.5 * c) + math.exp(0.5 * r))),
}


@pytest.mark.parametrize("objective", PAPERS)
def test_the_papers_formulas(objective):
    operands = answers(objective, 7)
    got = safeops.preference_loss(*operands, objective=objective, beta=0.5, reduction="none").loss
    want = [PAPERS[objective](*pair) for pair in zip(*(x.tolist() for x in operands))]
    torch.testing.assert_close(got.cpu(), torch.tensor(want, dtype=torch.float64))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_rewards_and_accuracy_are_those_of_the_kept(objective):
    """Rewards and accuracy must be detached, of the compute dtype, right, and untouched by what the mask drops."""
    shape = (2, 3, 5) if objective == "kto" else (3, 5)
    operands, keep = answers(objective, 3, 5), mask(*shape).to(DEVICE)
    want = preference_loss(*operands, objective=objective, mask=keep)
    for dtype in (torch.float16, torch.float32, torch.float64):
        cast = [x.to(dtype) for x in operands]
        exact = preference_loss(*(x.double() for x in cast), objective=objective, mask=keep)
        for garbage in (1.0, math.nan, -math.inf):
            keeps = (*keep, *keep) if objective == "kto" else (keep,) * 4
            leaves = [torch.where(k, x, garbage).requires_grad_() for k, x in zip(keeps, cast)]
            with case(dtype, garbage):
                result = safeops.preference_loss(*leaves, objective=objective, mask=keep)
                assert not any(x.requires_grad for x in result[1:])
                for name, got, truth in zip(result._fields, result, exact):
                    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
                    assert_close(name, got, truth.double(), scale=4.0)
                for k, grad in zip(keeps, torch.autograd.grad(result.loss, leaves)):
                    assert (grad[~k] == 0).all() and (grad[k] != 0).all()
    assert 0 < want[-1] < 1


def test_unpaired_answers():
    """A batch of answers with a bool label: the same losses as of the two kinds apart, with the paper's weights."""
    x, ref = (data(6, seed=i, low=-5.0, high=-1.0).to(DEVICE) for i in range(2))
    label, kl = flags(True, False, False, True, True, False), data(low=0.1).to(DEVICE)
    kinds = torch.tensor([[1.0], [1.5]], device=DEVICE)
    both = torch.stack((label, ~label))
    got = safeops.preference_loss(
        x, x, ref, ref, objective="kto", reference_point=kl, mask=both, weight=kinds, reduction="sum"
    )
    z = 0.1 * (x - ref - kl)
    want = (1 - torch.sigmoid(z[label])).sum() + 1.5 * (1 - torch.sigmoid(-z[~label])).sum()
    torch.testing.assert_close(got.loss, want)
    torch.testing.assert_close(got.accuracy, ((z > 0) == label).double().mean())


def test_no_gradient_passes_the_reference_point():
    c, r, cr, rr = (x.requires_grad_() for x in answers("kto", 9, seed=4))
    ratio = torch.stack((c - cr, r - rr))
    z0 = ratio.mean().clamp(min=0).detach()
    want = torch.cat((1 - torch.sigmoid(0.1 * (ratio[0] - z0)), 1 - torch.sigmoid(0.1 * (z0 - ratio[1])))).mean()
    got = safeops.preference_loss(c, r, cr, rr, objective="kto").loss
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(grads_of(got, (c, r)), grads_of(want, (c, r)))
    below = safeops.preference_loss(
        c, r, cr, rr, objective="kto", reference_point=torch.tensor(-3.0, device=DEVICE)
    ).loss
    zero = safeops.preference_loss(c, r, cr, rr, objective="kto", reference_point=torch.tensor(0.0, device=DEVICE)).loss
    assert torch.equal(below, zero)  # the estimate of a KL divergence may be negative, the point may not


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_batch_that_is_cut_has_the_gradients_of_the_whole(objective):
    """With `denominator`, for kto also `reference_point`, the sum of parts must be the mean of the whole (trl#5619)."""
    operands, keep = [x.requires_grad_() for x in answers(objective, 8)], mask(8).to(DEVICE)
    options = {"objective": objective} | (
        {"reference_point": torch.tensor(0.25, device=DEVICE)} if objective == "kto" else {}
    )
    whole = safeops.preference_loss(*operands, mask=keep, **options).loss
    count = keep.sum() * (2 if objective == "kto" else 1)
    parts = [
        safeops.preference_loss(*(x[i : i + 2] for x in operands), mask=keep[i : i + 2], denominator=count, **options)
        for i in range(0, 8, 2)
    ]
    total = sum(part.loss for part in parts)
    torch.testing.assert_close(total, whole)
    torch.testing.assert_close(grads_of(total, operands), grads_of(whole, operands))


def test_odds_near_one_and_near_zero():
    """Where p is nearly 1 or 0, fp32 must have the slope 1 / (1 - p) of the log odds: 1 - e^c alone has no digits."""
    c = torch.tensor([-1e-6, -3e-4, -1.0, -90.0], device=DEVICE, requires_grad=True)
    r = torch.full_like(c, -0.5)
    wide = c.detach().double().requires_grad_()
    want = safeops.preference_loss(wide, r.double(), objective="orpo", reduction="sum").loss
    odds = (wide - torch.log(-torch.expm1(wide))) - (r.double() - torch.log(-torch.expm1(r.double())))
    torch.testing.assert_close(want, -0.1 * F.logsigmoid(odds).sum())
    got = safeops.preference_loss(c, r, objective="orpo", reduction="sum").loss
    torch.testing.assert_close(grads_of(got, c)[0].double(), grads_of(want, wide)[0], rtol=1e-5, atol=0)


def test_one_tensor_of_margins():
    """Margins of a reward model's pairs: one for each, also where the pair is masked out and its margin is NaN."""
    c, r = (data(4, seed=i).to(DEVICE).requires_grad_() for i in range(2))
    margin = torch.tensor([0.5, math.nan, 1.0, 0.0], dtype=torch.float64, device=DEVICE, requires_grad=True)
    keep = flags(True, False, True, True)
    got = safeops.reward_ranking_loss(c, r, margin=margin, mask=keep, center=0.25)
    want = (-F.logsigmoid(c - r - margin) + 0.25 * (c + r) ** 2)[keep].mean()
    torch.testing.assert_close(got, want)
    for a, b in zip(grads_of(got, (c, r, margin)), grads_of(want, (c, r, margin))):
        torch.testing.assert_close(a[keep], b[keep])
        assert (a[~keep] == 0).all()
    other = safeops.preference_loss(c, r, objective="cpo", beta=1.0, margin=margin, mask=keep).loss
    torch.testing.assert_close(other, -F.logsigmoid(c - r - margin)[keep].mean())


def test_the_kernels_that_compute_them(monkeypatch):
    """The losses must be computed by the ops of the records' parts."""
    calls = []
    for part in {*registry["preference_loss"].parts, *registry["reward_ranking_loss"].parts}:
        call = part.call
        monkeypatch.setattr(part, "call", lambda *a, part=part, call=call: calls.append(part.name) or call(*a))
    x = answers("dpo", 4)
    safeops.preference_loss(*x)
    assert calls == ["binary_cross_entropy_with_logits", "masked_mean", "masked_mean"]
    calls.clear()
    safeops.preference_loss(*x[:2], objective="orpo")
    assert calls[:3] == ["log1mexp", "log1mexp", "binary_cross_entropy_with_logits"]
    calls.clear()
    safeops.reward_ranking_loss(*x[:2], reduction="sum")
    assert calls == ["binary_cross_entropy_with_logits", "masked_sum"]


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["dpo", "kto", "orpo", "ipo"])
def test_it_compiles_whole(objective):
    """Each kind of objective must be one graph, for any number of pairs."""

    def loss(*operands, mask):
        return safeops.preference_loss(*operands, objective=objective, mask=mask)

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (4, 7):
        operands, keep = [x.float().requires_grad_() for x in answers(objective, n)], mask(n).to(DEVICE)
        got, want = compiled(*operands, mask=keep), loss(*operands, mask=keep)
        torch.testing.assert_close(tuple(got), tuple(want))
        torch.testing.assert_close(grads_of(got.loss, operands), grads_of(want.loss, operands))


# ---- trl


def trl(path):
    module, _, name = path.rpartition(".")
    return getattr(pytest.importorskip(module), name)


HERE = types.SimpleNamespace(device=torch.device(DEVICE))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loss_type, objective", [("sigmoid", "cpo"), ("simpo", "simpo"), ("ipo", None)])
def test_trl_cpo(loss_type, objective):
    c, r = answers("cpo", 9)
    trainer = types.SimpleNamespace(
        alpha=0.0, beta=0.5, simpo_gamma=0.75, label_smoothing=0.125, loss_type=loss_type, accelerator=HERE
    )
    want, *rewards = trl("trl.experimental.cpo.cpo_trainer.CPOTrainer").cpo_loss(trainer, c, r)
    options = {"label_smoothing": 0.125, "margin": 0.75 if objective == "simpo" else 0.0}
    if objective is None:  # ipo, with a reference that gives all answers one probability
        zero = torch.zeros_like(c)
        got = safeops.preference_loss(c, r, zero, zero, objective="ipo", beta=0.5, reduction="none")
    else:
        got = safeops.preference_loss(c, r, objective=objective, beta=0.5, reduction="none", **options)
    torch.testing.assert_close([*got[:3]], [want, *rewards])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trl_orpo():
    c, r = (x.float() for x in answers("orpo", 9))
    trainer = types.SimpleNamespace(beta=0.25, accelerator=HERE)
    want, *rewards, _, _ = trl("trl.experimental.orpo.orpo_trainer.ORPOTrainer").odds_ratio_loss(trainer, c, r)
    got = safeops.preference_loss(c, r, objective="orpo", beta=0.25, reduction="none")
    torch.testing.assert_close([*got[:3]], [-want, *rewards])  # trl's is the term that it subtracts
