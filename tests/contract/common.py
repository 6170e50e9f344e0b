"""Helpers of the tests in this folder: the device, the two routes, short tensors."""

import contextlib

import pytest
import torch

from safeops.core.op import registry
from safeops.core.reduction import Reduction
from tests.ops import RECORDS
from tests.ops.record import DEVICE, along_a_dim, firsts, on  # noqa: F401

each_route = pytest.mark.parametrize("route", ["kernel", "composite"])
REPEATS = pytest.mark.slow, pytest.mark.exhaustive  # marks of a case that repeats another op's


def unless_first(name, *more):
    """Returns a test case for the op `name`, marked as a repeat unless the op is the first of its family."""
    return pytest.param(name, *more, marks=() if name in firsts() else REPEATS)


@contextlib.contextmanager
def case(*what):
    """Adds the case's name to an error raised inside. (Cases in a loop are faster than parametrized tests.)"""
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:
        raise AssertionError(f"case {', '.join(map(str, what))}: {error}") from error


def leaf(values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype, device=DEVICE, requires_grad=True)


def flags(*values):
    return torch.tensor(values, dtype=torch.bool, device=DEVICE)


def equal(got, want):
    return torch.allclose(got.detach().cpu().double(), torch.tensor(want, dtype=torch.float64), rtol=1e-4, atol=0)


def grad_of(value, x):
    return torch.autograd.grad(value, x)[0]


def tensor(values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def t(*values, dtype=torch.float32, grad=False):
    return torch.tensor(values, dtype=dtype, device=DEVICE, requires_grad=grad)


def names(*kinds):
    """Returns the names of the ops whose records are instances of the classes `kinds`."""
    return [name for name in RECORDS if isinstance(registry.get(name), kinds)]


REDUCTIONS = [name for name in names(Reduction) if {"mask", "weight"} <= RECORDS[name].call.keys()]
ALONG_A_DIM = along_a_dim()
