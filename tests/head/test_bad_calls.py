"""head_loss and HeadLoss: heads and arguments that are refused, by name; and the module."""

import copy
import pickle
import re

import pytest
import torch
from torch import nn

import safeops
from safeops.head._losses import LOSSES
from tests.head.heads import Capped, LoRA

D, C, ROWS = 8, 24, 40
MASK = torch.arange(ROWS) % 3 > 0


class Returns(nn.Module):
    def __init__(self, result):
        super().__init__()
        self.result = result

    def forward(self, hidden):
        return self.result(hidden)


HIDDEN, TARGET = torch.randn(ROWS, D), torch.randint(C, (ROWS,))
LAYER = Capped(D, C)
OUTPUT = type("CausalLMOutput", (), {"logits": HIDDEN})()
BAD = [
    ((1.0, HIDDEN, TARGET), {}, TypeError, "head must be a module or a function hidden -> logits, got float"),
    ((LAYER, [1.0], TARGET), {}, TypeError, "hidden must be a tensor"),
    ((LAYER, HIDDEN.long(), TARGET), {}, TypeError, "hidden must be a floating point tensor"),
    ((LAYER, HIDDEN[0, 0], TARGET), {}, ValueError, "hidden must be (..., D), got shape ()"),
    ((LAYER, HIDDEN, 3), {}, TypeError, "target must be a tensor, got int"),
    ((LAYER, HIDDEN, TARGET[:3]), {}, ValueError, "target (3,) must have the shape of hidden's rows (40,)"),
    ((LAYER, HIDDEN, TARGET > 0), {}, TypeError, "target must be class indices, int64, int32 or uint8, or floating"),
    ((LAYER, HIDDEN, TARGET.to("meta")), {}, ValueError, "target is on meta, hidden on cpu"),
    ((LAYER, HIDDEN, TARGET + C), {}, IndexError, "is out of range for the 24 classes of the head's logits (40, 24)"),
    ((nn.Linear(D, C), HIDDEN, TARGET + C), {}, IndexError, "out of range for the 24 classes of the head's logits"),
    ((nn.Linear(D + 1, C), HIDDEN, TARGET), {}, ValueError, "hidden (40, 8) must be (..., D), head.weight is (C, D)"),
    (
        (LAYER, HIDDEN, torch.rand(ROWS, C + 1)),
        {},
        ValueError,
        "must have the 24 classes of the head's logits",
    ),
    (
        (LAYER, HIDDEN, TARGET),
        {"loss": "ce"},
        ValueError,
        "loss must be one of 'cross_entropy', 'token",
    ),
    ((LAYER, HIDDEN, TARGET), {"check": 1}, TypeError, "check must be True or False, got 1"),
    (
        (LAYER, HIDDEN, TARGET),
        {"beta": 0.5},
        TypeError,
        "unexpected keyword argument 'beta', which does not exist",
    ),
    ((LAYER, HIDDEN, TARGET), {"num_items_in_batch": 3}, TypeError, "say denominator=3"),
    ((LAYER, HIDDEN, TARGET), {"weight": torch.ones(3)}, ValueError, "weight must be (24,), one a class, got (3,)"),
    ((LAYER, HIDDEN, TARGET), {"mask": MASK.float()}, TypeError, "mask must be a bool tensor"),
    ((LAYER, HIDDEN, TARGET), {"mask": MASK[:3]}, ValueError, "mask (3,) does not broadcast to the rows (40,)"),
    ((LAYER, HIDDEN, TARGET), {"row_weight": MASK}, TypeError, "row_weight must be a floating point tensor"),
    ((LAYER, HIDDEN, TARGET), {"reduction": "average"}, ValueError, "reduction must be one of 'none', 'mean', 'sum'"),
    ((LAYER, HIDDEN, TARGET), {"memory": "less"}, ValueError, "memory must be one of 'auto', 'low'"),
    ((LAYER, HIDDEN, TARGET), {"logits_dtype": torch.float32}, ValueError, "logits_dtype is for a plain nn.Linear"),
    ((LAYER, HIDDEN, TARGET), {"softcap": -1.0}, ValueError, "softcap must be greater than 0"),
    ((LAYER, HIDDEN, TARGET), {"label_smoothing": 2}, ValueError, "label_smoothing must be at most 1"),
    ((LAYER, HIDDEN, TARGET), {"loss": "kl_div"}, TypeError, "target must be a floating point tensor"),
    ((LAYER, HIDDEN, HIDDEN), {"loss": "kl_div"}, ValueError, "target (40, 8) must have the 24 classes of the head's"),
    ((LAYER, HIDDEN, None), {"loss": "kl_div"}, TypeError, "needs target, or target_values and target_indices"),
    ((LAYER, HIDDEN, HIDDEN), {"loss": "tv", "target_head": 1}, TypeError, "target_head must be a module or function"),
    (
        (LAYER, HIDDEN, HIDDEN),
        {"loss": "tv", "target_head": nn.Linear(D, 3)},
        ValueError,
        "target_head must return",
    ),
    (
        (Returns(lambda x: OUTPUT), HIDDEN, TARGET),
        {},
        TypeError,
        "got CausalLMOutput: say lambda hidden:",
    ),
    (
        (Returns(lambda x: x[1:]), HIDDEN, TARGET),
        {},
        ValueError,
        "head must return logits (rows, classes)",
    ),
    ((Returns(lambda x: x.sum(1)), HIDDEN, TARGET), {}, ValueError, "rows (7, 8), got (7,)"),
    ((Returns(lambda x: x.long()), HIDDEN, TARGET), {}, TypeError, "the head's result must be a floating"),
]


