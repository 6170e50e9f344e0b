"""Parts of the masked reductions' records: `reduction` makes one from a definition and from what users write."""

import torch

from safeops.testing import Bad, Sample
from tests.ops.bad_calls import KEEP, X, bad_masks, must
from tests.ops.gpu import masked
from tests.ops.operands import data, mask, plain, plain_mask, weights
from tests.ops.record import BY_COMPOSITE, Record
from tests.ops.truth import kept

SKIP = {
    "masked_upstream": "the result is reduced",
    "finite": "not a safe_ function: finite in, finite out is in tests/contract/reductions/test_norms.py",
}
ONE = {"partial_gradients": "one operand; the weight's gradient has a subject of its own"}


# ---- definitions and what users write


class Masked:
    """Mask, x and weight at the input's full shape; x and weight are 0 where not kept."""

    def __init__(self, input, mask, weight, dim, keepdim):
        self.axes = tuple(range(input.dim())) if dim is None or dim == () else dim
        self.keepdim = keepdim
        self.keep = kept(input.shape, mask, weight).to(input.device)
        self.x = torch.where(self.keep, input, 0)
        self.w = torch.where(self.keep, torch.ones_like(input) if weight is None else weight, 0)
        self.count, self.total = self.sum(self.keep.to(input.dtype)), self.sum(self.w)

    def sum(self, x):
        return x.sum(self.axes, keepdim=True)

    def result(self, value, exists, empty):
        value = torch.where(exists, value, float("nan") if empty == "nan" else 0.0)
        if self.keepdim:
            return value
        return value.squeeze(self.axes) if value.dim() else value

    def extreme(self, x, largest):
        """Returns the largest (or smallest) kept element. k tied elements share the gradient, 1 / k each."""
        if not x.numel():
            return self.sum(x)
        fill = -torch.inf if largest else torch.inf
        values = torch.where(self.keep, x, fill).detach()
        top = values.amax(self.axes, keepdim=True) if largest else values.amin(self.axes, keepdim=True)
        ties = self.keep & ((x == top) | (x.isnan() & top.isnan()))
        return self.sum(torch.where(ties, x / self.sum(ties.to(x.dtype)).clamp(min=1), 0))


def root(square):
    return torch.where(square == 0, 0, torch.where(square == 0, 1, square).sqrt())


def twin(function):
    """Adapts torch's function (input, mask, axes, keepdim), which has no weights, to the call of a masked reduction."""

    def call(input, mask=None, dim=None, *, keepdim=False, weight=None, dtype=None, empty="zero", **parameter):
        if weight is not None:
            raise TypeError("torch has no weights")
        axes = tuple(range(input.dim())) if dim is None or dim == () else dim
        return function(input, mask, axes, keepdim, **parameter)

    return call


def filled(x, mask, neutral):
    return x if mask is None else torch.where(mask, x, neutral)


# ---- records


def reduction(definition, plain_torch, *, extra=(), heavy=0, weighted=None, call=None, kernel_call=None, **fields):
    """Makes the record of a masked reduction.

    plain_torch  what users write: (input, mask=None, dim=None, *, keepdim, weight, dtype, empty, ...).
    extra        samples beside those of every reduction.
    heavy        added to each weight: a sum of few weights then exceeds a correction of 1, and no divisor is near 0.
    weighted     samples for the gradient to the weight; () if there is none.
    call         further arguments of the plain call. kernel_call: changes with which a kernel computes it.
    """
    name = definition.__name__
    bad_calls, variants = fields.pop("bad_calls", ()), fields.pop("variants", {})
    weighted = list(weight_samples(heavy)) if weighted is None else weighted
    if weighted:
        variants = {"gradient of the weight": (weighted, {"data": (0,), "skip": SKIP | BY_COMPOSITE}), **variants}
    return Record(
        name,
        definition,
        [*samples(heavy), *extra],
        bad_calls=[*bad_reductions(name), *bad_calls],
        call={"input": plain(), "mask": plain_mask(), "dim": 1, "keepdim": False, "weight": plain(2), "dtype": None,
              **(call or {})},
        kernel_call=kernel_call,
        gpu=fields.pop("gpu", masked(name)),
        variants=variants,
        data=(0,),
        dtype_argument=True,
        torch_equivalent=plain_torch,
        skip=SKIP | ONE | fields.pop("skip", {}),
        **fields,
    )  # fmt: skip


