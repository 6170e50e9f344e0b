"""How near results of the family must be to each other."""

import torch


def assert_close(got, want, rtol=1e-12, atol=1e-14):
    torch.testing.assert_close(got.detach().double().cpu(), want.detach().double().cpu(), rtol=rtol, atol=atol)
