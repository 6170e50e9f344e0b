"""Calls of linear_cross_entropy that compute all logits at once: class probabilities, or several targets per row."""

import torch

from safeops.core import check
from safeops.core.dtypes import compute_dtype
from safeops.core.matmul import matmul
from safeops.ops.classification.cross_entropy import cross_entropy
from safeops.ops.linear._layer import in_one_dtype, validate_layer, wide_logits


def is_whole(input, linear_weight, target):
    """True if target holds class probabilities, or linear_weight has over two dims: a row has several targets."""
    if not all(isinstance(x, torch.Tensor) and not x.is_nested for x in (input, linear_weight, target)):
        return False
    several = linear_weight.dim() > 2 and input.dim() == 2
    probabilities = target.is_floating_point() and target.dim() == input.dim() and linear_weight.dim() == 2
    return several or probabilities and input.dim() <= 2


def loss_of_logits(name, input, linear_weight, target, linear_bias, mask, ignore_index, logits_dtype, **options):
    """cross_entropy of the logits (N, C, d1, ...) of input (N, D) and linear_weight, in fp32 (fp64 for fp64).

    linear_weight: (C, d1, ..., D). linear_bias: (C, d1, ...). target: (N, d1, ...), or probabilities (N, C, d1, ...).
    """
    outputs = linear_weight.shape[:-1]
    if linear_bias is not None and linear_bias.shape != outputs:
        expected = check.shown(linear_weight, outputs)
        raise ValueError(f"{name}: linear_bias {check.shown(linear_bias)} must be {expected}, one an output")
    bias = None if linear_bias is None else linear_bias.flatten()
    layer = linear_weight.flatten(0, -2)
    validate_layer(name, input, layer, bias)
    wide_logits(name, logits_dtype, input, layer, bias)  # (only checked: these logits are wide in any case)
    rows = input.shape[:-1] + outputs[1:]
    classes = (*input.shape[:-1], *outputs)
    if target.shape != (classes if target.is_floating_point() else rows):
        expected = f"{check.shown(input, rows)} of class indices, or {check.shown(input, classes)} of probabilities"
        raise ValueError(f"{name}: target {target.dtype} {check.shown(target)} must be {expected}")
    if target.is_floating_point() and ignore_index != -100:
        raise ValueError(f"{name}: ignore_index {ignore_index} is for class indices, target is {target.dtype}")
    check.mask(name, mask, "the rows", input, rows)
    input, layer, bias = in_one_dtype(input, layer, bias)
    compute = compute_dtype(input.dtype)
    exists = None if target.is_floating_point() else target != ignore_index
    if mask is not None:
        exists = mask.expand(rows) if exists is None else exists & mask
    x = input.to(compute)
    if exists is not None:  # select before arithmetic: NaN in a row without a target would reach the layer's gradient
        whole = exists if len(rows) < 2 else exists.flatten(1).any(-1)
        x = torch.where(whole.unsqueeze(-1), x, 0)
    logits = matmul(x if x.dim() == 2 else x.unsqueeze(0), layer.to(compute))
    logits = logits if bias is None else logits + bias.to(compute)
    return cross_entropy(logits.reshape(classes), target, mask=mask, ignore_index=ignore_index, **options)
