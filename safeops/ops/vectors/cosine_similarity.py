"""cosine_similarity: the cosine of the angle between vectors; 0 where one of them is zero."""

import operator

import torch

from safeops.core import check
from safeops.core.definitions import keepdim_shape
from safeops.core.dtypes import LARGEST, compute_dtype
from safeops.core.foreign import refuse
from safeops.core.library import declare_raw, like
from safeops.core.op import Op
from safeops.core.sums import sum_to
from safeops.ops.vectors.normalize import resolve_eps, unit_vectors

# ---- definition


def _composite(x1, x2, dim=-1, eps=None):
    compute = compute_dtype(x1.dtype, x2.dtype)
    eps = resolve_eps(eps, compute)
    shape = torch.broadcast_shapes(x1.shape, x2.shape)
    (y1, norm1), (y2, norm2) = (unit_vectors(x.to(compute).expand(shape), dim, eps) for x in (x1, x2))
    # If one vector is zero, both get gradient 0; a NaN or inf in the other vector still shows.
    alive = ((norm1 != 0) | ~norm2.isfinite()) & ((norm2 != 0) | ~norm1.isfinite())
    value = (torch.where(alive, y1, 0) * torch.where(alive, y2, 0)).sum(dim)
    value = value - (value - value.clamp(-1, 1)).detach()  # rounding may exceed 1; the gradient stays
    return value, norm1.to(torch.float64), norm2.to(torch.float64)


def definition(x1, x2, dim=-1, eps=None):
    return _composite(x1, x2, dim, eps)[0]


# ---- op


def _fake(x1, x2, dim=-1, eps=None):
    shape = torch.broadcast_shapes(x1.shape, x2.shape)
    norms = (x1.new_empty(keepdim_shape(shape, dim), dtype=torch.float64) for _ in range(2))
    left = [n for d, n in enumerate(shape) if d != dim % len(shape)]
    return x1.new_empty(left, dtype=compute_dtype(x1.dtype, x2.dtype)), *norms


def _fake_backward(grad, x1, x2, value, norm1, norm2, dim=-1, eps=None, need_x1=True, need_x2=True):
    shape = torch.broadcast_shapes(x1.shape, x2.shape)
    wide = compute_dtype(x1.dtype, x2.dtype, grad.dtype)
    # A broadcast operand's gradient is summed to its shape later: it stays wide, and is rounded after the sum.
    dtypes = (x.dtype if x.shape == shape else wide for x in (x1, x2))
    return tuple(
        like(x, shape, dtype) if needed else x.new_empty(0, dtype=dtype)
        for x, dtype, needed in zip((x1, x2), dtypes, (need_x1, need_x2))
    )


_forward = declare_raw(
    "_cosine_similarity",
    "(Tensor x1, Tensor x2, int dim=-1, float? eps=None) -> (Tensor value, Tensor norm1, Tensor norm2)",
    fake=_fake,
    composite=_composite,
    triton="vectors.cosine_similarity.cosine_similarity",
)
_backward = declare_raw(
    "_cosine_similarity_backward",
    "(Tensor grad, Tensor x1, Tensor x2, Tensor value, Tensor norm1, Tensor norm2, int dim=-1, float? eps=None, "
    "bool need_x1=True, bool need_x2=True) -> (Tensor, Tensor)",
    fake=_fake_backward,
    triton="vectors.cosine_similarity.cosine_similarity_backward",
)

# ---- record


class CosineSimilarity(Op):
    differentiable = ("x1", "x2")
    sum_to = staticmethod(sum_to)
    saved, shards = ("value", "norm1", "norm2"), "cosine"

    def prepare(self, x1, x2, dim, eps):
        if dim.__class__ is not int or eps is not None and not (eps.__class__ is float and 0 <= eps <= LARGEST):
            self.validate(x1, x2, dim, eps)
            dim = operator.index(dim)
        return True, (x1, x2, dim, eps)

    def validate(self, x1, x2, dim, eps):
        check.floating("cosine_similarity", "x1", x1, numbers=True)
        check.floating("cosine_similarity", "x2", x2, numbers=True)
        shape = check.broadcast("cosine_similarity", x1=x1, x2=x2)
        check.same_device("cosine_similarity", "x1", x1, x2=x2)
        check.one_dim("cosine_similarity", dim, len(shape))
        if eps is not None:
            check.number("cosine_similarity", "eps", eps, minimum=0)

    def gradients(self, grad, needs, operands, results):
        x1, x2, dim, eps = operands
        return self.backward(grad, x1, x2, *results, dim, eps, *needs[:2])


_cosine_similarity = CosineSimilarity("cosine_similarity", _forward, _backward, definition)

# ---- public function


@_cosine_similarity.public("(Tensor x1, Tensor x2, int dim=1, float? eps=1e-8) -> Tensor")
def cosine_similarity(x1, x2, dim=1, eps=1e-8, *extra, **unknown):
    """<x1, x2> / (max(|x1|, eps) max(|x2|, eps)) along `dim`, within [-1, 1].

    Where one of the vectors is zero the result is 0, with gradient 0 to both. Neither the norms nor the product
    overflow or underflow: with eps=None, vectors of 1e30 or 1e-30 in fp32 are compared as any others.

    Half is computed in fp32, where an eps of 1e-8 is not 0. A NaN or inf shows in the results of its own vector alone.

    Args:
        x1: floating tensor.
        x2: floating tensor, broadcastable with `x1`.
        dim: the dim of the broadcast shape along which the vectors lie.
        eps: smallest divisor for each vector, at least 0, in the compute dtype; a floor, never added. None: the
            smallest normal number of the compute dtype (1.2e-38 in fp32, which half inputs use; 2.2e-308 in fp64).

    Returns:
        The cosines, of the broadcast shape without `dim`: fp32 for fp16, bf16 and fp32 operands, fp64 for fp64.

    Raises:
        TypeError: an operand is not floating, `dim` is not an int, eps is not a number.
        ValueError: shapes do not broadcast, devices differ, eps is negative.
        IndexError: dim out of range.

    Example:
        >>> x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
        >>> safeops.cosine_similarity(x, torch.tensor([[4.0, 3.0]]))
        tensor([0.9600, 0.0000])
    """
    if extra or unknown:
        refuse(cosine_similarity, extra, unknown)
    return _cosine_similarity.call(x1, x2, dim, eps)