def samples(heavy=0):
    def sample(*args, **options):
        kwargs = {key: options.pop(key) for key in ("dim", "keepdim", "weight") if key in options}
        if "weight" in kwargs:
            options["differentiable"] = (0,)
            kwargs["weight"] = kwargs["weight"] + heavy
        return Sample(args, kwargs, **{"mask": 1 if len(args) > 1 else None, **options})

    four = data(2, 3, 4, 5)
    yield sample(data(3, 5), mask(3, 5), name="all dims", slow=True)
    yield sample(data(3, 5), mask(3, 5), dim=1, weight=weights(3, 5), name="weighted rows", slow=True)
    yield sample(data(4, 3, 5), mask(4, 1, 5), dim=0, keepdim=True, name="mask broadcast, keepdim")
    yield sample(four, mask(2, 3, 1, 5), dim=(1, -1), name="inner dims of four")
    yield sample(four, mask(2, 3, 4, 5), dim=(0, 2), weight=weights(5), name="outer dims, weight broadcast")
    yield sample(data(7), dim=(), weight=weights(7), name="no mask, dim ()")
    yield sample(data(3, 5), name="neither mask nor weight")


def weight_samples(heavy=0):
    """Yields samples for the gradient to the weight. heavy: added to each weight."""
    rows = {"dim": 1, "weight": weights(3, 5) + heavy}
    yield Sample((data(3, 5), mask(3, 5)), rows, mask=1, name="weight")
    yield Sample((data(3, 5), mask(3, 1)), {"weight": weights(5) + heavy}, mask=1, name="weight broadcast")


A, M = data(4, 6, seed=7), mask(4, 6, seed=7)
ZEROS = torch.zeros_like(A)
ZEROS[2:] = A[2:]
ZERO_ROWS = Sample((ZEROS, M), {"dim": 1}, mask=1, smooth=False, name="rows of zeros")


def bad_reductions(name):
    large = torch.ones(3, 2, 5, dtype=torch.bool)
    yield from bad_masks(name, lambda m: ((X, m), {}))
    yield Bad((X, large), {}, ValueError, (name, "mask", "(3, 2, 5)", "(2, 5)"))
    yield Bad(([1.0],), {}, TypeError, (name, "input", "tensor", "list"))
    yield Bad((X.long(),), {}, TypeError, (name, "input", "floating", "torch.int64"))
    yield Bad((X.to(torch.complex64),), {}, TypeError, (name, "input", "floating", "torch.complex64"))
    yield Bad((X, KEEP, 2), {}, IndexError, (name, "dim", "2"))
    yield Bad((X, KEEP, -3), {}, IndexError, (name, "dim", "-3"))
    yield Bad((X, KEEP, (0, 0)), {}, ValueError, (name, "dim", "(0, 0)"))
    yield Bad((X, KEEP, (1, -1)), {}, ValueError, (name, "dim", "(1, -1)"))
    yield Bad((X, KEEP, "rows"), {}, TypeError, (name, "dim", "rows"))
    yield Bad((X, KEEP, 1.0), {}, TypeError, (name, "dim", "1.0"))
    yield from bad_flags(name)
    yield Bad((X,), {"weight": torch.ones(3)}, ValueError, (name, "weight", "(3,)", "(2, 5)"))
    yield Bad((X,), {"weight": torch.ones(4, 2, 5)}, ValueError, (name, "weight", "(4, 2, 5)", "(2, 5)"))
    yield Bad((X,), {"weight": KEEP}, TypeError, (name, "weight", "floating", "torch.bool"))
    yield Bad((X,), {"weight": 2.0}, TypeError, (name, "weight", "tensor", "float"))
    yield Bad((X,), {"weight": X.to("meta")}, ValueError, (name, "weight", "meta"))
    yield Bad((X,), {"dtype": torch.int64}, TypeError, (name, "dtype", "torch.int64"))
    yield Bad((X,), {"empty": "ignore"}, ValueError, (name, "empty", "ignore", "zero"))
    yield Bad((X,), {"empty": None}, (ValueError, TypeError), (name, "empty", "None"))
    yield Bad((X, ~KEEP), {"empty": "raise"}, ValueError, (name, "empty", "raise"))


def bad_flags(name):
    """Yields calls that must be refused by name: the dispatcher would accept them or blame another argument."""
    for keepdim in (2, None, 1):
        yield must(name, "keepdim", (X,), {"keepdim": keepdim}, TypeError)
    for dim in (True, (False, 1)):
        yield must(name, "dim", (X,), {"dim": dim}, TypeError)


def bad_parameters(name, key):
    """Yields calls with refused values of the reduction's own number, `key`."""
    yield Bad((X,), {key: "1"}, TypeError, (name, key, "str"))
    yield Bad((X,), {key: None}, TypeError, (name, key, "NoneType"))
    yield Bad((X,), {key: torch.ones(())}, TypeError, (name, key, "Tensor"))
    yield Bad((X,), {key: True}, TypeError, (name, key, "bool"))
