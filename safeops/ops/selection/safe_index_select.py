"""safe_index_select: torch.index_select in which an index out of range gives a fill value, not an error."""

from safeops.core import check
from safeops.core.foreign import refuse
from safeops.core.library import declare_raw
from safeops.ops.selection._indexed import Indexed
from safeops.ops.selection._selection import check_dim, select_rows

# ---- definition


def definition(input, index, dim, fill_value=0.0):
    if input.dim() == 0:
        return select_rows(input.reshape(1), index.reshape(1), fill_value).reshape(())
    dim %= input.dim()
    return select_rows(input.movedim(dim, 0), index.reshape(-1), fill_value).movedim(0, dim).contiguous()


# ---- op


def _fake(input, index, dim, fill_value=0.0):
    shape = list(input.shape)
    if shape:
        shape[dim] = index.numel()
    return input.new_empty(shape)


def _fake_backward(grad, index, dim, size):
    return grad.new_empty(size)


_forward = declare_raw(
    "_safe_index_select",
    "(Tensor input, Tensor index, int dim, float fill_value=0.0) -> Tensor",
    fake=_fake,
    composite=definition,
)
_backward = declare_raw(
    "_safe_index_select_backward",
    "(Tensor grad, Tensor index, int dim, SymInt[] size) -> Tensor",
    fake=_fake_backward,
)


def _check_shapes(input, dim, index):
    check_dim("safe_index_select", dim, input.dim())
    if index.dim() > 1 or (input.dim() == 0 and index.numel() != 1):
        need = "one index" if input.dim() == 0 else "one dim"
        raise ValueError(f"safe_index_select: index {check.shown(index)} must have {need} (input {check.shown(input)})")


_safe_index_select = Indexed("safe_index_select", _forward, _backward, definition, _check_shapes, gathers=False)

# ---- public function


@_safe_index_select.public("(Tensor input, int dim, Tensor index, *, Scalar fill_value=0) -> Tensor")
def safe_index_select(input, dim, index, *extra, fill_value=0, **unknown):
    """`torch.index_select`, where an index out of range gives `fill_value` and no gradient.

    For embedding lookups: a padding or ignored index (-1, -100, 255) is neither an IndexError nor, on CUDA, a device
    assert. A negative index does not count from the end. The gradients of a row that is taken several times are added
    in fp32 at least, in a fixed order: the same bits every time.

    Args:
        input: tensor of any dtype and strides. Keeps its dtype, also under autocast.
        dim: the dim to select along.
        index: int32 or int64 vector (or a 0-dim tensor: one index).
        fill_value: the result where the index is out of range; a finite one saturates to the dtype.

    Returns:
        A tensor of `input`'s dtype and shape, its `dim` as long as `index`.

    Raises:
        TypeError: `input` or `index` is not a tensor, `index` is not int32 or int64, `fill_value` is not a number.
        ValueError: `index` has more than one dim, devices differ.
        IndexError: `dim` out of range.

    Example:
        >>> table = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> safeops.safe_index_select(table, 0, torch.tensor([1, -1]))
        tensor([[3., 4.],
                [0., 0.]])
    """
    if extra or unknown:
        refuse(safe_index_select, extra, unknown)
    return _safe_index_select.call(input, dim, index, fill_value)
