"""linear_cross_entropy. Its operands do not broadcast: tests/contract has the checks that need broadcasting."""

import torch
import torch.nn.functional as F

from safeops.testing import Bad, Sample
from safeops.testing.compare import COMPUTE_EPS
from tests.ops.bad_calls import NAN, BadIndex, must
from tests.ops.classification import cross_entropy as classification
from tests.ops.operands import HUGE, data, mask, plain, weights
from tests.ops.record import NOT_SAFE, Record

NAME = "linear_cross_entropy"


def linear_cross_entropy(
    input, linear_weight, target, *, linear_bias=None, reduction="mean", memory="auto", logits_dtype=None, **options
):
    target, rows = target.long(), input.shape[:-1]
    _, keep, _ = classification._targets(target, len(linear_weight), *(options.get(k) for k in ("mask", "weight")),
                                     options.get("ignore_index", -100))  # fmt: skip
    x = torch.where(keep.unsqueeze(-1), input, 0).reshape(-1, input.shape[-1])
    logits = x @ linear_weight.mT
    logits = logits if linear_bias is None else logits + linear_bias
    loss = classification.cross_entropy(logits, target.reshape(-1), reduction=reduction, **{
        key: x.expand(rows).reshape(-1) if key in ("mask", "row_weight") and x is not None else x
        for key, x in options.items()
    })  # fmt: skip
    return loss.reshape(rows) if reduction == "none" else loss


def _twin(input, linear_weight, target, *, linear_bias=None, **options):
    logits = F.linear(input, linear_weight, linear_bias).reshape(-1, len(linear_weight))
    rows = {key: x.reshape(-1) if key == "mask" else x for key, x in options.items()}
    loss = classification._twin(F.cross_entropy)(logits, target.reshape(-1), **rows)
    return loss.reshape(target.shape) if options.get("reduction") == "none" else loss


# ---- tolerances


def _rounding(*tensors):
    """Returns eps(dtype) / eps(compute dtype), where products are rounded to dtype: a half dtype if it holds all
    tensors exactly, else the compute dtype (ratio 1)."""
    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(x.to(dtype).double(), x.double()) for x in tensors):
            return torch.finfo(dtype).eps / COMPUTE_EPS[dtype]
    return 1.0


def terms(sample, outcome):
    """Sizes of the terms. A logit's size is the sum of |x w|. Logits and the slopes to them are rounded to the
    operands' dtype. A logit's error also changes its probability in proportion."""
    x, w, kwargs = sample.args[0].detach(), sample.args[1].detach(), sample.kwargs
    b = kwargs.get("linear_bias")
    leaves = sample.leaves()
    rounding = _rounding(*leaves.values())
    largest = x.abs().amax(), w.abs().amax()
    logit = float((x.abs() @ w.abs().mT).max() + (0 if b is None else b.detach().abs().max()))
    per_class = kwargs.get("weight")
    heaviest = 1.0 if per_class is None else max(1.0, float(per_class.detach().max()))
    heaviest /= min(1.0, kwargs.get("temperature", 1.0))
    rows, z = x.numel() // x.shape[-1], kwargs.get("z_loss", 0.0)
    # A loss is a difference of two logits, plus z_loss times the square of the logsumexp.
    value = heaviest * 2 * (logit + 3) + z * (logit + 3) ** 2
    scale = 1.0
    if outcome.values[0].dim() == 0:
        scale = (
            rows if kwargs.get("reduction", "mean") == "sum" else 4.0
        )  # a mean over half of the rows, with weights of 1/2
    if not outcome.grads:
        return value * scale * rounding, {}
    up = float(outcome.upstream[0].double().abs().max()) * (scale / rows if scale == 4.0 else 1.0)
    slope = up * heaviest * (2 + 2 * z * (logit + 3)) * (1 + logit)
    classes = len(w)
    sizes = {
        0: slope * float(largest[1]) * classes,
        1: slope * float(largest[0]) * rows,
        "linear_bias": slope * rows,
        "weight": up * rows * (logit + 3) * 2,
        "row_weight": up * rows * (logit + 3) * 2,
    }
    return value * scale * rounding, {
        key: torch.full_like(t.detach(), sizes[key] * rounding) for key, t in leaves.items()
    }


# ---- samples

DENOMINATOR = torch.tensor(4.5, dtype=torch.float64)


def _sample(name, *shape, seed=0, bias=True, slow=False, leaves=(0, 1, "linear_bias"), **options):
    classes = 7
    x, w = data(*shape, 4, seed=seed), data(classes, 4, seed=seed + 1, low=-1.0, high=1.0)
    target = classification.indices(*shape, classes=classes, seed=seed)
    options = {"linear_bias": data(classes, seed=seed + 2) if bias else None, **options}
    return Sample((x, w, target), options, name=name, differentiable=leaves, masked=(0,), weight=None, slow=slow)


