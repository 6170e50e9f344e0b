"""multi_margin_loss, multilabel_margin_loss and multilabel_soft_margin_loss."""

import torch
import torch.nn.functional as F

from safeops.core.op import registry
from safeops.testing import Bad
from tests.ops import gpu
from tests.ops.bad_calls import BadIndex
from tests.ops.operands import data, plain, weights
from tests.ops.row_loss import bad_calls, row_loss, vectors

# ---- multi_margin_loss


def _multi_margin(x, target, p=1, margin=1.0, weight=None):
    is_target = target.long().unsqueeze(-1) == torch.arange(x.shape[-1], device=x.device)
    d = margin - torch.where(is_target, x, 0).sum(-1, keepdim=True) + x
    terms = torch.where(is_target | (d <= 0), 0, d) ** p
    loss = terms.sum(-1) / max(x.shape[-1], 1)
    return loss if weight is None else loss * torch.where(is_target, weight, 0).sum(-1)


def _multi_margin_sizes(x, target, p=1, margin=1.0, weight=None):
    """Sizes of the terms that cancel: a row's loss and slopes are means over the classes of differences of scores."""
    widest = abs(margin) + 2 * x.abs().amax(-1)
    largest = 1.0 if weight is None else weight.abs().max()
    return widest**p * largest, (p * widest.unsqueeze(-1) ** (p - 1) * largest,)


def _margin_case(n, dtype, seed):
    """Returns a GPU call on n scores: rows of about a thousand classes, or one row."""
    classes = next((c for c in (1000, 1024, 8) if n % c == 0), n)
    index = gpu.indices(n // classes, classes, seed)
    numbers, op = gpu.numbers(n, dtype, seed), registry["multi_margin_loss"]
    return gpu.Case(lambda x: op.call(x.view(-1, classes), index, None, None, 0.75, 2)[0], (numbers,))


CLASSES = torch.tensor([1, 0, 3, 2, 1])
CLASS_WEIGHT = weights(4, seed=7)
_scores, _two = torch.arange(10.0).reshape(2, 5), torch.tensor([1, 4])
_bad_class = torch.tensor([1, 5])
row_loss(
    "multi_margin_loss",
    _multi_margin,
    _multi_margin_sizes,
    F.multi_margin_loss,
    vectors(1, CLASSES[:, None]),
    {"input": plain(), "target": CLASSES, "weight": plain(2)[0].clone()},
    {"p": 2, "margin": 0.75},
    [
        *bad_calls("multi_margin_loss", ("input",), (_two,), {"margin": []}, of_rows=False),
        Bad((_scores, 1), {}, TypeError, ("multi_margin_loss", "target", "tensor", "int")),
        Bad((_scores, _two.float()), {}, TypeError, ("multi_margin_loss", "target", "class indices", "torch.float32")),
        Bad((_scores, _two[:1]), {}, ValueError, ("multi_margin_loss", "target", "(1,)", "rows (2,)")),
        Bad((_scores, _two.to("meta")), {}, ValueError, ("multi_margin_loss", "target", "meta")),
        BadIndex((_scores, _bad_class), {}, IndexError, ("multi_margin_loss", "target 5", "5 classes")),
        BadIndex((_scores, -_two), {}, IndexError, ("multi_margin_loss", "target -1", "5 classes")),
        Bad((_scores, _two), {"weight": torch.ones(2)}, ValueError, ("multi_margin_loss", "weight", "(2,)", "(5,)")),
        Bad((_scores, _two), {"p": 3}, ValueError, ("multi_margin_loss", "p", "1 or 2", "3")),
        Bad((_scores, _two), {"p": True}, ValueError, ("multi_margin_loss", "p", "1 or 2", "True")),
    ],
    gpu=_margin_case,
    by_class=CLASS_WEIGHT,
    skip={
        "partial_gradients": "one operand, where there is no weight",
        "weight_zero": "a weight is a class's: tests/contract/vectors/test_row_losses.py has it",
    },
)

# ---- multilabel_soft_margin_loss


def _times(a, b):
    """Returns a b, but 0 where a is 0 and b is infinite."""
    none = (a == 0) & b.isinf()
    return torch.where(none, 0, a) * torch.where(none, 0, b)


def _softplus(x):
    """Returns log(1 + e^x) with the derivative sigmoid(x), also at 0, where a form with |x| would have another."""
    positive, negative = torch.where(x > 0, x, 0), torch.where(x > 0, 0, x)
    return torch.where(x > 0, positive + torch.exp(-positive).log1p(), torch.exp(negative).log1p())


def _multilabel(x, y, weight=None):
    exists = torch.ones((), dtype=torch.bool) if weight is None else weight != 0
    x, y = torch.where(exists, x, 0), torch.where(exists, y, 0)
    terms = _times(1 - y, _softplus(x)) + _times(y, _softplus(-x))
    terms = terms if weight is None else torch.where(exists, terms * weight, 0)
    return terms.sum(-1) / max(x.shape[-1], 1)


def _multilabel_sizes(x, y, weight=None):
    """Returns the sizes of the terms of a row's loss, of its slopes to the logits, and of its slopes to the labels."""
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
    several_terms=True,  # infinite labels: a slope adds infinities
    skip={"weight_zero": "a weight is a class's: tests/contract/vectors/test_label_losses.py has it"},
)

# ---- multilabel_margin_loss


def _margins(x, target):
    """Returns each row's sum of hinges max(0, 1 - x[j] + x[i]) / C over the listed classes j (those before the first
    negative index) and the classes i that are not listed."""
    listed = (target >= 0).cumprod(-1) != 0
    place = torch.where(listed, target, 0)
    own = ((place.unsqueeze(-1) == torch.arange(x.shape[-1], device=x.device)) & listed.unsqueeze(-1)).any(-2)
    hinges = 1 - x.gather(-1, place).unsqueeze(-1) + x.unsqueeze(-2)  # dims (..., j, i)
    counts = listed.unsqueeze(-1) & ~own.unsqueeze(-2)
    loss = torch.where(counts & (hinges > 0), hinges, 0).sum((-1, -2)) / max(x.shape[-1], 1)
    lost = (counts & hinges.isnan()).any(-1).any(-1)  # a NaN hinge makes its row's loss and slopes NaN
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
