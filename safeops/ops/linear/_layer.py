"""Checks of a linear layer's operands, for losses that compute its logits; and the operands' common dtype."""

import torch

from safeops.core import check
from safeops.core.private_torch import is_autocast_available
from safeops.ops.classification._classification import INDICES


def validate_layer(name, input, linear_weight, linear_bias, keys=("input", "linear_weight", "linear_bias")):
    """Check a layer's operands. keys: their names in errors."""
    first, second, third = keys
    layer = {first: input, second: linear_weight} | ({} if linear_bias is None else {third: linear_bias})
    for key, x in layer.items():
        check.floating(name, key, x)
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


def in_one_dtype(*layer):
    """The operands, in autocast's dtype if their dtypes differ."""
    if len({x.dtype for x in layer if x is not None}) == 1:
        return layer
    dtype = torch.get_autocast_dtype(layer[0].device.type)
    return tuple(x if x is None else x.to(dtype) for x in layer)
