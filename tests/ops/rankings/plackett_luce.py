"""plackett_luce_loss: a ranking of the items of each list."""

import torch

from safeops.testing import Bad, Sample
from tests.ops.bad_calls import BadIndex
from tests.ops.operands import data, mask, plain, weights
from tests.ops.rankings.pairs import SKIP, a_kind
from tests.ops.record import ONE_OPERAND, Record
from tests.ops.row_loss import DENOMINATOR, NO_GPU, bad_calls, per_row_operands
from tests.ops.truth import kept, reduced

NAME = "plackett_luce_loss"
HERE = "tests/contract/rankings/test_plackett_luce.py"


@a_kind
def plackett_luce_loss(
    scores, ranking, *, mask=None, weight=None, reduction="mean", denominator=None, empty="zero"
):  # fmt: skip
    """Returns the paper's loss, with the logarithm of a softmax over the items from each place on."""
    each = None if weight is None else weight.unsqueeze(-1)
    keep = kept(scores.shape, mask, each).to(scores.device).expand(scores.shape)
    place = torch.where(ranking >= 0, ranking, 0).long()
    keep = keep.gather(-1, place) & (ranking >= 0)
    s = torch.where(keep, scores.gather(-1, place), 0)
    n = s.shape[-1]
    later = torch.ones(n, n, dtype=torch.bool, device=s.device).triu() & keep.unsqueeze(-2)
    later = later | torch.eye(n, dtype=torch.bool, device=s.device)
    log_p = torch.where(later, s.unsqueeze(-2), -torch.inf).log_softmax(-1)
    terms = -torch.where(keep, log_p.diagonal(dim1=-2, dim2=-1), 0).sum(-1)
    return reduced(terms, keep.any(-1), weight, reduction, denominator, empty)


def rankings(*shape, seed=0):
    return data(*shape, seed=20 + seed).argsort(-1)


def _terms(sample, outcome):
    """Sizes of the terms that cancel: scores less the logarithms of sums."""
    size = 1 + sample.args[0].detach().abs().nan_to_num(0, 0, 0).sum()
    up = outcome.upstream[0].abs().nan_to_num(0, 0, 0).max() if outcome.upstream and outcome.upstream[0].numel() else 1
    return size, {key: size * up * (1 if key == 0 else size) for key in outcome.grads}


def _samples():
    def sample(name, seed, leaves=(0,), slow=False, **options):
        x = data(5, 4, seed=seed)
        return Sample((x, rankings(5, 4, seed=seed)), options, name=name, differentiable=leaves, masked=(0,), slow=slow)

    keep, weight = mask(5, 4), weights(5, 1)
    yield sample("mean", 1, mask=keep, slow=True)
    yield sample("none, weighted", 2, mask=mask(5, 1), weight=weight, reduction="none")
    yield sample("mean, weighted", 3, (0, "weight"), mask=keep, weight=weight)
    yield sample("sum, neither mask nor weight", 4, reduction="sum")
    yield sample("denominator", 5, mask=mask(4), denominator=DENOMINATOR)


_x, _index = torch.arange(8.0).reshape(2, 4), torch.arange(4).expand(2, 4)
Record(
    NAME,
    plackett_luce_loss,
    _samples(),
    bad_calls=[
        *bad_calls(NAME, ("scores",), (_index,), {}, width=4, by_element=True),
        Bad((_x, 1), {}, TypeError, (NAME, "ranking", "tensor", "int")),
        Bad((_x, _index.float()), {}, TypeError, (NAME, "ranking", "int64", "torch.float32")),
        Bad((_x, _index[:, :3]), {}, ValueError, (NAME, "ranking", "(2, 3)", "(2, 4)")),
        Bad((_x, _index.to("meta")), {}, ValueError, (NAME, "ranking", "meta")),
        BadIndex((_x, _index + 1), {}, IndexError, (NAME, "ranking", "4 items", "(2, 4)")),
        BadIndex((_x, _index - 2), {}, IndexError, (NAME, "ranking", "4 items", "-1")),
    ],
    call={
        "scores": plain(),
        "ranking": rankings(5, 6),
        "mask": torch.arange(6) != 2,
        "weight": plain(2)[:, 0].clone(),
        "denominator": torch.tensor(5.0),
    },
    gpu=NO_GPU,
    no_route="the scan is plain torch on every route",
    adapt=lambda op: per_row_operands(op, by_element=True),
    terms=_terms,
    skip=SKIP
    | ONE_OPERAND
    | {
        "sizes": f"a list has one dim at least: {HERE} has the other sizes",
        "masked_upstream": f"no result is an item's: {HERE}",
    },
)
