"""Divergences of rows of logits, also with a target given by its best classes."""

import functools

import torch
import torch.nn.functional as F

import safeops
from safeops.core.op import registry
from safeops.testing import Bad, Sample
from tests.ops import gpu
from tests.ops.bad_calls import NAN, BadIndex
from tests.ops.classification.cross_entropy import SUPPORT
from tests.ops.operands import data, mask, plain, weights
from tests.ops.record import NOT_SAFE, Record
from tests.ops.row_loss import (
    NO_GPU,
    ROWS,
    bad_calls,
    definition_of,
    per_row_operands,
    samples_of,
    terms_of,
    twin_of,
    vectors,
)

# ---- definitions


def _logs(x, y, temperature):
    return (y / temperature).log_softmax(-1), (x / temperature).log_softmax(-1)


def _relative(u, v):
    """sum e^u (u - v), where a class with e^u = 0 adds 0."""
    none = u.exp() == 0
    return (torch.where(none, 0, u.exp()) * (torch.where(none, 0, u) - torch.where(none, 0, v))).sum(-1)


def _kl(x, y, temperature=1.0):
    return _relative(*_logs(x, y, temperature))


def _reverse_kl(x, y, temperature=1.0):
    return _relative(*_logs(y, x, temperature))


def _js(x, y, temperature=1.0, beta=0.5):
    u, v = _logs(x, y, temperature)
    m = beta * u.exp() + (1 - beta) * v.exp()
    m = torch.where(m == 0, 1, m).log()
    return beta * _relative(u, m) + (1 - beta) * _relative(v, m)


def _tv(x, y, temperature=1.0):
    u, v = _logs(x, y, temperature)
    d = u.exp() - v.exp()
    return (d * torch.where(d.isnan(), d, d.sign()).detach()).sum(-1) / 2  # |d|, but NaN has slope NaN, not 0


def _sizes(x, y, temperature=1.0, beta=0.5, support=None):
    """Sizes of the terms that cancel: a divergence and its slopes are means of differences of log probabilities."""
    x, y = (x, y) if support is None else (torch.where(support, t, 0) for t in (x, y))
    u, v = _logs(x, y, temperature)
    size = 1 + u.abs().amax(-1) + v.abs().amax(-1)
    return size, (size.unsqueeze(-1) / temperature,) * 2


def _torch_kl(x, y, reduction="none", temperature=1.0):
    u, v = _logs(x, y, temperature)
    return F.kl_div(v, u, reduction="none", log_target=True).sum(-1)


# ---- the calls

X = torch.arange(10.0).reshape(2, 5)
VALUES, BEST = X[:, :2].log_softmax(-1) - 1, torch.tensor([[4, 0], [2, 1]])


def _of_best(name):
    """Yields bad calls with a target given by its two best classes of five."""
    op = getattr(safeops, name)
    known = {"target_values": VALUES, "target_indices": BEST}
    yield Bad((X,), {}, TypeError, (name, "target", "target_values", "target_indices"))
    yield Bad((X, X), known, TypeError, (name, "target", "target_values"))
    yield Bad((X,), {"target_values": VALUES}, TypeError, (name, "target_indices"))
    yield Bad((X, X), {"target_indices": BEST}, TypeError, (name, "target_values"))
    for key, wrong, words in (
        ("target_values", VALUES[:, :1], ("(2, 1)", "(2, 2)")),
        ("target_values", VALUES[:1], ("(1, 2)", "(2, 5)")),
        ("target_values", VALUES[0], ("(2,)", "(2, 5)")),
        ("target_values", torch.zeros(2, 6), ("(2, 6)", "(2, 5)", "5 classes")),
        ("target_indices", BEST[:, :1], ("(2, 1)", "(2, 2)")),
        ("target_indices", BEST.to("meta"), ("meta",)),
        ("target_values", VALUES.to("meta"), ("meta",)),
    ):
        yield Bad((X,), {**known, key: wrong}, ValueError, (name, "target_", *words))
    yield Bad((X,), {**known, "target_values": BEST}, TypeError, (name, "target_values", "floating"))
    yield Bad((X,), {**known, "target_indices": VALUES}, TypeError, (name, "target_indices", "int64"))
    yield Bad((X, X), {"tail": "renormalize"}, TypeError, (name, "tail", "target_values", "target_indices"))
    for wrong in ("rest", None):
        yield Bad((X,), {**known, "tail": wrong}, ValueError, (name, "tail", str(wrong), "bucket", "renormalize"))
    for wrong in (5, -1):
        index = BEST.clone()
        index[1, 0] = wrong
        yield BadIndex((X,), {**known, "target_indices": index}, IndexError,
                       (name, f"target_indices {wrong}", "5 classes", "(2, 5)"))  # fmt: skip
    assert op(X, **known).isfinite()


