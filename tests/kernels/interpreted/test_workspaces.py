"""Blocks that share a result use no more counters and partial results of the workspace than the plan says: guards
around these do not change. There are few counters, so that few rows are split among blocks, and more rows are not.
(test_plans.py tests the number of counters at a GPU's sizes.)"""

import pytest
import torch
import triton.language as tl
from safeops.kernels.engine import buffers, launch, tiling
from safeops.kernels.engine import row_loss as classification
from safeops.kernels.engine import row_plan as plan
from safeops.kernels.reductions import segment_sum

import safeops
from tests.kernels.interpreted.truth import F32, fill

pytestmark = [pytest.mark.usefixtures("triton_route"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]

GUARD, COUNTERS = 40, 16


@pytest.fixture
def workspaces(monkeypatch):
    """Yields a list with [plan, partial results, counters] of each launch, the latter two with guards around them."""
    results = []

    def between(size, dtype):
        storage = torch.full((size + 2 * GUARD,), 77, dtype=dtype)
        results[-1].append(storage)
        return storage[GUARD : GUARD + size]

    def workspace(plan, device):
        if not plan.workspace:
            return None, None
        results.append([plan])
        return between(plan.workspace, torch.float64), between(plan.counters, torch.int32).zero_()

    monkeypatch.setattr(tiling, "workspace", workspace)
    for module in (buffers, tiling, plan, segment_sum):
        monkeypatch.setattr(module, "COUNTERS", COUNTERS)
    for module in (classification, plan):
        monkeypatch.setattr(module, "BUNDLE", tl.constexpr(4))
        monkeypatch.setattr(module, "BUNDLES", tl.constexpr(8))
    monkeypatch.setattr(tiling, "POLICY", tiling.POLICY._replace(blocks=1024))
    launch._plans.clear()
    yield results
    launch._plans.clear()


def first(x):
    return torch.zeros(x.shape[0], dtype=torch.int64)


CALLS = {
    "cross_entropy": lambda x: safeops.cross_entropy(x, first(x)),
    "smoothing": lambda x: safeops.cross_entropy(x, first(x), label_smoothing=0.1, reduction="none").sum(),
    "nll_loss": lambda x: safeops.nll_loss(x, first(x)),
    "multi_margin_loss": lambda x: safeops.multi_margin_loss(x, first(x)),
    "triplet_margin_loss": lambda x: safeops.triplet_margin_loss(x, x.flip(1), x.roll(1, 1), swap=True),
    "masked_softmax": lambda x: safeops.masked_softmax(x, None, -1).square().sum(),
    "normalize": lambda x: safeops.normalize(x, dim=-1)[:, 0].sum(),
    "cosine_similarity": lambda x: safeops.cosine_similarity(x, x.flip(1), dim=-1).sum(),
    "masked_sum": lambda x: safeops.masked_sum(x, dim=1).sum(),
    "masked_var": lambda x: safeops.masked_var(x, dim=1).sum(),
    "segment_sum": lambda x: safeops.segment_sum(x.T, cu_seqlens=torch.tensor([0, 1, x.shape[1]])).sum(),
    "dice_loss": lambda x: safeops.dice_loss(x[None].sigmoid(), x[None].round().clamp(0, 1)),
}


# At most 7 rows of a softmax, and at most 12 of a reduced loss, are split; these use all counters.
@pytest.mark.parametrize("rows", [7, 8, 12, 13, 40])
@pytest.mark.parametrize("name", CALLS)
def test_it_is_as_large_as_the_plan_says(name, rows, workspaces):
    x = fill((rows, 602), F32, 1).requires_grad_()
    value = CALLS[name](x)
    value.backward()
    assert value.isfinite() and x.grad.isfinite().all()
    for planned, partial, counters in workspaces:
        outside = [torch.cat((t[:GUARD], t[-GUARD:])) for t in (partial, counters)]
        assert all((t == 77).all() for t in outside), planned.kernel.fn.__name__
        assert not counters[GUARD:-GUARD].any() and planned.counters <= COUNTERS
    assert workspaces or "masked" in name
