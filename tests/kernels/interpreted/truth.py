"""Helpers of the interpreted tests: definitions in fp64, operands in every layout, and the comparison."""

import importlib
from math import prod

import torch

from safeops.core.dtypes import LARGEST
from safeops.core.op import registry
from safeops.ops.losses._pointwise import PointwiseLoss
from tests.ops import RECORDS

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
TOLERANCE = {F32: 3e-6, F64: 1e-14, F16: 1e-3, BF16: 8e-3}  # bf16: the interpreter truncates instead of rounding


def launchers(name):
    """Returns (forward, backward) of a pointwise loss."""
    module = importlib.import_module(f"safeops.kernels.losses.{name}")
    return getattr(module, name), getattr(module, name + "_backward")


class Loss:
    """A pointwise loss with fixed parameters: its launchers, and its record's definition."""

    def __init__(self, name, parameters):
        self.name, self.options, self.parameters = name, parameters, tuple(parameters.values())
        self.forward, self.backward = launchers(name)
        self.record, self.op = RECORDS[name], registry[name]
        self.count = self.op.count

    def operands(self, x, y):
        """Returns the loss's operands, made from any x and y and mapped into its domain; a third operand has their
        shape."""
        tensors = (x, y, fill(x.shape, y.dtype, 5))[: self.count]
        return tuple(to(t) for to, t in zip(self.record.domain, tensors))

    def sizes(self, *operands):
        """Returns the magnitudes of the terms that are summed in the loss, and in each derivative."""
        if self.record.sizes is None:
            return self.truth(*operands)
        return tuple(t.abs() for t in self.record.sizes(*(x.double() for x in operands), **self.options))

    def truth(self, *operands):
        """Returns (loss of each element in fp64, its derivative by each operand)."""
        leaves = [t.double().clone().requires_grad_() for t in operands]
        options = {self.op.names[-1]: leaves[-1]} if self.op.optional else {}
        tensors = leaves[: self.count - self.op.optional]
        value = self.record.definition(*tensors, reduction="none", **options, **self.options)
        return value.detach(), *torch.autograd.grad(value.sum(), leaves)


def losses():
    """Yields (name, Loss) for every pointwise loss, first with the parameters of its record's call, then with one
    parameter at its minimum or one flag inverted."""
    for name, op in registry.items():
        if isinstance(op, PointwiseLoss):
            plain = {p.name: RECORDS[name].call[p.name] for p in op.parameters}
            yield name, Loss(name, plain)
            for p in op.parameters:
                other = not plain[p.name] if p.kind is bool else p.minimum
                if other is not None and abs(other) < LARGEST:
                    yield f"{name} {p.name}={other}", Loss(name, plain | {p.name: other})


LOSSES = dict(losses())


def kept(shape, mask, weight):
    keep = torch.ones(shape, dtype=torch.bool)
    if mask is not None:
        keep = keep & mask
    return keep if weight is None else keep & (weight != 0)


def weights(shape, weight):
    return torch.ones(shape, dtype=F64) if weight is None else weight.double().expand(shape)


def total(value, shape, mask, weight, dims=None, keepdim=False):
    """Returns (sum of w * value over kept elements, size of its terms for `close`, count of these, sum of their
    weights)."""
    dims = tuple(range(len(shape))) if not dims else dims
    keep, w = kept(shape, mask, weight), weights(shape, weight)
    terms = torch.where(keep, w * value, 0)

    def over(t):
        return t.sum(dims, keepdim=keepdim) if shape else t

    return over(terms), over(terms.abs()), over(keep.double()), over(torch.where(keep, w, 0))


def close(actual, expected, scale=None, dtype=F32):
    """Assert that both agree within `dtype`'s rounding of numbers of size `scale` (None: of the expected numbers), and
    have NaN and inf in the same places."""
    assert actual.shape == expected.shape
    scale = (expected if scale is None else scale).abs()
    actual, rounded = actual.double(), expected.to(dtype).double()
    expected = torch.where(rounded.isinf(), rounded, expected)  # a number that overflows dtype is expected as inf
    odd = ~expected.isfinite()
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    least = 2**-24 if dtype == F16 else 1e-40  # the spacing of subnormal numbers
    near = (actual - expected).abs() <= TOLERANCE[dtype] * scale.nan_to_num(0, 0, 0) + least
    good = torch.where(odd, same, near)
    assert good.all(), f"{(~good).sum()} of {good.numel()} wrong, such as {actual[~good][:3]} for {expected[~good][:3]}"


