"""Losses of rows that meet many classes or keys at once: multilabel_soft_margin_loss, info_nce_loss,
supervised_contrastive_loss."""

import math

import torch
import torch.nn.functional as F

from safeops.testing import Bad
from tests.ops.bad_calls import NAN, BadIndex
from tests.ops.operands import data, plain, weights
from tests.ops.record import ONE_OPERAND
from tests.ops.row_losses import bad_calls, row_loss, vectors
from tests.ops.rows import normalize

# ---- multilabel_soft_margin_loss


def _times(a, b):
    """0 where a is 0 and b infinite."""
    none = (a == 0) & b.isinf()
    return torch.where(none, 0, a) * torch.where(none, 0, b)


def _softplus(x):
    """With derivative sigmoid(x) everywhere: that of |x| at 0 is chosen."""
    positive, negative = torch.where(x > 0, x, 0), torch.where(x > 0, 0, x)
    return torch.where(x > 0, positive + torch.exp(-positive).log1p(), torch.exp(negative).log1p())


def _multilabel(x, y, weight=None):
    exists = torch.ones((), dtype=torch.bool) if weight is None else weight != 0
    x, y = torch.where(exists, x, 0), torch.where(exists, y, 0)
    terms = _times(1 - y, _softplus(x)) + _times(y, _softplus(-x))
    terms = terms if weight is None else torch.where(exists, terms * weight, 0)
    return terms.sum(-1) / max(x.shape[-1], 1)


def _multilabel_sizes(x, y, weight=None):
    """Magnitudes of one logit's terms, and of their slopes to the logit and to the label."""
    hit, miss = _softplus(-x), _softplus(x)
    w, classes = 1.0 if weight is None else weight.abs(), max(x.shape[-1], 1)
    each = (y.abs() * hit + (1 - y).abs() * miss) * w
    slopes = (y.abs() * (-x).sigmoid() + (1 - y).abs() * x.sigmoid(), hit + miss)
    return each.sum(-1) / classes, tuple(s * w / classes for s in slopes)


NAME = "multilabel_soft_margin_loss"
_x, _y = torch.arange(10.0).reshape(2, 5), torch.ones(2, 5)
row_loss(
    NAME,
    _multilabel,
    _multilabel_sizes,
    F.multilabel_soft_margin_loss,
    lambda seed: (data(5, 4, seed=10 * seed), data(5, 4, seed=10 * seed + 1, low=0.0, high=1.0)),
    {"input": plain(), "target": plain(1) / 2, "weight": plain(2)[0].clone()},
    {},
    [
        *bad_calls(NAME, ("input", "target"), (), {}, of_rows=False),
        Bad((_x, _y), {"weight": torch.ones(2)}, ValueError, (NAME, "weight", "(2,)", "(2, 5)")),
        Bad((_x, _y), {"weight": torch.ones(5, device="meta")}, ValueError, (NAME, "weight", "meta")),
    ],
    by_class=weights(4, seed=7),
    several_terms=True,  # of an infinite label
    skip={"weight_zero": "a weight is a class's: tests/contract/rows/test_label_losses.py has it"},
)

# ---- multilabel_margin_loss


def _margins(x, target):
    """All hinges of a row: its classes, up to the first negative number, against every other class."""
    listed = (target >= 0).cumprod(-1) != 0
    place = torch.where(listed, target, 0)
    own = ((place.unsqueeze(-1) == torch.arange(x.shape[-1], device=x.device)) & listed.unsqueeze(-1)).any(-2)
    hinges = 1 - x.gather(-1, place).unsqueeze(-1) + x.unsqueeze(-2)  # (..., j, i)
    counts = listed.unsqueeze(-1) & ~own.unsqueeze(-2)
    loss = torch.where(counts & (hinges > 0), hinges, 0).sum((-1, -2)) / max(x.shape[-1], 1)
    lost = (counts & hinges.isnan()).any(-1).any(-1)  # no element of such a row has a slope
    return torch.where(lost, (torch.where(lost.unsqueeze(-1), x, 0) * torch.nan).sum(-1), loss)


