"""linear_token_log_probs. Its operands do not broadcast: tests/contract has the checks that need broadcasting."""

import torch

from safeops.testing import Bad, Sample
from tests.ops.bad_calls import BadIndex
from tests.ops.classification import cross_entropy as classification
from tests.ops.classification import log_probs
from tests.ops.linear.linear_cross_entropy import SHAPED, _rounding, bad_logits_dtypes
from tests.ops.operands import data, mask, plain
from tests.ops.record import NOT_SAFE, Record

NAME = "linear_token_log_probs"


def linear_token_log_probs(
    input, linear_weight, target, *, linear_bias=None, mask=None, logits_dtype=None, support=None,
    support_threshold=None, outside="-inf", **options,
):  # fmt: skip
    target = target.long()
    keep = (target >= 0) & (target < len(linear_weight)) & (target != options.get("ignore_index", -100))
    keep = keep if mask is None else keep & mask
    logits = torch.where(keep.unsqueeze(-1), input, 0) @ linear_weight.mT
    logits = logits if linear_bias is None else logits + linear_bias
    return log_probs.token_log_probs(logits, target, mask=keep, **options)


def terms(sample, outcome):
    """Sizes of the terms. A logit's size is the sum of |x w|. Logits and the slopes to them are rounded to the
    operands' dtype. A logit's error also changes its probability in proportion."""
    x, w = (t.detach() for t in sample.args[:2])
    leaves, temperature = sample.leaves(), sample.kwargs.get("temperature", 1.0)
    rounding, largest = _rounding(*leaves.values()), (x.abs().amax(), w.abs().amax())
    bias = sample.kwargs.get("linear_bias")
    logit = float((x.abs() @ w.abs().mT).max() + (0 if bias is None else bias.detach().abs().max())) / temperature
    if not outcome.grads:
        return 3 * (logit + 3) * rounding, {}
    up = max(float(u.double().abs().max()) for u in outcome.upstream)
    rows = x.numel() // x.shape[-1]
    slope = 3 * up * (3 + logit) ** 2 / temperature
    sizes = {0: slope * largest[1] * len(w), 1: slope * largest[0] * rows, "linear_bias": slope * rows}
    return 3 * (logit + 3) * rounding, {
        key: torch.full_like(t.detach(), float(sizes[key]) * rounding) for key, t in leaves.items()
    }


def _sample(name, *shape, seed=0, bias=True, slow=False, **options):
    x, w = data(*shape, 4, seed=seed), data(7, 4, seed=seed + 1, low=-1.0, high=1.0)
    options = {"linear_bias": data(7, seed=seed + 2) if bias else None, **options}
    leaves = (0, 1, "linear_bias") if bias else (0, 1)
    target = classification.indices(*shape, classes=7, seed=seed)
    return Sample((x, w, target), options, name=name, differentiable=leaves, masked=(0,), weight=None, slow=slow)


def _samples():
    yield _sample("rows", 5, mask=mask(5, seed=1), slow=True)
    yield _sample("one class ignored", 5, seed=3, ignore_index=2)
    yield _sample("sequences", 2, 3, seed=6, bias=False, mask=mask(3))
    yield _sample("temperature and softcap", 5, seed=9, mask=mask(5), temperature=0.5, softcap=2.0)


_x, _w, _t = torch.arange(10.0).reshape(2, 5) / 8, torch.ones(3, 5), torch.tensor([0, 2])


def _bad_calls():
    def call(*args, **kwargs):
        return args, kwargs

    yield Bad(*call([1.0], _w, _t), TypeError, (NAME, "input", "tensor", "list"))
    yield Bad(*call(_x.long(), _w, _t), TypeError, (NAME, "input", "floating", "torch.int64"))
    yield Bad(*call(_x, _w[0], _t), ValueError, (NAME, "linear_weight", "(C, D)", "(5,)"))
    yield Bad(*call(_x, _w[:, :3], _t), ValueError, (NAME, "input", "(2, 5)", "linear_weight", "(3, 3)"))
    yield Bad(*call(_x, _w.half(), _t), TypeError, (NAME, "one dtype", "torch.float32", "torch.float16"))
    yield Bad(*call(_x, _w, _t, linear_bias=torch.ones(5)), ValueError, (NAME, "linear_bias", "(3,)", "(5,)"))
    yield Bad(*call(_x, _w, torch.ones(2)), TypeError, (NAME, "target", "class indices", "torch.float32"))
    yield Bad(*call(_x, _w, _t[:1]), ValueError, (NAME, "target", "(1,)", "(2,)"))
    for tensor, key in ((_w, "linear_weight"), (_t, "target")):
        operands = [t.to("meta") if t is tensor else t for t in (_x, _w, _t)]
        yield Bad(*call(*operands), ValueError, (NAME, key, "meta"))
    for wrong in (3, -1, -101):
        bad = torch.tensor([0, wrong])
        yield BadIndex(*call(_x, _w, bad), IndexError, (NAME, f"target {wrong}", "3 classes", "(3, 5)", "-100"))
    yield Bad(*call(_x, _w, _t, mask=torch.ones(2)), TypeError, (NAME, "mask", "bool", "torch.float32"))
    yield Bad(*call(_x, _w, _t, mask=torch.ones(3, dtype=torch.bool)), ValueError, (NAME, "mask", "(3,)", "(2,)"))
    yield Bad(*call(_x, _w, _t, ignore_index=1.0), TypeError, (NAME, "ignore_index", "float"))
    yield from log_probs.bad_numbers(NAME, _x, _w, _t)
    yield from bad_logits_dtypes(NAME, _x, _w, _t)


HERE = "operands do not broadcast: tests/contract/linear/test_linear_log_probs.py has it"

Record(
    NAME,
    linear_token_log_probs,
    _samples(),
    bad_calls=_bad_calls(),
    call={
        "input": plain(),
        "linear_weight": plain(1)[:4].clone(),
        "target": torch.tensor([0, 3, 2, -100, 1]),
        "linear_bias": plain(2)[0, :4].clone(),
        "mask": torch.tensor([True, True, False, True, True]),
        "ignore_index": -100,
        "temperature": 0.75,
        "softcap": 4.0,
        "logits_dtype": None,
        "support": None,
        "support_threshold": None,
        "outside": "-inf",
    },
    gpu="plain torch operations between kernels of token_log_probs, on any device",
    no_route="not a kernel: tests/contract/linear/test_linear_log_probs.py watches that there are chunks",
    terms=terms,
    skip=NOT_SAFE | dict.fromkeys(SHAPED, HERE) | {
        "mixed_dtypes": "refused, as by a linear layer",
        "routes": "one of them rounds half logits: in fp32 tests/contract/linear/test_linear_log_probs.py has it",
        "threads": "the products are BLAS's, whose last digits depend on how many share them",
    },
)  # fmt: skip