def fill(shape, dtype, seed):
    """Returns random numbers in [-3, 3]; a tenth of them are 0."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=F64).clamp(-3, 3)
    return torch.where(torch.rand(shape, generator=generator) < 0.1, 0.0, x).to(dtype)


def in_order(shape, order, dtype, seed):
    """Returns a tensor of `shape` whose dims lie in memory in this order, the largest stride first."""
    back = [order.index(d) for d in range(len(shape))]
    return fill([shape[d] for d in order], dtype, seed).permute(back)


def shifted(x):
    """Returns a copy of the tensor that starts one element after an aligned address."""
    storage = torch.empty(x.numel() + 1, dtype=x.dtype)
    return storage[1:].view(x.shape).copy_(x)


# name -> (shape, memory order of x and y or None, mask's shape, weight's shape, True if x is unaligned)
LAYOUTS = {
    "flat": ((640,), None, (640,), None, False),
    "odd": ((641,), None, (641,), (641,), False),
    "shifted": ((320,), None, (320,), None, True),
    "row mask": ((12, 64), None, (12, 1), None, False),
    "column mask": ((12, 64), None, (64,), (64,), False),
    "channel mask": ((2, 5, 32), None, (2, 1, 32), (5, 1), False),
    "transposed": ((33, 18), (1, 0), (33, 18), None, False),
    "channels last": ((2, 3, 4, 16), (0, 2, 3, 1), (2, 3, 4, 16), None, False),
    "no two fuse": ((3, 4, 2, 3, 5), (4, 1, 3, 0, 2), (4, 1, 3, 5), (3, 1, 2, 1, 1), False),
    "many rows": ((40, 160), None, (40, 160), None, False),
    "narrow": ((90, 3), None, (90, 1), None, False),
    "one weight": ((7, 40), None, None, (), False),
    "no mask": ((513,), None, None, None, False),
    "one element": ((1, 1), None, (1,), (1,), False),
    "0-dim": ((), None, (), None, False),
    "empty": ((0, 5), None, (5,), None, False),
}


def build(layout, x_dtype=F32, y_dtype=F32, w_dtype=F32, garbage=True):
    """Returns (x, y, mask, weight). y is in row-major order, except in "channels last", where it has x's order."""
    shape, order, mask_shape, weight_shape, shift = LAYOUTS[layout]
    order = order or tuple(range(len(shape)))
    x, y = in_order(shape, order, x_dtype, 1), fill(shape, y_dtype, 2)
    if layout == "channels last":
        y = in_order(shape, order, y_dtype, 2)
    mask = None if mask_shape is None else torch.rand(mask_shape, generator=torch.Generator().manual_seed(3)) < 0.6
    weight = None if weight_shape is None else fill(weight_shape, w_dtype, 4)
    if weight is not None and weight.numel() == 1:
        weight = weight.fill_(0.75)
    if garbage and prod(shape) > 1:
        out = ~kept(shape, mask, weight)
        x[out], y[out] = float("nan"), float("inf")
    if shift:
        x = shifted(x)
    return x, y, mask, weight


def check_of_rows(forward, backward, losses, slope, weighted):
    """Assert that the reduction over rows (sum, mean) and its gradients agree with the rows' own losses and gradients.

    forward(mean, empty_nan), backward(grad, denominator, numbers): the reduced op. losses: (loss, keep, weights) of
    each row. slope(grad of each row): the gradients of the op without reduction."""
    loss, keep, weights = losses
    total, by = loss.double().sum(), (weights if weighted else keep).double().sum()
    for mean in (True, False):
        value, denominator, *numbers = forward(mean, False)
        assert value.dtype == loss.dtype and value.shape == denominator.shape == ()
        wanted = total if not keep.any() else total / by if mean else total
        close(value, wanted, 10 * loss.double().abs().sum() / (by if mean and keep.any() else 1) + 1e-6, loss.dtype)
        close(denominator, by)
        again = forward(mean, True)
        assert torch.equal(again[0], value) if keep.any() else again[0].isnan()  # NaN if nothing is kept
        grad = torch.tensor(0.75)
        result = backward(grad, denominator if mean else None, *numbers)
        of_each = (grad.double() / (by if mean and keep.any() else 1)).expand(loss.shape)
        for d, like in zip(result, slope(of_each.to(loss.dtype))):
            close(d, like.double(), like.double().abs().max() + 1e-6 if like.numel() else None, like.dtype)
