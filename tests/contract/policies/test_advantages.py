"""kl_to_reference, group_advantages, discounted_sum: digits, groups of equal rewards and of one, long trajectories."""

import pytest
import torch

import safeops
from tests.contract.common import DEVICE
from tests.contract.policies.close import assert_close
from tests.ops import definitions
from tests.ops.operands import data, mask

HALF = torch.float16, torch.bfloat16
each_dtype = pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64])


def test_k3_keeps_its_digits():
    """Near 0 exp(d) - 1 - d cancels: at 1e-3 fp32 has four digits left."""
    exponents = torch.linspace(-6, 1.2, 400, dtype=torch.float64)
    d = torch.cat((10**exponents, -(10**exponents))).float().to(DEVICE)
    x = torch.zeros_like(d, requires_grad=True)
    got = safeops.kl_to_reference(x, d)
    wide = d.double()
    series = wide**2 / 2 * (1 + wide / 3 * (1 + wide / 4 * (1 + wide / 5)))
    want = torch.where(wide.abs() < 1e-3, series, torch.expm1(wide) - wide)
    assert ((got.double() - want).abs() <= 1e-6 * want).all()
    (slope,) = torch.autograd.grad(got.sum(), x)
    assert ((slope.double() + torch.expm1(wide)).abs() <= 1e-6 * torch.expm1(wide).abs()).all()


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@each_dtype
def test_a_large_difference_saturates(kind, dtype):
    size = 1e38 if dtype != torch.float16 else 6e4
    reference = torch.tensor([size, -size, 800.0, 0.5], dtype=dtype, device=DEVICE)
    x = torch.zeros(4, dtype=dtype, device=DEVICE, requires_grad=True)
    got = safeops.kl_to_reference(x, reference, kind=kind)
    (grad,) = torch.autograd.grad(got.sum(), x)
    assert got.isfinite().all() and not grad.isnan().any() and grad[3] != 0
    if kind == "k3":
        assert grad[0] == grad[2] * 0 == 0 and got[1] == size or dtype in HALF


@each_dtype
@pytest.mark.parametrize("leave_one_out", [False, True])
def test_equal_rewards_have_no_advantage(dtype, leave_one_out):
    for value in (0.1, 0.3, 1 / 3, 1e-7, 6e4):
        for size in (2, 3, 7):
            rewards = torch.full((size,), value, dtype=dtype, device=DEVICE, requires_grad=True)
            got = safeops.group_advantages(rewards, size, leave_one_out=leave_one_out, eps=0.0)
            (grad,) = torch.autograd.grad(got.sum(), rewards)
            assert not got.any() and grad.isfinite().all(), (value, size)


def test_groups_of_one_reward_have_no_advantage():
    ids = torch.tensor([5, 2, 2, -9], device=DEVICE)
    rewards = torch.tensor([3.0, 0.0, 1.0, torch.nan], device=DEVICE)
    keep = rewards.isfinite()
    for leave_one_out in (False, True):
        got = safeops.group_advantages(rewards, ids, mask=keep, leave_one_out=leave_one_out)
        assert got[0] == 0 and got[3] == 0 and got[1] == -got[2] != 0
    alone = safeops.group_advantages(rewards, ids, mask=keep & torch.tensor([True, False, True, True], device=DEVICE))
    assert not alone.any()


def test_a_kept_nan_shows_in_its_group_alone():
    rewards = torch.tensor([3.0, torch.nan, 1.0, 0.0], device=DEVICE)
    assert safeops.group_advantages(rewards, 2).isnan().tolist() == [True, True, False, False]


def test_groups_by_size_are_groups_by_ids():
    rewards, keep = data(6, 4).to(DEVICE), mask(6, 4).to(DEVICE)
    ids = (torch.arange(24, device=DEVICE) // 4).view(6, 4)
    want = definitions.group_advantages(rewards, ids, mask=keep)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    shuffled = safeops.group_advantages(
        rewards.flatten()[order], ids.flatten()[order] * -77, mask=keep.flatten()[order]
    )
    assert_close(safeops.group_advantages(rewards, 4, mask=keep), want)
    assert_close(shuffled, want.flatten()[order])


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_long_trajectory_has_the_error_of_a_short_one(values, dtype):
    """At gamma = 0.5, gamma^t leaves fp32 from t = 150 on: a scan that divides by it has lost all digits."""
    r, v = (data(2, 600, seed=seed).to(DEVICE, dtype) for seed in range(2))
    keep = mask(2, 600).to(DEVICE)
    for gamma, lam in ((0.5, 1.0), (1.0, 1.0), (0.99, 0.95), (0.0, 0.5)):
        options = {"gamma": gamma, "lam": lam}
        got = safeops.discounted_sum(r, v if values else None, keep, **options)
        wide = definitions.discounted_sum(r.double(), v.double() if values else None, keep, **options)
        assert got.dtype == torch.float32
        assert ((got.double() - wide).abs() <= 2e-5 * (1 + wide.abs().amax())).all()


def test_packed_trajectories_end_where_they_end():
    r, v = data(9).to(DEVICE), data(9, seed=1).to(DEVICE)
    bounds = torch.tensor([0, 4, 4, 5, 9], device=DEVICE)
    keep = torch.tensor([True, True, True, False, True, False, True, True, True], device=DEVICE)
    got = safeops.discounted_sum(r, v, keep, gamma=0.9, lam=0.8, cu_seqlens=bounds)
    parts = [slice(0, 4), slice(4, 5), slice(5, 9)]
    each = [safeops.discounted_sum(r[p], v[p], keep[p], gamma=0.9, lam=0.8) for p in parts]
    assert_close(got, torch.cat(each))


def test_the_graph_grows_like_the_logarithm_of_time():
    def nodes(steps):
        x = torch.zeros(steps, dtype=torch.float64, device=DEVICE, requires_grad=True)
        stack, seen = [safeops.discounted_sum(x, gamma=0.9).grad_fn], set()
        while stack:
            if (node := stack.pop()) not in seen and node is not None:
                seen.add(node)
                stack += [parent for parent, _ in node.next_functions]
        return len(seen)

    assert nodes(1024) - nodes(512) == nodes(512) - nodes(256) < 16
