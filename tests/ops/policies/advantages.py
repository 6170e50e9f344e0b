"""group_advantages and discounted_sum."""

import functools

import torch

from safeops.testing import Bad, Sample
from tests.ops.bad_calls import NAN, X, bad_masks, must
from tests.ops.operands import HUGE, data, mask, plain, plain_mask
from tests.ops.policies.policies import CU, GPU, NO_ROUTE, SKIP, bad_tokens, place
from tests.ops.record import ONE_OPERAND, Record
from tests.ops.truth import kept


def group_advantages(
    rewards, groups, *, scale=True, leave_one_out=False, mask=None, correction=1.0, eps=1e-4, process_group=None
):
    """Computes each reward's advantage from the list of its group. process_group: not here."""
    keep = kept(rewards.shape, mask, None).to(rewards.device)
    if isinstance(groups, int):
        groups = (torch.arange(rewards.numel(), device=rewards.device) // groups).reshape(rewards.shape)
    same = (groups.reshape(-1, 1) == groups.reshape(1, -1)) & keep.reshape(1, -1)  # (N, N)
    r = torch.where(keep, rewards, 0).flatten()
    n = same.sum(1)
    average = torch.where(same, r, 0).sum(1) / n.clamp(min=1)
    apart = r - average
    squares = torch.where(same, r - average[:, None], 0).square().sum(1)
    if leave_one_out:
        others = torch.where(same, r, 0).sum(1) - r
        apart = r - torch.where(n > 1, others / (n - 1).clamp(min=1), r)
    if scale:
        variance = torch.where(n > correction, squares / torch.where(n > correction, n - correction, 1), 0)
        std = torch.where(variance > 0, torch.where(variance > 0, variance, 1).sqrt(), variance) + eps
        apart = torch.where(std == 0, 0, apart / torch.where(std == 0, 1, std))
    return torch.where(keep, apart.reshape(rewards.shape), 0)


def discounted_sum(rewards, values=None, mask=None, *, gamma, lam=1.0, cu_seqlens=None):
    """Computes the advantages by a loop over the steps from the last to the first."""
    keep = kept(rewards.shape, mask, None).to(rewards.device)
    r = torch.where(keep, rewards, 0)
    v, factor = (torch.zeros_like(r), gamma) if values is None else (torch.where(keep, values, 0), gamma * lam)
    ends = set() if cu_seqlens is None else {end - 1 for end in cu_seqlens.tolist()}
    following = next_value = torch.zeros_like(r[..., 0]) if r.shape[-1] else None
    results = []
    for t in reversed(range(r.shape[-1])):
        if t in ends:
            following = next_value = torch.zeros_like(r[..., 0])
        here = r[..., t] + gamma * next_value - v[..., t] + factor * following
        following, next_value = (
            torch.where(keep[..., t], x, y) for x, y in ((here, following), (v[..., t], next_value))
        )
        results.append(torch.where(keep[..., t], following, 0))
    return torch.stack(results[::-1], -1) if results else r


# ---- group_advantages


def _by_ids(op):
    """Returns `op` for samples of any size. ids: the rewards' groups by ids that the size repeats."""

    @functools.wraps(op)
    def call(rewards, *, size=None, **options):
        place = torch.arange(rewards.numel(), device=rewards.device).reshape(rewards.shape)
        return op(rewards, place * 5 % 7 % 2 - 1 if size is None else size, **options)

    return call


def _rewards():
    x = data(3, 4)
    yield Sample((x,), {"mask": mask(3, 4)}, name="ids", slow=True)
    yield Sample((x,), {"mask": mask(1, 4), "leave_one_out": True, "scale": False}, name="leave one out")
    yield Sample((data(3, 4, seed=1),), {"correction": 0.0, "eps": 0.0}, name="the group's own deviation")


def _bad_groups():
    name, x, ids = "group_advantages", X, torch.zeros(2, 5, dtype=torch.int64)
    yield Bad(([1.0], 2), {}, TypeError, (name, "rewards", "tensor", "list"))
    yield Bad((X.long(), 2), {}, TypeError, (name, "rewards", "floating", "torch.int64"))
    yield from bad_masks(name, lambda m: ((x, 5), {"mask": m}))
    yield Bad((x, ids[0]), {}, ValueError, (name, "groups", "(5,)", "(2, 5)"))
    yield Bad((x, ids.float()), {}, TypeError, (name, "groups", "int64", "torch.float32"))
    yield Bad((x, ids.to("meta")), {}, ValueError, (name, "groups", "meta"))
    for size in (2.0, None, "2", True, [0, 1]):
        yield Bad((x, size), {}, TypeError, (name, "groups", "ids or the size", type(size).__name__))
    for size in (1, 0, -5):
        yield Bad((x, size), {}, ValueError, (name, f"groups of {size}", "nothing to compare"))
    yield Bad((x, 3), {}, ValueError, (name, "groups of 3", "10 rewards", "(2, 5)"))
    for key in ("scale", "leave_one_out"):
        yield Bad((x, 5), {key: 1}, TypeError, (name, key, "True or False", "1"))
    for key in ("correction", "eps"):
        yield Bad((x, 5), {key: None}, TypeError, (name, key, "NoneType"))
        yield must(name, key, (x, 5), {key: HUGE}, ValueError)
        yield from (Bad((x, 5), {key: value}, ValueError, (name, key, str(value))) for value in (-1.0, NAN))
    yield Bad((x, 5), {"process_group": "all"}, (TypeError, ValueError), (name, "group"))


def _terms_of_groups(sample, outcome):
    """Sizes of the terms: a reward, over its group's deviation."""
    upstream = outcome.upstream[0].abs().max() if outcome.upstream and outcome.upstream[0].numel() else 1.0
    x = sample.args[0].detach().double()
    n = torch.ones_like(x) * x.numel()
    return 8 + x.abs().nan_to_num(0, 0, 0), {0: 8 * upstream * n.sqrt()}


Record(
    "group_advantages",
    group_advantages,
    _rewards(),
    bad_calls=_bad_groups(),
    call={"rewards": plain(), "groups": 6, "scale": True, "leave_one_out": False, "mask": plain_mask(),
          "correction": 1.0, "eps": 0.1, "process_group": None},
    gpu=GPU,
    no_route=NO_ROUTE,
    adapt=_by_ids,
    terms=_terms_of_groups,
    several_terms=True,
    skip=SKIP | ONE_OPERAND | {
        "weight_zero": "has no weight",
        "errors": "the samples have no ids: tests/contract/test_bad_calls.py has them",
        "gradient_overflow": "a group's gradient cancels: what is left of it is a rounding",
        "kept_nonfinite": "inf less a mean that is inf is NaN: tests/contract/policies has it",
        "accumulation": "a group's differences cancel; the sums are segment_sum's, which has it",
    },
)  # fmt: skip

# ---- discounted_sum


def _packed(op):
    """Returns `op` for samples. packed: rows are sequences that lie one after the other."""

    @functools.wraps(op)
    def call(rewards, values=None, mask=None, *, packed=False, **options):
        if not packed or op is discounted_sum:  # the definition takes the sequences as rows: its loop is long enough
            return op(rewards, values, mask, **options)
        bounds = torch.arange(rewards.shape[0] + 1, device=rewards.device) * rewards.shape[1]
        flat = [None if x is None else x.expand(rewards.shape).flatten() for x in (rewards, values, mask)]
        return op(*flat, cu_seqlens=bounds, **options).reshape(rewards.shape)

    return call


def _steps():
    x = data(3, 7), data(3, 7, seed=1)
    yield Sample(x, {"mask": mask(3, 7), "gamma": 0.9, "lam": 0.8}, name="padded", slow=True)
    yield Sample(x, {"mask": mask(3, 7), "gamma": 0.9, "lam": 0.8, "packed": True}, name="packed")
    yield Sample(x[:1], {"gamma": 1.0}, name="returns to go")


def _bad_steps():
    name, operands = "discounted_sum", {"rewards": X, "values": X}
    call = place(operands, gamma=0.9)
    yield from bad_tokens(name, ("rewards", "values"), call)
    for key in ("gamma", "lam"):
        for value in (-0.1, 1.1, NAN):
            yield Bad(*call({key: value}), ValueError, (name, key, str(value)))
        yield Bad(*call({key: "1"}), TypeError, (name, key, "str"))
        yield must(name, key, *call({key: HUGE}), ValueError)
    yield Bad(*call({"cu_seqlens": CU}), ValueError, (name, "rewards", "(T,)", "(2, 5)"))
    yield Bad((X[0],), {"gamma": 0.9, "cu_seqlens": CU}, ValueError, (name, "cu_seqlens", "end at the 5"))


def _terms_of_steps(sample, outcome):
    largest = sum(t.detach().abs().nan_to_num(0, 0, 0).sum() for t in sample.args)
    upstream = outcome.upstream[0].abs().sum() if outcome.upstream else 1.0
    return 1 + largest, {i: upstream * torch.ones_like(t) for i, t in enumerate(sample.args)}


Record(
    "discounted_sum",
    discounted_sum,
    _steps(),
    bad_calls=_bad_steps(),
    call={"rewards": plain(), "values": plain(1), "mask": plain_mask(), "gamma": 0.9, "lam": 0.8, "cu_seqlens": None},
    gpu=GPU,
    no_route=NO_ROUTE,
    adapt=_packed,
    data=(0, 1),
    terms=_terms_of_steps,
    several_terms=True,
    skip=SKIP
    | {
        "weight_zero": "has no weight",
        "accumulation": "a discounted sum has few terms of size",
        "opcheck": "made of torch's ops",
        "opcheck_traced": "made of torch's ops",
    },
)
