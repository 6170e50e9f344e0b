"""clip_grad_norm_: multiply all tensors of a list by one factor, in place."""

import torch

from safeops.core.dtypes import compute_dtype
from safeops.core.library import declare_raw
from safeops.ops.lists._scan import Scan, nothing


def scale_definition(tensors, factor):
    # A subnormal factor would lose digits in fp32: it is multiplied by 2^100, and the product by 2^-100.
    lift = torch.where(factor.abs() < torch.finfo(torch.float32).tiny, 2.0**100, 1.0)
    for x in tensors:
        wide = compute_dtype(x.dtype)
        x.copy_(x.to(wide) * (factor * lift).to(wide) * lift.reciprocal().to(wide))


_scale_ = declare_raw(
    "_scale_",
    "(Tensor(a!)[] tensors, Tensor factor) -> ()",
    fake=nothing,
    composite=scale_definition,
)
SCALE = Scan("clip_grad_norm_", _scale_)


def scale_(tensors, factor):
    """Multiply each tensor in place by `factor`, a 0-dim floating tensor: in fp32 (fp64 for fp64), rounded once, also
    for a subnormal factor. A factor of 1 changes no bit."""
    if tensors:
        SCALE.either((factor,), _scale_, scale_definition)(tensors, factor)
