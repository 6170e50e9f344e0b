"""The selection ops once more, in plain differentiable torch with data-dependent shapes. No code of safeops."""

import torch

from tests.contract.definitions import saturated


def _fill(input, fill_value, out_dtype):
    fill = torch.tensor(fill_value, dtype=input.dtype, device=input.device)
    return saturated(fill, out_dtype) if input.is_floating_point() else fill


def masked_compact(input, mask, *, capacity, fill_value=0, out_dtype=torch.float64):
    mask = mask.expand(input.shape[: mask.dim()])
    where = mask.reshape(-1).nonzero().squeeze(1)[:capacity]
    rest = input.shape[mask.dim() :]
    found = input.reshape(mask.numel(), *rest)[where]
    unused = capacity - len(where)
    values = torch.cat([found, _fill(input, fill_value, out_dtype).expand(unused, *rest)])
    return values, torch.cat([where, where.new_full((unused,), -1)]), mask.sum()


def masked_select(input, mask):
    return torch.masked_select(input, mask)


def masked_scatter(input, mask, source):
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    where = mask.expand(shape).reshape(-1).nonzero().squeeze(1)[: source.numel()]
    out = input.expand(shape).reshape(-1)
    return out.index_copy(0, where, source.reshape(-1)[: len(where)]).reshape(shape)


def _valid(index, size):
    return (index >= 0) & (index < size)


def safe_gather(input, dim, index, *, fill_value=0, out_dtype=torch.float64):
    fill = _fill(input, fill_value, out_dtype)
    size = input.shape[dim] if input.dim() else 1
    if size == 0:
        return fill.expand(index.shape) + input.sum().to(input.dtype)
    keep = _valid(index, size)
    return torch.where(keep, torch.gather(input, dim, torch.where(keep, index, 0).long()), fill)


def safe_index_select(input, dim, index, *, fill_value=0, out_dtype=torch.float64):
    fill = _fill(input, fill_value, out_dtype)
    size = input.shape[dim] if input.dim() else 1
    index = index.reshape(-1)
    if size == 0:
        shape = list(input.shape)
        shape[dim] = len(index)
        return fill.expand(shape) + input.sum().to(input.dtype)
    keep = _valid(index, size)
    taken = torch.index_select(input, dim, torch.where(keep, index, 0).long())
    along = [1] * input.dim()
    if along:
        along[dim] = -1
    return torch.where(keep.reshape(along), taken, fill)
