"""docs/language-models.md: each call of its tables runs, and is finite whatever lies where `keep` is False."""

import math
import re
from pathlib import Path

import pytest
import torch

import safeops

TEXT = (Path(__file__).parents[2] / "docs" / "language-models.md").read_text()
CALLS = re.findall(r"`((?:[\d.*]+ \* )?safeops\.\w+\(.*?\)[^`]*)`", TEXT)
LENGTH = torch.tensor([5, 2, 4, 1])  # tokens of four answers to two prompts


def operands(garbage):
    g = torch.Generator().manual_seed(0)

    def tokens(*shape):
        x = torch.randn(4, 5, *shape, generator=g)
        return torch.where(keep.reshape(4, 5, *(1 for _ in shape)), x, garbage)

    keep = torch.arange(5) < LENGTH[:, None]
    numbers = {name: -torch.rand(4, generator=g) - 0.1 for name in ("chosen", "rejected", "chosen_ref", "rejected_ref")}
    rows, head = torch.randn(4, 7, generator=g), torch.nn.Linear(8, 7)
    return {
        "keep": keep,
        **{name: tokens() for name in ("log_prob", "old", "reference", "advantage", "rewards", "values")},
        **numbers,
        **{"scores": torch.randn(4, generator=g), "answers": 4, "longest": 5, "margin": 0.5, "kl": torch.tensor(0.1)},
        **{"answer_rewards": torch.rand(4, generator=g), "prompts": torch.tensor([0, 0, 1, 1])},
        **{"chosen_reward": torch.rand(4, generator=g), "rejected_reward": torch.rand(4, generator=g)},
        **{"order": torch.tensor([2, 0, 3, 1]), "experts": 6, "router_logits": tokens(6)},
        **{"layers": [tokens(6), tokens(6)], "expert_index": torch.randint(6, (4, 5, 2), generator=g)},
        **{"student": tokens(7), "teacher": tokens(7), "best": tokens(7).log_softmax(-1).topk(3)},
        **{"logits": rows, "target": torch.tensor([0, 1, 2, 3]), "hidden": torch.randn(4, 8, generator=g)},
        **{"probable": (torch.arange(7) < 6).expand(4, 7), "head": head, "weight": head.weight},
    }


@pytest.mark.parametrize("call", CALLS)
def test_the_calls_run(call):
    torch.manual_seed(0)
    results = []
    for garbage in (0.0, torch.nan):
        result = eval(call, {"safeops": safeops, "torch": torch}, operands(garbage))
        results.append(result if isinstance(result, tuple) else (result,))
        assert all(x.isfinite().all() for x in results[-1] if x.is_floating_point()), call
        torch.manual_seed(0)
    assert "keep" not in call or all(map(torch.equal, *results))


def test_every_row_has_a_call():
    rows = [row for row in TEXT.splitlines() if row.startswith("| ") and not row.startswith(("| paper", "| what "))]
    assert len(rows) > 30 and all("safeops." in row.rsplit(" | ", 1)[1] for row in rows)


def test_the_names_of_papers_are_found():
    for name in (
        "PPO, GRPO, DAPO, Dr. GRPO, GSPO, CISPO, DPO, IPO, KTO, ORPO, SimPO, CPO, Bradley-Terry, Switch, GShard, "
        "DeepSeek-V3, z-loss, GKD"
    ).split(", "):
        assert re.search(rf"^\| .*{re.escape(name)}\b.* \| .* \| `", TEXT, re.MULTILINE), name


def far_apart():
    d, keep = torch.tensor([0.5, 95.0]), torch.tensor([True, False])
    ours = safeops.policy_loss(d, torch.zeros(2), torch.ones(2), mask=keep).loss
    return -(d.exp() * keep).sum(), ours, math.nan


def padded_answers():
    c, r = torch.tensor([-1.0, -torch.inf]), torch.tensor([-2.0, -3.0])
    keep = torch.tensor([True, False])
    theirs = -torch.nn.functional.logsigmoid((c - c) - (r - r)) * keep
    return theirs.sum(), safeops.preference_loss(c, r, c, r, mask=keep).loss, math.nan


def certain_answers():
    c, r = torch.tensor([-1.0]), torch.tensor([0.0])
    odds = (c - (1 - c.exp()).log()) - (r - (1 - r.exp()).log())
    masked = torch.nn.functional.logsigmoid(odds) * torch.tensor([False])
    ours = safeops.preference_loss(c, r, objective="orpo", mask=torch.tensor([False])).loss
    return masked.sum(), ours, math.nan


def scores_far_apart():
    s = torch.tensor([200.0, -200.0])
    theirs = (s.exp().flip(0).cumsum(0).flip(0).log() - s).sum()
    return theirs, safeops.plackett_luce_loss(s[None], torch.tensor([[0, 1]])), math.nan


def padded_logits():
    x, keep = torch.tensor([[1.0, 0.0], [torch.nan, 0.0]]), torch.tensor([True, False])
    p = x.softmax(-1) * keep[:, None]
    return p.sum(), safeops.load_balancing_loss(x, top_k=1, mask=keep), math.nan


def equal_rewards():
    r = torch.full((3,), 0.9)
    return ((r - r.mean()) / r.std(correction=0)).abs().max(), safeops.group_advantages(r, 3).abs().max(), 1


def softmax_twice():
    x = torch.tensor([[8.0, *[0.0] * 7]]).expand(4, 8)  # all tokens to one expert of eight: the loss is near 8
    twice = safeops.load_balancing_loss(x.softmax(-1), top_k=1)
    return (twice > 2.5).float(), 8 - safeops.load_balancing_loss(x.softmax(-1), top_k=1, scores="probabilities"), 0


@pytest.mark.parametrize("symptom, pattern", [
    ("NaN of a policy's loss", far_apart), ("NaN of a preference loss", padded_answers),
    ("NaN of a preference loss", certain_answers), ("NaN or inf of a ranking loss", scores_far_apart),
    ("NaN of a router's balance loss", padded_logits), ("advantages of 1 where", equal_rewards),
    ("a router's balance loss is near 1", softmax_twice),
])  # fmt: skip
def test_the_symptoms(symptom, pattern):
    """The pattern that docs/symptoms.md names must give what it says there, and our function a right number."""
    assert f"\n| {symptom}" in (Path(__file__).parents[2] / "docs" / "symptoms.md").read_text()
    theirs, ours, value = pattern()
    assert torch.allclose(theirs, torch.tensor(float(value)), equal_nan=True), theirs
    assert ours.isfinite() and ours < 2, ours
