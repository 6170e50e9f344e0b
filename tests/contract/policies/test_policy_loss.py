"""policy_loss: each paper's formula, how a batch is cut, what is logged, ratios beyond exp's range, trl's losses."""

import types
from unittest import mock

import pytest
import torch

import safeops
from tests.contract.common import DEVICE
from tests.contract.policies.close import assert_close
from tests.ops.operands import data

LENGTHS = 7, 1, 4, 0  # the last sequence keeps nothing
MASK = (torch.arange(7) < torch.tensor(LENGTHS)[:, None]).to(DEVICE)
OPTIONS = {
    "PPO": {"clip": 0.2},
    "PPO, dual clip": {"clip": 0.2, "dual_clip": 3.0},
    "GRPO": {"clip": 0.2, "beta": 0.04, "reduction": "sequence_mean"},
    "DAPO": {},
    "Dr. GRPO": {"clip": 0.2, "denominator": 4 * 16.0},
    "GSPO": {"clip": (0.3, 0.4), "level": "sequence", "reduction": "sequence_mean"},
    "CISPO": {"clip": (1.0, 0.5), "objective": "cispo"},
}
each_method = pytest.mark.parametrize("method", OPTIONS)


def operands(dtype=torch.float64):
    """Returns (log_prob, old_log_prob, reference, advantage), with garbage where nothing is kept."""
    x, old, reference = (-data(4, 7, seed=seed, low=0.0, high=1.5).to(DEVICE) for seed in range(3))
    garbage = torch.tensor([torch.nan, torch.inf, -torch.inf, 95.0], device=DEVICE).repeat(7)[:28].view(4, 7)
    x, old, reference = (torch.where(MASK, t, garbage).to(dtype) for t in (x, old, reference))
    return x.requires_grad_(), old, reference, torch.tensor([1.5, -0.5, -2.0, torch.nan], dtype=dtype, device=DEVICE)


def formula(method, x, old, reference, advantage):
    """Computes a paper's objective, token by token, and returns it negated."""
    answers, total, count = [], 0, sum(LENGTHS)
    for i, length in enumerate(LENGTHS):
        tokens, a = [], advantage[i]
        s = ((x - old)[i, :length].sum() / max(length, 1)).exp()
        for t in range(length):
            r = (x[i, t] - old[i, t]).exp()
            if method in ("PPO", "PPO, dual clip", "Dr. GRPO", "GRPO"):
                one = torch.minimum(r * a, r.clamp(0.8, 1.2) * a)
                one = torch.maximum(one, 3 * a) if method == "PPO, dual clip" and a < 0 else one
                d = reference[i, t] - x[i, t]
                tokens.append(one - 0.04 * (d.exp() - d - 1) if method == "GRPO" else one)
            elif method == "DAPO":
                tokens.append(torch.minimum(r * a, r.clamp(0.8, 1.28) * a))
            elif method == "GSPO":
                tokens.append(torch.minimum(s * a, s.clamp(0.7, 1.4) * a))
            else:
                tokens.append(r.clamp(max=1.5).detach() * a * x[i, t])
        total = total + sum(tokens)
        answers += [sum(tokens) / length] if length else []
    if method in ("GRPO", "GSPO"):
        return -sum(answers) / len(answers)
    return -total / (64 if method == "Dr. GRPO" else count)


def options_of(method, reference):
    options = OPTIONS[method]
    return options | ({"reference_log_prob": reference} if "beta" in options else {})


@each_method
def test_is_the_papers_formula(method):
    x, old, reference, advantage = operands()
    got = safeops.policy_loss(x, old, advantage, mask=MASK, **options_of(method, reference))
    want = formula(method, x, old, reference, advantage)
    assert_close(got.loss, want)
    grad, wanted = torch.autograd.grad(got.loss, x)[0], torch.autograd.grad(want, x)[0]
    assert_close(grad, torch.where(MASK, wanted, 0))
    assert not grad[~MASK].any() and not any(t.requires_grad for t in got[1:])


@each_method
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_is_computed_in_fp32(method, dtype):
    x, old, reference, advantage = operands(dtype)
    got = safeops.policy_loss(x, old, advantage, mask=MASK, **options_of(method, reference)).loss
    wide = [t.detach().double() for t in (x, old, reference, advantage)]
    wide[0].requires_grad_()
    want = formula(method, *wide)
    assert got.dtype == torch.float32 and x.grad is None
    assert_close(got, want, rtol=1e-5)
    grad, wanted = torch.autograd.grad(got, x)[0], torch.autograd.grad(want, wide[0])[0]
    assert_close(grad.double(), torch.where(MASK, wanted, 0), rtol=4 * torch.finfo(dtype).eps, atol=1e-6)


