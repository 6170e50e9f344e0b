"""Log probabilities and entropies of rows of logits: classes last."""

import functools

import torch

import safeops
from safeops.testing import Bad, Sample
from tests.ops import gpu
from tests.ops.bad_calls import NAN, BadIndex, X, must
from tests.ops.classification.cross_entropy import SUPPORT, indices, restricted, shaped, supports
from tests.ops.operands import HUGE, data, mask, plain
from tests.ops.record import DEVICE, NOT_SAFE, ONE_OPERAND, Record

# ---- definitions


def token_log_probs(
    logits, target, *, mask=None, ignore_index=-100, temperature=1.0, softcap=None, with_argmax=False, support=None,
    support_threshold=None, outside="-inf",
):  # fmt: skip
    classes, count = logits.shape[-1], ()
    keep = (target >= 0) & (target < classes) & (target != ignore_index)
    keep = keep if mask is None else keep & mask
    if support is not None:
        logits, keep, *count = restricted(logits, target, keep, support, support_threshold, outside)
    is_own = (torch.arange(classes, device=target.device) == target.unsqueeze(-1)) & keep.unsqueeze(-1)
    best = ()
    if with_argmax:
        argmax = torch.where(keep, logits.argmax(-1) if classes else target, 0)
        best = argmax, keep & (argmax == target)
    x = shaped(torch.where(keep.unsqueeze(-1), logits, 0), temperature, softcap)
    if not classes:
        return *(x.sum(-1),) * 3, *best, *count
    certain = ((x == torch.inf) == is_own).all(-1) & is_own.any(-1) & ~x.isnan().any(-1)
    x = torch.where(certain.unsqueeze(-1), 0, x)
    x = x + torch.where((x == torch.inf).any(-1, keepdim=True), torch.nan, 0)  # NaN gradients, too
    log_sum = x.logsumexp(-1, keepdim=True)
    log_p = x - log_sum
    p = log_p.exp()
    log_prob = torch.where(is_own, log_p, 0).sum(-1)
    entropy = -torch.where(p == 0, 0, p * torch.where(p == 0, 0, log_p)).sum(-1)
    results = log_prob, entropy, torch.where(log_prob.isnan(), torch.nan, log_sum.squeeze(-1))
    limits = 0, 0, torch.inf
    return *(torch.where(keep, torch.where(certain, at, r), 0) for r, at in zip(results, limits)), *best, *count


# ---- the op as the contract's checks call it: all operands broadcast to one shape


def adapted(op):
    """Returns `op` for operands that broadcast: class indices and mask have a last dim of size 1 for the classes.
    dim, classes: as in `adapted` of cross_entropy.py."""

    @functools.wraps(op)
    def call(logits, target, *args, dim=-1, classes=0, **kwargs):
        def squeezed(t):
            fits = isinstance(t, torch.Tensor) and isinstance(logits, torch.Tensor) and t.dim() == logits.dim() > 0
            return t.squeeze(-1) if fits and t.shape[-1] == 1 else t

        kwargs["mask"] = squeezed(kwargs.get("mask"))
        kwargs |= {"support_threshold": squeezed(kwargs["support_threshold"])} if "support_threshold" in kwargs else {}
        if isinstance(target, torch.Tensor):
            target = squeezed(target)
            if classes and logits.shape[-1] < classes:
                target = torch.where(target < logits.shape[-1], target, kwargs.get("ignore_index", -100))
        return op(logits, target, *args, **kwargs)

    return call


def row_terms(sample, outcome):
    """Sizes of the terms that cancel. log p is x - logsumexp, both rounded; the entropy H has the terms p log p; d/dx
    has p (log p + H)."""
    x = shaped(
        sample.args[0].detach().nan_to_num(0, 0, 0), sample.kwargs.get("temperature", 1), sample.kwargs.get("softcap")
    )
    log = x.logsumexp(-1, keepdim=True) if x.shape[-1] else x.sum(-1, keepdim=True)
    size = 1 + float((log - x).abs().max()) + float(log.abs().max()) if x.numel() else 1.0
    if not outcome.grads:
        return size, {}
    g = max(float(u.double().nan_to_num(0, 0, 0).abs().max()) if u.numel() else 0.0 for u in outcome.upstream)
    scale = 3 * g * size / sample.kwargs.get("temperature", 1)
    return size, {key: torch.full_like(t.detach(), scale) for key, t in sample.leaves().items()}


def _sample(x, target, **options):
    name = options.pop("name")
    slow = options.pop("slow", False)
    options = {"dim": -1, "classes": x.shape[-1], **options}
    return Sample((x, target), options, differentiable=(0,), weight=None, name=name, slow=slow)


def _reduced():
    t, m = indices(4, 1, classes=5), mask(4, 1)
    yield _sample(data(4, 5), t, mask=m, name="rows", slow=True)
    yield _sample(data(4, 5, seed=1), t, ignore_index=int(t[1]), name="one class ignored")
    yield _sample(data(2, 3, 5, seed=2), indices(2, 3, 1, classes=5), mask=mask(2, 3, 1), name="sequences")
    yield _sample(data(3, 40), indices(3, 1, classes=40), mask=mask(1, 1), name="long rows, mask broadcast")
    options = {"mask": m, "temperature": 0.5, "softcap": 2.0}
    yield _sample(data(4, 5, seed=3), t, **options, name="temperature and softcap", slow=True)
    yield _sample(data(3, 40, seed=4), indices(3, 1, classes=40), temperature=1.5, name="temperature")
    options = {"mask": mask(2, 3, 1), "with_argmax": True}
    yield _sample(data(2, 3, 40, seed=5), indices(2, 3, 1, classes=40), **options, name="argmax")


