"""lpips_distance: the distance of images in the features of a network."""

import torch
import torch.nn.functional as F

from safeops.core import check, loss_reduction, sums
from safeops.core.dtypes import compute_dtype
from safeops.core.foreign import refuse
from safeops.core.library import declare_raw, only
from safeops.core.op import Composed, Inner
from safeops.ops.images._image import ARGUMENTS, finish
from safeops.ops.reductions.masked_sum_of_squares import _masked_sum_of_squares, masked_sum_of_squares
from safeops.ops.vectors.normalize import _normalize, normalize

NAME = "lpips_distance"

# ---- definition, for the features of one layer


def definition(input, target, weight=None, keep=None):
    """The distance at each position, (N, 1, H, W). weight: (C, 1, 1). keep: bool, True for kept positions, or None."""
    compute = compute_dtype(input.dtype, target.dtype)
    if keep is not None:
        input, target = torch.where(keep, input, 0), torch.where(keep, target, 0)
    u, v = (normalize(f.to(compute), dim=1, eps=None) for f in (input, target))
    return masked_sum_of_squares(u - v, dim=1, keepdim=True, weight=weight)


# ---- op


def _fake(input, target, weight=None, keep=None):
    compute = compute_dtype(input.dtype, target.dtype)
    dtypes = compute, compute, torch.float64, torch.float64
    return tuple(input.new_empty((input.shape[0], 1, *input.shape[2:]), dtype=dtype) for dtype in dtypes)


_forward = declare_raw(
    "_lpips_distance",
    "(Tensor input, Tensor target, Tensor? weight=None, Tensor? keep=None) -> "
    "(Tensor value, Tensor product, Tensor norm0, Tensor norm1)",
    fake=_fake,
    triton="images.lpips_distance.lpips_distance",
)
_backward = declare_raw(
    "_lpips_distance_backward",
    "(Tensor grad, Tensor input, Tensor target, Tensor? weight, Tensor value, Tensor product, Tensor norm0, "
    "Tensor norm1, bool need_input=True, bool need_target=True) -> (Tensor, Tensor)",
    fake=lambda grad, *rest: only(rest[-2:], rest[:2]),
    triton="images.lpips_distance.lpips_distance_backward",
)

# ---- record


class Layer(Inner):
    """The record of the op that returns one layer's distances (N, 1, H, W)."""

    constant, saved = ("weight",), ("value", "product", "norm0", "norm1")

    def prepare(self, input, target, weight, keep):
        compute = compute_dtype(input.dtype, target.dtype)
        takes = not input.is_cpu and (weight is None or compute_dtype(weight.dtype, compute) == compute)
        return takes, (input, target, weight, keep)

    def gradients(self, grad, needs, operands, results):
        return self.backward(grad, *operands[:3], *results, *needs[:2])


_apart = Layer(NAME, _forward, _backward, definition)
_lpips_distance = Composed(NAME, _normalize, _masked_sum_of_squares, *sums.ALL)

# ---- public function


def shrink(mask, size):
    """The mask (N, 1, H, W) of the images at a layer's `size`: a position is kept if all of its pixels are kept."""
    if tuple(mask.shape[2:]) in (tuple(size), (1, 1)):
        return mask
    return F.adaptive_max_pool2d((~mask).to(torch.float32), size) == 0


def validate(features0, features1, weights, mask):
    layers = _validate_list("features0", features0)
    if not layers:
        raise ValueError(f"{NAME}: features0 must have a layer at least, got none")
    for key, x in (("features1", features1), ("weights", weights)):
        if not (key == "weights" and x is None) and _validate_list(key, x) != layers:
            raise ValueError(f"{NAME}: {key} must have one tensor for each of the {layers} layers, got {len(x)}")
    first = features0[0]
    for i, (f0, f1) in enumerate(zip(features0, features1)):
        shape, channels = check.shown(f0), f0.shape[1:2]
        if f0.dim() != 4 or f0.shape[0] != first.shape[0]:
            wanted = "(N, C, H, W)" + f", of as many images as features0[0] {check.shown(first)}" * (i > 0)
            raise ValueError(f"{NAME}: features0[{i}] must be {wanted}, got shape {shape}")
        if f1.shape != f0.shape:
            raise ValueError(f"{NAME}: features1[{i}] {check.shown(f1)} must have the shape of features0[{i}] {shape}")
        operands = {f"features0[{i}]": f0, f"features1[{i}]": f1}
        if weights is not None:
            operands[f"weights[{i}]"] = w = weights[i]
            if w.shape not in (channels, (1, *channels, 1, 1)):
                wanted = f"{tuple(channels)}, one number for each channel of features0[{i}] {shape}"
                raise ValueError(f"{NAME}: weights[{i}] must be {wanted}, got {check.shown(w)}")
        check.same_device(NAME, "features0[0]", first, **operands)
    if mask is not None:
        check.boolean(NAME, "mask", mask, "True = keep")
        fits = mask.dim() == 4 and check.stretches(mask.shape[0], first.shape[0]) and mask.shape[1] == 1
        if not fits or 0 in mask.shape[2:] and any(f.shape[2:] != mask.shape[2:] for f in features0):
            wanted = f"(N, 1, H, W) for features0[0] {check.shown(first)}"
            raise ValueError(f"{NAME}: mask must be {wanted}, got shape {check.shown(mask)}")
        for i, f0 in enumerate(features0):
            if mask.shape[2:] != (1, 1) and any(m < n for m, n in zip(mask.shape[2:], f0.shape[2:])):
                wanted = f"at least as large as features0[{i}] {check.shown(f0)}"
                raise ValueError(f"{NAME}: mask {check.shown(mask)} must be of the images' size, {wanted}")
        check.same_device(NAME, "features0[0]", first, mask=mask)


