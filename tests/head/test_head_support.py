"""support= of head_loss: a bool support, and a sampler's logits, are cut into chunks of rows as the hidden states."""

import pytest
import torch
from torch import nn

import safeops
from tests.head.test_head_loss import OF_LOGITS, C, D

ROWS = (30, 10)  # (300 rows: two chunks)
G = torch.Generator().manual_seed(0)
HIDDEN, SUPPORT = torch.randn(*ROWS, D, generator=G), torch.rand(*ROWS, C, generator=G) < 0.6
SUPPORT[..., 3] = True
SAMPLER = {"support": torch.where(SUPPORT, 1.0, -1.0), "support_threshold": torch.zeros(ROWS)}
MASK = torch.rand(ROWS, generator=G) < 0.8


def head():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, C), nn.Tanh())


def target_of(loss):
    if loss in ("cross_entropy", "token_log_probs"):
        return torch.randint(C, ROWS, generator=torch.Generator().manual_seed(1))
    return torch.randn(*ROWS, C, generator=torch.Generator().manual_seed(1))


def outcome(function, loss, module, hidden):
    """Returns (results, gradients of hidden and of the head's parameters)."""
    hidden = hidden.detach().requires_grad_()
    results = function(module, hidden)
    results = results if isinstance(results, tuple) else (results,)
    total = sum(((i + 1) * r).sum() for i, r in enumerate(results) if r.is_floating_point())
    return [r.detach() for r in results], torch.autograd.grad(total, [hidden, *module.parameters()])


@pytest.mark.parametrize("loss", OF_LOGITS)
@pytest.mark.parametrize("given", [{"support": SUPPORT}, SAMPLER], ids=["bool", "threshold"])
def test_as_of_all_logits(loss, given):
    options, target = {**given, "mask": MASK}, target_of(loss)
    if loss in ("cross_entropy", "token_log_probs"):
        options["outside"] = "mask"

    def whole(module, hidden):
        if loss == "cross_entropy":
            flat = {key: x if isinstance(x, str) else x.flatten(0, 1) for key, x in options.items()}
            return safeops.cross_entropy(module(hidden).flatten(0, 1), target.flatten(), **flat)
        return OF_LOGITS[loss](module(hidden), target, **options)

    want = outcome(whole, loss, head(), HIDDEN)
    got = outcome(lambda m, x: safeops.head_loss(m, x, target, loss=loss, **options), loss, head(), HIDDEN)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    if loss in ("cross_entropy", "token_log_probs"):
        assert 0 < got[0][-1] == want[0][-1]
    masked, module = HIDDEN.masked_fill(~MASK.unsqueeze(-1), torch.nan), head()
    again = outcome(lambda m, x: safeops.head_loss(m, x, target, loss=loss, **options), loss, module, masked)
    torch.testing.assert_close(again, got, rtol=1e-5, atol=1e-6)


OFFSETS = torch.arange(301)


@pytest.mark.parametrize(
    "loss, options, error, words",
    [
        ("cross_entropy", {"support": (OFFSETS, OFFSETS[1:])}, ValueError, "support in CSR form is for a plain"),
        ("kl_div", {"support": SUPPORT[0]}, ValueError, r"support \(10, 24\) must have the rows.*hidden \(30, 10, 8\)"),
        ("tv", {"support": SUPPORT[..., :5]}, ValueError, r"support .*must have the 24 classes.*\(30, 10, 24\)"),
        ("tv", {"support": SAMPLER["support"]}, TypeError, "support must be bool.*torch.float32"),
        ("js_div", {"support_threshold": torch.zeros(ROWS)}, TypeError, "support_threshold needs support"),
        ("cross_entropy", {"outside": "mask"}, TypeError, "outside='mask' needs support"),
        ("token_log_probs", {"support": SUPPORT, "outside": "drop"}, ValueError, "outside must be one of '-inf', 'm"),
        ("token_log_probs", {"support": SUPPORT, "with_argmax": True}, TypeError, "with_argmax does not go with"),
        ("cross_entropy", {"support": SUPPORT, "label_smoothing": 1}, ValueError, "label_smoothing must be below 1"),
        ("cross_entropy", {"support": SUPPORT & False}, ValueError, "support of row 0 has no class"),
    ],
    ids=lambda x: None,
)  # fmt: skip
def test_bad_calls(loss, options, error, words):
    with pytest.raises(error, match=f"^head_loss: {words}"):
        safeops.head_loss(head(), HIDDEN, target_of(loss), loss=loss, **options)