@each_method
def test_packed_sequences_are_the_padded_ones(method):
    x, old, reference, advantage = operands()
    packed = [t[MASK] for t in (x, old, reference)]
    bounds = torch.tensor([0, 7, 8, 12, 12], device=DEVICE)
    options = options_of(method, packed[2])
    got = safeops.policy_loss(packed[0], packed[1], advantage, cu_seqlens=bounds, **options)
    want = safeops.policy_loss(x, old, advantage, mask=MASK, **options_of(method, reference))
    for a, b in zip(got, want):
        assert_close(a, b)
    assert_close(torch.autograd.grad(got.loss, x)[0], torch.autograd.grad(want.loss, x)[0])


@each_method
def test_any_split_has_the_same_gradient(method):
    """Parts must add up to the whole, whatever each of them keeps, in fp32 to 1e-6."""
    x, old, reference, advantage = operands(torch.float32)
    options = options_of(method, reference)
    whole = 64.0 if method == "Dr. GRPO" else 3.0 if "reduction" in options else float(sum(LENGTHS))
    want = safeops.policy_loss(x, old, advantage, mask=MASK, **options).loss
    (wanted,) = torch.autograd.grad(want, x)
    for rows in ([0, 1, 2, 3], [3, 1], [2, 3]):
        parts = [i for i in range(4) if i not in rows], rows
        losses = []
        for part in filter(len, parts):
            cut = options | ({"reference_log_prob": reference[part]} if "beta" in options else {})
            cut["denominator"] = torch.tensor(whole, device=DEVICE)
            losses.append(safeops.policy_loss(x[part], old[part], advantage[part], mask=MASK[part], **cut).loss)
        assert_close(sum(losses), want, rtol=1e-6)
        assert_close(torch.autograd.grad(sum(losses), x)[0], wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_ratio_beyond_exp_saturates(dtype):
    """One token's log-probabilities differ by 200. Each sign of the advantage must leave all other tokens alone."""
    old = torch.tensor([[-201.0, -1.0], [-201.0, -1.0], [0.0, -1.0]], dtype=dtype, device=DEVICE)
    x = torch.tensor([[-1.0, -0.875], [-1.0, -0.875], [-201.0, -0.875]], dtype=dtype, device=DEVICE, requires_grad=True)
    advantage = torch.tensor([2.0, -2.0, 2.0], dtype=dtype, device=DEVICE)
    got = safeops.policy_loss(x, old, advantage, reduction="none", reference_log_prob=old)
    (grad,) = torch.autograd.grad(got.loss, x, torch.ones_like(got.loss))
    assert got.loss.isfinite().all() and got.clip_fraction.isfinite() and not grad[:, 0].any()
    assert_close(grad[:, 1], -advantage * torch.tensor(0.125).exp(), rtol=2e-3 if dtype != torch.bfloat16 else 8e-3)
    bounded = safeops.policy_loss(x, old, advantage, dual_clip=3.0)
    assert bounded.loss.isfinite() and torch.autograd.grad(bounded.loss, x)[0].isfinite().all()
    masked = safeops.policy_loss(x, old, advantage, mask=torch.arange(2, device=DEVICE) == 1, reduction="sequence_mean")
    assert masked.loss.isfinite() and masked.mean_ratio < 1.2


def test_what_is_logged():
    x, old = (torch.tensor(t, device=DEVICE).log() for t in ([[0.5, 0.2, 0.3, 0.4]], [[0.25, 0.2, 0.6, 0.4]]))
    got = safeops.policy_loss(x, old, torch.tensor([1.0]), clip=0.2, reference_log_prob=old, kl="k1")
    assert_close(got.clip_fraction, torch.tensor(0.25), rtol=1e-6)  # of r = 2 alone: 0.5 loses nothing where A > 0
    assert_close(got.mean_ratio, torch.tensor((2 + 1 + 0.5 + 1) / 4), rtol=1e-6)
    r = torch.tensor([2.0, 1.0, 0.5, 1.0])
    assert_close(got.old_kl, (r - 1 - r.log()).mean(), rtol=1e-6)
    assert_close(got.reference_kl, r.log().mean(), rtol=1e-6, atol=1e-7)
    assert safeops.policy_loss(x, old, -torch.ones(1), clip=0.2).clip_fraction == 0.25  # of 0.5
    assert safeops.policy_loss(x, old, torch.ones(1), clip=0.2, objective="cispo").clip_fraction == 0.5


def test_without_an_old_policy_it_is_the_policy_gradient():
    x, advantage = data(2, 3).requires_grad_(), data(2, seed=1)
    got = safeops.policy_loss(x, None, advantage)
    assert_close(torch.autograd.grad(got.loss, x)[0], -advantage[:, None].expand(2, 3) / 6)
    assert got.mean_ratio == 1 and got.clip_fraction == 0


def test_the_token_form_of_gspo():
    """Its value must be the sequence's, its gradient that of each token, with advantages of tokens."""
    x, old, a = data(2, 3).requires_grad_(), data(2, 3, seed=1), data(2, 3, seed=2)
    options = {"clip": (1.0, 1e9), "reduction": "sequence_mean"}
    ratio = (x - old).mean(1, keepdim=True).exp()
    got = safeops.policy_loss(x, old, a, level="sequence_token", **options).loss
    assert_close(got, -(ratio * a).mean())
    assert_close(torch.autograd.grad(got, x)[0], -(ratio * a).detach() / 6)
    same = a[:, :1].expand(2, 3)
    pair = [safeops.policy_loss(x, old, same, level=level, **options).loss for level in ("sequence", "sequence_token")]
    assert_close(*(torch.autograd.grad(loss, x)[0] for loss in pair))


def test_constants_take_no_gradient():
    leaves = [data(2, 3, seed=seed).requires_grad_() for seed in range(4)]
    x, old, a, reference = leaves
    loss = safeops.policy_loss(x, old, a, reference_log_prob=reference, beta=0.1).loss
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    assert [g is not None for g in grads] == [True, False, False, False]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["GRPO"])
def test_compiled_whole(method):
    torch._dynamo.reset()
    x, old, reference, advantage = operands()
    options = options_of(method, reference)
    compiled = torch.compile(safeops.policy_loss, fullgraph=True, backend="aot_eager")
    got, want = (f(x, old, advantage, mask=MASK, **options) for f in (compiled, safeops.policy_loss))
    assert_close(got.loss, want.loss)
    assert_close(torch.autograd.grad(got.loss, x)[0], torch.autograd.grad(want.loss, x)[0])


