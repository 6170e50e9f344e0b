"""Cases of cross_entropy and nll_loss on DTensors with sharded classes or rows, beside the call on plain tensors."""

import functools
import itertools
import operator
from unittest import mock

import torch
from torch.distributed.tensor.debug import CommDebugMode

import safeops
from safeops.core.op import registry
from safeops.distributed import _collectives
from tests.distributed.sharded import S0, S1, P, R, close, compare, distributed

S2 = type(S0)(2)
# (placements of the logits, of the rows), for a mesh of one dim or two
CLASSES = [([S1], [R]), ([S0, S1], [S0, R]), ([S1, R], [R, R]), ([S1, S2], [R, S1])]
ROWS = [([S0], [S0]), ([R], [R]), ([S0, R], [S0, R]), ([S2], [S1]), ([P], [R])]
OPTIONS = [
    {},
    {"label_smoothing": 0.1},
    {"z_loss": 1e-3},
    {"label_smoothing": 0.2, "z_loss": 1e-3, "reduction": "none"},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"denominator": 7},
]
NLL_OPTIONS = [{}, {"reduction": "sum"}, {"reduction": "none"}, {"denominator": 7}, {"ignore_index": 4}]


def operands(dtype, shape=(6, 11, 3), probabilities=False, weight=False, mask=False):
    g = torch.Generator().manual_seed(5)
    x = 4 * torch.randn(shape, generator=g, dtype=torch.float64)
    x[0, 2] = float("-inf")  # a class that is left out
    rows = (shape[0], *shape[2:])
    target = torch.randint(3, shape[1], rows, generator=g)
    target[1] = -100
    tensors = {"input": x.to(dtype), "target": target}
    if probabilities:
        tensors["target"] = torch.rand(shape, generator=g, dtype=torch.float64).to(dtype)
        tensors["target"][0, 2] = 0
    if weight:
        tensors["weight"] = torch.rand(shape[1], generator=g, dtype=torch.float64).to(dtype)
        tensors["weight"][4] = 0
    if mask:
        tensors["mask"] = torch.rand(rows, generator=g) < 0.6
        tensors["input"].movedim(1, -1)[~tensors["mask"]] = float("nan")
    return tensors


def check(dtype, layouts, name="cross_entropy", options=OPTIONS):
    for (logits, rows), chosen in itertools.product(layouts, options):
        for probabilities, weight, mask in itertools.product((False, True), repeat=3):
            if name == "nll_loss" and probabilities:
                continue
            tensors = operands(dtype, probabilities=probabilities, weight=weight, mask=mask)
            if not probabilities:
                tensors["target"][1] = chosen.get("ignore_index", -100)
            if P in logits:  # a partial placement cannot hold inf or NaN
                tensors["input"].nan_to_num_(nan=0.5, neginf=-9)
            where = {
                "input": logits,
                "target": logits if probabilities else rows,
                "mask": rows,
                "weight": [R] * len(rows),
            }
            compare(name, tensors, where, dtype, **chosen)


def check_second_order():
    layouts = ([S1], [R]), ([S0], [S0]), ([P], [R])
    for (logits, rows), probabilities in itertools.product(layouts, (False, True)):
        tensors, result = operands(torch.float64, (4, 5), probabilities), []
        tensors["input"].nan_to_num_(neginf=-9)
        for sharded in (False, True):
            x, target = tensors["input"].clone().requires_grad_(), tensors["target"]
            if sharded:
                x, target = (
                    distributed(tensors["input"], logits),
                    distributed(target, logits if probabilities else rows),
                )
            loss = safeops.cross_entropy(x, target, label_smoothing=0.1)
            (first,) = torch.autograd.grad(loss, x, create_graph=True)
            result += torch.autograd.grad(first.square().sum(), x)
        close(result[1], result[0], 1e-12)


def check_few_classes():
    """Results are right with 4 or 5 classes, of which some ranks have none."""
    for classes in (4, 5):
        tensors = operands(torch.float64, (6, classes, 2))
        compare("cross_entropy", tensors, {"input": [S1], "target": [R]}, torch.float64, label_smoothing=0.1)
        tensors = operands(torch.float64, (6, classes, 2), weight=classes > 4, mask=True)
        where = {"input": [S1], "target": [R], "mask": [R], "weight": [R]}
        compare("nll_loss", tensors, where, torch.float64, reduction="none")


def check_few_rows():
    """Results are right with so few rows that only one rank has any."""
    for weight in (False, True):
        tensors = operands(torch.float64, (2, 11), weight=weight)
        compare(
            "cross_entropy", tensors, {"input": [S0], "target": [S0], "weight": [R]}, torch.float64, reduction="none"
        )


def check_far_from_zero():
    tensors = operands(torch.float32)
    tensors["input"] += 1e4
    compare("cross_entropy", tensors, {"input": [S1], "target": [R]}, torch.float32)


