"""grad_norm: one norm of all elements of a list of tensors."""

import torch

from safeops.core.library import declare_raw
from safeops.core.private_torch import foreach_norm
from safeops.ops.lists._scan import Scan


def norm_definition(inputs, ord):
    inputs = [x for x in inputs if x.numel()] or [inputs[0].new_zeros(1)]
    scale = inputs[0].new_ones((), dtype=torch.float64)
    if ord not in (1, float("inf")) and (ord > 2 or torch.float64 in {x.dtype for x in inputs}):
        # |x|^ord may leave fp64's range: x is divided by the largest |x|, so that each power is at most 1
        largest = torch.stack([x.abs().amax().double() for x in inputs]).amax()
        scale = torch.where((largest > 0) & largest.isfinite(), largest, 1)
        inputs = [x.double() / scale for x in inputs]
    norms = foreach_norm(inputs, ord, dtype=torch.float64)
    return torch.linalg.vector_norm(torch.stack(norms), ord) * scale


_grad_norm = declare_raw(
    "_grad_norm",
    "(Tensor[] inputs, float ord) -> Tensor",
    fake=lambda inputs, ord: inputs[0].new_empty((), dtype=torch.float64),
    composite=norm_definition,
)
NORM = Scan("grad_norm", _grad_norm)


def norm(inputs, ord):
    """The `ord`-norm (above 0, or inf) of all elements of `inputs`, at least one tensor, as a 0-dim fp64 tensor."""
    kernel = _grad_norm if ord in (1, 2, float("inf")) else norm_definition
    return NORM.either(inputs[:1], kernel, norm_definition)(inputs, ord)