def _samples():
    yield _sample("mean", 5, mask=mask(5, seed=1), slow=True)
    yield _sample("none, weighted", 5, seed=3, weight=weights(7), reduction="none", ignore_index=2)
    yield _sample("sum of sequences", 2, 3, seed=6, bias=False, leaves=(0, 1), reduction="sum")
    yield _sample("weighted mean", 2, 3, seed=9, weight=weights(7), mask=mask(3))
    yield _sample("denominator", 5, seed=12, denominator=DENOMINATOR)
    yield _sample("smoothing", 5, seed=15, label_smoothing=0.25, mask=mask(5, seed=1))
    yield _sample("all options", 5, seed=18, label_smoothing=0.25, z_loss=0.125, weight=weights(7), mask=mask(5))
    yield _sample("z-loss", 5, seed=21, z_loss=0.125, reduction="none")

    yield _sample("softcap", 5, seed=24, temperature=0.5, softcap=2.0, mask=mask(5), leaves=(0, 1))
    yield _sample("row weights", 2, 3, seed=27, row_weight=weights(2, 3), weight=weights(7), memory="low")


def _by_row_weight():
    yield _sample("row weight", 5, leaves=(0, 1, "row_weight"), row_weight=weights(5), mask=mask(5))


def _by_weight():
    yield _sample("weight", 5, leaves=(0, 1, "weight"), weight=weights(7), mask=mask(5))


# ---- bad calls

_x, _w, _t = torch.arange(10.0).reshape(2, 5) / 8, torch.ones(3, 5), torch.tensor([0, 2])


def bad_logits_dtypes(name, *operands):
    """Yields calls with a logits_dtype that fp32 operands, and their copies in fp64 and bf16, do not have."""
    for wrong in ("float32", torch.int32, 32):
        yield Bad(operands, {"logits_dtype": wrong}, TypeError, (name, "logits_dtype", repr(wrong)))
    for own, wrong in ((torch.float32, torch.float16), (torch.float64, torch.float32), (torch.bfloat16, torch.float16)):
        cast = tuple(x.to(own) if x is not None and x.is_floating_point() else x for x in operands)
        yield Bad(cast, {"logits_dtype": wrong}, ValueError, (name, "logits_dtype", str(own), str(wrong)))


def _bad_calls():
    rows = torch.ones(2, dtype=torch.bool)

    def call(*args, **kwargs):
        return args, kwargs

    yield Bad(*call([1.0], _w, _t), TypeError, (NAME, "input", "tensor", "list"))
    yield Bad(*call(_x.long(), _w, _t), TypeError, (NAME, "input", "floating", "torch.int64"))
    yield Bad(*call(_x, None, _t), TypeError, (NAME, "linear_weight", "tensor", "NoneType"))
    yield Bad(*call(_x, _w[0], _t), ValueError, (NAME, "linear_weight", "(C, D)", "(5,)"))
    yield Bad(*call(_x, _w[:, :3], _t), ValueError, (NAME, "input", "(2, 5)", "linear_weight", "(3, 3)"))
    yield Bad(*call(_x[0, 0], _w, _t), ValueError, (NAME, "input", "()", "linear_weight"))
    yield Bad(*call(_x, _w.half(), _t), TypeError, (NAME, "one dtype", "torch.float32", "torch.float16"))
    bias = {"linear_bias": torch.ones(3).double()}
    yield Bad(*call(_x, _w, _t, **bias), TypeError, (NAME, "linear_bias", "one dtype", "torch.float64"))
    yield Bad(*call(_x, _w, _t, linear_bias=torch.ones(5)), ValueError, (NAME, "linear_bias", "(3,)", "(5,)"))
    yield Bad(*call(_x, _w, _t, linear_bias=1.0), TypeError, (NAME, "linear_bias", "tensor", "float"))
    yield Bad(*call(_x, _w, _t, linear_bias=torch.ones(3, device="meta")), ValueError, (NAME, "linear_bias", "meta"))
    yield Bad(*call(_x, _w.to("meta"), _t), ValueError, (NAME, "linear_weight", "meta"))
    yield Bad(*call(_x, _w, 3), TypeError, (NAME, "target", "tensor", "int"))
    yield Bad(*call(_x, _w, torch.ones(2)), TypeError, (NAME, "target", "class indices", "torch.float32"))
    yield Bad(*call(_x, _w, torch.ones(2, 4)), ValueError, (NAME, "target", "(2, 4)", "(2, 3)", "probabilities"))
    many = _w.unsqueeze(1).expand(3, 2, 5)
    yield Bad(*call(_x, many, _t), ValueError, (NAME, "target", "(2,)", "(2, 2)", "(2, 3, 2)"))
    yield Bad(*call(_x, many, _t, linear_bias=torch.ones(3)), ValueError, (NAME, "linear_bias", "(3,)", "(3, 2)"))
    yield Bad(*call(_x, _w, _t[:1]), ValueError, (NAME, "target", "(1,)", "(2,)"))
    yield Bad(*call(_x, _w, _t.to("meta")), ValueError, (NAME, "target", "meta"))
    for wrong in (3, -1, -101):
        bad = torch.tensor([0, wrong])
        yield BadIndex(*call(_x, _w, bad), IndexError, (NAME, f"target {wrong}", "3 classes", "(3, 5)", "-100"))
    yield BadIndex(*call(_x, _w[:0], _t), IndexError, (NAME, "target 0", "0 classes", "(0, 5)"))
    yield Bad(*call(_x, _w, _t, weight=torch.ones(2)), ValueError, (NAME, "weight", "(3,)", "(2,)"))
    yield Bad(*call(_x, _w, _t, weight=torch.ones(3).long()), TypeError, (NAME, "weight", "floating", "torch.int64"))
    yield Bad(*call(_x, _w, _t, mask=rows.float()), TypeError, (NAME, "mask", "bool", "torch.float32"))
    yield Bad(*call(_x, _w, _t, mask=torch.ones(3, dtype=torch.bool)), ValueError, (NAME, "mask", "(3,)", "(2,)"))
    yield Bad(*call(_x, _w, _t, mask=rows.to("meta")), ValueError, (NAME, "mask", "meta"))
    yield Bad(*call(_x, _w, _t, reduction="average"), ValueError, (NAME, "reduction", "average", "mean"))
    yield Bad(*call(_x, _w, _t, empty="skip"), ValueError, (NAME, "empty", "skip", "zero"))
    yield Bad(*call(_x, _w, _t, ignore_index=1.0), TypeError, (NAME, "ignore_index", "float"))
    yield Bad(*call(_x, _w, _t, denominator=torch.ones(2)), ValueError, (NAME, "denominator", "(2,)"))
    yield must(NAME, "denominator", (_x, _w, _t), {"denominator": HUGE}, ValueError)
    yield Bad(*call(_x, _w, _t, denominator=4.0, reduction="sum"), ValueError, (NAME, "denominator", "sum"))
    yield Bad(*call(_x, _w, _t, mask=~rows, empty="raise"), ValueError, (NAME, "empty", "raise"))
    for key, wrong in {"label_smoothing": (-0.1, 1.5, NAN), "z_loss": (-1.0, NAN)}.items():
        for value in wrong:
            yield Bad(*call(_x, _w, _t, **{key: value}), ValueError, (NAME, key, str(value)))
        yield Bad(*call(_x, _w, _t, **{key: "1"}), TypeError, (NAME, key, "str"))
    for key in ("temperature", "softcap"):
        for value in (0.0, -1.0, NAN):
            yield Bad(*call(_x, _w, _t, **{key: value}), ValueError, (NAME, key, str(value)))
        yield Bad(*call(_x, _w, _t, **{key: "1"}), TypeError, (NAME, key, "str"))
    yield Bad(*call(_x, _w, _t, row_weight=torch.ones(3)), ValueError, (NAME, "row_weight", "(3,)", "(2,)"))
    yield Bad(*call(_x, _w, _t, row_weight=rows), TypeError, (NAME, "row_weight", "torch.bool"))
    yield Bad(*call(_x, _w, _t, row_weight=torch.ones(2, device="meta")), ValueError, (NAME, "row_weight", "meta"))
    yield Bad(*call(_x, _w, _t, memory="high"), ValueError, (NAME, "memory", "high", "low"))
    yield from bad_logits_dtypes(NAME, _x, _w, _t)


