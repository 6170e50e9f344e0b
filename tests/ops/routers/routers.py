"""The losses and statistics of routers, as their papers write them: a row of logits for each token."""

import functools

import torch

from safeops.testing import Bad, Sample
from tests.ops.operands import HUGE, data, mask, plain
from tests.ops.record import NO_WEIGHT, ONE_OPERAND, Record
from tests.ops.reductions.moments import masked_logsumexp
from tests.ops.reductions.sums import DIFFERENTIATES
from tests.ops.row_loss import DENOMINATOR, NO_GPU, PLAIN, ROWS, bad_calls, row_loss, vectors
from tests.ops.truth import kept, reduced

HERE = "tests/contract/routers/test_routers.py"
NO_ROUTE = f"made of other ops: {HERE} watches which"
OF_PARTS = dict.fromkeys(("repeatable", "threads"), "the sums and softmaxes are other ops', which have it")
KEPT_INF = {"kept_nonfinite": f"beside an infinite logit the slope 2 z p is inf times 0: {HERE} has the value"}
X = torch.arange(10.0).reshape(2, 5)

# ---- router_z_loss, router_entropy


def _z_loss(logits):
    return masked_logsumexp(logits, dim=-1) ** 2


def _entropy(logits):
    log_p = torch.log_softmax(logits, -1)
    return -(log_p.exp() * torch.where(log_p == -torch.inf, 0, log_p)).sum(-1)


def _sizes(logits):
    """Sizes of a token's terms and of its slopes, 2 z p or -p (log p + H): z is known to the rounding of a logit."""
    size = 1 + logits.abs().amax(-1) + logits.shape[-1]
    return size**2, ((4 * size**2).unsqueeze(-1).expand(logits.shape),)


def eager_z_loss(logits, reduction):
    return torch.logsumexp(logits, -1) ** 2


def eager_entropy(logits, reduction):
    p = torch.softmax(logits, -1)
    return -(p * p.log()).sum(-1)


for name, element, twin, skip in (
    ("router_z_loss", _z_loss, eager_z_loss, KEPT_INF),
    ("router_entropy", _entropy, eager_entropy, {}),
):
    row_loss(
        name,
        element,
        _sizes,
        twin,
        vectors(1),
        {"logits": plain()},
        {},
        list(bad_calls(name, ("logits",), (), {})),
        skip=ONE_OPERAND | OF_PARTS | skip,
    )  # fmt: skip

# ---- load_balancing_loss, router_load


def shares(logits, scores):
    if scores == "probabilities":
        return logits
    s = torch.sigmoid(logits) if scores == "sigmoid" else (logits - logits.detach().amax(-1, keepdim=True)).exp()
    return s / s.sum(-1, keepdim=True)


def chosen(logits, expert_index, top_k):
    """Returns (..., E) numbers: 1 for the experts that a token chose."""
    index = logits.topk(top_k, -1).indices if expert_index is None else expert_index
    each = torch.arange(logits.shape[-1], device=logits.device)
    return (index.unsqueeze(-1) == each).any(-2).to(logits.dtype)


def load_balancing_loss(
    logits, expert_index=None, *, top_k=None, scores="softmax", level="batch", load=None, group=None, mask=None,
    reduction="mean", denominator=None, empty="zero",
):  # fmt: skip
    """Computes DeepSeek-V2's equations: f_i = E / (K T) (number of tokens that chose i), and sum_i f_i P_i. (An index
    out of range makes K T the number of choices that are left.)"""
    tokens, experts = logits.shape[:-1], logits.shape[-1]
    keep = kept(tokens, mask, None).to(logits.device).expand(tokens)
    each = keep.unsqueeze(-1)
    x = torch.where(each, logits, 0)
    choices = torch.where(each, chosen(x, expert_index, top_k), 0)
    p = torch.where(each, shares(x, scores), 0)
    if level == "sequence":
        f = experts * choices.sum(-2) / choices.sum((-1, -2)).clamp(min=1).unsqueeze(-1)
        terms, keep = (f * p.sum(-2) / keep.sum(-1, keepdim=True).clamp(min=1)).sum(-1), keep.any(-1)
    else:
        count = choices.sum(tuple(range(len(tokens)))) if load is None else load.to(logits.dtype)
        terms = (experts * count / count.sum().clamp(min=1) * p).sum(-1)
    return reduced(terms, keep, None, reduction, denominator, empty)