def _of_supports():
    for i, form in enumerate(supports((2, 3), 20, 2)):
        options = {"mask": mask(2, 3, 1), "outside": "mask", "temperature": (1.0, 1.5)[i], **form}
        name = ("bool", "threshold")[i]
        yield _sample(data(2, 3, 20, seed=6), indices(2, 3, 1, classes=20), **options, name=name)


T = torch.tensor([0, 4])


def _bad_calls(name):
    rows = torch.ones(2, dtype=torch.bool)

    def call(*args, **kwargs):
        return args, kwargs

    yield Bad(*call([1.0], T), TypeError, (name, "logits", "tensor", "list"))
    yield Bad(*call(X.long(), T), TypeError, (name, "logits", "floating", "torch.int64"))
    yield Bad(*call(X[0, 0], T[0]), ValueError, (name, "logits", "classes", "()"))
    yield Bad(*call(X, 3), TypeError, (name, "target", "tensor", "int"))
    for dtype in (torch.bool, torch.int16, torch.float32):
        yield Bad(*call(X, T.to(dtype)), TypeError, (name, "target", "int64", str(dtype)))
    yield Bad(*call(X, T.repeat(2)), ValueError, (name, "target", "(4,)", "(2, 5)", "(2,)"))
    yield Bad(*call(X[None], T), ValueError, (name, "target", "(2,)", "(1, 2, 5)", "(1, 2)"))
    yield Bad(*call(X, T.to("meta")), ValueError, (name, "target", "meta"))
    for wrong in (5, -1, -101):
        yield BadIndex(*call(X, torch.tensor([0, wrong])), IndexError, (name, f"target {wrong}", "5 classes", "-100"))
    yield BadIndex(*call(X[:, :0], T), IndexError, (name, "target 0", "0 classes", "(2, 0)"))
    yield Bad(*call(X, T, mask=rows.float()), TypeError, (name, "mask", "bool", "torch.float32"))
    yield Bad(*call(X, T, mask=torch.ones(2, 5, dtype=torch.bool)), ValueError, (name, "mask", "(2, 5)", "(2,)"))
    yield Bad(*call(X, T, mask=rows.to("meta")), ValueError, (name, "mask", "meta"))
    yield Bad(*call(X, T, ignore_index=1.0), TypeError, (name, "ignore_index", "float"))
    yield Bad(*call(X, T, ignore_index=None), TypeError, (name, "ignore_index", "NoneType"))


def _bad_flags(name):
    for value in (1, None, "yes", torch.tensor(True)):
        yield must(name, "with_argmax", (X, T), {"with_argmax": value}, TypeError)


def bad_numbers(name, *operands):
    """Yields calls with refused values of temperature and softcap."""
    for key in ("temperature", "softcap"):
        for value in (0, 0.0, -1.0, NAN, float("inf"), HUGE):
            yield must(name, key, operands, {key: value}, ValueError)
        for value in ("1", True, torch.ones(2)):
            yield must(name, key, operands, {key: value}, TypeError)
    yield must(name, "temperature", operands, {"temperature": None}, TypeError)


def _gpu_case(n, dtype, seed):
    """Returns a GPU call on n logits: rows of about a thousand classes, or one row that several blocks share."""
    classes = next((c for c in (1000, 1024, 8) if n % c == 0), n)
    target, keep = gpu.indices(n // classes, classes, seed), gpu.keep(n // classes, seed)
    keep[0] = True

    def call(x):
        return torch.stack(safeops.token_log_probs(x.view(-1, classes), target, mask=keep, softcap=8.0))

    return gpu.Case(call, (gpu.numbers(n, dtype, seed),))


def _direct():
    x = data(4, 5).float().to(DEVICE).requires_grad_()
    operands, options = (x, indices(4, classes=5).to(DEVICE)), {"temperature": 0.5}
    yield torch.ops.safeops.token_log_probs.default, operands, options
    yield torch.ops.safeops.token_log_probs.with_argmax, operands, {**options, "with_argmax": True}
    support = torch.ones(4, 5, dtype=torch.bool, device=DEVICE)
    support[:, 1] = False
    yield torch.ops.safeops.token_log_probs.support, operands, {**options, "support": [support], "outside": "mask"}


SKIP = (
    NOT_SAFE
    | ONE_OPERAND
    | {
        "weight_zero": "it has no weights",
        "masked_upstream": "a mask drops rows: tests/contract/classification/test_log_probs.py",
    }
)
Record(
    "token_log_probs",
    token_log_probs,
    _reduced(),
    bad_calls=[
        *_bad_calls("token_log_probs"),
        *bad_numbers("token_log_probs", X, T),
        *_bad_flags("token_log_probs"),
    ],
    call={
        "logits": plain(),
        "target": torch.tensor([0, 5, 2, -100, 3]),
        "mask": torch.tensor([True, True, False, True, True]),
        "ignore_index": -100,
        "temperature": 0.75,
        "softcap": 4.0,
        "with_argmax": False,
        "support": None,
        "support_threshold": None,
        "outside": "-inf",
    },
    gpu=_gpu_case,
    skip=SKIP,
    adapt=adapted,
    row_terms=row_terms,
    raw_ops=[*_direct()],
    variants={"support": (_of_supports(), {"skip": SKIP | SUPPORT, "row_terms": row_terms})},
)
