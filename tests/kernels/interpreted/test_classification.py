"""cross_entropy and nll_loss, and their backward, agree with the records' definitions in fp64 and their autograd."""

import pytest
import torch
import triton.runtime.interpreter as interpreter
from safeops.kernels.classification import cross_entropy, cross_entropy_backward, nll_loss
from safeops.kernels.engine import indexing, launch
from safeops.kernels.engine import row_plan as row

from safeops.ops.classification import cross_entropy as op
from safeops.ops.classification.nll_loss import define as define_nll
from tests.kernels.interpreted.truth import BF16, F16, F32, F64, check_of_rows, close, fill, in_order, shifted
from tests.ops import RECORDS, definitions
from tests.ops.classification.cross_entropy import adapted

NAN, INF = float("nan"), float("inf")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns about garbage in rows that are not kept

# name -> (shape, memory order or None): classes along memory and across it, in one tile and in several
LAYOUTS = {
    "rows": ((5, 40), None),
    "odd rows": ((3, 37), None),
    "long rows": ((2, 300), None),
    "odd long row": ((301,), None),
    "images": ((2, 9, 4, 8), None),
    "odd images": ((2, 9, 17), None),
    "long columns": ((2, 70, 20), None),
    "classes last": ((2, 50, 7), (0, 2, 1)),
    "no two fuse": ((2, 3, 2, 5), (3, 1, 0, 2)),
    "one class": ((4, 1), None),
    "one row": ((1, 12), None),
    "one number": ((1,), None),
    "no rows": ((0, 5), None),
    "no classes": ((3, 0), None),
}
SPLIT = ("long rows", "odd long row", "long columns")
OPTIONS = {
    "plain": {},
    "weight": {"weight": True},
    "z-loss": {"z_loss": 0.125},
    "smoothing": {"label_smoothing": 0.25},
    "all": {"weight": True, "label_smoothing": 0.25, "z_loss": 0.125},
    "shares": {"probabilities": True},
    "shares all": {"probabilities": True, "weight": True, "label_smoothing": 0.25, "z_loss": 0.125},
}
DEFAULTS = {
    "weight": None,
    "mask": None,
    "ignore_index": -100,
    "label_smoothing": 0.0,
    "z_loss": 0.0,
    "temperature": 1.0,
    "softcap": 0.0,
}


@pytest.fixture(autouse=True)
def more_splits(monkeypatch):
    monkeypatch.setattr(row.tiling, "POLICY", row.tiling.POLICY._replace(blocks=32))


def numbers_of(options):
    return [(DEFAULTS | options)[name] for name in DEFAULTS]


def rows_of(shape):
    return shape[:1] + shape[2:] if len(shape) > 1 else ()


