"""Extremes, norms and sums of squares."""

import torch

from safeops.testing import Bad, Sample
from tests.ops.bad_calls import KEEP, NAN, X, bad_masks, must
from tests.ops.gpu import masked
from tests.ops.operands import HUGE, data, mask, plain, plain_mask, weights
from tests.ops.record import BY_COMPOSITE, NO_WEIGHT, Record
from tests.ops.reductions import reduction as common
from tests.ops.reductions.reduction import ONE, SKIP, ZERO_ROWS, A, M, Masked, filled, reduction, root, twin
from tests.ops.truth import absolute

INF = float("inf")


# ---- definitions


def masked_amax(input, mask=None, dim=None, *, keepdim=False, weight=None, empty="zero", largest=True):
    m = Masked(input, mask, weight, dim, keepdim)
    return m.result(m.extreme(m.x, largest), m.count > 0, empty)


def masked_amin(input, *args, **kwargs):
    return masked_amax(input, *args, **kwargs, largest=False)


def masked_norm(input, mask=None, dim=None, *, ord=2, keepdim=False, weight=None, empty="zero"):
    m = Masked(input, mask, weight, dim, keepdim)
    a = absolute(m.x)
    if ord in (INF, -INF):
        value = m.extreme(a, ord > 0)
    elif ord == 2:
        value = root(m.sum(m.w * m.x * m.x))
    elif ord == 1:
        value = m.sum(m.w * a)
    elif ord == 0:
        value = m.sum(m.w * torch.where(a.isnan(), a, (a != 0).to(a.dtype)))
    else:
        # An element 0 has gradient 0; for ord < 0 its power is inf.
        powers = torch.where(a == 0, 0 if ord > 0 else INF, torch.where(a == 0, 1, a) ** ord)
        total = m.sum(torch.where(m.keep, m.w * powers, 0))
        none = (total == 0) | (total.isposinf() & (ord < 0))
        value = torch.where(none, 0, torch.where(none, 1, total) ** (1 / ord))
    return m.result(value, m.count > 0, empty)


def safe_norm(input, dim=None, *, ord=2, keepdim=False, mask=None):
    return masked_norm(input, mask, dim, ord=ord, keepdim=keepdim)


def masked_sum_of_squares(input, mask=None, dim=None, *, keepdim=False, weight=None, empty="zero"):
    m = Masked(input, mask, weight, dim, keepdim)
    return m.result(m.sum(m.w * m.x * m.x), m.count > 0, empty)


def masked_rms(input, mask=None, dim=None, *, keepdim=False, weight=None, empty="zero"):
    m = Masked(input, mask, weight, dim, keepdim)
    value = root(m.sum(m.w * m.x * m.x) / torch.where(m.count > 0, m.total, 1))
    return m.result(value, m.count > 0, empty)


# ---- what users write


def _torch_norm(x, m, axes, keepdim, ord=2):
    return torch.linalg.vector_norm(filled(x, m, 0 if ord != -INF else INF), ord, axes, keepdim)


def _torch_squares(x, m, axes, keepdim):
    return filled(x, m, 0).square().sum(axes, keepdim)


def _torch_rms(x, m, axes, keepdim):
    count = (torch.ones_like(x, dtype=torch.bool) if m is None else m.expand(x.shape)).sum(axes, keepdim)
    return (_torch_squares(x, m, axes, keepdim) / count).sqrt()


# ---- records


def _extreme_samples(**order):
    """Yields samples of an extreme (masked_amax, masked_amin) or of a norm of ord inf or -inf."""
    ties, columns = (A * 2 / 3).round(), {"dim": 0, **order, "weight": weights(6)}
    yield Sample((ties, M), {"dim": 1, **order}, mask=1, smooth=False, name=f"ties {order}")
    yield Sample((A, M), columns, mask=1, differentiable=(0,), name=f"columns, weighted {order}", slow=True)
    yield Sample((A, M), order, mask=1, name=f"all dims {order}")


def _norm_samples():
    for ord in (INF, -INF):
        yield from _extreme_samples(ord=ord)
    yield Sample((A, M), {"dim": 1, "ord": 1}, mask=1, name="ord 1", slow=True)
    weighted = {"ord": 1, "weight": weights(4, 1)}
    yield Sample((A, M), weighted, mask=1, differentiable=(0,), name="ord 1, weighted")
    yield ZERO_ROWS