def check_probabilities_times_weights():
    """Probabilities times class weights must not be rounded to their dtype: neither half products to half nor, with
    fp64 logits, fp32 products to fp32."""
    for logits, others in (
        (torch.float32, torch.float16),
        (torch.float16, torch.float16),
        (torch.float64, torch.float32),
    ):
        tensors = {
            "input": torch.linspace(-2, 2, 300).repeat(4, 1).to(logits),
            "target": torch.full((4, 300), 2e-5).to(others),
            "weight": torch.linspace(5e-5, 1e-4, 300).to(others),
        }
        where = {"input": [S1], "target": [S1], "weight": [R]}
        compare("cross_entropy", tensors, where, torch.float32 if logits == torch.float16 else logits, reduction="sum")


def check_infinite_logits():
    """A +inf logit of the target alone gives loss 0; several, or another class's, make a row NaN."""
    inf = float("inf")
    for classes in ((0,), (7,), (0, 1), (0, 7)):
        for target in (0, 7, 3):
            x = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(3, 8).clone()
            x[1, list(classes)] = inf
            tensors = {"input": x, "target": torch.full((3,), target)}
            for options in ({}, {"label_smoothing": 0.1}, {"z_loss": 1e-3}):
                for weight in (None, torch.arange(1.0, 9, dtype=torch.float64)):
                    both = tensors if weight is None else {**tensors, "weight": weight}
                    where = {"input": [S1], "target": [R], "weight": [R]}
                    got = compare("cross_entropy", both, where, torch.float64, reduction="none", **options)
                    certain = classes == (target,) and not options
                    assert got.full_tensor()[1].isnan() != certain


def check_a_rank_of_which_no_class_exists():
    tensors = operands(torch.float64, (6, 8))
    tensors["input"][:, :2] = float("-inf")
    compare("cross_entropy", tensors, {"input": [S1], "target": [R]}, torch.float64, label_smoothing=0.1)


def check_the_wire():
    """Forward sends 16 bytes per row and rank, and nothing of the logits' size; backward sends nothing."""
    x, target = distributed(torch.randn(64, 40), [S1]), distributed(torch.randint(0, 40, (64,)), [R])
    sent = []
    gather = _collectives.all_gather

    def count(output, input, **options):
        sent.append(input.numel() * input.element_size())
        return gather(output, input, **options)

    with CommDebugMode() as seen, mock.patch.object(_collectives, "all_gather", count):
        loss = safeops.cross_entropy(x, target)
        loss.backward()
    assert sent == [64 * 16], sent
    assert seen.get_total_counts() <= 1, seen.get_comm_counts()
    assert x.grad.placements == (S1,)
    for options, size in (({}, 24), ({"with_argmax": True}, 40)):
        x.grad = None
        sent.clear()
        with CommDebugMode() as seen, mock.patch.object(_collectives, "all_gather", count):
            safeops.token_log_probs(x, target, **options).entropy.sum().backward()
        assert sent == [64 * size], sent
        assert seen.get_total_counts() <= 2, seen.get_comm_counts()  # the second: sum's all-reduce of one number
    x.grad, sent, add_up = None, [], torch.distributed.all_reduce
    note = lambda t, **options: (sent.append(t.nbytes), add_up(t, **options))[1]  # noqa: E731
    with CommDebugMode() as seen, mock.patch.object(torch.distributed, "all_reduce", note):
        safeops.nll_loss(x, target).backward()
    assert sent == [64 * 8] and seen.get_total_counts() <= 1, (sent, seen.get_comm_counts())
    assert x.grad.placements == (S1,)


def check_an_index_out_of_range():
    """A class index out of range must be left out with its row: no rank alone can see that no other rank has the
    class."""
    tensors = operands(torch.float64)
    plain = {**tensors, "target": tensors["target"].clone()}
    tensors["target"][3], plain["target"][3] = 99, -100
    for logits, rows in (([S1], [R]), ([S0], [S0])):
        for loss in (safeops.cross_entropy, safeops.nll_loss):
            got = loss(distributed(tensors["input"], logits), distributed(tensors["target"], rows))
            close(got, loss(**plain), 1e-12)


def check_what_the_composite_has():
    """The composite is right for classes over both mesh dims, class weights with a gradient, partial logits, and other
    losses of rows."""
    tensors = operands(torch.float64, (6, 11), weight=True)
    assert registry["cross_entropy"].shards
    x, target, weight = tensors["input"].nan_to_num(neginf=-9), tensors["target"], tensors["weight"]
    for loss, (logits, rows), grad in itertools.product(
        (safeops.cross_entropy, safeops.nll_loss),
        (([S1, S1], [R, R]), ([P, R], [S0, R]), ([P, R], [R, S0]), ([S0, P], [R, R]), ([P], [R])),
        (False, True),
    ):
        replicated = distributed(weight, [R] * len(rows), grad)
        got = loss(distributed(x, logits), distributed(target, rows), weight=replicated)
        close(got, loss(x, target, weight=weight), 1e-12)
    for layout in [P], [S0, P], [P, S1]:
        three = (x, x + 1, x * 2)
        got = safeops.triplet_margin_loss(*(distributed(t, layout) for t in three))
        close(got, safeops.triplet_margin_loss(*three), 1e-12)


