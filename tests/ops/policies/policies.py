"""policy_loss and kl_to_reference: a number for each token, padded or packed."""

import functools

import torch

from safeops.testing import Bad, Sample
from tests.ops.bad_calls import KEEP, NAN, X, bad_masks, must
from tests.ops.operands import HUGE, data, mask, plain, plain_mask, weights
from tests.ops.record import NOT_SAFE, Record
from tests.ops.truth import kept, reduce, saturated, weighted

HERE = "tests/contract/policies"
GPU = "made of other ops, whose kernels the GPU tests run"
NO_ROUTE = "made of other ops, and of torch's elementwise ones"
OF_PARTS = "made of elementwise ops of torch and of sums whose own records have it"
SKIP = NOT_SAFE | {
    "repeatable": OF_PARTS,
    "threads": OF_PARTS,
    "saved_bytes": "made of torch's ops, which save their own operands",
    "peak_memory": "made of other ops: what one gives another is a tensor",
    "sizes": f"tokens lie along a dim, which a 0-dim tensor has not: {HERE} has the other sizes",
}
CU = torch.tensor([0, 2])
LARGEST = {torch.float64: torch.finfo(torch.float64).max}


def estimators(d, dtype):
    """Returns Schulman's estimators of d = log q - log p."""
    return {"k1": lambda: -d, "k2": lambda: d * d / 2, "k3": lambda: torch.expm1(d) - d}


def kl_to_reference(log_prob, reference_log_prob, *, kind="k3", mask=None, out_dtype=torch.float64):
    keep = kept(log_prob.shape, mask, None).to(log_prob.device)
    d = torch.where(keep, reference_log_prob, 0) - torch.where(keep, log_prob, 0)
    return saturated(estimators(d, out_dtype)[kind](), out_dtype)


def policy_loss(
    log_prob, old_log_prob, advantage, *, mask=None, weight=None, cu_seqlens=None, level="token", clip=(0.2, 0.28),
    dual_clip=None, objective="clip", reference_log_prob=None, kl="k3", beta=0.0, reduction="mean", denominator=None,
    empty="zero", out_dtype=torch.float64,
):  # fmt: skip
    """Computes the objective as its papers write it, sequence by sequence. advantage: of tokens."""
    keep = kept(log_prob.shape, mask, weight).to(log_prob.device)
    x, old, a = (torch.where(keep, t, 0) for t in (log_prob, old_log_prob.detach(), advantage.detach()))
    d = x - old
    if level == "sequence":
        d = (d.sum(-1, keepdim=True) / keep.sum(-1, keepdim=True).clamp(min=1)).expand(d.shape)
    r = saturated(d.exp(), out_dtype)
    low, high = 1 - clip[0], 1 + clip[1]
    bounded = torch.where(r > high, high, torch.where(r < low, low, r))
    if objective == "cispo":
        loss, clipped = -(bounded.detach() * a * x), bounded != r
    else:
        worse = (-r * a.sign() > -bounded * a.sign()) | r.isnan() | a.isnan()
        q, clipped = torch.where(worse, r, bounded), ~worse & (bounded != r) & (a != 0)
        if dual_clip is not None:
            far = (a < 0) & (r > dual_clip)
            q, clipped = torch.where(far, dual_clip, q), clipped | far
        loss = -q * a
    divergence = torch.zeros_like(x)
    if reference_log_prob is not None:
        divergence = kl_to_reference(x, reference_log_prob.detach(), kind=kl, mask=keep, out_dtype=out_dtype)
        loss = loss + beta * divergence
    loss, w = weighted(loss, keep, weight), None if weight is None else torch.where(keep, weight, 0)
    if reduction == "sequence_mean":
        each = reduce(True, loss, keep, w, -1, False, "zero")
        loss = reduce(True, each, keep.any(-1), None, None, False, empty, denominator)
    elif reduction != "none":
        loss = reduce(reduction == "mean", loss, keep, w, None, False, empty, denominator)
    numbers = clipped.to(x.dtype), r, saturated(torch.expm1(d) - d, out_dtype), divergence
    return loss, *(reduce(True, torch.where(keep, t.detach(), 0), keep, None, None, False, empty) for t in numbers)


