"""Divergences with the last layer. Operands do not broadcast: tests/contract has the checks that need broadcasting."""

import torch

from safeops.testing import Bad, Sample
from tests.ops.bad_calls import NAN, BadIndex, must
from tests.ops.divergences import divergences
from tests.ops.linear.linear_cross_entropy import SHAPED, _rounding, bad_logits_dtypes
from tests.ops.operands import HUGE, data, mask, plain, weights
from tests.ops.record import NOT_SAFE, Record
from tests.ops.row_loss import DENOMINATOR, PLAIN, definition_of

# ---- definitions


def linear(element):
    """Returns the definition for two layers' operands. element: the divergence of rows of logits."""
    of_logits = definition_of(element)

    def loss(
        input, linear_weight, target, target_weight, *, linear_bias=None, target_bias=None, logits_dtype=None, **options
    ):
        keep = torch.ones(input.shape[:-1], dtype=torch.bool, device=input.device)
        for key in ("mask", "weight"):
            if options.get(key) is not None:
                keep = keep & (options[key] != 0)
        x, y = (torch.where(keep.unsqueeze(-1), t, 0) for t in (input, target))
        x, y = x @ linear_weight.mT, y if target_weight is None else y @ target_weight.mT
        x, y = (t if b is None else t + b for t, b in ((x, linear_bias), (y, target_bias)))
        return of_logits(x, y, **options)

    return loss


def terms(sample, outcome):
    """Sizes of the terms. A logit's size is the sum of |x w|. Logits and the slopes to them are rounded to the
    operands' dtype. A logit's error also changes its probability in proportion."""
    x, w, y, v = (t.detach() for t in sample.args)
    temperature, leaves = sample.kwargs["temperature"], sample.leaves()
    rounding = _rounding(*leaves.values())
    logit = 2 + max(float((a.abs() @ b.abs().mT).max()) for a, b in ((x, w), (y, v))) / temperature
    rows = x.numel() // x.shape[-1]
    weight = sample.kwargs.get("weight")
    heaviest = 1.0 if weight is None else max(1.0, float(weight.detach().max()))
    whole = rows if sample.kwargs.get("reduction") == "sum" else 4.0
    value = 3 * logit * heaviest * whole * rounding
    if not outcome.grads:
        return value, {}
    slope = 3 * float(outcome.upstream[0].double().abs().max()) * heaviest * logit**2 / temperature * whole
    sizes = {0: slope * float(w.abs().max()) * len(w), 1: slope * float(x.abs().max()) * rows}
    sizes["linear_bias"] = slope * rows
    return value, {key: torch.full_like(t.detach(), sizes[key] * rounding) for key, t in leaves.items()}


# ---- the calls


def _sample(options, name, *shape, seed=0, slow=False, **more):
    x, y = data(*shape, 4, seed=seed), data(*shape, 3, seed=seed + 1)
    w, v = (data(7, width, seed=seed + 2 + width, low=-1.0, high=1.0) for width in (4, 3))
    options = {"linear_bias": data(7, seed=seed + 9), "target_bias": data(7, seed=seed + 10), **options, **more}
    return Sample((x, w, y, v), options, name=name, differentiable=(0, 1, "linear_bias"), masked=(0, 2), weight=None,
                  slow=slow)  # fmt: skip


def samples_of(options):
    yield _sample(options, "mean", 5, mask=mask(5, seed=1), slow=True)
    yield _sample(options, "none, weighted", 5, seed=20, weight=weights(5), reduction="none")
    yield _sample(options, "sum of sequences", 2, 3, seed=40, mask=mask(3), reduction="sum")
    yield _sample(options, "denominator", 5, seed=60, denominator=DENOMINATOR)


_x, _w, _y, _v = torch.arange(10.0).reshape(2, 5) / 8, torch.ones(3, 5), torch.ones(2, 4), torch.ones(3, 4)


def _bad_calls(name, numbers):
    good, keep = (_x, _w, _y, _v), torch.ones(2, dtype=torch.bool)

    def with_one(i, y):
        return (*good[:i], y, *good[i + 1 :])

    for i, key in enumerate(("input", "linear_weight", "target", "target_weight")):
        yield Bad(with_one(i, [1.0]), {}, TypeError, (name, key, "tensor", "list"))
        yield Bad(with_one(i, good[i].long()), {}, TypeError, (name, key, "floating", "torch.int64"))
        yield Bad(with_one(i, good[i].to("meta")), {}, ValueError, (name, "meta"))
    for i, key in ((1, "linear_weight"), (3, "target_weight")):
        yield Bad(with_one(i, good[i][0]), {}, ValueError, (name, key, "(C, D)"))
        yield Bad(with_one(i, good[i][:, :3]), {}, ValueError, (name, key, "(3, 3)"))
        yield Bad(with_one(i, good[i].half()), {}, TypeError, (name, "one dtype", "torch.float16"))
    yield Bad(with_one(2, _y[:1]), {}, ValueError, (name, "target", "(1, 4)", "(2,)"))
    yield Bad(with_one(3, _v[:2]), {}, ValueError, (name, "target_weight", "(2, 4)", "3 classes"))
    yield Bad((_x, _w, _y, None), {}, ValueError, (name, "target", "(2, 4)", "3 classes"))
    yield Bad((_x, _w, torch.ones(2, 3), None), {"target_bias": torch.ones(3)}, TypeError, (name, "target_bias"))
    for key in ("linear_bias", "target_bias"):
        yield Bad(good, {key: torch.ones(5)}, ValueError, (name, key, "(3,)", "(5,)"))
        yield Bad(good, {key: torch.ones(3).double()}, TypeError, (name, key, "one dtype"))
    yield Bad(good, {"mask": keep.float()}, TypeError, (name, "mask", "bool", "torch.float32"))
    yield Bad(good, {"mask": torch.ones(5, dtype=torch.bool)}, ValueError, (name, "mask", "(5,)", "rows (2,)"))
    yield Bad(good, {"weight": torch.ones(5)}, ValueError, (name, "weight", "(5,)", "(2,)"))
    yield Bad(good, {"reduction": "average"}, ValueError, (name, "reduction", "average", "mean"))
    yield Bad(good, {"empty": "skip"}, ValueError, (name, "empty", "skip", "zero"))
    yield Bad(good, {"mask": ~keep, "empty": "raise"}, ValueError, (name, "empty", "raise"))
    yield Bad(good, {"denominator": 4.0, "reduction": "sum"}, ValueError, (name, "denominator", "sum"))
    yield from bad_logits_dtypes(name, *good)
    yield from _bad_best_classes(name, _x, _w)
    for key, refused in numbers.items():
        yield Bad(good, {key: "1"}, TypeError, (name, key, "str"))
        yield must(name, key, good, {key: HUGE}, ValueError)
        for value in refused:
            yield Bad(good, {key: value}, ValueError, (name, key, str(value)))


