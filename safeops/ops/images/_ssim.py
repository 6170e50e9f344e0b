"""Shared by `ssim`, `ssim_loss` and `ms_ssim`.

Each window gives 1 - SSIM; the functions return their map or sum, or combine sums over the windows of each plane
(n, c). x, y: pixels of input and target. E, var, mx, my: means and variances with a window's weights. With
s = (x + y) / data_range and d = (x - y) / data_range:

    1 - luminance = 2 E[d]^2 / (E[s]^2 + E[d]^2 + 2 k1^2)          luminance = (2 mx my + C1) / (mx^2 + my^2 + C1)
    1 - contrast  = 2 var d  / (var s + var d  + 2 k2^2)           contrast  = (2 cov + C2) / (var x + var y + C2)
    1 - SSIM = a + b - a b, with a = 1 - luminance and b = 1 - contrast

These formulas take four moments (of s, d, s^2, d^2) where the usual ones take five. 1 - SSIM is never below 0, and
keeps its digits where the images are nearly equal. A reference value per plane is subtracted from x and y before the
moments: a large offset would cost digits in E[s^2] - E[s]^2.
"""

import math

import torch
import torch.nn.functional as F

from safeops.core import check, loss_reduction
from safeops.core.definitions import accumulate, gathered
from safeops.core.dtypes import LARGEST, compute_dtype
from safeops.core.library import declare_raw, only
from safeops.core.loss_reduction import REDUCTION
from safeops.core.op import Op
from safeops.core.symbolic import SYMBOLIC
from safeops.ops.images._image import over_all

# ---- definition

PLANES = 3  # a value of `reduction` beside 0, 1 and 2: return the sums of each plane


