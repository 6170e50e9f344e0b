"""normalize: x / |x| along a dim; a zero vector stays 0."""

import math
import operator

import torch

from safeops.core import check
from safeops.core.definitions import keepdim_shape
from safeops.core.dtypes import LARGEST, compute_dtype, filled, to_one
from safeops.core.foreign import refuse
from safeops.core.library import declare_raw
from safeops.core.op import Op
from safeops.core.symbolic import as_operand, symbolic
from safeops.ops.elementwise.safe_div import safe_div
from safeops.ops.reductions.safe_norm import safe_norm

# ---- definition


def unit_vectors(x, dim, eps):
    """Returns (x / max(|x|, eps), |x|) along dim, in x's dtype; a zero vector is 0 with gradient 0."""
    info = torch.finfo(x.dtype)
    fixed = x.detach()  # no_grad would keep the tangents of forward mode
    empty = x.dim() > 0 and x.shape[dim] == 0
    largest = x.new_zeros(keepdim_shape(x.shape, dim)) if empty else fixed.abs().amax(dim, keepdim=True)
    zero = (fixed == 0).all(dim, keepdim=True)
    # (x scale)^2 neither overflows nor underflows. (A zero vector has scale 1: a second derivative squares the scale.)
    scale = torch.where(zero, 1, _to_one(largest.clamp(min=info.tiny)))
    floor_scale = _to_one(filled(x, (), eps).clamp(min=info.tiny))
    scaled = x * scale
    # The root has no derivative at 0: select before taking it.
    squares = torch.where(zero, 1, scaled.square().sum(dim, keepdim=True))
    root = torch.where(zero, 0, squares.sqrt())
    # For |x| < eps the result is x / eps, whose derivative does not contain |x|. floor_scale is the scale of eps.
    under = root <= eps * scale
    divisor = torch.where(zero, 1, torch.where(under, eps * floor_scale, root))
    y = torch.where(zero, 0, torch.where(under, x * floor_scale, scaled)) / divisor
    return y, (root / scale).detach()


def _to_one(size):
    """The power of two that brings a positive number to [1, 2); 1 for inf and NaN."""
    return torch.where(size.isfinite(), to_one(size), 1)


def resolve_eps(eps, compute):
    """eps, a number or 0-dim tensor, clamped to the compute dtype's range. For None: its smallest normal number."""
    info = torch.finfo(compute)
    if isinstance(eps, torch.Tensor):
        return eps.to(compute).clamp(max=info.max)
    return info.tiny if eps is None else min(eps, info.max)


def _composite(input, dim=-1, eps=None):
    compute = compute_dtype(input.dtype)
    y, norm = unit_vectors(input.to(compute), dim, resolve_eps(eps, compute))
    return y.to(input.dtype), norm.to(torch.float64)


def definition(input, dim=-1, eps=None):
    return _composite(input, dim, eps)[0]


# ---- op


def _fake(input, dim=-1, eps=None):
    return torch.empty_like(input), input.new_empty(keepdim_shape(input.shape, dim), dtype=torch.float64)


def _fake_backward(grad, input, norm, dim=-1, eps=None):
    return torch.empty_like(input)


_forward = declare_raw(
    "_normalize",
    "(Tensor input, int dim=-1, float? eps=None) -> (Tensor output, Tensor norm)",
    fake=_fake,
    composite=_composite,
    triton="vectors.normalize.normalize",
)
_backward = declare_raw(
    "_normalize_backward",
    "(Tensor grad, Tensor input, Tensor norm, int dim=-1, float? eps=None) -> Tensor",
    fake=_fake_backward,
    triton="vectors.normalize.normalize_backward",
)

# ---- record


class Normalize(Op):
    shards = "normalize"

    def prepare(self, input, dim, eps):
        if dim.__class__ is not int or eps is not None and not (eps.__class__ is float and 0 <= eps <= LARGEST):
            self.validate(input, dim, eps)
            dim = operator.index(dim)
        return True, (input, dim, eps)

    def validate(self, input, dim, eps):
        check.floating("normalize", "input", input, numbers=True)
        check.one_dim("normalize", dim, input.dim())
        if eps is not None:
            check.number("normalize", "eps", eps, minimum=0)

    def gradients(self, grad, needs, operands, results):
        return (self.backward(grad, operands.input, results.norm, operands.dim, operands.eps),)


_normalize = Normalize("normalize", _forward, _backward, definition)

# ---- public function


def by_norm(input, p, dim, eps):
    """`normalize` with p other than 2, or over several dims: `safe_norm` and torch ops."""
    check.floating("normalize", "input", input, numbers=True)
    check.number("normalize", "p", p, minimum=-math.inf, maximum=math.inf)
    check.dims("normalize", dim, input.dim())
    if eps is not None:
        check.number("normalize", "eps", eps, minimum=0)
        eps = as_operand(eps, input)
    x = input.to(compute_dtype(input.dtype))  # converted once: autograd adds both gradients, then rounds
    length = safe_norm(x, dim, ord=p, keepdim=True)
    floored = length.clamp(min=resolve_eps(eps, x.dtype))
    zero = (x == 0).all(dim, keepdim=True)
    return safe_div(x, torch.where(zero, 0, floored), dtype=x.dtype).to(input.dtype)


@_normalize.public("(Tensor input, float p=2.0, int[1] dim=1, float? eps=1e-12) -> Tensor")
def normalize(input, p=2.0, dim=1, eps=1e-12, *extra, **unknown):
    """`input / max(|input|_p, eps)` along `dim`: vectors of length 1.

    A zero vector stays 0, with gradient 0. The Euclidean norm neither overflows nor underflows: with eps=None, vectors
    of 1e30 or 1e-30 in fp32 have length 1 afterwards. A vector shorter than `eps` becomes `input / eps`, with gradient
    `1 / eps`.

    Half is computed in fp32 and rounded once: 64 channels of 40 give 0.125, and an eps of 1e-12 is not 0. A NaN turns
    its vector into NaN; an inf becomes NaN, and the rest of its vector 0.

    Args:
        input: floating tensor of any shape and strides.
        p: order of the norm, any number, inf and -inf included. Orders other than 2 run as several operations.
        dim: the dim along which the vectors lie; or several, as a tuple, which run as several operations.
        eps: smallest divisor, at least 0, in the compute dtype; a floor, never added. None: the smallest normal number
            of the compute dtype (1.2e-38 in fp32, which half inputs use; 2.2e-308 in fp64).

    Returns:
        A tensor of `input`'s shape, dtype and memory order.

    Raises:
        TypeError: `input` is not floating, `dim` is not an int or a tuple of ints, p or eps is not a number.
        ValueError: eps is negative.
        IndexError: dim out of range.

    Example:
        >>> safeops.normalize(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]])
    """
    if extra or unknown:
        refuse(normalize, extra, unknown)
    if isinstance(dim, (list, tuple)) and len(dim) == 1:
        (dim,) = dim
    if not (isinstance(p, torch.Tensor) or symbolic(p)) and p == 2 and not isinstance(dim, (list, tuple)):
        return _normalize.call(input, dim, eps)
    return by_norm(input, p, dim, eps)