def _terms_of_kl(sample, outcome):
    """Sizes of the terms that cancel: log-probabilities, and their exponentials."""
    x, y = (t.detach().double() for t in sample.args)
    d = (y - x).nan_to_num(0, 0, 0)
    size = 1 + d.abs() + d.exp() + x.abs().nan_to_num(0, 0, 0) * (1 + d.abs() + d.exp())
    upstream = outcome.upstream[0].abs() if outcome.upstream else 1.0
    return size, dict.fromkeys((0, 1), size * upstream)


def _kl_samples():
    x = data(4, 5), data(4, 5, seed=1)
    yield Sample(x, {"mask": mask(4, 5)}, name="k3", slow=True)
    yield Sample(x, {"kind": "k2", "mask": mask(1, 5)}, name="k2")
    yield Sample(x, {"kind": "k1"}, name="k1")
    yield Sample((x[0], x[0] + data(4, 5, seed=2) / 1000), {}, name="k3 of policies that are close")


def bad_tokens(name, names, call):
    """Yields bad calls. call: {operand: tensor} -> (args, kwargs)."""
    first, *others = names
    yield Bad(*call({first: X.long()}), TypeError, (name, first, "floating", "torch.int64"))
    yield Bad(*call({first: [1.0]}), TypeError, (name, first, "tensor", "list"))
    yield Bad(*call(dict.fromkeys(names, X[0, 0])), ValueError, (name, first, "last dim", "()"))
    for key in others:
        yield Bad(*call({key: X.long()}), TypeError, (name, key, "floating", "torch.int64"))
        yield Bad(*call({key: X[:, :3]}), ValueError, (name, key, first, "(2, 3)", "(2, 5)"))
        yield Bad(*call({key: X.to("meta")}), ValueError, (name, key, "meta"))
    yield from bad_masks(name, lambda m: call({"mask": m}))


def place(operands, **options):
    def call(changes):
        positions = [changes.pop(key, x) for key, x in operands.items()]
        return tuple(positions), {**options, **changes}

    return call


def _bad_kl():
    name, operands = "kl_to_reference", {"log_prob": X, "reference_log_prob": X}
    yield from bad_tokens(name, operands, place(operands))
    for value in ("k4", None, 3):
        yield Bad((X, X), {"kind": value}, ValueError, (name, "kind", "k1", "k2", "k3", str(value)))


Record(
    "kl_to_reference",
    kl_to_reference,
    _kl_samples(),
    bad_calls=_bad_kl(),
    call={"log_prob": plain(), "reference_log_prob": plain(1), "kind": "k2", "mask": plain_mask()},
    gpu=GPU,
    no_route=NO_ROUTE,
    data=(0, 1),
    terms=_terms_of_kl,
    skip=SKIP | {"weight_zero": "has no weight", "accumulation": "nothing is summed"},
)


def by_sequence(op):
    """Returns `op` for samples, whose operands broadcast: an advantage (N, 1) is one of each sequence. packed: the
    sequences lie one after the other. With a denominator the loss alone, as that is not of the numbers to log."""

    @functools.wraps(op)
    def call(*operands, **options):
        result = laid_out(*operands, **options)
        return result if options.get("denominator") is None else result[0]

    def laid_out(log_prob, old, advantage, *, packed=False, **options):
        if op is policy_loss:
            advantage = advantage.expand(log_prob.shape)
        elif advantage.shape[-1:] == (1,) != log_prob.shape[-1:]:
            advantage = advantage[..., 0]
        if not packed or op is policy_loss:
            return op(log_prob, old, advantage, **options)
        bounds = torch.arange(log_prob.shape[0] + 1, device=log_prob.device) * log_prob.shape[1]
        flat = {
            key: x.expand(log_prob.shape).flatten() if isinstance(x, torch.Tensor) and x.dim() else x
            for key, x in options.items()
        }
        return op(log_prob.flatten(), old.flatten(), advantage.flatten(), cu_seqlens=bounds, **flat)

    return call