# ---- record

HERE = "operands do not broadcast: tests/contract/linear/test_linear_cross_entropy.py has it"
SHAPED = (
    "masked_garbage masked_upstream masked_garbage_transforms nothing_kept weight_zero kept_nonfinite layouts "
    "upstream_layouts sizes accumulation saved_bytes peak_memory export"
).split()

VARIANTS = {"weight": _by_weight, "row weight": _by_row_weight}

Record(
    NAME,
    linear_cross_entropy,
    _samples(),
    bad_calls=_bad_calls(),
    call={
        "input": plain(),
        "linear_weight": plain(1)[:4].clone(),
        "target": torch.tensor([0, 3, 2, -100, 1]),
        "linear_bias": plain(2)[0, :4].clone(),
        "weight": plain(3)[0, :4].clone(),
        "mask": torch.tensor([True, True, False, True, True]),
        "ignore_index": -100,
        "label_smoothing": 0.125,
        "z_loss": 0.0625,
        "row_weight": torch.tensor([0.5, 1.0, 0.0, 1.0, 2.0]),
        "temperature": 0.75,
        "softcap": 8.0,
        "memory": "low",
        "logits_dtype": None,
        "denominator": torch.tensor(5.0),
    },
    kernel_call={"reduction": "none", "denominator": None, "row_weight": None},
    gpu="plain torch operations, on any device",
    no_route="not a kernel: tests/contract/linear/test_linear_cross_entropy.py watches that there are chunks",
    variants={f"gradient of the {of}": (samples(), {"terms": terms, "skip": NOT_SAFE | dict.fromkeys(
        [*SHAPED, "mixed_dtypes", "routes"], HERE)}) for of, samples in VARIANTS.items()},
    torch_equivalent=_twin,
    terms=terms,
    skip=NOT_SAFE | dict.fromkeys(SHAPED, HERE) | {
        "mixed_dtypes": "refused, as by a linear layer",
        "routes": "one of them rounds half logits: in fp32 tests/contract/linear/test_linear_cross_entropy.py has it",
        "threads": "the products are BLAS's, whose last digits depend on how many share them",
    },
)  # fmt: skip
