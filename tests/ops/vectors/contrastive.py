"""info_nce_loss and supervised_contrastive_loss, where a row's loss depends on all rows."""

import math

import torch
import torch.nn.functional as F

from safeops.testing import Bad
from tests.ops.bad_calls import NAN
from tests.ops.operands import plain
from tests.ops.record import ONE_OPERAND
from tests.ops.row_loss import bad_calls, row_loss, vectors
from tests.ops.vectors.cosines import normalize

# ---- info_nce_loss


def _info_nce(query, positive_key, temperature=0.1, keep=None):
    """Returns the losses with the batch's keys as negatives. (test_label_losses.py of the contract has other keys.)"""
    logits = normalize(query, eps=None) @ normalize(positive_key, eps=None).mT / temperature
    is_positive = torch.eye(len(query), dtype=torch.bool, device=query.device)
    logits = torch.where(keep | is_positive, logits, -torch.inf)
    top = logits.detach().amax(-1, keepdim=True) if len(query) else logits
    return (logits - top).exp().sum(-1).log() + top.sum(-1) - torch.where(is_positive, logits, 0).sum(-1)


def _info_nce_sizes(query, positive_key, temperature=0.1, keep=None):
    """Sizes of the terms. Logits are at most 1 / t, and their error changes the probabilities p in proportion. The
    slope to a query is the sum of (p - own) key / t, less its part along the query, divided by the query's length. The
    slope to a key sums over all rows."""
    size = 2 / temperature + math.log(max(len(query), 1))

    def slope(x):
        norm = x.norm(dim=-1, keepdim=True)
        return 4 * len(x) / temperature * (1 + 2 / temperature) / torch.where(norm == 0, 1, norm)

    return query.new_full(query.shape[:-1], size), (slope(query), slope(positive_key))


def _eager(query, positive_key, reduction, temperature=0.1):
    logits = F.normalize(query, dim=-1) @ F.normalize(positive_key, dim=-1).mT / temperature
    return F.cross_entropy(logits, torch.arange(len(query), device=query.device), reduction=reduction)


SQUARE = "n rows have n^2 cosines: tests/contract/vectors/test_label_losses.py has it, of fewer"
NAME = "info_nce_loss"
_x, _key = torch.arange(10.0).reshape(2, 5), torch.ones(2, 5)
row_loss(
    NAME,
    _info_nce,
    _info_nce_sizes,
    _eager,
    vectors(2),
    # fp64: in fp32 the gradients cancel to fewer digits than the tests of DTensors compare
    {**{key: plain(i).double() for i, key in enumerate(("query", "positive_key", "negative_keys"))},
     "temperature": torch.tensor(0.5)},
    {"temperature": 0.5},
    [
        *bad_calls(NAME, ("query", "positive_key"), (), {"temperature": [0.0, -1.0, NAN]}),
        Bad((_x[0], _x[0]), {}, ValueError, (NAME, "query", "(N, D)", "(5,)")),
        Bad((_x, _key, _x.long()), {}, TypeError, (NAME, "negative_keys", "floating", "torch.int64")),
        Bad((_x, _key, 1.0), {}, TypeError, (NAME, "negative_keys", "tensor", "float")),
        Bad((_x, _key, _x[:, :3]), {}, ValueError, (NAME, "negative_keys", "(2, 3)", "(M, 5)", "(2, M, 5)")),
        Bad((_x, _key, torch.ones(3, 4, 5)), {}, ValueError, (NAME, "negative_keys", "(3, 4, 5)", "(2, M, 5)")),
        Bad((_x, _key, _x[0]), {}, ValueError, (NAME, "negative_keys", "(5,)", "(M, 5)")),
        Bad((_x, _key, _x.to("meta")), {}, ValueError, (NAME, "negative_keys", "meta")),
        Bad((_x, _key), {"temperature": torch.ones(2)}, ValueError, (NAME, "temperature", "(2,)")),
        Bad((_x, _key), {"temperature": torch.tensor(1)}, TypeError, (NAME, "temperature", "torch.int64")),
    ],
    skip={"repeatable": SQUARE, "threads": SQUARE},
)  # fmt: skip

# ---- supervised_contrastive_loss


def _positives(keep, labels):
    others = keep & ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    return others, others & (labels[:, None] == labels)


def _supervised(features, labels, temperature=0.07, keep=None):
    others, positive = _positives(keep, labels)
    z = normalize(features, eps=None)
    logits = torch.where(others, z @ z.mT / temperature, -torch.inf)
    top = logits.detach().amax(-1, keepdim=True) if len(z) else logits
    top = torch.where(top == -torch.inf, 0, top)
    sums = (logits - top).exp().sum(-1)
    log = torch.where(sums == 0, 1, sums).log() + top.sum(-1)
    return log - torch.where(positive, logits, 0).sum(-1) / positive.sum(-1).clamp(min=1)


_supervised.counted = lambda keep, features, labels: keep & _positives(keep, labels)[1].any(-1)


def _supervised_sizes(features, labels, temperature=0.07, keep=None):
    """Sizes of the terms: those of info_nce_loss, where each row is also a key for the other rows."""
    size, (slope, _) = _info_nce_sizes(features, features, temperature)
    return size, (2 * slope,)


def _eager_supervised(features, labels, reduction, temperature=0.07):
    """Computes the loss as its authors do, for one view a row."""
    z = F.normalize(features, dim=-1)
    logits = z @ z.mT / temperature
    logits = logits - logits.amax(1, keepdim=True).detach()
    others = 1 - torch.eye(len(z), dtype=z.dtype, device=z.device)
    positive = (labels[:, None] == labels).to(z.dtype) * others
    log_prob = logits - (logits.exp() * others).sum(1, keepdim=True).log()
    return -(positive * log_prob).sum(1) / positive.sum(1).clamp(min=1)


NAME = "supervised_contrastive_loss"
LABELS = torch.tensor([1, 0, 1, 1, 0])
_x, _two = torch.arange(10.0).reshape(2, 5), torch.tensor([1, 1])
row_loss(
    NAME,
    _supervised,
    _supervised_sizes,
    _eager_supervised,
    vectors(1, LABELS[:, None]),
    {"features": plain().double(), "labels": LABELS, "temperature": torch.tensor(0.5)},
    {"temperature": 0.5},
    [
        *bad_calls(NAME, ("features",), (_two,), {"temperature": [0.0, -1.0, NAN]}),
        Bad((_x[0], _two), {}, ValueError, (NAME, "features", "(N, D)", "(5,)")),
        Bad((_x, 1), {}, TypeError, (NAME, "labels", "tensor", "int")),
        Bad((_x, _two.float()), {}, TypeError, (NAME, "labels", "int64", "torch.float32")),
        Bad((_x, _two[:1]), {}, ValueError, (NAME, "labels", "(1,)", "(2,)", "(2, 5)")),
        Bad((_x, _two.repeat(2)), {}, ValueError, (NAME, "labels", "(4,)", "(2,)")),
        Bad((_x, _two.to("meta")), {}, ValueError, (NAME, "labels", "meta")),
        Bad((_x, _two), {"temperature": torch.ones(2)}, ValueError, (NAME, "temperature", "(2,)")),
        Bad((_x, _two), {"temperature": torch.tensor(1)}, TypeError, (NAME, "temperature", "torch.int64")),
    ],
    skip={
        "repeatable": SQUARE,
        "threads": SQUARE,
        "compile": "tests/contract/vectors/test_supervised_contrastive.py counts the graphs of plain labels",
        **ONE_OPERAND,
    },
)
