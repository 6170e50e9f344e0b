"""ordinal_loss: classes in an order."""

import torch
import torch.nn.functional as F

from safeops.testing import Bad, Sample
from tests.ops.bad_calls import BadIndex
from tests.ops.operands import data, mask, plain, weights
from tests.ops.rankings.pairs import SKIP, a_kind
from tests.ops.record import ONE_OPERAND, Record
from tests.ops.row_loss import DENOMINATOR, NO_GPU, bad_calls, per_row_operands
from tests.ops.truth import kept, reduce, reduced, weighted

NAME = "ordinal_loss"
HERE = "tests/contract/rankings/test_ordinal.py"


@a_kind
def ordinal_loss(
    logits, target, *, kind="corn", mask=None, weight=None, reduction="mean", denominator=None, empty="zero"
):  # fmt: skip
    """Returns the papers' losses: of corn, a question is asked of the rows whose class reaches it."""
    keep = kept(target.shape, mask, weight).to(logits.device).expand(target.shape)
    y = torch.where(keep, target, 0).long().unsqueeze(-1)
    question = torch.arange(logits.shape[-1], device=logits.device)
    asked = keep.unsqueeze(-1) & ((y > question - 1) | (kind == "coral"))
    x = torch.where(asked, logits, 0)
    terms = torch.where(asked, -torch.where(y > question, F.logsigmoid(x), F.logsigmoid(-x)), 0).sum(-1)
    if kind == "coral" or reduction != "mean" or denominator is not None:
        return reduced(terms, keep, weight, reduction, denominator, empty)
    each = None if weight is None else weight.unsqueeze(-1).expand(asked.shape)
    divisor = asked.sum() if weight is None else torch.where(asked, each, 0).sum()
    return reduce(True, weighted(terms, keep, weight), keep, weight, None, False, empty, divisor)


def _terms(sample, outcome):
    """Sizes of the terms: those of logits, and of a mean's rows for the weights."""
    size = 1 + sample.args[0].detach().abs().nan_to_num(0, 0, 0).sum()
    up = outcome.upstream[0].abs().nan_to_num(0, 0, 0).max() if outcome.upstream and outcome.upstream[0].numel() else 0
    return size, {key: torch.zeros(()) if key == 0 else size * up for key in outcome.grads}


CLASSES = torch.tensor([2, 0, 4, 1, 3])


def _samples():
    def sample(name, seed, leaves=(0,), slow=False, **options):
        x = data(5, 4, seed=seed)
        return Sample((x, CLASSES[:, None]), options, name=name, differentiable=leaves, masked=(0,), slow=slow)

    keep, weight = mask(5, 1), weights(5, 1)
    yield sample("mean", 1, mask=keep, slow=True)
    yield sample("none, weighted", 2, mask=keep, weight=weight, reduction="none")
    yield sample("mean, weighted", 3, (0, "weight"), mask=keep, weight=weight)
    yield sample("coral, weighted", 4, (0, "weight"), mask=keep, weight=weight, kind="coral")
    yield sample("denominator", 5, mask=keep, denominator=DENOMINATOR)


_x, _y = torch.arange(10.0).reshape(2, 5), torch.tensor([0, 5])
Record(
    NAME,
    ordinal_loss,
    _samples(),
    bad_calls=[
        *bad_calls(NAME, ("logits",), (_y,), {}),
        Bad((_x, 1), {}, TypeError, (NAME, "target", "tensor", "int")),
        Bad((_x, _y.float()), {}, TypeError, (NAME, "target", "int64", "torch.float32")),
        Bad((_x, _y[:1]), {}, ValueError, (NAME, "target", "(1,)", "(2,)")),
        Bad((_x, _y.to("meta")), {}, ValueError, (NAME, "target", "meta")),
        Bad((_x, _y), {"kind": "corr"}, ValueError, (NAME, "kind", "'corn', 'coral'", "'corr'")),
        BadIndex((_x, _y + 1), {}, IndexError, (NAME, "target 6", "6 classes", "(2, 5)")),
        BadIndex((_x, _y - 1), {}, IndexError, (NAME, "target -1", "6 classes")),
    ],
    call={
        "logits": plain(),
        "target": torch.tensor([2, 0, 6, 1, 3]),
        "kind": "corn",
        "mask": torch.arange(5) != 2,
        "weight": plain(2)[:, 0].clone(),
        "denominator": torch.tensor(5.0),
    },
    gpu=NO_GPU,
    no_route="made of other ops: tests/contract/rankings/test_ordinal.py watches which",
    adapt=per_row_operands,
    terms=_terms,
    skip=SKIP
    | ONE_OPERAND
    | {
        "sizes": f"a row has one dim at least: {HERE} has the other sizes",
        "masked_upstream": f"no result is a logit's: {HERE} has it, of rows",
    },
)
