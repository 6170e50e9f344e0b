"""cox_loss: the negative partial log-likelihood of Cox's proportional hazards, with ties."""

import torch

from safeops.core import check, loss_reduction, sums
from safeops.core.composed_loss import ARGUMENTS, one_a_row, validate
from safeops.core.definitions import kept
from safeops.core.dtypes import compute_dtype, wide_on_cpu
from safeops.core.foreign import refuse
from safeops.core.op import Composed
from safeops.ops.rankings._scan import log_cumsum_exp
from safeops.ops.reductions.segment_sum import _segment_sum, segment_sum
from safeops.ops.selection.safe_gather import _safe_gather, safe_gather

NAME = "cox_loss"
TIES = ("breslow", "efron")

# ---- definition


class Groups:
    """Neighbours of one time. time: (N,), sorted. event: bool (N,). All attributes are int64 (N,).

    index: of each element's group, from 0. last: the place of the group's last element. events: how many events the
    group has. event_rank: how many events of the group come before the element.
    """

    def __init__(self, time, event):
        place = torch.ones_like(event, dtype=torch.int64).cumsum(0) - 1
        begins = torch.cat((torch.ones_like(event[:1]), time[1:] != time[:-1]))
        ends = torch.cat((begins[1:], torch.ones_like(event[:1])))
        self.index = begins.cumsum(0) - 1
        self.last = torch.where(ends, place, time.shape[0]).flip(0).cummin(0).values.flip(0)
        first = torch.where(begins, place, 0).cummax(0).values
        before = event.cumsum(0) - event.long()
        self.event_rank = before - before.gather(0, first)
        self.events = (before + event).gather(0, self.last) - before.gather(0, first)

    def sum(self, x):
        """The sum of x over each element's group."""
        # (safe_gather adds the gradients of equal indices in a fixed order)
        return safe_gather(segment_sum(x, segment_ids=self.index, num_segments=x.shape[0]), 0, self.index)


def define(risk, time, event, keep, weight, ties):
    """Returns each event's term (N,), times its weight; 0 where `event` is False. event, keep: bool. By falling time:

    (1) log_total_i = log sum_{t_j >= t_i} w_j exp(r_j), a running logsumexp up to the last of the group of t_i
    (2) breslow: w_i (log_total_i - r_i)
    (3) efron: the l-th of a group's d events, l = 0 .. d - 1, has m (log_total_i + log(1 - l / d share)) - w_i r_i, m
        the mean of their weights, share the events' part of the group's total
    """
    compute = compute_dtype(risk.dtype, *(() if weight is None else (weight.dtype,)))
    r, w = (None if x is None else wide_on_cpu(x.to(compute)) for x in (risk, weight))
    order = time.sort(descending=True, stable=True).indices
    time, event, keep, r, w = (None if x is None else x.gather(0, order) for x in (time, event, keep, r, w))
    groups, r = Groups(time, event), r + torch.where(time.isnan(), float("nan"), 0)
    # the loss does not change if all risks do; near 0 the sums keep their digits
    largest = torch.where(keep, r, float("-inf")).detach().amax()
    shift = torch.where(largest == float("-inf"), 0, largest)
    s = r - shift
    x = torch.where(keep, s if w is None else s + w.log(), float("-inf"))
    log_total = safe_gather(log_cumsum_exp(x), 0, groups.last)
    if ties == "efron":
        share = groups.sum(torch.where(event, torch.where(event, x - log_total, 0).exp(), 0))
        part = groups.event_rank.to(s.dtype) / groups.events.clamp(min=1)
        log_total = log_total + torch.log1p(-torch.where(event, part * share, 0))
    if w is None:
        loss = log_total - s
    else:
        m = groups.sum(torch.where(event, w, 0)) / groups.events.clamp(min=1) if ties == "efron" else w
        loss = m * log_total - w * s + (m - w) * shift
    back = torch.zeros_like(order).scatter(0, order, torch.ones_like(order).cumsum(0) - 1)
    return torch.where(event, loss, 0).to(compute).gather(0, back)


# ---- record


def validate_options(name, reduction, empty, ties):
    loss_reduction.validate_options(name, reduction, empty)
    check.choice(name, "ties", ties, TIES)


_cox_loss = Composed(
    NAME,
    _safe_gather,
    _segment_sum,
    *sums.ALL,
    module="CoxLoss",
    example="torch.tensor([0.5, -0.5, 0.0]), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([True, True, False])",
    validate_options=validate_options,
)