def check_log_probs(layouts, shapes=({}, {"temperature": 0.5, "softcap": 3.0})):
    """Compares each of the three results alone, with its gradients."""
    names = ("log_prob", "entropy", "logsumexp")
    for (logits, rows), options, mask, result in itertools.product(layouts, shapes, (False, True), names):
        tensors = operands(torch.float64, mask=mask)
        tensors["logits"] = tensors.pop("input").movedim(1, -1).contiguous()
        where = {"logits": [type(S0)(LAST[p.dim]) if p.is_shard() else p for p in logits], "target": rows, "mask": rows}
        compare("token_log_probs", tensors, where, torch.float64, take=operator.attrgetter(result), **options)


LAST = {0: 0, 1: 2, 2: 1}  # dims of (N, C, d1) -> dims of (N, d1, C)


def check_log_probs_of_infinite_logits():
    """A +inf logit makes a row NaN unless it is the target's alone, also if ranks have only classes of -inf or none."""
    inf = float("inf")
    for classes in ((0,), (7,), (0, 1), (0, 7)):
        for target, result in itertools.product((0, 7, 3), ("log_prob", "entropy", "logsumexp")):
            x = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(3, 8).clone()
            x[1, list(classes)], x[2, :2] = inf, -inf
            tensors = {"logits": x, "target": torch.full((3,), target)}
            where = {"logits": [S1], "target": [R]}
            got = compare("token_log_probs", tensors, where, torch.float64, take=operator.attrgetter(result))
            assert got.full_tensor()[1].isnan() != (classes == (target,))
    x = torch.randn(6, 16, dtype=torch.float64)
    x[:, 4:8] = -inf
    x[2, 6] = float("nan")  # on a rank whose other classes are -inf
    for result in ("log_prob", "entropy", "logsumexp"):
        tensors = {"logits": x, "target": torch.arange(6)}
        where = {"logits": [S1], "target": [R]}
        got = compare("token_log_probs", tensors, where, torch.float64, take=operator.attrgetter(result))
        assert got.full_tensor()[2].isnan()
    tensors = {"logits": torch.randn(6, 5, dtype=torch.float64), "target": torch.arange(6) % 5}
    where = {"logits": [S1], "target": [R]}
    compare("token_log_probs", tensors, where, torch.float64, take=lambda got: got.entropy)


def check_argmax():
    """argmax is the first of equal logits over all ranks, and NaN counts as the largest, also if ranks have no
    class."""
    for (logits, rows), classes, mask in itertools.product([*CLASSES, *ROWS[:2]], (11, 5), (False, True)):
        tensors = operands(torch.float64, (6, classes, 3), mask=mask)
        x = tensors.pop("input").movedim(1, -1).round().div(4).round()
        x[2, 0, [1, 4]], x[2, 1], x[2, 2, 3:] = float("nan"), -float("inf"), float("inf")
        tensors["logits"] = x.contiguous()
        where = {"logits": [type(S0)(LAST[p.dim]) if p.is_shard() else p for p in logits], "target": rows, "mask": rows}
        shared = {key: distributed(x, where[key]) for key, x in tensors.items()}
        got = safeops.token_log_probs(**shared, with_argmax=True)
        want = safeops.token_log_probs(**tensors, with_argmax=True)
        assert got.argmax.dtype == torch.int64 and got.correct.dtype == torch.bool
        assert torch.equal(got.argmax.full_tensor(), want.argmax)
        assert torch.equal(got.correct.full_tensor(), want.correct)
        for key in ("log_prob", "entropy", "logsumexp"):
            take = lambda result: getattr(result, key)  # noqa: B023, E731
            compare("token_log_probs", tensors, where, torch.float64, take=take, with_argmax=True)


CASES = {
    "log-probs": functools.partial(check_log_probs, [*CLASSES, *ROWS[:2]]),
    "log-probs-infinite": check_log_probs_of_infinite_logits,
    "argmax": check_argmax,
    "classes-fp64": functools.partial(check, torch.float64, CLASSES),
    "classes-fp32": functools.partial(check, torch.float32, CLASSES[:2]),
    "rows": functools.partial(check, torch.float64, ROWS, options=OPTIONS[:4]),
    "nll_loss": functools.partial(check, torch.float64, ROWS, "nll_loss", [{}, {"reduction": "none"}]),
    "nll_loss-classes": functools.partial(check, torch.float64, CLASSES, "nll_loss", NLL_OPTIONS),
    "nll_loss-fp32": functools.partial(check, torch.float32, CLASSES[:1], "nll_loss", NLL_OPTIONS[:1]),
    "second-order": check_second_order,
    "few-classes": check_few_classes,
    "few-rows": check_few_rows,
    "infinite-logits": check_infinite_logits,
    "far-from-zero": check_far_from_zero,
    "probabilities-times-weights": check_probabilities_times_weights,
    "no-class-exists": check_a_rank_of_which_no_class_exists,
    "wire": check_the_wire,
    "index-out-of-range": check_an_index_out_of_range,
    "composite": check_what_the_composite_has,
}