def _margins_sizes(x, target):
    classes = x.shape[-1]
    return (1 + 2 * x.abs().amax(-1)) * classes, (torch.full_like(x, classes),)


NAME = "multilabel_margin_loss"
_x, _two = torch.arange(10.0).reshape(2, 5), torch.tensor([[1, 4, -1, 0, 9], [-1, 0, 0, 0, 0]])
_classes = torch.tensor([[0, 2, -1, 3], [-1, 0, 0, 0], [3, 2, 1, 0], [1, 1, -1, 0], [2, -1, 0, 0]])
row_loss(
    NAME,
    _margins,
    _margins_sizes,
    F.multilabel_margin_loss,
    vectors(1, _classes),
    {"input": data(5, 4), "target": _classes},
    {},
    [
        *bad_calls(NAME, ("input",), (_two,), {}),
        Bad((_x, 1), {}, TypeError, (NAME, "target", "tensor", "int")),
        Bad((_x, _two.float()), {}, TypeError, (NAME, "target", "class indices", "torch.float32")),
        Bad((_x, _two[:1]), {}, ValueError, (NAME, "target", "(1, 5)", "(2, 5)")),
        Bad((_x, _two.to("meta")), {}, ValueError, (NAME, "target", "meta")),
        BadIndex((_x, torch.full((2, 5), 5)), {}, IndexError, (NAME, "target 5", "5 classes")),
    ],
    skip={"partial_gradients": "one operand, where there is no weight"},
)

# ---- info_nce_loss


def _info_nce(query, positive_key, temperature=0.1, keep=None):
    """The keys are those of the batch. With others: tests/contract/rows/test_label_losses.py."""
    logits = normalize(query, eps=None) @ normalize(positive_key, eps=None).mT / temperature
    is_positive = torch.eye(len(query), dtype=torch.bool, device=query.device)
    logits = torch.where(keep | is_positive, logits, -torch.inf)
    top = logits.detach().amax(-1, keepdim=True) if len(query) else logits
    return (logits - top).exp().sum(-1).log() + top.sum(-1) - torch.where(is_positive, logits, 0).sum(-1)


def _info_nce_sizes(query, positive_key, temperature=0.1, keep=None):
    """The logits are of the size 1 / t, and their rounding is one of the probabilities p, relative; the slope to a
    query is a sum of (p - own) key / t, less its part along the query, over its length. A key meets all rows."""
    size = 2 / temperature + math.log(max(len(query), 1))

    def slope(x):
        norm = x.norm(dim=-1, keepdim=True)
        return 4 * len(x) / temperature * (1 + 2 / temperature) / torch.where(norm == 0, 1, norm)

    return query.new_full(query.shape[:-1], size), (slope(query), slope(positive_key))


def _eager(query, positive_key, reduction, temperature=0.1):
    logits = F.normalize(query, dim=-1) @ F.normalize(positive_key, dim=-1).mT / temperature
    return F.cross_entropy(logits, torch.arange(len(query), device=query.device), reduction=reduction)


SQUARE = "n rows have n^2 cosines: tests/contract/rows/test_label_losses.py has it, of fewer"
NAME = "info_nce_loss"
_x, _key = torch.arange(10.0).reshape(2, 5), torch.ones(2, 5)
row_loss(
    NAME,
    _info_nce,
    _info_nce_sizes,
    _eager,
    vectors(2),
    # (in fp64: the gradients cancel to less than the digits that DTensors are compared in)
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
    """As info_nce_loss's, and a row meets the others as their key, too."""
    size, (slope, _) = _info_nce_sizes(features, features, temperature)
    return size, (2 * slope,)


def _eager_supervised(features, labels, reduction, temperature=0.07):
    """As its authors wrote it, of one view a row."""
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
        "compile": "tests/contract/rows/test_supervised_contrastive.py counts the graphs of plain labels",
        **ONE_OPERAND,
    },
)
