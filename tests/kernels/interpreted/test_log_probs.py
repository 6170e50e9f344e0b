"""token_log_probs and its backward, and cross_entropy of capped logits, agree with the definitions in fp64."""

import pytest
import torch
from safeops.kernels.classification import cross_entropy, cross_entropy_backward, token_log_probs
from safeops.kernels.engine import row_plan as row

from safeops.ops.classification.token_log_probs import define_argmax
from tests.kernels.interpreted.test_classification import (
    LAYOUTS,
    example,
    more_splits,  # noqa: F401  (a fixture)
    rows_of,
    variants,
)
from tests.kernels.interpreted.truth import BF16, F16, F32, F64, close, fill
from tests.ops import definitions

INF, NAN = float("inf"), float("nan")
SHAPES_OF_LOGITS = {"as they are": (1.0, 0.0), "scaled": (0.5, 0.0), "capped": (0.75, 2.0)}
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns about garbage in rows that are not kept


def classes_last(x):
    return x.movedim(1, -1) if x.dim() > 1 else x


def check(x, target, mask, temperature=1.0, softcap=0.0, ignore_index=-100):
    """Assert that the three results agree with the definition, and so do the gradients from each result alone and from
    all together."""
    options = mask, ignore_index, temperature, softcap
    rows, row_stats = token_log_probs.token_log_probs(x, target, *options)
    leaf = x.double().requires_grad_()
    want = torch.stack(
        definitions.token_log_probs(
            classes_last(leaf), target, mask=mask, ignore_index=ignore_index, temperature=temperature,
            softcap=softcap or None,
        )
    )  # fmt: skip
    assert rows.dtype == row_stats.dtype and rows.shape == want.shape
    check_argmax(rows, row_stats, x, target, *options)
    if want.numel() == 0:
        return rows
    finite = want.detach().nan_to_num(0, 0, 0)
    close(rows, want.detach(), 10 * (1 + finite.abs().amax()) * torch.ones_like(finite), rows.dtype)
    for used in ((1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1)):
        grad = fill(rows.shape, F32, 9) * torch.tensor(used).reshape(-1, *[1] * (rows.dim() - 1))
        (slope,) = torch.autograd.grad(want, leaf, grad.double(), retain_graph=True)
        d = token_log_probs.token_log_probs_backward(grad.to(rows.dtype), x, target, row_stats, *options)
        assert d.dtype == x.dtype and d.stride() == torch.empty_like(x).stride()
        close(d, slope, 4 * (grad.abs().max() / temperature) * (1 + finite.abs().amax()), x.dtype)
    return rows


def check_argmax(rows, row_stats, x, target, mask, ignore_index, *shape):
    """Assert that argmax is right, and that the other results have the same bits with and without it."""
    same, argmax, correct, same_stats = token_log_probs.token_log_probs_argmax(x, target, mask, ignore_index, *shape)
    for one, other in ((same, rows), (same_stats, row_stats)):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    _, want, is_own = define_argmax(x, target, mask, ignore_index)
    assert argmax.dtype == torch.int64 and correct.dtype == torch.bool
    assert torch.equal(argmax, want) and torch.equal(correct, is_own)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(1.0, 0.0), (0.75, 0.01)], ids=["as they are", "capped alike"])
def test_the_first_of_equal_logits(layout, shape):
    """argmax is the first of equal maxima, also where the softcap makes logits equal; NaN counts as larger than inf."""
    x, target, options = example(layout)
    rounded, nothing = x.nan_to_num(0).round(), torch.full_like(x, -INF)
    for logits, special in ((rounded, ()), (rounded.clone(), (INF,)), (rounded, (INF, NAN)), (nothing, ())):
        classes = classes_last(logits)
        for i, value in enumerate(special):
            classes[..., i + 1 :: 3] = value
        numbers = options["mask"], -100, *shape
        check_argmax(*token_log_probs.token_log_probs(logits, target, *numbers), logits, target, *numbers)


@pytest.mark.parametrize("layout, how", [
    (layout, how) for layout in LAYOUTS for how in SHAPES_OF_LOGITS
    if how == "capped" or layout in ("rows", "long rows", "images")
])  # fmt: skip
def test_layouts(layout, how):
    x, target, options = example(layout)
    check(x, target, options["mask"], *SHAPES_OF_LOGITS[how])


@pytest.mark.parametrize("dtype", [BF16, F16, F64])
def test_dtypes(dtype):
    x, target, options = example("long rows", dtype)
    check(x, target, options["mask"], 0.75, 2.0)
    x, target, options = example("images", dtype)
    check(x, target, options["mask"])


@pytest.mark.parametrize("layout", ["rows", "long rows", "long columns"])
def test_classes_that_do_not_exist_and_infinite_logits(layout):
    x, target, options = example(layout)
    x.movedim(1, -1)[..., 1:4] = -INF  # for some rows this is the target's class
    check(x, target, options["mask"])
    check(x, target, options["mask"], 0.5, 3.0)
    x[0] = -INF
    x.view(x.shape[0], x.shape[1], -1)[1, 2] = INF  # the target's class in one row; NaN for the other rows
    check(x, target, options["mask"])


@pytest.mark.parametrize("shape", [(1, 2300), (3, 400, 2)], ids=str)
def test_long_rows_of_which_there_are_enough(shape, monkeypatch):
    """Where the rows outnumber the counters, one block reads all pieces of a row and adds them up itself."""
    monkeypatch.setattr(row, "COUNTERS", 0)
    monkeypatch.setitem(LAYOUTS, "many", (shape, None))
    x, target, options = example("many")
    check(x, target, options["mask"])
    assert all(v["PIECES"] and v["splits"] == 1 for v in variants()) and variants()


@pytest.mark.parametrize("layout", ["rows", "long rows", "images", "odd images"])
@pytest.mark.parametrize("probabilities", [False, True])
def test_cross_entropy_of_capped_logits(layout, probabilities):
    x, target, options = example(layout, probabilities=probabilities, weight=True)
    weight, mask = options["weight"], options["mask"]
    numbers = weight, mask, -100, 0.25, 0.125, 0.75, 2.0
    loss, keep, _, row_stats = cross_entropy.cross_entropy(x, target, *numbers)
    leaves = [t.double().requires_grad_() for t in (x, target) if t.is_floating_point()]
    want = definitions.cross_entropy(
        *leaves, *(() if probabilities else (target,)), weight=weight.double(), mask=mask, reduction="none",
        label_smoothing=0.25, z_loss=0.125, temperature=0.75, softcap=2.0,
    )  # fmt: skip
    close(loss, want.detach(), 10 * (1 + want.detach().abs().max()) * torch.ones_like(want), loss.dtype)
    grad = torch.where(keep, fill(rows_of(x.shape), F32, 9), 0)
    result = cross_entropy_backward.cross_entropy_backward(grad, x, target, row_stats, *numbers, True, probabilities)
    for d, slope in zip(result, torch.autograd.grad(want, leaves, grad.double())):
        close(d, slope, 4 * slope.abs().max() + grad.abs().max(), d.dtype)