def window(size, sigma):
    """The normalised Gaussian weights along one dim, `size` numbers. A pixel's weight is the product over the dims."""
    exp = torch.exp if isinstance(sigma, torch.Tensor) else math.exp
    scaled = [(k - size // 2) / sigma for k in range(size)]
    weights = [exp(-0.5 * x * x) for x in scaled]
    total = sum(weights)
    return [w / total for w in weights]


def blur(x, weights, spatial, same):
    """Weighted sums over the windows, one dim after the other. (By slices: a cuDNN convolution may run in TF32.)"""
    size = len(weights)
    if same:
        x = F.pad(x, (size // 2,) * (2 * spatial))
    for d in range(-spatial, 0):
        n = x.shape[d] - size + 1
        x = sum(w * x.narrow(d, k, n) for k, w in enumerate(weights))
    return x


def reach(counted, size, spatial):
    """Bool, one per pixel: True if the pixel is in a window that counts. counted: bool, one per window."""
    seen = F.pad(counted, (size - 1,) * (2 * spatial))
    for d in range(-spatial, 0):
        n = seen.shape[d] - size + 1
        slices = [seen.narrow(d, k, n) for k in range(size)]
        seen = slices[0]
        for x in slices[1:]:
            seen = seen | x
    return seen


def reference(x, keep, dims):
    """The mean of the kept finite pixels of each plane."""
    x = x.detach()  # the result does not depend on the reference
    finite = keep & x.isfinite()
    count = finite.sum(dims, keepdim=True).clamp(min=1)
    mean = accumulate(torch.where(finite, x / count, 0), dims, keepdim=True).to(x.dtype)  # x / count: no overflow
    return torch.where(mean.isfinite(), mean, 0)


def variance(squares, mean):
    """E[x^2] - E[x]^2. A value below 0, from rounding, becomes 0; the gradient is that of the formula."""
    v = squares - mean * mean
    return v - (v - v.clamp(min=0)).detach()


def define(
    input, target, mask, reduction=1, similarity=False, empty_nan=False, data_range=1.0, win_size=11, win_sigma=1.5,
    k1=0.01, k2=0.03, same=False,
):  # fmt: skip
    """Returns (value, result_slope). result_slope: the derivative of value by each window's 1 - SSIM, 0-dim, or empty
    for reduction 0 and PLANES.

    value, by reduction: 1: the mean of 1 - SSIM (with `similarity`: of SSIM) over the windows. 2: the sum. 0: the map,
    0 where a window does not count. PLANES: (3, N, C) in fp64, each plane's sums of 1 - SSIM and of 1 - contrast, and
    its number of windows. A window counts if its centre pixel is kept; it contains its kept pixels."""
    compute, spatial = compute_dtype(input.dtype, target.dtype), input.dim() - 2
    dims = tuple(range(2, input.dim()))
    # (Without this, torch's backward of a slice of a sharded dim would add parts of different sizes.)
    input, target = gathered(input, dims), gathered(target, dims)
    no_share = input.new_empty(0, dtype=torch.float64)
    if 0 in input.shape:
        zero = input.to(compute).sum() + target.to(compute).sum()
        if reduction == 0:
            return zero.expand(_map_shape(input.shape, win_size, same)), no_share
        if reduction == PLANES:
            return zero.double().expand(3, *input.shape[:2]), no_share
        value, result_slope = over_all(zero, zero.detach(), reduction, empty_nan)
        return value.to(compute), result_slope
    keep = input.new_ones((), dtype=torch.bool) if mask is None else mask
    counted = keep = gathered(keep.expand(input.shape), dims)
    if not same:
        for d in dims:
            counted = counted.narrow(d, win_size // 2, counted.shape[d] - win_size + 1)
        if mask is not None:
            keep = keep & reach(counted, win_size, spatial)
    x, y = input.to(compute), target.to(compute)
    origin_x, origin_y = reference(x, keep, dims), reference(y, keep, dims)
    x = (torch.where(keep, x, origin_x) - origin_x) / data_range  # select before arithmetic: NaN * 0 is NaN
    y = (torch.where(keep, y, origin_y) - origin_y) / data_range
    weights, s, d = window(win_size, win_sigma), x + y, x - y
    moments = blur(torch.stack((s, d, s * s, d * d)), weights, spatial, same)
    if same or mask is not None:
        kept_weight = blur(keep.to(compute), weights, spatial, same)
        moments = torch.where(counted, moments, 0) / torch.where(counted, kept_weight, 1)
    mean_s, mean_d, squares_s, squares_d = moments.unbind()
    var_s, var_d = variance(squares_s, mean_s), variance(squares_d, mean_d)
    origin_x, origin_y = origin_x / data_range, origin_y / data_range  # before they are added: the sum may overflow
    mean_s, mean_d = mean_s + (origin_x + origin_y), mean_d + (origin_x - origin_y)
    contrast = 2 * var_d / (var_s + var_d + 2 * k2 * k2)
    mean_d = mean_d * mean_d
    luminance = 2 * mean_d / (mean_s * mean_s + mean_d + 2 * k1 * k1)
    loss = luminance + contrast - luminance * contrast
    if reduction == 0:
        windows = torch.where(counted, 1 - loss if similarity else loss, 0)
        return gathered(windows, dims), no_share  # (gathers the gradient)
    loss, contrast = torch.where(counted, loss, 0), torch.where(counted, contrast, 0)
    if reduction == PLANES:
        return torch.stack([accumulate(t, dims).double() for t in (loss, contrast, counted.to(compute))]), no_share
    count = counted.sum().double()
    loss = accumulate(loss, ()).double()
    value, result_slope = over_all(count - loss if similarity else loss, count, reduction, empty_nan)
    return value.to(compute), -result_slope if similarity else result_slope


# ---- op


def _map_shape(shape, win_size, same):
    """The shape of the map of windows: one per pixel (`same`), or those inside the image."""
    return (*shape[:2], *(n if same else max(n - win_size + 1, 0) for n in shape[2:]))


def _fake(input, target, mask, reduction, similarity, empty_nan, data_range, win_size, win_sigma, k1, k2, same):
    compute, shape = compute_dtype(input.dtype, target.dtype), ()
    if reduction == 0:
        shape = _map_shape(input.shape, win_size, same)
    elif reduction == PLANES:
        compute, shape = torch.float64, (3, *input.shape[:2])
    is_scalar = reduction in (1, 2)
    return input.new_empty(shape, dtype=compute), input.new_empty(() if is_scalar else 0, dtype=torch.float64)


def _fake_backward(grad, result_slope, input, target, *operands):
    return only(operands[-3:-1], (input, target))


_IMAGES = "Tensor input, Tensor target, Tensor? mask=None, int reduction=1"
_WINDOW = "float data_range=1.0, int win_size=11, float win_sigma=1.5, float k1=0.01, float k2=0.03, bool same=False"
_forward = declare_raw(
    "_ssim",
    f"({_IMAGES}, bool similarity=False, bool empty_nan=False, {_WINDOW}) -> (Tensor value, Tensor result_slope)",
    fake=_fake,
    composite=define,
)
_backward = declare_raw(
    "_ssim_backward",
    f"(Tensor grad, Tensor result_slope, {_IMAGES}, {_WINDOW}, bool need_input=True, bool need_target=True, "
    "bool similarity=False) -> (Tensor, Tensor)",
    fake=_fake_backward,
)

# ---- record

LEAST_K = 1e-15  # k1^2 and k2^2 must be normal fp32 numbers: for constant images the divisor of contrast is 2 k2^2
PADDING = "valid", "same"
DEFAULTS = 1.0, 11, 1.5, 0.01, 0.03, "valid"
# {dims of the input: largest win_size of the CUDA kernels}: up to it, a tile fits shared memory and registers.
LARGEST_ON_CUDA = {4: 21, 5: 11}


class StructuralSimilarity(Op):
    """The record of the mean, sum or map of SSIM or 1 - SSIM over the windows. Backward reads `result_slope`."""

    owner = "C++/CUDA"
    differentiable = ("input", "target")
    compiled = ("cpu", "cuda")  # the kernels use tiles in shared memory; Inductor's code for the composite does not
    example = "torch.zeros(1, 3, 16, 16), torch.ones(1, 3, 16, 16)"

    def __init__(self, name, module=None):
        self.module = module
        super().__init__(name, _forward, _backward, lambda *operands: define(*operands)[0])

    def prepare(self, input, target, mask, options, reduction, similarity, empty):
        data_range, win_size, win_sigma, k1, k2, padding = options
        typed = (
            win_size.__class__ is int and data_range.__class__ is float and win_sigma.__class__ is float
            and k1.__class__ is float and k2.__class__ is float
        )  # fmt: skip
        usual, shape = typed and options == DEFAULTS, input.shape
        good = usual or (
            typed and padding in PADDING and win_size > 0 and win_size % 2 == 1
            and 0 < data_range <= LARGEST and 0 < win_sigma <= LARGEST
            and LEAST_K <= k1 <= LARGEST and LEAST_K <= k2 <= LARGEST
        )  # fmt: skip
        if not good or padding == "valid" and (
            shape[2] < win_size or shape[-2] < win_size or shape[-1] < win_size
        ):  # fmt: skip
            self.validate(input, target, mask, options)
        takes = not input.is_cuda or win_size <= LARGEST_ON_CUDA[len(shape)]
        if usual and empty != "nan":  # most calls
            return takes, (input, target, mask, reduction, similarity)
        window = data_range, win_size, win_sigma, k1, k2, padding == "same"
        return takes, (input, target, mask, reduction, similarity, empty == "nan", *window)

    def validate(self, input, target, mask, options, *_):
        validate(self.name, input, target, mask, options)

    def validate_options(self, name, reduction, empty, *options):
        loss_reduction.validate_options(name, reduction, empty)
        validate_window(name, *options)

    def gradients(self, grad, needs, operands, results):
        images, window = operands[:4], operands[6:]  # from input to reduction, from data_range on
        return self.backward(grad, results.result_slope, *images, *window, *needs[:2], operands.similarity)

    def loss(self, similarity, input, target, mask, reduction, denominator, empty, *options):
        """The body of the public functions `ssim` and `ssim_loss`."""
        name = self.name
        named = reduction.__class__ is empty.__class__ is str
        if not named or reduction not in REDUCTION or empty not in check.EMPTY:
            loss_reduction.validate_options(name, reduction, empty)
        if denominator is not None:
            loss_reduction.validate_denominator(name, reduction, denominator)
            check.tensor(name, "input", input)
            check.same_device(name, "input", input, denominator=denominator)
        if empty == "raise" and reduction != "none":
            self.validate(input, target, mask, options)
            keep = None if mask is None else counted(mask, input.shape, *options)
            shape = _map_shape(input.shape, options[1], options[-1] == "same")
            loss_reduction.raise_if_nothing_kept(name, keep, shape, f"windows {tuple(shape)}", denominator)
        if denominator is not None:
            total = self.call(input, target, mask, options, REDUCTION["sum"], similarity, "zero")
            return loss_reduction.over(total, denominator, empty)
        return self.call(input, target, mask, options, REDUCTION[reduction], similarity, empty)


def counted(mask, shape, data_range, win_size, win_sigma, k1, k2, padding):
    """Bool, one per window: True if the window counts, that is, if its centre pixel is kept."""
    keep = mask.expand(shape)
    if padding == "valid":
        for d in range(2, len(shape)):
            keep = keep.narrow(d, win_size // 2, max(shape[d] - win_size + 1, 0))
    return keep


# ---- checks


def validate_images(name, input, target):
    """Check two tensors of images, (N, C, H, W) or (N, C, D, H, W), of one shape."""
    check.floating(name, "input", input)
    check.floating(name, "target", target)
    validate_dims(name, input)
    if target.shape != input.shape:
        raise ValueError(f"{name}: target {check.shown(target)} must have the shape of input {check.shown(input)}")


def validate_dims(name, input):
    if input.dim() not in (4, 5):
        raise ValueError(f"{name}: input must be (N, C, H, W) or (N, C, D, H, W), got shape {check.shown(input)}")


def validate(name, input, target, mask, options, scales=1):
    """Check the arguments. scales: 1, or for ms_ssim the number of image sizes, each half of the size before."""
    validate_images(name, input, target)
    check.mask(name, mask, "input", input)
    check.same_device(name, "input", input, target=target, mask=mask)
    validate_window(name, *options)
    win_size, padding = options[1], options[-1]
    if padding == "valid":
        coarsest = 2 ** (scales - 1)
        for n in input.shape[2:]:
            if 0 < n and -(-n // coarsest) < win_size:
                of = f" at scale {scales}, of sizes divided by {coarsest}" if scales > 1 else ""
                raise ValueError(
                    f"{name}: win_size {win_size} is larger than the image, {tuple(input.shape[2:])} pixels{of}; input "
                    f'is {check.shown(input)}, (N, C, H, W) or (N, C, D, H, W); padding="same" takes any size'
                )


def validate_window(name, data_range, win_size, win_sigma, k1, k2, padding):
    """Check the options of a module's constructor."""
    check.number(name, "data_range", data_range, above=0)
    if isinstance(win_size, bool) or not isinstance(win_size, (int, *SYMBOLIC[:1])):
        raise TypeError(f"{name}: win_size must be an int, got {type(win_size).__name__}")
    if win_size < 1 or win_size % 2 == 0:
        raise ValueError(f"{name}: win_size must be odd and at least 1, got {win_size}")
    check.number(name, "win_sigma", win_sigma, above=0)
    check.number(name, "k1", k1, minimum=LEAST_K)
    check.number(name, "k2", k2, minimum=LEAST_K)
    check.choice(name, "padding", padding, PADDING)


# The text that replaces {arguments} in each docstring of the family.
ARGUMENTS = """\
        input: floating tensor (N, C, H, W) or (N, C, D, H, W); half is read as it is, and computed in fp32.
        target: floating tensor of `input`'s shape. Differentiable, too.
        mask: bool tensor, broadcastable to `input`; True = keep. A window contains its kept pixels, with weights that
            are normalised again, and counts if the pixel at its centre is kept. Masked-out pixels do not exist: NaN,
            inf or garbage there changes neither the result nor a gradient, and their own gradient is exactly 0.
        data_range: the largest minus the smallest value that a pixel may have, greater than 0: 1.0, or 255.0.
        win_size: number of pixels of a window along each dim: odd. On CUDA there are kernels for windows of up to 21
            pixels in (N, C, H, W) and 11 in (N, C, D, H, W); larger ones run as plain torch operations.
        win_sigma: standard deviation of the Gaussian weights of a window, in pixels.
        k1: constant of the luminance, at least 1e-15: C1 = (k1 data_range)^2.
        k2: constant of the contrast, at least 1e-15: C2 = (k2 data_range)^2.
        padding: "valid": the windows that lie inside the image. "same": one for each pixel; those at the border
            contain the pixels inside the image.
        empty: value of a mean or sum over no window: "zero" (attached to the graph, zero gradients), "nan", or "raise"
            (ValueError; the host waits for the device, so the call cannot be compiled whole).
"""
