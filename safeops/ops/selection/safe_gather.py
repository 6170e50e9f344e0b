"""safe_gather: torch.gather in which an index out of range gives a fill value, not an error that ends all CUDA work."""

import torch

from safeops.core import check
from safeops.core.dtypes import fill_of, filled, where
from safeops.core.foreign import refuse
from safeops.core.library import declare_raw
from safeops.ops.selection._indexed import Indexed
from safeops.ops.selection._selection import check_dim, full, summed_wide

# ---- definition


def definition(input, index, dim, fill_value=0.0):
    if input.dim() == 0:
        return definition(input.reshape(1), index.reshape(1), dim, fill_value).reshape(())
    if input.numel() == 0:
        return full(input, index.shape, fill_value)
    dim %= input.dim()
    valid = (index >= 0) & (index < input.shape[dim])
    # Advanced indexing (for dim = 1: input[i, index[i, j]]): its backward adds duplicates in a fixed order, on CUDA too
    place = []
    for d, n in enumerate(index.shape):
        along = [1] * index.dim()
        along[d] = n
        place.append(torch.arange(n, device=index.device).reshape(along))
    place[dim] = torch.where(valid, index, 0).long()
    taken = summed_wide(input)[tuple(place)].to(input.dtype)
    return where(valid, taken, filled(input, (), fill_of(fill_value, input.dtype)))


# ---- op


def _fake(input, index, dim, fill_value=0.0):
    return input.new_empty(index.shape)


def _fake_backward(grad, index, dim, size, dtype=None):
    return grad.new_empty(size, dtype=dtype or grad.dtype)


_forward = declare_raw(
    "_safe_gather",
    "(Tensor input, Tensor index, int dim, float fill_value=0.0) -> Tensor",
    fake=_fake,
    composite=definition,
)
_backward = declare_raw(
    "_safe_gather_backward",
    "(Tensor grad, Tensor index, int dim, SymInt[] size, ScalarType? dtype=None) -> Tensor",
    fake=_fake_backward,
)


def _check_shapes(input, dim, index):
    d = check_dim("safe_gather", dim, input.dim())
    fits = input.dim() == index.dim() and all(
        i == d or n <= m for i, (n, m) in enumerate(zip(index.shape, input.shape))
    )
    if not fits:
        raise ValueError(
            f"safe_gather: index {check.shown(index)} must have the dims of input {check.shown(input)}, none but dim "
            f"{d} larger"
        )
    check.no_dtensor("safe_gather", "input", input)


_safe_gather = Indexed("safe_gather", _forward, _backward, definition, _check_shapes, gathers=True)

# ---- public function


@_safe_gather.public("(Tensor input, int dim, Tensor index, *, Scalar fill_value=0) -> Tensor")
def safe_gather(input, dim, index, *extra, fill_value=0, **unknown):
    """`torch.gather`, where an index out of range gives `fill_value` and no gradient.

    In torch such an index is an IndexError on the CPU and, on CUDA, a device assert after which nothing works any
    more. Here every index is allowed, -1 and -100 included (a negative index does not count from the end), and the host
    reads none. The gradients of duplicates are added in fp32 at least, in a fixed order: the same bits every time.

    Args:
        input: tensor of any dtype and strides. Keeps its dtype, also under autocast.
        dim: the dim to gather along.
        index: int32 or int64 tensor with as many dims as `input`, and not larger except along `dim`.
        fill_value: the result where the index is out of range; a finite one saturates to the dtype.

    Returns:
        A tensor of `index`'s shape and `input`'s dtype.

    Raises:
        TypeError: `input` or `index` is not a tensor, `index` is not int32 or int64, `fill_value` is not a number.
        ValueError: the shapes do not fit, devices differ.
        IndexError: `dim` out of range.

    Example:
        >>> scores = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> safeops.safe_gather(scores, 1, torch.tensor([[1], [-100]]))
        tensor([[2.],
                [0.]])
    """
    if extra or unknown:
        refuse(safe_gather, extra, unknown)
    return _safe_gather.call(input, dim, index, fill_value)
