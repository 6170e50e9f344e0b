"""safe_index_select: torch.index_select in which an index out of range is a stand-in, not an error."""

import torch

from safeops import _check, _route
from safeops._library import Op, declare_public, declare_raw
from safeops.ops._selection import MOVABLE, check_dim, check_fill, check_index, check_movable, select_rows

# ---- definition


def definition(input, dim, index, fill_value=0.0):
    if input.dim() == 0:
        return select_rows(input.reshape(1), index.reshape(1), fill_value).reshape(())
    dim %= input.dim()
    return select_rows(input.movedim(dim, 0), index.reshape(-1), fill_value).movedim(0, dim).contiguous()


# ---- op


def _fake(input, dim, index, fill_value=0.0):
    shape = list(input.shape)
    if shape:
        shape[dim] = index.numel()
    return input.new_empty(shape)


def _fake_backward(grad, dim, index, size):
    return grad.new_empty(size)


_safe_index_select = declare_raw(
    "_safe_index_select",
    "(Tensor input, int dim, Tensor index, float fill_value=0.0) -> Tensor",
    fake=_fake,
    composite=definition,
)
_safe_index_select_backward = declare_raw(
    "_safe_index_select_backward",
    "(Tensor grad, int dim, Tensor index, SymInt[] size) -> Tensor",
    fake=_fake_backward,
)

# ---- autograd


class _SafeIndexSelect(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, dim, index, fill_value=0.0):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(index)
        ctx.arguments = (input.shape, dim)
        return _safe_index_select(input, dim, index, fill_value)

    @staticmethod
    def backward(ctx, grad):
        nothing = (None,) * (len(ctx.needs_input_grad) - 1)
        if grad is None:
            return None, *nothing
        (index,), (shape, dim) = ctx.saved_tensors, ctx.arguments
        if grad.is_complex() or _route.by_composite(grad):
            # Linear in its input, so the derivative may be taken at 0.
            origin = torch.zeros((), dtype=grad.dtype, device=grad.device).expand(shape).requires_grad_()
            return _route.differentiable_backward(definition, (origin, dim, index), grad)[0], *nothing
        return _safe_index_select_backward(grad, dim, index, shape), *nothing


OP = Op(
    "safe_index_select",
    ("_safe_index_select", "_safe_index_select_backward"),
    "C++/CUDA",
    _safe_index_select,
    _SafeIndexSelect,
)

# ---- public function


def safe_index_select(input, dim, index, *, fill_value=0):
    """`torch.index_select`, where an index out of range gives `fill_value` and no gradient.

    What an embedding lookup needs: a padding or ignored index (-1, -100, 255) is neither an IndexError nor, on CUDA, a
    device assert; a negative index does not count from the end. Rows taken more than once add up their gradients in
    fp32 at least, in a fixed order: the same bits every time.

    Args:
        input: tensor of any dtype and strides. Keeps its dtype, also under autocast.
        dim: the dim to select along.
        index: int32 or int64 vector (or a 0-dim tensor: one index).
        fill_value: the result where the index is out of range; a finite one saturates to the dtype.

    Returns:
        A tensor of `input`'s dtype and shape, its `dim` as long as `index`.

    Raises:
        TypeError: `input` or `index` is no tensor, `index` is not int32 or int64, `fill_value` no number.
        ValueError: `index` has more than one dim, devices differ.
        IndexError: `dim` out of range.

    Example:
        >>> table = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> safeops.safe_index_select(table, 0, torch.tensor([1, -1]))
        tensor([[3., 4.],
                [0., 0.]])
    """
    try:
        kernel = _route.kernel(OP, input, index) if input.dtype in MOVABLE else None
        if kernel is not None:
            if fill_value != 0 or kernel is OP.traced:
                _validate(input, dim, index, fill_value)
            arguments = (input, dim, index) if fill_value == 0 else (input, dim, index, float(fill_value))
            if torch.is_grad_enabled() and input.requires_grad:
                return kernel.apply(*arguments)
            return kernel.raw(*arguments)
    except Exception:
        _validate(input, dim, index, fill_value)
        raise
    _validate(input, dim, index, fill_value)
    return definition(input, dim, index, fill_value)


def _validate(input, dim, index, fill_value):
    check_movable("safe_index_select", "input", input)
    check_index("safe_index_select", index)
    check_dim("safe_index_select", dim, input.dim())
    if index.dim() > 1 or (input.dim() == 0 and index.numel() != 1):
        need = "one index" if input.dim() == 0 else "one dim"
        raise ValueError(f"safe_index_select: index {tuple(index.shape)} must have {need} (input {tuple(input.shape)})")
    _check.same_device("safe_index_select", "input", input, index=index)
    check_fill("safe_index_select", fill_value, input.dtype)


declare_public(
    safe_index_select, "safe_index_select(Tensor input, int dim, Tensor index, *, Scalar fill_value=0) -> Tensor"
)
