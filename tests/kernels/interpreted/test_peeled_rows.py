"""Rows at unaligned addresses are read in words that extend beyond the row; the NaN stored between rows does not
show."""

import pytest
import torch
import triton
import triton.language as tl
from safeops.kernels.classification import masked_softmax
from safeops.kernels.engine import launch
from safeops.kernels.engine import row_plan as row
from safeops.kernels.engine.indexing import PEELED
from safeops.kernels.engine.unaligned import fetch_unaligned

from tests.kernels.interpreted import test_classification as classes
from tests.kernels.interpreted import test_multi_margin as margins
from tests.kernels.interpreted import test_rows as rows
from tests.kernels.interpreted.truth import BF16, F16, F32, F64, fill

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns about the NaN

# name -> (columns, elements before the first row, elements between rows)
LAYOUTS = {"dense": (301, 0, 0), "offset": (303, 5, 0), "gaps": (298, 3, 9), "aligned but for the first": (304, 1, 0)}
CASES = [(layout, F32) for layout in LAYOUTS] + [("dense", BF16), ("gaps", F16), ("offset", F64)]


@pytest.fixture(autouse=True)
def more_splits(monkeypatch):
    monkeypatch.setattr(row.tiling, "POLICY", row.tiling.POLICY._replace(blocks=32))


def with_neighbours(layout, dtype, other, shape=(3,)):
    """Returns (a storage filled with `other`, a view of it with rows in this layout)."""
    columns, first, gap = LAYOUTS[layout]
    steps = torch.empty(*shape, columns + gap).stride()
    storage = torch.full((first + shape[0] * steps[0] + 16,), other, dtype=dtype)
    return storage, storage.as_strided((*shape, columns), steps, first)


def example(layout, dtype=F32, seed=1, shape=(3,)):
    x = with_neighbours(layout, dtype, float("nan"), shape)[1]
    return x.copy_(fill(x.shape, dtype, seed))


def plans():
    """Returns (the plans of all launches of rows, the plans among them that read unaligned rows in words)."""
    every = [plan for plan in launch._plans.values() if "PEEL" in plan.constants]
    return every, [plan for plan in every if plan.constants["PEEL"] and max(plan.kinds.values()) > PEELED.value]


@pytest.mark.parametrize("layout, dtype", CASES)
@pytest.mark.parametrize("op", rows.OPS[:3])
def test_softmax_and_normalize(op, layout, dtype):
    x = example(layout, dtype)
    mask = None if op == "normalize" else fill(x.shape, F32, 3) > -1
    rows.check(op, x, None, mask)
    every, peeled = plans()
    assert len(peeled) == len(every) == 2 and any(plan.values["splits"] > 1 for plan in every)


@pytest.mark.parametrize("cut", [slice(None, -1), slice(1, None)])
@pytest.mark.parametrize("op", rows.OPS[:3])
def test_a_gradient_that_lies_elsewhere(op, cut):
    """Nothing is read beyond the gradient's end where logits[:, :-1] have gaps between rows and a new gradient has
    none."""
    x = fill((3, 302), F32, 1)[:, cut]
    value, row_stats = rows.run(op, x, None)
    for grad in (fill((3, 301), F32, 2), fill((3, 301, 2), F32, 2)[..., 0]):
        (got,), (wanted,) = (rows.backward(op, grad, row_stats, each, None) for each in (x, x.contiguous()))
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("op", rows.OPS[:3])
def test_one_block_for_a_row(op, monkeypatch):
    monkeypatch.setattr(row, "COUNTERS", 0)
    rows.check(op, fill((2, 2303), F32, 1))
    assert all(plan.values["pieces"] > 1 and plan.values["splits"] == 1 for plan in plans()[1])
    assert len(plans()[1]) == 2


@pytest.mark.parametrize("options, layout, dtype", [
    *((options, layout, dtype) for options in ("plain", "shares all") for layout, dtype in CASES),
    *((options, "gaps", F32) for options in classes.OPTIONS if options not in ("plain", "shares all")),
])  # fmt: skip
def test_cross_entropy(options, layout, dtype):
    options = dict(classes.OPTIONS[options])
    x, probabilities = example(layout, dtype), options.pop("probabilities", False)
    target = example(layout, dtype, 2).abs_() if probabilities else torch.tensor([7, 0, x.shape[1] - 1])
    if options.get("weight"):
        options["weight"] = fill(x.shape[1:], F32, 5).abs() + 0.25
    classes.check(x, target, options | {"mask": torch.tensor([True, True, True])})
    every, peeled = plans()
    assert len(peeled) == len(every) == 2


@pytest.mark.parametrize("layout, dtype", CASES)
def test_multi_margin_and_nll(layout, dtype):
    x, place = example(layout, dtype, shape=(2, 3)), torch.tensor([[3, -1, 0], [5, 17, LAYOUTS[layout][0] - 1]])
    margins.check(x, place, p=2)
    assert len(plans()[1]) == 2
    classes.check_nll(x[0], place[0], {"mask": None})


@triton.jit
def first_columns(x, out, N, BN: tl.constexpr, VEC: tl.constexpr):
    value = fetch_unaligned(x + tl.zeros([1], tl.int32), 0, N, 1, BN, VEC, True)
    tl.store(out + tl.arange(0, BN)[None, :], value.to(tl.float32))


@pytest.mark.parametrize("dtype, vec, most", [(F32, 4, 1 << 31), (BF16, 8, 1 << 31), (F64, 2, 1 << 30)])
def test_the_longest_rows(dtype, vec, most):
    """A row is right whose words can be counted in 31 bits, but whose bytes cannot. Only the row's beginning is
    read."""
    x = fill((65,), dtype, 1)[1:]
    for columns in (60, (1 << 29) + 1, most - (1 << 17)):
        out = torch.full((64,), 7.0)
        first_columns[(1,)](x, out, columns, 64, vec)
        assert torch.equal(out[:60], x[:60].float()), columns


@pytest.mark.parametrize("op", ["softmax", "softmax_backward"])
@pytest.mark.parametrize("layout", ["dense", "offset", "gaps"])
def test_nothing_is_written_beside_a_row(op, layout, monkeypatch):
    """A result in a larger storage is written without anything before, between or after its rows."""
    x, grad = example(layout, BF16), example(layout, BF16, 2)
    value, *row_stats = masked_softmax.masked_softmax(x)
    storage, out = with_neighbours(layout, BF16, 7.0)
    monkeypatch.setattr(torch, "empty_like", lambda x: out)
    if op == "softmax":
        masked_softmax.masked_softmax(x)
        assert torch.equal(out, value)
    else:
        masked_softmax.masked_softmax_backward(grad, x, *row_stats)
    assert plans()[1][-1].kinds["out"] > PEELED.value
    assert not (out == 7).any()
    out.fill_(7.0)
    assert (storage == 7).all()