TRL = {
    "GRPO": {"loss_type": "grpo", "beta": 0.04},
    "DAPO": {"loss_type": "bnpo", "epsilon_high": 0.28},
    "Dr. GRPO": {"loss_type": "dr_grpo"},
    "PPO, dual clip": {"loss_type": "bnpo", "delta": 3.0},
    "GSPO": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.3, "epsilon_high": 0.4},
}


@pytest.mark.slow
@pytest.mark.parametrize("method", TRL)
def test_is_trls_loss(method):
    """GRPOTrainer._compute_loss of trl 1.16, run on a stand-in for its trainer."""
    trainer = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer
    x, old, reference, advantage = (torch.where(t.isfinite(), t, 0) for t in operands())
    x, old, reference = (torch.where(MASK, t, 0).detach().cpu() for t in (x, old, reference))
    x.requires_grad_()
    mask_, rows = MASK.cpu(), [0, 1, 2]  # trl counts a sequence that keeps nothing
    settings = {"beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2, "importance_sampling_level": "token",
                "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "use_vllm": False, "delta": None,
                "aux_loss_enabled": False, "_entropy_bonus_enabled": False, "current_gradient_accumulation_steps": 1,
                "max_completion_length": 64 / 3} | TRL[method]  # fmt: skip
    this = mock.MagicMock(**settings)
    this.args = types.SimpleNamespace(delta=settings["delta"], use_bias_correction_kl=False)
    this._get_per_token_logps_and_entropies.return_value = x[rows], torch.zeros(3, 7).double(), None
    this.accelerator.gather.side_effect = lambda t: t
    ids = torch.zeros(3, 7, dtype=torch.int64)
    inputs = {"prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": mask_[rows].double(),
              "advantages": advantage.cpu()[rows], "old_per_token_logps": old[rows],
              "ref_per_token_logps": reference[rows]}  # fmt: skip
    want = trainer._compute_loss(this, None, inputs)
    got = safeops.policy_loss(x[rows], old[rows], advantage.cpu()[rows], mask=mask_[rows],
                              **options_of(method, reference[rows]))  # fmt: skip
    assert_close(got.loss, want)
    assert_close(torch.autograd.grad(got.loss, x)[0], torch.autograd.grad(want, x)[0])