def labels(shape, seed=0, dtype=torch.int64):
    """Returns class indices. Some rows have no class: their index is ignored, or below or above the range."""
    classes, rows = shape[min(1, len(shape) - 1)], rows_of(shape)
    target = torch.randint(0, max(classes, 1), rows, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    if len(rows) and classes:
        for at, wrong in enumerate((-100, classes, -1)):
            target.view(-1)[4 + at :: 7] = wrong
    return target if classes else target - 100


def example(layout, dtype=F32, probabilities=False, weight=False, **options):
    """Returns (x, target, options), with garbage where the mask is False."""
    shape, order = LAYOUTS[layout]
    x = in_order(shape, order or tuple(range(len(shape))), dtype, 1)
    mask = torch.rand(rows_of(shape), generator=torch.Generator().manual_seed(3)) < 0.8
    dim = min(1, x.dim() - 1)
    x.masked_fill_(~mask.unsqueeze(dim), NAN)
    target = fill(shape, dtype, 2).abs() if probabilities else labels(shape)
    if probabilities:
        target.masked_fill_(~mask.unsqueeze(dim), INF)
    if weight:
        options["weight"] = fill(shape[dim : dim + 1], F32, 5).abs() + 0.25
        options["weight"][:1] = 1.0 if probabilities or shape[dim] == 1 else 0.0
    return x, target, options | {"mask": mask}


def gradients(x, target, grad, saved, options, **needs):
    needs = {"need_input": True, "need_target": target.is_floating_point(), "partial": False} | needs
    return cross_entropy_backward.cross_entropy_backward(
        grad, x, target, saved, *numbers_of(options), *needs.values()
    )  # fmt: skip


def wide(options):
    return {key: t.double() if key == "weight" and t is not None else t for key, t in options.items()}


def truth(name, x, target, grad, options):
    """Returns (loss of each row, gradients) in fp64."""
    leaves = [t.detach().double().requires_grad_() for t in (x, target) if t.is_floating_point()]
    loss = getattr(definitions, name)(
        *leaves, *(() if len(leaves) == 2 else (target,)), reduction="none", **wide(options)
    )
    return loss.detach(), torch.autograd.grad(loss, leaves, grad.double())


def check(x, target, options, grad=None):
    grad = fill(rows_of(x.shape), F32, 9) if grad is None else grad
    loss, keep, weights, row_stats = cross_entropy.cross_entropy(x, target, *numbers_of(options))
    kept = [t.nan_to_num(0) if t.is_floating_point() and t.shape == x.shape else t for t in (x, target)]
    _, keep_wanted, weights_wanted, numbers_wanted = op._composite(*kept, *numbers_of(options))
    assert torch.equal(keep, keep_wanted)
    assert weights.dtype == weights_wanted.dtype and row_stats.dtype == numbers_wanted.dtype
    close(weights, weights_wanted.double())
    wanted, slopes = truth("cross_entropy", x, target, torch.where(keep, grad, 0), options)
    compute = loss.dtype
    scale = 10 * (1 + wanted.abs().max()) if wanted.numel() else None
    close(loss, wanted, scale, compute)
    if x.numel():
        close(row_stats, numbers_wanted, 10 + numbers_wanted.abs(), compute)
    result = gradients(x, target, torch.where(keep, grad, NAN), row_stats, options)
    for d, slope, leaf in zip(result, slopes, (x, target)):
        assert d.dtype == leaf.dtype and d.stride() == torch.empty_like(leaf).stride()
        assert not d.masked_fill(keep.unsqueeze(min(1, x.dim() - 1)), 0).any()
        # terms: with class probabilities the gradient is a difference of terms as large as `grad`, so it has their
        # rounding error even where it is far smaller.
        terms = grad.abs().max() if target.is_floating_point() and grad.numel() else 0
        close(d, slope, slope.abs().max() * 4 + terms if slope.numel() else None, leaf.dtype)
    upstream, needs = torch.where(keep, grad, NAN), (True, target.is_floating_point(), False)
    in_torch = op._composite_backward(upstream, x, target, row_stats, *numbers_of(options), *needs)
    for d, other in zip(result, in_torch):
        close(d, other.double(), other.double().abs().max() * 4 + 1 if other.numel() else None, other.dtype)
    return row_stats


@pytest.mark.parametrize("options", ["plain", "all", "shares all"])
@pytest.mark.parametrize("layout", ["rows", "odd long row", "images", "odd images", "classes last", "one number"])
def test_cross_entropy_reduced(layout, options):
    x, target, options = example(layout, BF16, **OPTIONS[options])
    numbers = numbers_of(options)
    *losses, row_stats = cross_entropy.cross_entropy(x, target, *numbers)
    needs = True, target.is_floating_point()

    def backward(grad, denominator, stats):
        return cross_entropy_backward.cross_entropy_reduced_backward(
            grad, denominator, x, target, stats, *numbers, *needs
        )

    check_of_rows(
        lambda *reduction: cross_entropy.cross_entropy_reduced(x, target, *numbers, *reduction),
        backward,
        losses,
        lambda grad: gradients(x, target, grad, row_stats, options),
        losses[2].numel() > 0,
    )


@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("layout", ["rows", "odd long row", "odd images", "one number", "nothing kept"])
def test_nll_loss_reduced(layout, weight):
    x, target, options = example("rows" if layout == "nothing kept" else layout, BF16, weight=weight)
    target = torch.full_like(target, -100) if layout == "nothing kept" else target
    numbers = numbers_of(options)[:3]
    check_of_rows(
        lambda *reduction: nll_loss.nll_loss_reduced(x, target, *numbers, *reduction),
        lambda *grad: (nll_loss.nll_loss_reduced_backward(*grad, x.shape, x.dtype, target, *numbers),),
        nll_loss.nll_loss(x, target, *numbers),
        lambda grad: (nll_loss.nll_loss_backward(grad, x.shape, x.dtype, target, *numbers),),
        weight,
    )


# ---- cross entropy


def variants():
    return [plan.values for plan in launch._plans.values() if "PIECES" in plan.constants]


@pytest.mark.parametrize("layout, options", [
    (layout, options) for layout in LAYOUTS for options in OPTIONS
    if options in ("plain", "shares all") or layout in ("rows", "long rows") or (layout, options) == ("images", "all")
])  # fmt: skip
def test_layouts(layout, options):
    x, target, options = example(layout, **OPTIONS[options])
    row_stats = check(x, target, options)
    assert any(v["splits"] > 1 for v in variants()) == (layout in SPLIT)
    if not target.is_floating_point():
        grad, overwritten = fill(rows_of(x.shape), F32, 9), x.clone()
        cross_entropy_backward.cross_entropy_overwrite(grad, overwritten, target, row_stats, *numbers_of(options))
        assert torch.equal(overwritten, gradients(x, target, grad, row_stats, options)[0])


@pytest.mark.parametrize("sample", RECORDS["cross_entropy"].samples, ids=lambda sample: sample.name)
def test_the_records_samples(sample):
    def call(input, target, weight=None, mask=None, reduction=None, denominator=None, **options):
        mask = None if mask is None else mask.expand(rows_of(input.shape))
        check(input.float(), target.float() if target.is_floating_point() else target,
              options | {"weight": None if weight is None else weight.float(), "mask": mask})  # fmt: skip

    adapted(call)(*sample.args, **sample.kwargs)


@pytest.mark.parametrize("layout, dtype", [("long rows", F16), ("rows", BF16), ("images", F64)])
@pytest.mark.parametrize("options", ["plain", "shares all"])
def test_dtypes(layout, dtype, options):
    check(*example(layout, dtype, **OPTIONS[options]))


@pytest.mark.parametrize("probabilities", [False, True])
def test_operands_of_several_dtypes(probabilities):
    x, target, options = example("rows", BF16, probabilities, weight=True, label_smoothing=0.25)
    options["weight"] = options["weight"].double() * 1e-60  # below fp32's smallest number
    loss, *_ = cross_entropy.cross_entropy(x, target, *numbers_of(options))
    assert loss.dtype == F32
    x, target = x.float(), target.half() if probabilities else target.int()
    check(x, target, options | {"weight": None})
    check(x, target, options | {"weight": options["weight"] * 1e60})


@pytest.mark.parametrize(
    "shape, options", [((1, 2300), "all"), ((3, 400, 2), "smoothing"), ((3, 400, 2), "shares all")]
)
def test_long_rows_of_which_there_are_enough(shape, options, monkeypatch):
    """Where the rows outnumber the counters, one block reads all pieces of a row and adds them up itself."""
    monkeypatch.setattr(row, "COUNTERS", 0)
    monkeypatch.setitem(LAYOUTS, "many", (shape, None))
    check(*example("many", **OPTIONS[options]))
    assert all(v["PIECES"] and v["splits"] == 1 for v in variants()) and variants()


def test_any_strides():
    x, target, options = example("rows", weight=True, label_smoothing=0.25)
    check(shifted(x), target, options)
    weight = torch.empty(40, 3)[:, 1].copy_(options["weight"])
    check(x[:, :40], target.repeat(2)[:5], options | {"weight": weight, "mask": torch.tensor(True).expand(5)})
    check(x[:1].nan_to_num(1).expand(5, 40), target[:1].expand(5), options, torch.tensor(1.5).expand(5))
    uniform = torch.full((), 0.125).expand(5, 37)
    check(fill((5, 37), F32, 1), uniform, {"label_smoothing": 0.25})


@pytest.mark.parametrize("options", ["plain", "all"])
def test_chunks_of_the_classes(options):
    """With `partial`, each chunk of the classes gives its part of the gradient, from the maximum and logsumexp over all
    classes, also if a row's class is in another chunk. The parts together are the whole gradient."""
    x, target, arguments = example("long rows", **(OPTIONS[options] | {"weight": False}))
    target[0], arguments["mask"] = 299, None
    x, grad = x.nan_to_num(0), torch.tensor([1.5, -2.0])
    row_stats = cross_entropy.cross_entropy(x, target, *numbers_of(arguments))[3]
    expected = gradients(x, target, grad, row_stats, arguments)[0]
    for part in (slice(0, 120), slice(120, 300)):
        chunk = gradients(
            x[:, part], target - part.start, grad, row_stats, arguments | {"ignore_index": -(2**63)}, partial=True
        )
        close(chunk[0], expected[:, part].double(), expected.abs().max())
        gone = gradients(
            x[:, part], target, grad, row_stats, arguments | {"ignore_index": int(target[0])}, partial=True
        )[0]
        assert not gone[0].any() and gone[1].any()


def test_one_gradient_of_two():
    x, q, options = example("rows", **OPTIONS["shares all"])
    row_stats, grad = check(x, q, options), torch.ones(5)
    both = gradients(x, q, grad, row_stats, options)
    for i, needs in enumerate(({"need_target": False}, {"need_input": False})):
        one = gradients(x, q, grad, row_stats, options, **needs)
        assert torch.equal(one[i], both[i]) and one[1 - i].shape == (0,)


# ---- what is infinite, and what is small


@pytest.mark.parametrize("options", ["plain", "weight", "smoothing", "z-loss"])
@pytest.mark.parametrize("length", [20, 300])
def test_infinite_logits(length, options):
    x, last = torch.zeros(9, length), length - 1
    target = torch.tensor([last, last, 0, 0, 0, 0, 0, last, 1])
    x[0, last], x[1, last], x[2, last] = INF, -INF, -INF
    x[3, last], x[4, last], x[5], x[6, :2] = INF, NAN, -INF, INF
    x[7, last], x[7, 0] = INF, torch.finfo(F32).max
    arguments = {key: torch.full((length,), 2.0) if key == "weight" else n for key, n in OPTIONS[options].items()}
    loss, keep, _, row_stats = cross_entropy.cross_entropy(x, target, *numbers_of(arguments))
    (dx, _) = gradients(x, target, torch.ones(9), row_stats, arguments)
    certain, finite = options in ("plain", "weight"), [2, 8]
    want, slopes = truth("cross_entropy", x[finite], target[finite], torch.ones(2), arguments)
    close(loss[finite], want)
    close(dx[finite], slopes[0], torch.full_like(slopes[0], 4))
    assert keep.all() and loss[1] == INF and dx[1].isfinite().all() and dx[2, last] == 0
    for r in (0, 7):
        assert (loss[r] == 0 and not dx[r].any()) if certain else (loss[r].isnan() and dx[r].isnan().any())
    assert loss[3:7].isnan().all() and dx[3:7].isnan().any(1).all()


@pytest.mark.parametrize("length", [20, 300])
def test_classes_of_minus_infinity(length):
    """Classes of logit -inf do not exist, unless the target gives them a share: then the loss is inf."""
    x, q = fill((3, length), F32, 1), fill((3, length), F32, 2).abs()
    x[:, 0] = x[:, length // 2] = -INF
    q[:2, 0] = q[:2, length // 2] = 0
    others = [c for c in range(length) if c not in (0, length // 2)]
    w = fill((length,), F32, 5).abs() + 0.25
    for target, few in ((torch.full((3,), 1), torch.full((3,), 0)), (q, q[:, others])):
        arguments = {"weight": w, "label_smoothing": 0.25}
        loss, _, _, row_stats = cross_entropy.cross_entropy(x, target, *numbers_of(arguments))
        probabilities = target.is_floating_point()
        rows = slice(0, 2 if probabilities else 3)
        want = cross_entropy.cross_entropy(x[rows, others], few[rows], *numbers_of(arguments | {"weight": w[others]}))[
            0
        ]
        close(loss[rows], want.double())
        assert not probabilities or loss[2] == INF
        dx, dq = gradients(x, target, torch.ones(3), row_stats, arguments)
        assert not dx[rows, 0].any() and dx[rows].isfinite().all() and (not probabilities or not dq[rows, 0].any())


@pytest.mark.parametrize("length", [20, 300])
def test_logits_of_any_size(length):
    """Logits of any size give exact digits: sums of exponentials are relative to the maximum."""
    x = fill((3, length), F32, 1) * 1e-3 + 1e4
    check(x, labels((3, length)), {"label_smoothing": 0.25})
    check(x - 2e4, labels((3, length)), {})
    check(x, fill((3, length), F32, 2).abs() / length, {"label_smoothing": 0.25})
    x = torch.full((1, length), -3e38)
    x[0, 1], x[0, length - 1] = -1e38, 3e38
    check(x, torch.tensor([length - 1]), {})
    x = torch.full((1, length), 2e38)  # minus fp32's lowest number: inf. (The logsumexp has no digit for log n.)
    x[0, 1] = 1e38
    smooth = {"label_smoothing": 0.25}
    loss = cross_entropy.cross_entropy(x, torch.tensor([1]), *numbers_of(smooth))[0]
    close(loss, truth("cross_entropy", x, torch.tensor([1]), torch.ones(1), smooth)[0])


def test_a_confident_row():
    """A row that is almost sure of its class keeps its digits: the loss is log(1 + 1.7e-6), with the sum rounded to
    fp32, and the gradient p - 1 is computed before it is rounded to fp16 or bf16."""
    x = torch.zeros(2, 3, dtype=F16)
    x[:, 0] = torch.tensor([6.0, 14.0])
    loss, _, _, row_stats = cross_entropy.cross_entropy(x, torch.tensor([0, 0]))
    want, slopes = truth("cross_entropy", x, torch.tensor([0, 0]), torch.ones(2), {})
    assert ((loss.double() - want).abs() < 2**-23).all()
    dx = gradients(x, torch.tensor([0, 0]), torch.ones(2), row_stats, {})[0]
    assert abs(dx[0, 0].double() / slopes[0][0, 0] - 1) < 2**-10


def test_a_gradient_too_large_for_half_is_inf():
    x, target = fill((2, 24), F16, 1), torch.tensor([3, 5])
    row_stats = cross_entropy.cross_entropy(x, target)[3]
    assert gradients(x, target, torch.full((2,), 1e6), row_stats, {})[0][0, 3] == -INF


# ---- execution


@pytest.mark.parametrize("options", ["all", "shares all"])
def test_whichever_block_is_first(options, monkeypatch):
    """The results have the same bits in any order of the blocks and with 64-bit offsets, and the counters end at 0."""
    counters = torch.zeros(64, dtype=torch.int32)
    monkeypatch.setattr(row.tiling, "split_counters", lambda device: counters)
    x, target, arguments = example("long rows", **OPTIONS[options])

    def every():
        loss, keep, weights, row_stats = cross_entropy.cross_entropy(x, target, *numbers_of(arguments))
        return loss, keep, weights, row_stats, *gradients(x, target, torch.ones(2), row_stats, arguments)

    def same(a, b):
        return all(torch.equal(s, t) for s, t in zip(a, b)) and not counters.any()

    first = every()
    builder = interpreter.interpreter_builder
    in_order = builder.set_grid_idx
    last = lambda *index: in_order(*(n - 1 - i for i, n in zip(index, builder.grid_dim)))  # noqa: E731
    monkeypatch.setattr(builder, "set_grid_idx", last)
    assert same(first, every())
    monkeypatch.setattr(indexing, "INT32_LIMIT", 0)
    launch._plans.clear()
    assert same(first, every())
    assert all(plan.signature["space"].M == "i64" for plan in launch._plans.values())


def test_the_callers_tensors_are_not_written():
    x, q, options = example("images", **OPTIONS["shares all"])
    operands = x, q, options["weight"], options["mask"]
    before = [t.clone() for t in operands]
    check(x, q, options)
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(before, operands))


def test_numbers_of_another_call_are_refused():
    x, target, options = example("rows", **OPTIONS["all"])
    row_stats = cross_entropy.cross_entropy(x, target, *numbers_of(options))[3]
    for wrong in (row_stats[:2], row_stats[:, :3], row_stats.half()):
        with pytest.raises(ValueError, match=rf"row_stats .*{wrong.dtype}"):
            gradients(x, target, torch.ones(5), wrong, options)


# ---- nll_loss


@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nll_loss(layout, weight):
    check_nll(*example(layout, weight=weight))


@pytest.mark.parametrize("dtype", [F16, BF16, F64])
def test_dtypes_of_nll_loss(dtype):
    x, target, options = example("images", dtype, weight=True)
    check_nll(x, target.int(), options)
    if dtype != BF16:  # the interpreter converts fp64 to bf16 wrongly, to 0
        check_nll(x, target, options | {"weight": options["weight"].double(), "ignore_index": 3})


def check_nll(x, target, options):
    values = numbers_of(options)[:3]
    loss, keep, weights = nll_loss.nll_loss(x, target, *values)
    _, keep_wanted, weights_wanted = define_nll(x, target, *values)
    assert torch.equal(keep, keep_wanted) and torch.equal(weights, weights_wanted)
    grad = fill(rows_of(x.shape), F32, 9)
    wanted, (slope,) = truth("nll_loss", x, target, torch.where(keep, grad, 0), options)
    close(loss, wanted, dtype=loss.dtype)
    dx = nll_loss.nll_loss_backward(torch.where(keep, grad, NAN), x.shape, x.dtype, target, *values)
    assert dx.dtype == x.dtype and dx.is_contiguous()
    close(dx, slope, dtype=x.dtype)