@pytest.mark.parametrize("args, options, error, words", BAD, ids=[words[:40] for *_, words in BAD])
def test_bad_calls(args, options, error, words):
    with pytest.raises(error, match=r"^head_loss(\(loss='\w+'\))?[: ].*" + re.escape(words)):
        safeops.head_loss(*args, **options)


@pytest.mark.parametrize("loss", LOSSES.values())
def test_every_option_is_read_or_refused(loss):
    """An option that the functions get later must not be passed by: a head in chunks refuses what it does not read."""
    assert set(loss.in_chunks) - {"beta"} <= set(loss.defaults)
    for key in set(loss.defaults) - set(loss.in_chunks):
        record = loss.__new__(loss)
        record.given = {key: None}
        with pytest.raises(ValueError, match=f"^head_loss: {key} is for a plain nn.Linear as head"):
            record.refuse_unread()


ROWS_OF_3 = torch.arange(4), torch.arange(3)
CSR = {"support": ROWS_OF_3}
BOTH = {"support": torch.ones(3, C, dtype=torch.bool), "logits_dtype": torch.float32}
KNOWN = {"loss": "kl_div", "target_values": torch.zeros(3, 2), "target_indices": torch.zeros(3, 2).long()}


@pytest.mark.parametrize(
    "target, options, error, words",
    [
        (TARGET[:3], CSR, ValueError, "support in CSR form is for a plain nn.Linear with loss='token_log_probs'"),
        (TARGET[:3], BOTH, ValueError, "logits_dtype does not go with support"),
        (torch.zeros(3, C), KNOWN, TypeError, "give target, or target_values and target_indices, not both"),
        (None, KNOWN, ValueError, "target_indices has class 0 twice in a row"),
    ],
)
def test_pairs_of_options_that_a_plain_layer_refuses(target, options, error, words):
    with pytest.raises(error, match=re.escape(words)):
        safeops.head_loss(nn.Linear(D, C), HIDDEN[:3], target, **options)


def test_a_layer_with_hooks_has_no_wide_logits():
    layer = nn.Linear(D, C)
    layer.register_forward_hook(lambda *args: None)
    with pytest.raises(ValueError, match="this one has hooks"):
        safeops.head_loss(layer, HIDDEN, TARGET, logits_dtype=torch.float32)


class TestModule:
    def test_it_holds_the_head_and_its_options(self):
        module = safeops.nn.HeadLoss(LoRA(D, C), label_smoothing=0.1, weight=torch.rand(C))
        assert {"head.b.weight", "weight"} <= module.state_dict().keys() and "label_smoothing=0.1" in repr(module)
        expected = safeops.head_loss(module.head, HIDDEN, TARGET, mask=MASK, label_smoothing=0.1, weight=module.weight)
        for copied in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert torch.equal(copied(HIDDEN, TARGET, mask=MASK), expected)

    def test_bad_calls(self):
        for error, words, call in (
            (TypeError, "HeadLoss: head must be a module", lambda: safeops.nn.HeadLoss(None)),
            (ValueError, "HeadLoss: loss must be one of", lambda: safeops.nn.HeadLoss(LAYER, loss="mse")),
            (ValueError, "logits_dtype is for", lambda: safeops.nn.HeadLoss(LAYER, logits_dtype=torch.float32)),
            (TypeError, "'beta', which does not exist", lambda: safeops.nn.HeadLoss(LAYER, beta=1)),
            (TypeError, "reduction is given", lambda: safeops.nn.HeadLoss(LAYER, reduction="sum")(
                HIDDEN, TARGET, reduction="sum")),
        ):  # fmt: skip
            with pytest.raises(error, match=words):
                call()