def router_load(logits, expert_index=None, *, top_k=None, scores="softmax", group=None, mask=None):
    tokens = logits.shape[:-1]
    each = kept(tokens, mask, None).to(logits.device).expand(tokens).unsqueeze(-1)
    x, over = torch.where(each, logits, 0), tuple(range(len(tokens)))
    load = torch.where(each, chosen(x, expert_index, top_k), 0).sum(over)
    importance = torch.where(each, shares(x, scores), 0).sum(over)
    return load.long(), importance, torch.where(load.sum() > 0, load.max() / load.mean() - 1, 0)


def of_tokens(op):
    """Returns `op` for samples, whose operands broadcast. mask: its last dim has size 1. indexed: each token's experts
    are a pattern, with one index out of range."""

    @functools.wraps(op)
    def call(logits, index=None, *, mask=None, indexed=False, **options):
        if indexed:
            token = torch.ones_like(logits[..., 0], dtype=torch.int64)  # (of DTensors: a DTensor)
            token = token.flatten().cumsum(0).reshape(token.shape) - 1
            experts = logits.shape[-1]
            index = torch.stack([token % 3 % experts, (2 * token + 1) % (experts + 1)], -1)
        mask = mask[..., 0] if isinstance(mask, torch.Tensor) and mask.dim() > 1 else mask
        return op(logits, index, mask=mask, **options)

    return call


def eager_balance(logits, expert_index=None, *, top_k=None, scores="softmax", mask=None, **options):
    return load_balancing_loss(logits, expert_index, top_k=top_k, scores=scores, mask=mask, **options)


def _terms(sample, outcome):
    """Sizes of the terms: E f_i p_i, at most E of a token, and of their slopes E p_i (f_i - sum_j f_j p_j)."""
    x, options = sample.args[0], sample.kwargs
    upstream = outcome.upstream[0].abs() if outcome.upstream else torch.ones(())
    rows = x.shape[:-2] if options.get("level") == "sequence" else x.shape[:-1]
    size = x.shape[-1] * (1 + x.detach().abs().nan_to_num(0, 0, 0).amax())
    share = upstream.max() if upstream.numel() else upstream.sum()
    if options.get("reduction", "mean") == "mean":
        share = share / options.get("denominator", 1)
    return size * max(rows.numel(), 1), {0: (size * share).expand(x.shape)}


def _samples():
    def sample(name, *shape, seed=0, slow=False, low=-3.0, **options):
        x = data(*shape, seed=seed, low=low)
        return Sample((x,), options, name=name, differentiable=(0,), slow=slow)

    keep = mask(5, 1)
    yield sample("batch", 5, 4, top_k=2, mask=keep, slow=True)
    yield sample("sigmoid, none", 5, 4, seed=1, top_k=1, scores="sigmoid", mask=keep, reduction="none")
    yield sample("sequence", 3, 5, 4, seed=2, top_k=2, level="sequence", scores="sigmoid", mask=mask(3, 5, 1))
    yield sample("shares, index, sum", 5, 4, seed=3, low=0.0, indexed=True, scores="probabilities", reduction="sum",
                 mask=keep)  # fmt: skip
    load = torch.tensor([5, 0, 2, 1])
    yield sample("load, denominator", 5, 4, seed=4, top_k=2, load=load, mask=keep, denominator=DENOMINATOR)


def _bad_choices(name, options):
    """Yields bad calls that both functions refuse. options: {option: refused values that are no choice}."""
    index = torch.zeros(2, 1, dtype=torch.int64)
    yield Bad((X,), {}, ValueError, (name, "give top_k or expert_index"))
    yield Bad((X, index), {"top_k": 1}, ValueError, (name, "give top_k or expert_index, not both"))
    for value in (1.0, "1", True):
        yield Bad((X,), {"top_k": value}, TypeError, (name, "top_k", "integer", repr(value)))
    for value in (0, -1, HUGE):
        yield Bad((X,), {"top_k": value}, ValueError, (name, "top_k"))
    yield Bad((X,), {"top_k": 6}, ValueError, (name, "top_k 6", "experts", "(2, 5)"))
    yield Bad((X, [0, 1]), {}, TypeError, (name, "expert_index", "tensor", "list"))
    yield Bad((X, index.float()), {}, TypeError, (name, "expert_index", "int64", "torch.float32"))
    yield Bad((X, index[0]), {}, ValueError, (name, "expert_index", "(1,)", "(2, 5)"))
    yield Bad((X, index[:1]), {}, ValueError, (name, "expert_index", "(1, 1)", "(2, 5)"))
    yield Bad((X, index.to("meta")), {}, ValueError, (name, "expert_index", "meta"))
    for key, values in options.items():
        yield from (Bad((X, index), {key: x}, ValueError, (name, key, "'", str(x))) for x in (*values, None))