def _validate_list(key, x):
    """Check that x is a list of floating tensors. Returns its length."""
    if not isinstance(x, (tuple, list)):
        raise TypeError(f"{NAME}: {key} must be a list of tensors, got {type(x).__name__}")
    for i, t in enumerate(x):
        check.floating(NAME, f"{key}[{i}]", t)
    return len(x)


@_lpips_distance.public(
    "(Tensor[] features0, Tensor[] features1, Tensor[]? weights=None, *, Tensor? mask=None, "
    'str reduction="mean", str empty="zero") -> Tensor',
    arguments=ARGUMENTS,
)
def lpips_distance(features0, features1, weights=None, *extra, mask=None, reduction="mean", empty="zero", **unknown):
    """Learned perceptual distance: sum_c w_c (u0_c - u1_c)^2, the mean over positions, the sum over layers.

    u is the vector of channels at a position, scaled to length 1 and computed in fp32: 64 channels of 40 do not
    overflow half, and a zero vector stays 0 with gradient 0. The features are those of any network, a tensor for each
    layer. Zhang et al., "The unreasonable effectiveness of deep features as a perceptual metric", 2018.

    Args:
        features0: list of floating tensors (N, C, H, W); C, H and W may differ between layers.
        features1: list of tensors of the same shapes. Differentiable, too.
        weights: list of floating tensors w, one per layer with a number for each channel, (C,), or (1, C, 1, 1) as in
            the paper's linear layers; None: all are 1. Differentiable.
        mask: bool tensor (N, 1, H, W) of the images' size, or the layers'; True = keep. A position of a smaller layer
            is kept if all pixels that fall into it are kept. Other positions do not exist: NaN, inf or garbage there
            changes neither the result nor a gradient, and their own gradient is exactly 0.
        reduction: "mean" over the images, "sum", or "none": (N,).
        {arguments}

    Raises:
        TypeError: the features are not lists of floating tensors, `mask` is not bool.
        ValueError: no layer, features of different depth or shape, weights that do not fit the channels, a mask that
            does not fit the images, devices differ, unknown `reduction` or `empty`.

    Example:
        >>> x = torch.zeros(1, 2, 4, 4)
        >>> east, north = x.clone(), x.clone()
        >>> east[:, 0], north[:, 1] = 3.0, 5.0
        >>> safeops.lpips_distance([east, east], [north, east * 2]), safeops.lpips_distance([x], [east])
        (tensor(2.), tensor(1.))
    """
    if extra or unknown:
        refuse(lpips_distance, extra, unknown)
    loss_reduction.validate_options(NAME, reduction, empty)
    validate(features0, features1, weights, mask)
    weights = [None] * len(features0) if weights is None else [w.reshape(-1, 1, 1) for w in weights]
    compute = compute_dtype(*(f.dtype for f in (*features0, *features1)))
    total, count = 0, None
    for f0, f1, weight in zip(features0, features1, weights):
        keep = None if mask is None else shrink(mask, f0.shape[2:])
        if compute == torch.float64:
            f0, f1 = f0.to(compute), f1.to(compute)
        apart = _apart.call(f0, f1, weight, keep)
        total = total + sums.mean(apart, keep, dim=(1, 2, 3))
        kept = sums.count(apart, keep, dim=(1, 2, 3))
        count = kept if count is None else count * (kept > 0)
    return finish(NAME, total, count, compute, reduction, empty)
