"""cox_loss: subjects at risk until an event."""

import torch

from safeops.testing import Bad, Sample
from tests.ops.bad_calls import KEEP, X, bad_reductions
from tests.ops.operands import data, mask, plain, weights
from tests.ops.rankings.pairs import SKIP, a_kind
from tests.ops.record import ONE_OPERAND, Record
from tests.ops.row_loss import DENOMINATOR, NO_GPU
from tests.ops.truth import kept, reduce

NAME = "cox_loss"
HERE = "tests/contract/rankings/test_cox.py"


@a_kind
def cox_loss(
    risk, time, event, *, ties="breslow", mask=None, weight=None, reduction="mean", denominator=None, empty="zero"
):  # fmt: skip
    """Returns the papers' loss from N x N sums: of those at risk, and of the events tied with each."""
    keep = kept(risk.shape, mask, weight).to(risk.device).expand(risk.shape)
    event, time = (event != 0) & keep, torch.where(keep, time, 0)
    no_time = time.isnan().any()
    r, w = torch.where(keep, risk, 0), torch.where(keep, 1.0 if weight is None else weight, 1.0)
    r = r + torch.where((r == torch.inf).any() | r.isnan().any() | no_time, torch.nan, 0)
    at_risk, tied = (time >= time.unsqueeze(1)) & keep, (time == time.unsqueeze(1)) & event & event.unsqueeze(1)
    top = torch.where(keep, r, -torch.inf).detach().amax() if len(r) else 0
    top = torch.where(top.isfinite(), top, 0) if len(r) else 0
    hazard = w * torch.where(keep, r - top, 0).exp()
    total = torch.where(at_risk, hazard, 0).sum(1)
    if ties == "efron":
        count = tied.sum(1).clamp(min=1)
        rank = (tied & torch.ones_like(tied).tril(-1)).sum(1)
        total = total - rank.to(r.dtype) / count * torch.where(tied, hazard, 0).sum(1)
        mean = torch.where(tied, w, 0).sum(1) / count
    else:
        mean = w
    terms = mean * (torch.where(event, total, 1).log() + top) - w * r
    terms = torch.where(event, terms, 0)
    if reduction == "none":
        return terms
    divisor = torch.where(event, w, 0).sum() if denominator is None and weight is not None else denominator
    return reduce(reduction == "mean", terms, event, None, None, False, empty, divisor)


def _terms(sample, outcome):
    """Sizes of the terms that cancel: risks less the logarithms of sums, for each of the subjects."""
    risk = sample.args[0].detach()
    size = (2 + 2 * risk.abs().nan_to_num(0, 0, 0).max() + (1 + risk.shape[0]) ** 0.5) if risk.numel() else 1.0
    up = outcome.upstream[0].abs().nan_to_num(0, 0, 0).max() if outcome.upstream and outcome.upstream[0].numel() else 0
    reduced = not outcome.values or outcome.values[0].dim() == 0
    value = size * (1 if not reduced or sample.kwargs.get("reduction") != "sum" else risk.shape[0])
    return torch.as_tensor(value), {key: torch.as_tensor(value * up * 2.0) for key in outcome.grads}


TIMES = torch.tensor([2.0, 1, 2, 3, 1, 2, 5, 2], dtype=torch.float64)
EVENTS = torch.tensor([1, 1, 1, 0, 1, 0, 1, 1], dtype=torch.bool)


def _samples():
    def sample(name, seed, leaves=(0,), slow=False, event=EVENTS, **options):
        return Sample((data(8, seed=seed), TIMES, event), options, name=name, differentiable=leaves, masked=(0, 1),
                      slow=slow)  # fmt: skip

    keep, weight = mask(8), weights(8)
    yield sample("mean", 1, mask=keep, slow=True)
    yield sample("efron, none", 2, mask=keep, ties="efron", reduction="none", event=EVENTS.long())
    yield sample("efron, weighted", 3, (0, "weight"), mask=keep, weight=weight, ties="efron", slow=True)
    yield sample("weighted, none", 4, (0, "weight"), weight=weight, reduction="none")
    yield sample("sum, neither mask nor weight", 5, reduction="sum", ties="efron")
    yield sample("denominator", 6, mask=keep, denominator=DENOMINATOR)


def _bad_calls():
    x, time, event = X[0], X[1], KEEP[0]
    good = x, time, event
    yield Bad((x.long(), time, event), {}, TypeError, (NAME, "risk", "floating", "torch.int64"))
    yield Bad((X, time, event), {}, ValueError, (NAME, "risk", "(N,)", "(2, 5)"))
    yield Bad((X[:1].mT, time, event), {}, ValueError, (NAME, "risk", "(5, 1)", "say risk.squeeze(1)"))
    yield Bad((x[0], time, event), {}, ValueError, (NAME, "risk", "(N,)", "()"))
    for i, key in ((1, "time"), (2, "event")):
        for bad, error, *words in (
            (1.0, TypeError, "tensor", "float"),
            (X, ValueError, "(2, 5)", "(5,)"),
            (x.to(torch.complex64), TypeError, "real", "torch.complex64"),
            (x.to("meta"), ValueError, "meta"),
        ):
            yield Bad((*good[:i], bad, *good[i + 1 :]), {}, error, (NAME, key, *words))
    yield Bad(good, {"mask": torch.ones(5)}, TypeError, (NAME, "mask", "bool", "torch.float32"))
    yield Bad(good, {"mask": [True]}, TypeError, (NAME, "mask", "tensor", "list"))
    yield Bad(good, {"mask": torch.ones(4, dtype=torch.bool)}, ValueError, (NAME, "mask", "(4,)", "(5,)"))
    yield Bad(good, {"mask": event.to("meta")}, ValueError, (NAME, "mask", "meta"))
    yield Bad(good, {"weight": torch.ones(4)}, ValueError, (NAME, "weight", "(4,)", "(5,)"))
    yield Bad(good, {"weight": time.long()}, TypeError, (NAME, "weight", "floating", "torch.int64"))
    yield Bad(good, {"ties": "exact"}, ValueError, (NAME, "ties", "'breslow', 'efron'", "'exact'"))
    yield Bad(good, {"ties": None}, ValueError, (NAME, "ties", "None"))
    yield from bad_reductions(NAME, good, ~event)


Record(
    NAME,
    cox_loss,
    _samples(),
    bad_calls=_bad_calls(),
    call={
        "risk": plain()[:, 0].clone(),
        "time": torch.tensor([2, 1, 2, 3, 1]),
        "event": torch.tensor([True, True, True, False, True]),
        "ties": "efron",
        "mask": torch.arange(5) != 1,
        "weight": plain(2)[:, 0].clone(),
        "denominator": torch.tensor(5.0),
    },
    gpu=NO_GPU,
    no_route="the sort and the scan are plain torch on every route",
    data=(0,),
    terms=_terms,
    skip=SKIP
    | ONE_OPERAND
    | {
        "sizes": f"subjects have one dim: {HERE} has the other sizes",
        "saved_bytes": "made of other ops, which save their own operands",
    },
)