def _bad_losses():
    name = "load_balancing_loss"
    for bad in bad_calls(name, ("logits",), (), {}, of_rows=False):
        if "weight" not in bad.kwargs:
            words = ["(2,)" if word == "rows (2,)" else word for word in bad.words]
            yield Bad(bad.args, {"top_k": 1, **bad.kwargs}, bad.error, tuple(words))
    yield from _bad_choices(name, {"scores": ["relu"], "level": ["token"]})
    yield Bad((X[0],), {"top_k": 1, "level": "sequence"}, ValueError, (name, "sequence", "(..., S, E)", "(5,)"))
    yield Bad((X,), {"top_k": 1, "group": 1}, ValueError, (name, "group", "global", "'batch'"))
    yield Bad((X,), {"top_k": 1, "level": "global", "group": 1}, (TypeError, ValueError), (name, "group"))
    load = torch.ones(5)
    yield Bad((X,), {"top_k": 1, "load": load[:2]}, ValueError, (name, "load", "(2,)", "(2, 5)"))
    yield Bad((X,), {"top_k": 1, "load": [1] * 5}, TypeError, (name, "load", "tensor", "list"))
    yield Bad((X,), {"top_k": 1, "load": load.to(torch.complex64)}, TypeError, (name, "load", "complex"))
    yield Bad((X,), {"top_k": 1, "load": load.to("meta")}, ValueError, (name, "load", "meta"))
    for level in ("sequence", "global"):
        yield Bad((X,), {"top_k": 1, "load": load, "level": level}, ValueError, (name, "load", f"'{level}'"))


def _bad_loads():
    name, keep = "router_load", torch.ones(2, dtype=torch.bool)
    yield from _bad_choices(name, {"scores": ["relu"]})
    yield Bad((X.long(),), {"top_k": 1}, TypeError, (name, "logits", "floating", "torch.int64"))
    yield Bad((X[0, 0],), {"top_k": 1}, ValueError, (name, "logits", "last dim", "()"))
    yield Bad((X,), {"top_k": 1, "mask": keep.float()}, TypeError, (name, "mask", "bool", "torch.float32"))
    yield Bad((X,), {"top_k": 1, "mask": keep.repeat(2)}, ValueError, (name, "mask", "(4,)", "(2,)"))
    yield Bad((X,), {"top_k": 1, "mask": keep.to("meta")}, ValueError, (name, "mask", "meta"))
    yield Bad((X,), {"top_k": 1, "group": 1}, (TypeError, ValueError), (name, "group"))


CALL = {"logits": plain(), "expert_index": None, "top_k": 2, "scores": "sigmoid", "group": None, "mask": PLAIN["mask"]}
FIELDS = {"gpu": NO_GPU, "no_route": NO_ROUTE, "adapt": of_tokens, "data": (0,)}
SKIP = {**ROWS, **NO_WEIGHT, **ONE_OPERAND, **OF_PARTS, "finite": "not a safe_* function: a kept inf shows"}
Record(
    "load_balancing_loss",
    load_balancing_loss,
    _samples(),
    bad_calls=_bad_losses(),
    call={**CALL, "level": "batch", "load": torch.arange(6), "denominator": PLAIN["denominator"]},
    torch_equivalent=of_tokens(eager_balance),
    terms=_terms,
    skip=SKIP | {"uninitialized": "no experts are fewer than top_k, which is refused"},
    **FIELDS,
)
Record(
    "router_load",
    router_load,
    [
        Sample(s.args, {k: s.kwargs[k] for k in s.kwargs if k in (*CALL, "indexed")}, name=s.name, differentiable=())
        for s in _samples()
        if s.name in ("batch", "sequence", "shares, index, sum")
    ],
    bad_calls=_bad_loads(),
    call=CALL,
    skip=SKIP | dict.fromkeys(DIFFERENTIATES, "numbers to log have no gradient"),
    **FIELDS,
)