def _samples():
    def sample(name, advantage=(3, 4), slow=False, leaves=(0,), **options):
        operands = data(3, 4), data(3, 4, seed=1), data(*advantage, seed=2)
        return Sample(operands, options, name=name, differentiable=leaves, slow=slow)

    reference = {"reference_log_prob": data(3, 4, seed=3), "beta": 0.5}
    weighted = {"leaves": (0, "weight"), "mask": mask(3, 4), "weight": weights(3, 4)}
    divided = {"denominator": torch.tensor(4.5, dtype=torch.float64), "packed": True, "reduction": "sequence_mean"}
    yield sample("DAPO", mask=mask(3, 4), slow=True)
    yield sample("PPO, dual clip", clip=(0.2, 0.2), dual_clip=3.0, reduction="none", **weighted)
    yield sample("GRPO, packed", (3, 1), clip=(0.2, 0.2), **weighted, **divided, **reference)
    yield sample("GSPO", (3, 1), mask=mask(3, 4), level="sequence", clip=(0.5, 1.0), reduction="sequence_mean")
    yield sample("sum", level="sequence", reduction="sum", clip=(0.5, 1.0), packed=True, kl="k2", **reference)


def _cispo():
    operands = data(3, 4), data(3, 4, seed=1), data(3, 1, seed=2)
    options = {"mask": mask(3, 4), "weight": weights(3, 4), "objective": "cispo", "clip": (0.5, 2.0)}
    yield Sample(operands, options, differentiable=(0, "weight"))


def _terms(sample, outcome):
    """Sizes of the terms: exp(d) has the rounding of d, which is that of log-probabilities."""
    x, old, a = (t.detach().double().nan_to_num(0, 0, 0) for t in sample.args)
    reference = sample.kwargs.get("reference_log_prob", old)
    w = sample.kwargs.get("weight")
    sizes = 1 + (x.abs() + old.abs() + reference.abs()) * (1 + a.abs())
    size = sizes * (1 + (x - old).exp() + (reference - x).exp()) * (1 + a.abs())
    largest = size.max() if size.numel() else 0.0
    if sample.kwargs.get("reduction") == "sum":
        largest = largest * x.numel()
    upstream = outcome.upstream[0].abs().max() if outcome.upstream and x.numel() else 1.0
    sizes = {0: upstream * largest}
    if w is not None:
        sizes["weight"] = upstream * largest * w.new_ones(()) * (1 + 1 / w.detach().abs().clamp(min=1e-3).min())
    return largest, {key: s * torch.ones_like(sample.get(key)) for key, s in sizes.items()}


