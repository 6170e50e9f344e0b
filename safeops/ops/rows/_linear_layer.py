"""The operands of a linear layer that a loss of its rows takes with them: what they are, and their one dtype."""

import torch

from safeops.core import check
from safeops.core.private_torch import is_autocast_available
from safeops.ops.rows._classification import INDICES


def validate_layer(name, input, linear_weight, target, linear_bias, mask, weight=None):
    """weight: of the classes."""
    layer = {"input": input, "linear_weight": linear_weight}
    if linear_bias is not None:
        layer["linear_bias"] = linear_bias
    for key, x in layer.items():
        check.floating(name, key, x)
    if linear_weight.dim() != 2:
        raise ValueError(f"{name}: linear_weight must be (C, D), got {check.shown(linear_weight)}")
    if input.dim() == 0 or input.shape[-1] != linear_weight.shape[1]:
        raise ValueError(
            f"{name}: input {check.shown(input)} must be (..., D), linear_weight is (C, D) = "
            f"{check.shown(linear_weight)}"
        )
    rows, classes = input.shape[:-1], linear_weight.shape[0]
    for key, x in {"linear_bias": linear_bias, "weight": weight}.items():
        if x is not None:
            check.floating(name, key, x)
            if tuple(x.shape) != (classes,):
                raise ValueError(f"{name}: {key} must be ({classes},), one a class, got {check.shown(x)}")
    check.tensor(name, "target", target)
    if target.dtype not in INDICES:
        raise TypeError(f"{name}: target must be class indices, int64, int32 or uint8, got {target.dtype}")
    if target.shape != rows:
        raise ValueError(
            f"{name}: target {check.shown(target)} must have the shape of input's rows {check.shown(input, rows)}"
        )
    check.mask(name, mask, "the rows", input, rows)
    check.same_device(name, "input", input, **{**layer, "target": target, "mask": mask, "weight": weight})
    dtypes, device = [x.dtype for x in layer.values()], input.device.type
    if len(set(dtypes)) > 1 and not (is_autocast_available(device) and torch.is_autocast_enabled(device)):
        raise TypeError(
            f"{name}: {', '.join(layer)} must be of one dtype, as in a linear layer outside autocast, got "
            f"{', '.join(map(str, dtypes))}"
        )


def in_one_dtype(*layer):
    """The operands in autocast's dtype, where theirs differ."""
    if len({x.dtype for x in layer if x is not None}) == 1:
        return layer
    dtype = torch.get_autocast_dtype(layer[0].device.type)
    return tuple(x if x is None else x.to(dtype) for x in layer)
