"""info_nce_loss of fp16 and bf16 operands and its gradients agree with the definition in fp64."""

import copy

import pytest
import torch
import triton.language as tl  # noqa: F401  (the interpreter looks for it beside every jit function)
from safeops.kernels.engine import launch
from safeops.kernels.vectors import info_nce as kernels
from safeops.kernels.vectors.info_nce import info_nce
from safeops.kernels.vectors.info_nce_backward import info_nce_backward

import safeops
from safeops.core import private_torch
from safeops.core.autograd import autograd_function
from safeops.core.library import launchers
from safeops.ops.vectors import _info_nce
from safeops.ops.vectors.info_nce_loss import in_batch
from tests.kernels.interpreted.truth import BF16, F16, F32

NAN = float("nan")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns about garbage in rows that are not kept
each_half = pytest.mark.parametrize("half", [BF16, F16])


def rows(n, columns, half, scale=1.0, near=0.0):
    torch.manual_seed(n)
    query, key = torch.randn(2, n, columns, dtype=torch.float64)
    return ((query * scale).to(half), ((key + near * query) * scale).to(half))


def both(query, key, keep=None, temperature=0.07, as_tensor=False, grad=None):
    """Returns ((loss, gradients of queries, keys and temperature) of the kernels, those of the definition)."""
    n, columns = query.shape
    grad = torch.rand(n, dtype=F32) + 0.5 if grad is None else grad
    t = torch.tensor(temperature, dtype=F32) if as_tensor else None
    loss, units, row_stats = info_nce(query, key, keep, t, temperature)
    dquery, dkey, strength = info_nce_backward(grad, units, row_stats, t, temperature, columns, True, True)
    got = loss, dquery, dkey, -strength.sum() / temperature
    leaves = [x.double().requires_grad_() for x in (query, key, torch.tensor(temperature))]
    want = safeops.info_nce_loss(*leaves[:2], temperature=leaves[2], mask=keep, reduction="none")
    up = grad.double() if keep is None else torch.where(keep, grad, 0).double()
    return got, (want.detach(), *torch.autograd.grad(want, leaves, up))


def check(got, want, half, temperature=0.07):
    """Assert that values and gradients agree. The interpreter truncates to bf16, where a GPU rounds, so bf16 gets twice
    the room."""
    off = torch.finfo(half).eps * (1 if half == BF16 else 0.5)
    torch.testing.assert_close(got[0].double(), want[0], rtol=1e-5, atol=2e-6 / temperature)
    for g, w in zip(got[1:], want[1:]):
        assert g.shape == w.shape and g.isfinite().all()
        assert (g.double() - w).norm() <= off * w.norm() + 1e-7 * g.numel() ** 0.5


@each_half
@pytest.mark.parametrize("n, columns", [(300, 64), (257, 33), (128, 130), (5, 320), (40, 4), (1, 7)])
def test_against_the_definition(half, n, columns):
    for near in (0.0, 1.0):
        check(*both(*rows(n, columns, half, near=near)), half)


@each_half
def test_rows_that_do_not_exist(half):
    query, key = rows(200, 40, half)
    keep = torch.arange(200) % 3 != 0
    for x in (query, key):
        x[~keep] = NAN
    got, want = both(query, key, keep, 0.5, as_tensor=True, grad=torch.where(keep, 1.0, NAN))
    check(got, [want[0], *(w.nan_to_num(0) for w in want[1:])], half, 0.5)
    assert not any(x[~keep].any() for x in got[:3])
    assert not info_nce(query, key, torch.zeros(200, dtype=torch.bool))[0].any()


@each_half
def test_zero_vectors_and_one_row(half):
    query, key = rows(9, 16, half)
    query[2], key[3] = 0, 0
    got, want = both(query, key)
    check(got, want, half)
    assert not got[1][2].any() and not got[2][3].any() and got[1][3].any()
    got, _ = both(*rows(1, 16, half))
    assert got[0] == 0 and not got[1].any() and not got[2].any()


@each_half
@pytest.mark.parametrize("up", [2.0**-16, 1.0, 2.0**16])
def test_lengths_and_gradients_of_any_size(half, up):
    """Rows whose squares overflow or underflow give the same loss, and gradients of any size are right, though fp16
    could not hold the intermediate ones."""
    query, key = rows(70, 16, half)
    lengths = (2.0**100, 2.0**-100) if half == BF16 else (2.0**10, 2.0**2)
    longer, shorter = query * lengths[0], key * lengths[1]
    grad = torch.full((70,), up)
    got, _ = both(longer, shorter, grad=grad)
    loss, units, row_stats = info_nce(query, key, None, None, 0.07)
    assert torch.equal(got[0], loss)
    wanted = info_nce_backward(torch.ones(70), units, row_stats, None, 0.07, 16, True, True)
    for g, w, length in zip(got[1:], wanted, lengths):
        if half == BF16:
            torch.testing.assert_close(g.double(), w.double() / length * up, rtol=2**-6, atol=1e-37)