def _bad_best_classes(name, x, w):
    """Yields bad calls with a teacher given by its two best classes of three."""
    values, indices = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]]), torch.tensor([[2, 0], [1, 2]])
    known = {"target_values": values, "target_indices": indices}
    yield Bad((x, w), {}, TypeError, (name, "target", "target_values", "target_indices"))
    yield Bad((x, w, _y, _v), known, TypeError, (name, "target", "target_values"))
    yield Bad((x, w, None, _v), known, TypeError, (name, "target_weight", "needs target"))
    yield Bad((x, w), {**known, "target_bias": torch.ones(3)}, TypeError, (name, "target_bias", "needs target"))
    yield Bad((x, w, _y, _v), {"tail": "renormalize"}, TypeError, (name, "tail", "target_values", "target_indices"))
    for wrong in ("rest", None):
        yield Bad((x, w), {**known, "tail": wrong}, ValueError, (name, "tail", str(wrong), "bucket", "renormalize"))
    for key, other in (("target_values", "target_indices"), ("target_indices", "target_values")):
        yield Bad((x, w), {key: known[key]}, TypeError, (name, other))
        yield Bad((x, w), {**known, key: known[key][:, :1]}, ValueError, (name, key, "(2, 1)", "(2, 2)"))
        yield Bad((x, w), {**known, key: known[other]}, TypeError, (name, key))
        yield Bad((x, w), {**known, key: known[key].to("meta")}, ValueError, (name, key, "meta"))
    yield Bad((x, w), {**known, "target_values": values[:1]}, ValueError, (name, "target_values", "(1, 2)", "(2, 5)"))
    many = {"target_values": torch.zeros(2, 4), "target_indices": torch.zeros(2, 4, dtype=torch.long)}
    yield Bad((x, w), many, ValueError, (name, "target_values", "(2, 4)", "linear_weight's 3 classes"))
    for wrong in (3, -1):
        index = indices.clone()
        index[1, 0] = wrong
        yield BadIndex((x, w), {**known, "target_indices": index}, IndexError,
                       (name, f"target_indices {wrong}", "3 classes", "linear_weight"))  # fmt: skip


HERE = "operands do not broadcast: tests/contract/linear/test_linear_divergences.py has it"


def record(name, element, options, numbers):
    Record(
        name,
        linear(element),
        samples_of(options),
        bad_calls=_bad_calls(name, numbers),
        call={
            **{"input": plain(), "linear_weight": plain(1)[:4].clone(), "linear_bias": plain(2)[0, :4].clone()},
            **{"target": plain(3), "target_weight": plain(4)[:4].clone(), "target_bias": plain(5)[0, :4].clone()},
            **PLAIN,
            **options,
            "logits_dtype": None,
            **{"target_values": None, "target_indices": None, "tail": "bucket"},
            **{"support": None, "support_threshold": None},
        },
        gpu="plain torch operations between kernels of the divergences, on any device",
        no_route="not a kernel: tests/contract/linear/test_linear_divergences.py watches that there are chunks",
        terms=terms,
        skip=NOT_SAFE
        | dict.fromkeys(SHAPED, HERE)
        | {
            "mixed_dtypes": "refused, as by a linear layer",
            "routes": "one of them rounds half logits: in fp32 tests/contract/linear/test_linear_divergences.py has it",
            "threads": "the products are BLAS's, whose last digits depend on how many share them",
        },
    )


TEMPERATURE = {"temperature": [0.0, -1.0, NAN]}
record("linear_kl_div", divergences._kl, {"temperature": 0.75}, TEMPERATURE)
record("linear_reverse_kl_div", divergences._reverse_kl, {"temperature": 0.75}, TEMPERATURE)
record("linear_js_div", divergences._js, {"temperature": 0.75, "beta": 0.25},
       {**TEMPERATURE, "beta": [0.0, 1.0, NAN]})  # fmt: skip
record("linear_tv", divergences._tv, {"temperature": 0.75}, TEMPERATURE)