def _bad_calls():
    name, operands = "policy_loss", {"log_prob": X, "old_log_prob": X, "advantage": X}
    call = place(operands)
    yield from bad_tokens(name, ("log_prob", "old_log_prob", "reference_log_prob"), call)
    for shape in ((3,), (2, 3), (), (1, 5)):
        bad = call({"advantage": torch.zeros(shape)})
        yield Bad(*bad, ValueError, (name, "advantage", str(shape), "(2, 5)", "(2,)"))
    yield Bad(*call({"advantage": X.long()}), TypeError, (name, "advantage", "floating", "torch.int64"))
    yield Bad(*call({"advantage": X.to("meta")}), ValueError, (name, "advantage", "meta"))
    yield Bad(*call({"weight": torch.ones(3)}), ValueError, (name, "weight", "(3,)", "(2, 5)"))
    yield Bad(*call({"weight": X.long()}), TypeError, (name, "weight", "floating", "torch.int64"))
    for key, known in (
        ("level", "sequence_token"), ("objective", "cispo"), ("kl", "k3"), ("reduction", "sequence_mean"),
        ("empty", "raise"),
    ):  # fmt: skip
        for value in ("grpo", None):
            yield Bad(*call({key: value}), ValueError, (name, key, known, str(value)))
    for value in (None, "0.2", True, (0.2,), (0.2, 0.3, 0.4), torch.tensor(0.2)):
        yield Bad(*call({"clip": value}), TypeError, (name, "clip", "(low, high)"))
    for value, key in (((-0.2, 0.2), "clip[0]"), ((0.2, -0.2), "clip[1]"), ((NAN, 0.2), "clip[0]"), (-0.1, "clip[0]")):
        yield Bad(*call({"clip": value}), ValueError, (name, key, "at least 0"))
    yield Bad(*call({"clip": (0.2, "1")}), TypeError, (name, "clip[1]", "number", "str"))
    for value in (1.0, 0.5, NAN):
        yield Bad(*call({"dual_clip": value}), ValueError, (name, "dual_clip", "greater than 1", str(value)))
    yield Bad(*call({"dual_clip": "3"}), TypeError, (name, "dual_clip", "str"))
    yield Bad(*call({"dual_clip": 3.0, "objective": "cispo"}), ValueError, (name, "dual_clip", "cispo"))
    for key, options in (("beta", {"reference_log_prob": X}), ("denominator", {})):
        yield Bad(*call({key: -1.0, **options}), ValueError, (name, key, "-1.0"))
        yield Bad(*call({key: "1", **options}), TypeError, (name, key, "str"))
        yield must(name, key, *call({key: HUGE, **options}), ValueError)
    yield Bad(*call({"beta": 0.1}), ValueError, (name, "beta 0.1", "reference_log_prob"))
    yield Bad(*call({"denominator": torch.ones(2)}), ValueError, (name, "denominator", "(2,)"))
    yield Bad(*call({"denominator": 4.0, "reduction": "sum"}), ValueError, (name, "denominator", "sum"))
    yield Bad(*call({"mask": ~KEEP, "empty": "raise"}), ValueError, (name, "empty", "raise"))
    yield Bad(*call({"cu_seqlens": CU}), ValueError, (name, "log_prob", "(T,)", "(2, 5)"))
    packed = place({key: X[0] for key in operands})
    yield Bad(*packed({"cu_seqlens": CU.float()}), TypeError, (name, "cu_seqlens", "int64", "torch.float32"))
    yield Bad(*packed({"cu_seqlens": [0, 5]}), TypeError, (name, "cu_seqlens", "tensor", "list"))
    yield Bad(*packed({"cu_seqlens": CU[None]}), ValueError, (name, "cu_seqlens", "(1, 2)"))
    yield Bad(*packed({"cu_seqlens": CU}), ValueError, (name, "cu_seqlens", "end at the 5"))
    yield Bad(*packed({"cu_seqlens": torch.tensor([0, 3, 2, 5])}), ValueError, (name, "cu_seqlens", "decrease"))


PLAIN = {
    "log_prob": -plain(),
    "old_log_prob": -plain(1),
    "advantage": plain(2) - 1,
    "mask": plain_mask(),
    "weight": plain(3),
    "cu_seqlens": None,
    "level": "token",
    "clip": (0.2, 0.3),
    "dual_clip": 3.0,
    "objective": "clip",
    "reference_log_prob": -plain(4),
    "kl": "k2",
    "beta": 0.0,
    "denominator": torch.tensor(5.0),
}
CONSTANT = dict.fromkeys(
    ("gradcheck", "gradgradcheck", "forward_ad"), "the clipped ratio is a constant, whose change finite differences see"
)
LOGGED = {
    "accumulation": "the divergences cancel; the sums are masked_mean's, which has it",
    "masked_upstream": "a result for each token comes with means, which have none",
}

Record(
    "policy_loss",
    policy_loss,
    _samples(),
    bad_calls=_bad_calls(),
    call=PLAIN,
    gpu=GPU,
    no_route=NO_ROUTE,
    data=(0, 1, 2, "reference_log_prob"),
    terms=_terms,
    skip=SKIP | LOGGED,
    adapt=by_sequence,
    variants={"cispo": (_cispo(), {"data": (0, 1, 2), "terms": _terms, "skip": SKIP | LOGGED | CONSTANT})},
)