def _case(name):
    """Returns a GPU call of the kernel alone (no reduction): rows of about a thousand classes, or one row."""

    def case(n, dtype, seed):
        length = next((k for k in (1000, 1024, 8) if n % k == 0), n)
        op = registry[name]
        rows = lambda *xs: op.call(*(x.view(-1, length) for x in xs), None, 0.75, 0.25)  # noqa: E731
        return gpu.Case(rows, (gpu.numbers(n, dtype, seed), gpu.numbers(n, dtype, seed + 1)))

    return case


def _over_support(element):
    @functools.wraps(element)
    def over_support(x, y, support=None, **options):
        x, y = (x, y) if support is None else (torch.where(support, t, -torch.inf) for t in (x, y))
        return element(x, y, **options)

    return over_support


def divergence(name, element, options, numbers, twin=None, own=True):
    definition = definition_of(_over_support(element))
    samples = list(samples_of(vectors(2), (0, 1), options, None))
    samples += [
        Sample((data(3, 40), data(3, 40, seed=1)), {"mask": mask(3, 1), **options}, name="long rows"),
        Sample((data(2, 3, 7), data(2, 3, 7, seed=1)), {"weight": weights(2, 3, 1), **options}, name="sequences"),
    ]
    support = (data(2, 3, 7, seed=30) > 0) | (torch.arange(7) == 2)
    of_support = {"mask": mask(2, 3, 1), "support": support, **options}
    of_support = Sample((data(2, 3, 7), data(2, 3, 7, seed=1)), of_support, name="support", masked=(0, 1))
    keep = torch.arange(5) != 2
    Record(
        name,
        definition,
        samples,
        bad_calls=[*bad_calls(name, ("input",), (X,), numbers), *_of_best(name)],
        call={
            "input": plain(),
            "target": plain(1),
            "mask": keep,
            "weight": plain(2)[:, 0].clone(),
            "denominator": torch.tensor(5.0),
            "target_values": None,
            "target_indices": None,
            "tail": "bucket",
            "support": None,
            "support_threshold": None,
            **options,
        },
        gpu=_case(name) if own else NO_GPU,
        no_route="its rows are reduced by other ops: tests/contract/divergences/test_divergences.py watches which",
        adapt=per_row_operands,
        data=(0, 1),
        torch_equivalent=twin and per_row_operands(twin_of(twin)),
        terms=terms_of(definition, _sizes),
        skip=NOT_SAFE | ROWS,
        variants={"support": ([of_support], {"data": (0, 1), "terms": terms_of(definition, _sizes), "skip": SKIP})},
    )


SKIP = (
    NOT_SAFE
    | ROWS
    | SUPPORT
    | {
        "weight_zero": "the sample has no weight: test_divergence_support.py has some",
        "uninitialized": "a row of no class has no support, and is refused",
    }
)
TEMPERATURE = {"temperature": [0.0, -1.0, NAN]}
divergence("kl_div_with_logits", _kl, {"temperature": 0.75}, TEMPERATURE, _torch_kl)
divergence("reverse_kl_div_with_logits", _reverse_kl, {"temperature": 0.75}, TEMPERATURE, own=False)
divergence("js_div_with_logits", _js, {"temperature": 0.75, "beta": 0.25},
           {**TEMPERATURE, "beta": [0.0, 0.0005, 0.9995, 1.0, NAN]})  # fmt: skip
divergence("tv_with_logits", _tv, {"temperature": 0.75}, TEMPERATURE)
