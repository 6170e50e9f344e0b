"""head_loss of several depths of hidden states, as multi-token prediction has them: one head, a loss for each depth.

    loss = sum_d w_d loss_d

The rows of all depths are cut into chunks together, so that the head's parameters are gathered once, and their
gradients have one fp32 sum. Each depth keeps its own target, mask and denominator.
"""

from typing import NamedTuple

import torch

from safeops.core import check
from safeops.core.private_torch import saved_by_name
from safeops.head._loss import NAME, Loss

# options that may be one for all depths, or a list or tuple of one a depth
OF_A_DEPTH = "mask", "weight", "row_weight", "denominator", "target_values", "target_indices"


@saved_by_name
class DepthLosses(NamedTuple):
    loss: torch.Tensor
    depth_losses: torch.Tensor


def split(loss, hidden, target, depth_weight, options):
    """Returns ([(hidden, target, options) of each depth], [the weight of each depth])."""
    depths = len(hidden)
    if not depths:
        raise ValueError(f"{NAME}: hidden must have a tensor for each depth, got none")
    for x in hidden:
        check.floating(NAME, "hidden", x)
        if x.dim() == 0 or (x.shape[-1], x.dtype, x.device) != (hidden[0].shape[-1], hidden[0].dtype, hidden[0].device):
            both = " and ".join(f"{x.dtype} {check.shown(x)} on {x.device}" for x in (hidden[0], x))
            raise ValueError(f"{NAME}: hidden of all depths must have one width, dtype and device, got {both}")
    if loss == "token_log_probs" or options.get("reduction") == "none":
        what = "loss='token_log_probs'" if loss == "token_log_probs" else "reduction='none'"
        raise ValueError(f"{NAME}: {what} has no sum over depths: give the hidden states of one depth")
    if options.get("support") is not None:
        raise ValueError(f"{NAME}: support is for the hidden states of one depth")
    of_depth = {"target": target, **{key: options[key] for key in OF_A_DEPTH if key in options}}
    for key, x in of_depth.items():
        if key == "denominator" and isinstance(x, torch.Tensor) and x.dim() == 1:
            x = x.unbind()
        if not isinstance(x, (list, tuple)):
            if key == "target" and x is not None:
                raise TypeError(f"{NAME}: target must be a list or tuple of one a depth, as hidden is, got {_kind(x)}")
            x = [x] * depths
        of_depth[key] = _of_length(key, x, depths)
    weights = weights_of(depth_weight, hidden)
    calls = []
    for d, w in enumerate(weights):
        own = options | {key: x[d] for key, x in of_depth.items()}
        if not isinstance(w, float):
            counts = w != 0
        else:
            counts = None if w else torch.zeros((), dtype=torch.bool, device=hidden[d].device)
        mask = own.get("mask")
        if counts is not None and (mask is None or getattr(mask, "dtype", None) == torch.bool):
            own["mask"] = counts if mask is None else mask & counts  # a depth of weight 0 is masked out
        calls.append((hidden[d], own.pop("target"), own))
    return calls, weights


def _kind(x):
    return f"a tensor {check.shown(x)}" if isinstance(x, torch.Tensor) else type(x).__name__


def _of_length(key, x, depths):
    if len(x) != depths:
        raise ValueError(f"{NAME}: {key} must have one a depth, {depths} as hidden has, got {len(x)}")
    return x


def weights_of(depth_weight, hidden):
    """The weight of each depth: a float, or a 0-dim tensor."""
    if depth_weight is None:
        return [1.0] * len(hidden)
    if not isinstance(depth_weight, torch.Tensor):
        if not isinstance(depth_weight, (list, tuple)):
            raise TypeError(
                f"{NAME}: depth_weight must be numbers or a tensor of one a depth, got {type(depth_weight).__name__}"
            )
        for w in depth_weight:
            check.number(NAME, "depth_weight", w, minimum=0)
        return [float(w) for w in _of_length("depth_weight", depth_weight, len(hidden))]
    check.floating(NAME, "depth_weight", depth_weight)
    if tuple(depth_weight.shape) != (len(hidden),):
        raise ValueError(
            f"{NAME}: depth_weight {check.shown(depth_weight)} must be ({len(hidden)},), one a depth as hidden has"
        )
    check.same_device(NAME, "hidden", hidden[0], depth_weight=depth_weight)
    if check.may_look(depth_weight) and not (depth_weight.detach() >= 0).all():
        raise ValueError(f"{NAME}: depth_weight must be at least 0, got {depth_weight.tolist()}")
    return list(depth_weight.unbind())


def each(function, calls):
    """[function(*call)] of all depths. An error names the depth."""
    results = []
    for d, call in enumerate(calls):
        try:
            results.append(function(*call))
        except (IndexError, TypeError, ValueError) as error:
            raise type(error)(f"{error} (of depth {d})") from error
    return results


def total(losses, weights):
    """sum_d w_d loss_d, where a depth of weight 0 adds 0, with gradient 0."""
    terms = []
    for w, loss in zip(weights, losses):
        w = torch.full_like(loss, w) if isinstance(w, float) else w
        terms.append(w.to(loss.dtype) * torch.where(w != 0, loss, 0))  # select before arithmetic: NaN * 0 is NaN
    return torch.stack(terms).sum()


def shown(losses, loss):
    return DepthLosses(loss, torch.stack([x.detach() for x in losses]))


class Depths(Loss):
    """The losses of all depths as one loss of all rows, those of the first depth first."""

    def __init__(self, records, weights):
        self.records, self.weights, self.losses = records, weights, None
        sizes = [record.shape.numel() for record in records]
        ends = torch.tensor(sizes).cumsum(0).tolist()
        self.places = [slice(end - size, end) for end, size in zip(ends, sizes)]
        self.shape, self.reduction = torch.Size(ends[-1:]), records[0].reduction
        for record in records:
            record.refuse_unread()
            record.flatten()
        if any(record.keep is not None for record in records):
            device = next(record.keep.device for record in records if record.keep is not None)
            keeps = [torch.ones(n, dtype=torch.bool, device=device) if record.keep is None else record.keep
                     for record, n in zip(records, sizes)]  # fmt: skip
            self.keep = torch.cat(keeps)

    def begin(self, logits):
        each(lambda record: record.begin(logits), [(record,) for record in self.records])

    def rows(self, logits, part, replaced):
        first, last, _ = part.indices(self.shape[0])
        results = []
        for record, place in zip(self.records, self.places):
            start, stop = max(first, place.start), min(last, place.stop)
            if start < stop:
                of_depth = slice(start - place.start, stop - place.start)
                results.append(record.rows(logits[start - first : stop - first], of_depth, replaced)[0])
        return (torch.cat(results) if results else self.records[0].rows(logits, slice(0, 0), replaced)[0],)

    def is_linear(self):
        wanted = any(isinstance(w, torch.Tensor) and w.requires_grad for w in self.weights)
        return not wanted and all(record.is_linear() for record in self.records)

    def finish(self, loss):
        losses = [record.finish(loss[place]) for record, place in zip(self.records, self.places)]
        self.losses = [x.detach() for x in losses]
        return total(losses, self.weights)

    def shown(self, result):
        return shown(self.losses, result)