# ---- public function


@_cox_loss.public(
    '(Tensor risk, Tensor time, Tensor event, *, str ties="breslow", Tensor? mask=None, Tensor? weight=None, '
    'str reduction="mean", Tensor? denominator=None, str empty="zero") -> Tensor',
    arguments=ARGUMENTS[ARGUMENTS.index("        reduction:") :].replace("kept rows", "kept events"),
)
def cox_loss(
    risk, time, event, *extra, ties="breslow", mask=None, weight=None, reduction="mean", denominator=None,
    empty="zero", **unknown,
):  # fmt: skip
    """log sum_{t_j >= t_i} exp(r_j) - r_i, the negative partial log-likelihood of an event i; the mean over the events.

    The loss of survival networks, which predict the logarithm r of a subject's hazard: Cox, "Regression Models and
    Life-Tables", 1972; Katzman et al., "DeepSurv", 2018. A subject is at risk up to its own time, and one without an
    event is censored there.

    d events at one time come one after the other in an order that nobody knows. Breslow's sum leaves them all in; that
    of Efron, "The Efficiency of Cox's Likelihood Function for Censored Data", 1977, takes l / d of them out for the
    l-th, which is nearer to the truth where ties are many.

    The subjects are sorted once, and one running logsumexp has all sums, in fp64 on the CPU and in fp32 elsewhere (fp64
    for fp64). A batch without an event is empty: its loss is 0, with gradients 0.

    Args:
        risk: floating tensor (N,), the logarithm r of each subject's hazard. A kept inf or NaN gives NaN.
        time: real tensor (N,), when the event happened or the subject was last seen.
        event: bool or real tensor (N,); 0 or False: the subject is censored.
        ties: "breslow" or "efron".
        mask: bool tensor, broadcastable to (N,); True = keep. Masked-out subjects do not exist, in no sum over those at
            risk either: NaN, inf or garbage there, also in `time` and `event`, changes neither the loss nor a
            gradient, and their own gradient is exactly 0.
        weight: floating tensor, broadcastable to (N,), at least 0: a subject of weight 2 counts as two, among those at
            risk too; with efron, tied events have the mean of their weights, as in R's survival. 0 means the same as
            masked out. Differentiable.
        {arguments}

    Raises:
        TypeError: `risk` is not floating, `time` or `event` is not real, `mask` is not bool.
        ValueError: shapes do not fit, devices differ, unknown `ties`, `reduction` or `empty`.

    Example:
        >>> risk, time = torch.tensor([1.0, 0.0, torch.nan]), torch.tensor([3.0, 5.0, 4.0])
        >>> event, keep = torch.tensor([True, False, True]), torch.tensor([True, True, False])
        >>> safeops.cox_loss(risk, time, event, mask=keep)
        tensor(0.3133)
    """
    if extra or unknown:
        refuse(cox_loss, extra, unknown)
    check.floating(NAME, "risk", risk, numbers=True)
    if risk.dim() != 1:
        remedy = "risk.squeeze(1)" if risk.dim() == 2 and risk.shape[1] == 1 else ""
        raise ValueError(f"{NAME}: risk must be (N,), one number a subject, got {check.shown(risk)}{check.say(remedy)}")
    check.choice(NAME, "ties", ties, TIES)
    for key, x in ("time", time), ("event", event):
        one_a_row(NAME, key, x, risk, risk.shape)
    validate(NAME, risk.shape, mask, weight, reduction, denominator, empty, risk=risk, time=time, event=event)
    check.no_dtensor(NAME, "risk", risk)
    keep = kept(mask, weight)
    keep = torch.ones_like(risk, dtype=torch.bool) if keep is None else keep.expand(risk.shape)
    happened = keep & (event != 0)
    if weight is not None:  # (converted once: autograd adds its gradients wide)
        weight = torch.where(keep, weight.to(compute_dtype(weight.dtype)), 1)
    if risk.shape[0]:
        loss = define(torch.where(keep, risk, 0), torch.where(keep, time, 0), happened, keep, weight, ties)
    else:
        loss = risk.to(compute_dtype(risk.dtype)) * (1 if weight is None else weight)
    weight = None if weight is None else torch.where(happened, weight.to(loss.dtype), 0)
    loss = loss_reduction.reduce(NAME, loss, happened, weight, reduction, denominator, empty)
    return loss.to(compute_dtype(risk.dtype))
