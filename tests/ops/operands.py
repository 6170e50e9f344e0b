"""Operands of the records' calls, in float64, generated from seeds, so that each import gives equal numbers."""

import torch

HUGE = 10**400  # too large for any float


def data(*shape, seed=0, low=-3.0, high=3.0):
    g = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=g, dtype=torch.float64) * (high - low) + low


def mask(*shape, seed=0, keep=0.6):
    g = torch.Generator().manual_seed(100 + seed)
    m = torch.rand(shape, generator=g) < keep
    if m.numel() > 1:  # at least one True and one False
        m.view(-1)[0], m.view(-1)[-1] = True, False
    return m


def weights(*shape, seed=0):
    return data(*shape, seed=seed, low=0.25, high=2.0)


# ---- operands of the plain calls: fp32, of one shape, in every function's domain


def plain(seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.rand(5, 6, generator=g) * 1.5 + 0.25


def plain_mask():
    return torch.arange(30).reshape(5, 6) % 5 != 2
