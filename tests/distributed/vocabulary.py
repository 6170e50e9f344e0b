"""Cases of linear_cross_entropy on DTensors with sharded classes, rows, or both, compared with plain tensors."""

import functools
import itertools
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

import safeops
from safeops.distributed import _collectives
from safeops.ops.linear import _chunks
from tests.distributed.sharded import S0, S1, P, R, close, compare, distributed, mesh

NAME = "linear_cross_entropy"
# (placements of the input, of the linear layer, of the rows)
VOCABULARY = [([R], [S0], [R]), ([S0, R], [R, S0], [S0, R])]
OTHERS = [
    ([S0], [R], [S0]),  # data parallel
    ([S1], [S0], [R]),  # sequence parallel: the mesh dim that has the classes also shards the rows' second dim
    ([S0, S1], [R, S0], [S0, R]),
    ([R, S1], [S0, S0], [R, S1]),
    ([P], [S0], [R]),
    ([R], [S1], [R]),
]
OPTIONS = [
    {},
    {"label_smoothing": 0.1, "z_loss": 1e-3},
    {"z_loss": 1e-3, "reduction": "sum"},
    {"label_smoothing": 0.2, "reduction": "none"},
    {"reduction": "none"},
    {"denominator": 7},
]


def operands(dtype, rows=(6, 3), classes=11, width=5, bias=False, weight=False, mask=False):
    g = torch.Generator().manual_seed(5)

    def normal(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)

    tensors = {"input": normal(*rows, width), "linear_weight": normal(classes, width)}
    tensors["target"] = torch.randint(3, classes, rows, generator=g)
    tensors["target"][1] = -100
    if bias:
        tensors["linear_bias"] = normal(classes)
        tensors["linear_bias"][2] = float("-inf")  # a class that is left out
    if weight:
        tensors["weight"] = normal(classes).abs()
        tensors["weight"][4] = 0
    if mask:
        tensors["mask"] = torch.rand(rows, generator=g) < 0.6
        tensors["input"][~tensors["mask"]] = float("nan")
    return tensors


def placements(layout):
    input, linear, rows = layout
    everywhere = [R] * len(rows)
    bias = [p if p == S0 else R for p in linear]
    return {"input": input, "linear_weight": linear, "linear_bias": bias, "target": rows, "mask": rows} | {
        "weight": everywhere
    }


def check(dtype, layouts, options=OPTIONS):
    for layout, chosen in itertools.product(layouts, options):
        for bias, weight, mask in itertools.product((False, True), repeat=3):
            tensors = operands(dtype, bias=bias, weight=weight, mask=mask)
            if P in layout[0]:  # a partial placement cannot hold inf or NaN
                tensors["input"].nan_to_num_(nan=0.5)
            compare(NAME, tensors, placements(layout), dtype, **chosen)


def check_chunks():
    """Results are right with several chunks on each rank, the last of another size."""
    with mock.patch.object(_chunks, "CHUNK", 40):
        check(torch.float64, VOCABULARY, OPTIONS[:2])


def check_few_classes():
    """Results are right with 4 or 5 classes, of which some ranks have none."""
    for classes in (4, 5):
        tensors = operands(torch.float64, classes=classes, bias=True)
        compare(NAME, tensors, placements(VOCABULARY[0]), torch.float64, label_smoothing=0.1)


def check_infinite_logits():
    """A +inf logit of the target alone gives loss 0; several, or another class's, make a row NaN."""
    for at, target_class in (((0,), 0), ((7,), 7), ((7,), 0), ((0, 1), 0), ((0, 7), 7)):
        tensors = operands(torch.float64, rows=(3,), classes=8)
        tensors["linear_weight"][:, 0] = tensors["input"][:, 0] = 0
        tensors["linear_weight"][list(at), 0], tensors["input"][1, 0], tensors["target"][1] = 16, 1.7e308, target_class
        for options in ({}, {"label_smoothing": 0.1}, {"z_loss": 1e-3}):
            for weight, layout in itertools.product(({}, {"weight": torch.arange(1.0, 9).double()}), VOCABULARY):
                where = placements(layout)
                got = compare(NAME, {**tensors, **weight}, where, torch.float64, reduction="none", **options)
                assert got.full_tensor()[1].isnan() == (at != (target_class,) or bool(options))


def check_few_rows():
    """Results are right with so few rows that only one rank has any."""
    tensors = operands(torch.float64, rows=(2,), mask=True)
    compare(NAME, tensors, placements(OTHERS[0]), torch.float64)


def check_half():
    """Half gradients must be rounded once, at the end: they differ from fp64's by at most 4 ulp of the largest."""
    for dtype, ulp in ((torch.float16, 2**-11), (torch.bfloat16, 2**-8)):
        tensors = operands(dtype, bias=True, weight=True)
        tensors["linear_bias"][2] = 0
        where, exact = placements(VOCABULARY[0]), {}
        for key, x in tensors.items():
            exact[key] = x.double().requires_grad_(key != "weight") if x.is_floating_point() else x
        safeops.linear_cross_entropy(**exact).backward()
        shared = {key: distributed(x, where[key], key != "weight") for key, x in tensors.items()}
        safeops.linear_cross_entropy(**shared).backward()
        for key in ("input", "linear_weight", "linear_bias"):
            got, want = shared[key].grad.full_tensor().double(), exact[key].grad
            assert shared[key].grad.dtype == dtype
            assert (got - want).abs().max() <= 4 * ulp * want.abs().max(), (key, dtype)