def test_a_value_that_is_no_number_shows():
    query, key = rows(130, 16, BF16)
    query[129, 3], grad = NAN, torch.ones(130)
    loss, units, row_stats = info_nce(query, key)
    assert loss.isnan().nonzero().tolist() == [[129]]
    dquery, dkey, _ = info_nce_backward(grad, units, row_stats, None, 1.0, 16, True, True)
    assert dquery.isnan().any(1).nonzero().tolist() == [[129]] and dkey.isnan().all()
    key[1, 0] = float("inf")
    assert info_nce(query, key)[0].isnan().all()


def test_whole_rows_as_in_the_shared_memory_of_large_gpus(monkeypatch):
    """Results are right where rows fit in shared memory whole, as on large GPUs; for one gradient alone; and for rows
    in any memory order."""
    query, key = rows(150, 96, BF16)
    loss, units, row_stats = info_nce(query.T.contiguous().T, key)
    want = info_nce_backward(torch.ones(150), units, row_stats, None, 1.0, 96, True, True)
    monkeypatch.setattr(kernels, "ROOMY", (None,))
    launch._plans.clear()
    again, units, row_stats = info_nce(query, key)
    torch.testing.assert_close(again, loss, rtol=1e-6, atol=1e-6)
    for needs in ((True, False), (False, True)):
        got = info_nce_backward(torch.ones(1).expand(150), units, row_stats, None, 1.0, 96, *needs)
        for g, w, need in zip(got, want, needs):
            torch.testing.assert_close(g, w if need else w[:0], rtol=1e-2, atol=1e-3)


def test_sizes_of_nothing():
    for shape in ((0, 4), (3, 0), (0, 0)):
        x = torch.ones(shape, dtype=F16)
        loss, units, row_stats = info_nce(x, x)
        torch.testing.assert_close(loss, torch.full(shape[:1], float(max(shape[0], 1))).log())
        dquery, dkey, _ = info_nce_backward(torch.ones(shape[0]), units, row_stats, None, 1.0, shape[1], True, True)
        assert dquery.shape == dkey.shape == shape


@each_half
def test_the_public_function_by_the_kernels(half, monkeypatch):
    """info_nce_loss calls the kernels, with all its options and the temperature's gradient; its second derivative comes
    from the definition."""
    op = in_batch
    routed = copy.copy(op)
    routed.forward, routed.backward = map(launchers.get, (op.forward, op.backward))
    routed.save = private_torch.save_directly
    recorded = private_torch.direct_apply(autograd_function(routed))
    monkeypatch.setattr(op, "eager", [(routed.forward, False), (recorded, False)])
    monkeypatch.setattr(op, "cpu", True)
    monkeypatch.setattr(_info_nce, "sums_wide", lambda device: True)
    query, key = (x.requires_grad_() for x in rows(150, 24, half))
    t = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
    exact = [x.detach().double().requires_grad_() for x in (query, key, t)]
    weight = (torch.arange(150) % 4).to(half)
    for options in ({}, {"mask": weight != 2, "reduction": "sum"}, {"weight": weight}):
        results = [safeops.info_nce_loss(q, k, temperature=x, **options) for q, k, x in ((query, key, t), exact)]
        got, want = (torch.autograd.grad(z, x) for z, x in zip(results, ((query, key, t), exact)))
        assert [g.dtype for g in got] == [half, half, torch.float64]
        check((results[0].detach(), *got), (results[1].detach(), *want), half)
    loss = safeops.info_nce_loss(query, key, temperature=0.2)
    first = torch.autograd.grad(loss, query, create_graph=True)[0]
    assert torch.autograd.grad(first.double().square().sum(), query)[0].any()
    loss = safeops.info_nce_loss(query, key.detach())
    assert torch.autograd.grad(loss, query)[0].any()
    for shape in ((150, 24), (3, 300), (1, 1)):
        x = torch.ones(shape, dtype=half)
        for r, f in zip(info_nce(x, x), _info_nce._fake(x, x)):
            assert r.shape == f.shape and r.dtype == f.dtype