def _bad_orders(name):
    yield from common.bad_parameters(name, "ord")
    yield Bad((X,), {"ord": NAN}, ValueError, (name, "ord", "nan"))
    for order in (HUGE, -HUGE):
        yield must(name, "ord", (X,), {"ord": order}, ValueError)


def _other_orders():
    """Yields samples of norms whose ord has no kernel."""
    x, m = data(4, 6, seed=8, low=0.25), mask(4, 6, seed=8)
    signed = torch.where(mask(4, 6, seed=9), x, -x)
    zeros = torch.where(mask(4, 6, seed=10), signed, 0)
    for ord in (3, 2.5, 0.5, -1, -2):
        yield Sample((signed, m), {"dim": 1, "ord": ord}, mask=1, name=f"ord {ord}", slow=ord == 3)
    for ord in (4, 1.5, 0.5, 0):
        options = {"mask": 1, "differentiable": (0,), "smooth": False, "name": f"zeros, weighted, ord {ord}"}
        yield Sample((zeros, m), {"dim": 1, "ord": ord, "weight": weights(6)}, **options)
    yield Sample((zeros, m), {"dim": 1, "ord": -1}, mask=1, smooth=False, name="zeros, ord -1")


# A weight only drops elements (where it is 0): it has no gradient.
reduction(masked_amax, twin(lambda x, m, *rest: filled(x, m, -INF).amax(*rest)), extra=_extreme_samples(),
          weighted=())  # fmt: skip
reduction(masked_amin, twin(lambda x, m, *rest: filled(x, m, INF).amin(*rest)), extra=_extreme_samples(),
          weighted=())  # fmt: skip
ORDERS = {k: v for k, v in BY_COMPOSITE.items() if k in ("saved_bytes", "peak_memory", "errors")}
reduction(
    masked_norm,
    twin(_torch_norm),
    extra=_norm_samples(),
    weighted=[*common.weight_samples(), *(s.with_kwargs(ord=1) for s in common.weight_samples())],
    bad_calls=_bad_orders("masked_norm"),
    call={"ord": 3.0},
    kernel_call={"ord": 2},
    variants={
        "orders without a kernel": (
            [*_other_orders()],
            {"data": (0,), "dtype_argument": True, "skip": SKIP | ONE | ORDERS},
        )
    },
)
reduction(masked_sum_of_squares, twin(_torch_squares), extra=[ZERO_ROWS])
reduction(masked_rms, twin(_torch_rms), extra=[ZERO_ROWS])


# ---- safe_norm

INNER = {"dim": (1, -1), "mask": mask(2, 3, 1, 5), "keepdim": True}


def _bad_norms(name="safe_norm"):
    yield from bad_masks(name, lambda m: ((X,), {"mask": m}))
    yield Bad(([1.0],), {}, TypeError, (name, "input", "tensor", "list"))
    yield Bad((X.long(),), {}, TypeError, (name, "input", "floating", "torch.int64"))
    yield Bad((X, 2), {}, IndexError, (name, "dim", "2"))
    yield Bad((X, (1, -1)), {}, ValueError, (name, "dim", "(1, -1)"))
    yield Bad((X,), {"mask": KEEP, "dtype": torch.int64}, TypeError, (name, "dtype", "torch.int64"))
    yield from common.bad_flags(name)
    yield from _bad_orders(name)


Record(
    "safe_norm",
    safe_norm,
    [
        Sample((data(3, 5),), {"dim": 1}, name="rows", slow=True),
        Sample((data(3, 5),), {"mask": mask(3, 5)}, name="all dims, masked", slow=True),
        Sample((data(2, 3, 4, 5),), INNER, name="inner dims of four"),
        Sample((data(3, 5),), {"dim": 0, "ord": INF}, name="columns, ord inf"),
    ],
    bad_calls=_bad_norms(),
    call={"input": plain(), "mask": plain_mask(), "dim": 1, "ord": 3.0, "dtype": None},
    kernel_call={"ord": 2},
    gpu=masked("safe_norm"),
    dtype_argument=True,
    torch_equivalent=lambda x, dim=None, ord=2, keepdim=False, mask=None, dtype=None: torch.linalg.vector_norm(
        filled(x, mask, 0), ord, dim, keepdim
    ),
    skip=SKIP | ONE | NO_WEIGHT | {"mixed_dtypes": "one floating operand"},
)