def check_wide_logits():
    """With logits_dtype=torch.float32 a loss of half operands must have fp32's error, also in chunks; gradients those
    of half, and less than with logits in half."""

    def gradients(tensors, **options):
        loss = safeops.linear_cross_entropy(**tensors, **options)
        return loss, *torch.autograd.grad(loss, [tensors[key] for key in ("input", "linear_weight")])

    for dtype in (torch.float16, torch.bfloat16):
        tensors = operands(dtype, bias=True)
        tensors["linear_bias"][2] = 0
        tensors["linear_weight"] *= 6
        where, leaves = placements(VOCABULARY[0]), ("input", "linear_weight")
        exact = {k: x.double() if x.is_floating_point() else x for k, x in tensors.items()}
        want = gradients({k: x.requires_grad_(k in leaves) for k, x in exact.items()})
        errors = []
        for options in ({"logits_dtype": torch.float32}, {}):
            with mock.patch.object(_chunks, "CHUNK", 40), mock.patch.object(_chunks, "UPCAST", 8):
                got = gradients({k: distributed(x, where[k], k in leaves) for k, x in tensors.items()}, **options)
            errors.append([float((g.full_tensor() - w).square().mean().sqrt()) for g, w in zip(got, want)])
        assert errors[0][0] <= 1e-5 < 1e-4 <= errors[1][0], (errors, dtype)
        assert all(wide < half for wide, half in zip(*errors)), (errors, dtype)


def check_second_order():
    tensors, where, result = operands(torch.float64, rows=(4,)), placements(VOCABULARY[0]), []
    for sharded in (False, True):
        arguments = {k: distributed(x, where[k]) if sharded else x.clone() for k, x in tensors.items()}
        x = arguments["input"].requires_grad_()
        (first,) = torch.autograd.grad(safeops.linear_cross_entropy(**arguments), x, create_graph=True)
        result += torch.autograd.grad(first.square().sum(), x)
    close(result[1], result[0], 1e-12)


def check_the_wire():
    """Forward must send 16 bytes per row, backward the input's gradient in fp32, and neither anything of the logits'
    size."""
    tensors, where, sent = operands(torch.float32, rows=(64,), classes=40), placements(VOCABULARY[0]), []
    sharded = {key: distributed(x, where[key]) for key, x in tensors.items()}
    gather = _collectives.all_gather

    def count(output, input, **options):
        sent.append(input.numel() * input.element_size())
        return gather(output, input, **options)

    with CommDebugMode() as seen, mock.patch.object(_collectives, "all_gather", count):
        loss = safeops.linear_cross_entropy(**sharded)
        forward = seen.get_total_counts()
        loss.backward()
    assert sent == [64 * 16] and forward <= 1, (sent, seen.get_comm_counts())
    assert seen.get_total_counts() == forward + 1, seen.get_comm_counts()  # backward has one all-reduce
    assert sharded["linear_weight"].grad.placements == (S0,) and sharded["input"].grad.placements == (R,)


def check_the_order():
    """The collective of the input's gradient must start before the last product of the weight's gradient, to
    overlap."""
    tensors, where, order = operands(torch.float32), placements(VOCABULARY[0]), []
    sharded = {key: distributed(x, where[key]) for key, x in tensors.items()}
    loss = safeops.linear_cross_entropy(**sharded)
    mm, redistribute = torch.mm, type(sharded["input"]).redistribute

    def product(a, b, out=None):
        if out is not None and out.shape == sharded["linear_weight"].to_local().shape:
            order.append("product")
        return mm(a, b, out=out)

    def collective(x, *args, **options):
        order.append("collective")
        return redistribute(x, *args, **options)

    with mock.patch.object(torch, "mm", product), mock.patch.object(type(sharded["input"]), "redistribute", collective):
        loss.backward()
    assert order[:2] == ["collective", "product"], order


def check_autocast():
    tensors, where = operands(torch.float32), placements(VOCABULARY[0])
    with torch.autocast("cpu", torch.bfloat16):
        want = safeops.linear_cross_entropy(**tensors)
        got = safeops.linear_cross_entropy(**{key: distributed(x, where[key]) for key, x in tensors.items()})
    close(got, want, 1e-6)


def check_refused():
    """A plain operand beside DTensors must raise on every rank, by name, before any collective."""
    tensors, where = operands(torch.float32), placements(VOCABULARY[0])
    sharded = {key: distributed(x, where[key]) for key, x in tensors.items()}
    for key, x in tensors.items():
        try:
            safeops.linear_cross_entropy(**{**sharded, key: x})
        except TypeError as error:
            assert NAME in str(error) and "DTensor" in str(error), error
        else:
            raise AssertionError(f"plain {key} was taken")
    assert mesh().size() == dist.get_world_size()


CASES = {
    "vocabulary-fp64": functools.partial(check, torch.float64, VOCABULARY),
    "vocabulary-fp32": functools.partial(check, torch.float32, VOCABULARY, OPTIONS[:3]),
    "others": functools.partial(check, torch.float64, OTHERS, OPTIONS[1:5:3]),
    "chunks": check_chunks,
    "few-classes": check_few_classes,
    "few-rows": check_few_rows,
    "infinite-logits": check_infinite_logits,
    "half": check_half,
    "wide-logits": check_wide_logits,
    "second-order": check_second_order,
    "wire": check_the_wire,
    "order": check_the_order,
    "autocast": check_autocast,
    "refused": check_refused,
}
