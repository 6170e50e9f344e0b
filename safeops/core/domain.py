"""Domains of operands: each function maps a tensor of any numbers to one that an op accepts, such as probabilities.

An op's record names a function per tensor (`Op.domain`); tests, `safeops verify` and benchmarks make operands with it.
"""

import torch


def any_number(x):
    return x


def probability(x):
    return x.sigmoid()


def cosine(x):
    """Numbers in [-1, 1]."""
    return x.tanh()


def at_least_one(x):
    return x.abs() + 1


def log_probability(x):
    return -x.abs()


def count(x):
    return x.abs()


def factor(x):
    """A weight of a class or an element, in [0, 1e4]."""
    return x.abs().clamp(max=1e4)


def positive(x):
    return x.abs() + 1 / 16


def side(x):
    """-1 or 1."""
    return torch.where(x.isnan(), x, torch.where(x < 0, -1, 1)).to(x.dtype)


def box(x):
    """(x1, y1, x2, y2) along the last dim, with x1 <= x2 and y1 <= y2."""
    first, size = x[..., :2], x[..., 2:].abs()
    return torch.cat((first, first + size), -1)
