"""Checks of a linear layer's operands, for losses that compute its logits; and the operands' common dtype."""

import torch

from safeops.core import check
from safeops.core.dtypes import FLOATING, HALF
from safeops.core.matmul import matmul
from safeops.core.private_torch import is_autocast_available
from safeops.ops.classification._classification import INDICES


def validate_layer(name, input, linear_weight, linear_bias, keys=("input", "linear_weight", "linear_bias")):
    """Check a layer's operands. keys: their names in errors."""
    first, second, third = keys
    layer = {first: input, second: linear_weight} | ({} if linear_bias is None else {third: linear_bias})
    for key, x in layer.items():
        check.floating(name, key, x)
    if check.mesh(linear_weight) is not None and check.mesh(input) is None:
        raise TypeError(
            f"{name}: {second} and {first} must be DTensors of one mesh, or neither of them one; got "
            f"{check.shown(linear_weight)} and {check.shown(input)} of no mesh: head_loss(layer, ...) gathers a layer "
            "of fully_shard"
        )
    if linear_weight.dim() != 2:
        raise ValueError(f"{name}: {second} must be (C, D), got {check.shown(linear_weight)}")
    if input.dim() == 0 or input.shape[-1] != linear_weight.shape[1]:
        raise ValueError(
            f"{name}: {first} {check.shown(input)} must be (..., D), {second} is (C, D) = {check.shown(linear_weight)}"
        )
    validate_per_class(name, third, linear_bias, linear_weight)
    check.same_device(name, first, input, **layer)
    dtypes, device = [x.dtype for x in layer.values()], input.device.type
    if len(set(dtypes)) > 1 and not (is_autocast_available(device) and torch.is_autocast_enabled(device)):
        raise TypeError(
            f"{name}: {', '.join(layer)} must be of one dtype, as in a linear layer outside autocast, got "
            f"{', '.join(map(str, dtypes))}"
        )


def validate_per_class(name, key, x, linear_weight):
    if x is not None:
        check.floating(name, key, x)
        if tuple(x.shape) != (len(linear_weight),):
            raise ValueError(f"{name}: {key} must be ({len(linear_weight)},), one a class, got {check.shown(x)}")


def validate_classes(name, input, linear_weight, target, mask):
    rows = input.shape[:-1]
    check.tensor(name, "target", target)
    if target.dtype not in INDICES:
        remedy = check.say(check.of_one_hot("target", target, (*rows, len(linear_weight)), -1))
        raise TypeError(f"{name}: target must be class indices, int64, int32 or uint8, got {target.dtype}{remedy}")
    if target.shape != rows:
        raise ValueError(
            f"{name}: target {check.shown(target)} must have the shape of input's rows {check.shown(input, rows)}"
            f"{check.say(check.of_one_hot('target', target, (*rows, len(linear_weight)), -1))}"
        )
    check.mask(name, mask, "the rows", input, rows)
    check.same_device(name, "input", input, target=target, mask=mask)


def all_logits(x, weight, bias, keep, compute):
    """All logits of a layer, for the definition. If weight is None, x holds logits."""
    if keep is not None:  # select before arithmetic: NaN * 0 is NaN
        x = torch.where(keep.unsqueeze(-1), x, 0)
    if weight is None:
        return x
    logits = matmul(x.to(compute), weight.to(compute))
    return logits if bias is None else logits + bias.to(compute)


def in_one_dtype(*layer):
    """The operands, in autocast's dtype if their dtypes differ."""
    dtype = common_dtype(*layer)
    return tuple(x if x is None or x.dtype == dtype else x.to(dtype) for x in layer)


def common_dtype(*layer):
    """The operands' dtype, or autocast's if their dtypes differ."""
    dtypes = {x.dtype for x in layer if x is not None}
    return dtypes.pop() if len(dtypes) == 1 else torch.get_autocast_dtype(layer[0].device.type)


def wide_logits(name, logits_dtype, *layer):
    """True if the logits are the fp32 sums of a product of half operands. Raises if the layer has no such logits."""
    validate_logits_dtype(name, logits_dtype)
    dtype = common_dtype(*layer)
    if logits_dtype in (None, dtype) or (logits_dtype == torch.float32 and dtype in HALF):
        return logits_dtype == torch.float32
    wider = " or torch.float32" if dtype in HALF else ""
    raise ValueError(f"{name}: logits_dtype must be None, the operands' {dtype}{wider}, got {logits_dtype}")


def validate_logits_dtype(name, logits_dtype):
    if logits_dtype is not None and logits_dtype not in FLOATING:
        raise TypeError(f"{name}: logits_dtype must be None or a floating dtype of torch, got {logits_dtype!r}")


LOGITS_DTYPE = """\
        logits_dtype: torch.float32: the logits of half operands are the fp32 sums of their products, which else are
            rounded to half. The gradients of the logits are rounded to half, as else. Chunks have half as many logits,
            and as many bytes; on the CPU they are products in fp32, of blocks of the operands. None, or the operands'
            dtype: logits are in the operands' dtype.
"""
