"""Shared by the region losses.

A region is one class of one image, (n, c), or with `batch=True` one class of all images. The record is
`RegionLoss(name, module, value, **parameters)`: `value(both, input, target, smooth_nr, smooth_dr, *parameters)`
computes the regions' losses from sums over their kept pixels, in torch ops (kernels/losses/region_loss.py has the
Triton code). The sums are both = sum(p t), input = sum(p), target = sum(t); with `squared_pred` sum(p^2), sum(t^2).
"""

import torch
from torch.compiler import is_compiling

from safeops.core import check, loss_reduction
from safeops.core.definitions import accumulate
from safeops.core.dtypes import FLOATING, compute_dtype
from safeops.core.library import declare_raw, like
from safeops.core.op import Op

# ---- definition


def define(input, target, mask=None, exists=None, ignore_index=None, squared=False):
    """(4, N, C) in fp64: the sums of p t, p (or p^2) and t (or t^2), and the count of kept pixels."""
    lead = (1, -1) + (1,) * (input.dim() - 2)  # (1, C, 1, ...)
    # p is in two sums, and its two slopes may cancel: on the CPU all is fp64. (The Triton kernel adds in twice fp32's
    # digits; this definition, off the CPU, in the compute dtype.)
    compute = torch.float64 if input.device.type == "cpu" else compute_dtype(input.dtype, target.dtype)
    keep = input.new_ones((), dtype=torch.bool) if mask is None else mask
    p, t = input.to(compute), target
    if not target.is_floating_point():
        index = target.unsqueeze(1)  # (N, 1, d1, ...)
        if ignore_index is not None:
            keep = keep & (index != ignore_index)
        if index.device.type == "cpu" and type(index) is torch.Tensor:
            _look_up(index, keep, input.shape[1])
        keep = keep & check.in_range(index, input.shape[1], keep)
        # (new_ones, not arange, makes the class numbers: they are a DTensor if input is one)
        t = index == (input.new_ones(input.shape[1], dtype=torch.int64).cumsum(0) - 1).reshape(lead)
    if exists is not None:
        keep = keep & exists.reshape(lead)
    keep = keep.expand(input.shape)
    p, t = torch.where(keep, p, 0), torch.where(keep, t, 0).to(compute)  # select before arithmetic: NaN * 0 is NaN
    terms = p * t, p * p if squared else p, t * t if squared else t, keep
    dims = tuple(range(2, input.dim()))
    return torch.stack([(accumulate(x, dims) if dims else x).to(torch.float64) for x in terms])


def _look_up(index, keep, classes):
    """Raise if a kept pixel's class index is out of range: torch's CPU index_select raises; Python reads no value."""
    table, index = torch.empty(max(classes, 1), device=index.device), torch.where(keep, index, 0)
    table.index_select(0, index.reshape(-1))


# ---- op


def _fake(input, target, mask, exists, ignore_index, squared):
    return input.new_empty((4, *input.shape[:2]), dtype=torch.float64)


def _fake_backward(grad, input, target, mask, exists, ignore_index, squared, need_input, need_target):
    dtype = target.dtype if target.is_floating_point() else torch.float32
    return (
        like(input, input.shape, input.dtype) if need_input else input.new_empty(0),
        like(target, target.shape, dtype) if need_target else target.new_empty(0, dtype=dtype),
    )


def _fake_loss(sums, weight, denominator, divisor, reduction, empty_nan, batch, dtype, *numbers):
    return sums.new_empty(() if reduction else sums.shape[2:] if batch else sums.shape[1:], dtype=dtype)


def _fake_loss_backward(grad, sums, weight, *options):
    *_, need_sums, need_weight = options
    like = sums if weight is None else weight
    return (
        sums.new_empty(sums.shape if need_sums else 0),
        like.new_empty(like.shape if need_weight else 0),
    )


_forward = declare_raw(
    "_region_sums",
    "(Tensor input, Tensor target, Tensor? mask=None, Tensor? exists=None, int? ignore_index=None, "
    "bool squared=False) -> Tensor",
    fake=_fake,
    composite=define,
    triton="losses.region_sums.region_sums",
)
_backward = declare_raw(
    "_region_sums_backward",
    "(Tensor grad, Tensor input, Tensor target, Tensor? mask=None, Tensor? exists=None, int? ignore_index=None, "
    "bool squared=False, bool need_input=True, bool need_target=False) -> (Tensor, Tensor)",
    fake=_fake_backward,
    triton="losses.region_sums_backward.region_sums_backward",
)

_OPTIONS = "Tensor? weight, Tensor? denominator, float? divisor, int reduction, bool empty_nan, bool batch"
_NUMBERS = "float smooth_nr, float smooth_dr, float? alpha=None, float? beta=None"  # alpha, beta: of tversky_loss
_loss = declare_raw(
    "_region_loss",
    f"(Tensor sums, {_OPTIONS}, ScalarType dtype, {_NUMBERS}) -> Tensor",
    fake=_fake_loss,
    triton="losses.region_loss.region_loss",
)
_loss_backward = declare_raw(
    "_region_loss_backward",
    f"(Tensor grad, Tensor sums, {_OPTIONS}, {_NUMBERS}, bool need_sums=True, bool need_weight=False) "
    "-> (Tensor, Tensor)",
    fake=_fake_loss_backward,
    triton="losses.region_loss.region_loss_backward",
)

# ---- records

REGIONS = 4096  # the most regions for the kernel of `OfSums`: one block computes them all in a few microseconds


class OfSums(Op):
    """The record of a region loss from its sums (4, N, C): one kernel, or torch ops if there are over REGIONS regions.

    It has the name of the loss, so that errors name the loss; the loss's record stays in the registry."""

    differentiable = ("sums", "weight")
    constant = ("denominator",)

    def __init__(self, name, value):
        self.value = value
        super().__init__(name, _loss, _loss_backward, self.define)

    def prepare(self, *operands):
        if is_compiling():  # a trace keeps no such kernel, and the comparison below would restrict the program's sizes
            return False, operands
        _, images, classes = operands[0].shape
        in_schema = len(operands) <= len(self.Operands._fields)  # (False with gamma of a Tversky loss)
        return images * classes <= REGIONS and in_schema, operands

    def validate(self, *operands):
        """Nothing to do: the region loss computes the sums and validates the options."""

    def gradients(self, grad, needs, operands, results):
        return self.backward(grad, *operands[:7], *operands[8:], *needs[:2])

    def define(self, sums, weight, denominator, divisor, reduction, empty_nan, batch, dtype, *numbers):
        sums = sums.sum(1) if batch else sums
        both, input_sum, target_sum = sums[:3].unbind()  # (without the count, which has no gradient)
        keep = sums[3].detach() > 0
        loss = self.value(both, input_sum, target_sum, *(x for x in numbers if x is not None))
        weights = None
        if weight is not None:
            weights = weight.double().expand(keep.shape)
            keep = keep & (weights != 0)
            loss = loss * torch.where(keep, weights, 0)
        loss = torch.where(keep, loss, float("nan") if empty_nan and reduction == 0 else 0.0)
        # Reduced in fp64, then rounded. Empty regions change the order of the sum: in fp64 the mean keeps its bits.
        reduction, empty = tuple(loss_reduction.REDUCTION)[reduction], "nan" if empty_nan else "zero"
        denominator = divisor if denominator is None else denominator
        return loss_reduction.reduce(self.name, loss, keep, weights, reduction, denominator, empty).to(dtype)


BY_REGION = """\
        reduction: "mean" divides the sum over the regions by the count of those with a kept pixel (by the sum of their
            weights, with weights), "sum", or "none": (N, C), or (C,) with `batch`.
"""


class RegionLoss(Op):
    """The record of a region loss. Its raw op computes the sums; `of_sums` computes the loss from them."""

    differentiable = ("input", "target")
    reduction_text = BY_REGION
    buffers = ("weight",)
    example = "torch.tensor([[[0.9, 0.2], [0.1, 0.8]]]), torch.tensor([[0, 1]])"

    def __init__(self, name, module, value, **parameters):
        """parameters: {name: default} of the last arguments of `value`. value: None if a subclass overrides `loss`."""
        self.module, self.parameters = module, parameters
        if value is not None:
            self.of_sums = OfSums(name, value)
            self.parts = (self.of_sums,)
        super().__init__(name, _forward, _backward, define)
        if value is not None:
            self.of_sums.cuda = self.cuda
        self.sums = self.call

    def prepare(self, input, target, mask, weight, reduction, denominator, empty, options, *parameters):
        squared, _, _, ignore_index, _ = options
        self.validate_options(self.name, reduction, empty, *options, *parameters)
        self._validate(input, target, mask, weight, reduction, denominator, ignore_index)
        if mask is not None and mask.dim() == input.dim() - 1:
            mask = mask.unsqueeze(1)  # (N, 1, d1, ...)
        if target.dtype not in FLOATING:
            target = target.to(_read_as(target, input))
        exists = None if weight is None else weight != 0
        return True, (input, target, mask, exists, ignore_index, squared)

    def validate(self, *arguments):
        self.prepare(*arguments)

    def validate_operands(self, *operands):
        """Nothing to do: `prepare` validates every call."""

    def _validate(self, input, target, mask, weight, reduction, denominator, ignore_index):
        name = self.name
        check.floating(name, "input", input)
        if input.dim() < 2:
            raise ValueError(f"{name}: input must be (N, C, d1, ...), got shape {check.shown(input)}")
        check.real(name, "target", target)
        shape = input.shape
        pixels = (shape[0], *shape[2:])
        if target.dim() == input.dim() - 1:
            if target.is_floating_point() or target.dtype == torch.bool:
                remedy = "target.unsqueeze(1)" if shape[1] == 1 else "target.long()"
                raise TypeError(
                    f"{name}: target {check.shown(target)} must be class indices, integers, got {target.dtype}; or "
                    f"the shape of input {check.shown(input)}: say {remedy}"
                )
            if shape[1] == 1:
                raise ValueError(
                    f"{name}: of class indices {check.shown(target)} for the one class of input "
                    f"{check.shown(input)} all pixels would be of it: give 0 and 1 in the shape of input, "
                    "target.unsqueeze(1)"
                )
        elif ignore_index is not None:
            raise ValueError(
                f"{name}: ignore_index needs class indices, target of shape {tuple(pixels)}, got {check.shown(target)}"
                f"{check.say(check.reshaped('target', target, pixels))}"
            )
        if target.shape != shape and target.shape != pixels:  # (not `in`: see check.stretches)
            remedy = check.classes_first("input", input, target) or check.reshaped("target", target, pixels)
            raise ValueError(
                f"{name}: target must be class indices {pixels} or of the shape of input {check.shown(input)}, got "
                f"{check.shown(target)}{check.say(remedy)}"
            )
        if mask is not None:
            check.boolean(name, "mask", mask, "True = keep")
            per_class = mask.dim() >= input.dim()
            check.broadcasts_to(
                name, "mask", mask, "input" if per_class else "the pixels", input, None if per_class else pixels
            )
        if weight is not None:
            check.floating(name, "weight", weight)
            if tuple(weight.shape) != (shape[1],):
                raise ValueError(f"{name}: weight must be ({shape[1]},), one a class, got {check.shown(weight)}")
        loss_reduction.validate_denominator(name, reduction, denominator)
        check.same_device(name, "input", input, target=target, mask=mask, weight=weight, denominator=denominator)

    def validate_options(self, name, reduction, empty, squared_pred, smooth_nr, smooth_dr, ignore_index, batch,
                         *parameters):  # fmt: skip
        """Check the options of a module's constructor."""
        loss_reduction.validate_options(name, reduction, empty)
        check.boolean_flag(name, "squared_pred", squared_pred)
        check.number(name, "smooth_nr", smooth_nr, minimum=0)
        check.number(name, "smooth_dr", smooth_dr, minimum=0)
        if ignore_index is not None and (isinstance(ignore_index, bool) or not isinstance(ignore_index, int)):
            raise TypeError(f"{name}: ignore_index must be an int or None, got {type(ignore_index).__name__}")
        if ignore_index is not None and not -(2**31) <= ignore_index < 2**31:
            raise ValueError(f"{name}: ignore_index must be an integer of 32 bits, got {ignore_index}")
        check.boolean_flag(name, "batch", batch)
        for key, x in zip(self.parameters, parameters):
            check.number(name, key, x, minimum=0)

    def _refuse_indices(self, input, target, mask, ignore_index):
        """Raise IndexError if a class index is out of range, naming it: on the CPU such an index stopped the kernel."""
        bad = (target < 0) | (target >= input.shape[1])
        if ignore_index is not None:
            bad &= target != ignore_index
        if mask is not None:
            bad &= mask.expand(input.shape).any(1) if mask.dim() == input.dim() else mask
        if int(bad.sum()):  # waits for a device, but the call fails anyway
            raise IndexError(
                f"{self.name}: target has the class index {target[bad][0].item()}, out of range for the "
                f"{input.shape[1]} classes of input {check.shown(input)} (ignore_index={ignore_index})"
            ) from None

    def gradients(self, grad, needs, operands, results):
        return self.backward(grad, *operands, *needs[:2])

    def checked_sums(self, input, target, mask, weight, reduction, denominator, empty, options, *parameters):
        try:
            return self.sums(input, target, mask, weight, reduction, denominator, empty, options, *parameters)
        except (IndexError, RuntimeError):
            if target.dim() < input.dim() and not is_compiling():
                self._refuse_indices(input, target, mask, options[3])
            raise

    def loss(self, input, target, mask, weight, reduction, denominator, empty, options, *parameters):
        """The body of the public function."""
        _, *smooth, _, batch = options
        sums = self.checked_sums(input, target, mask, weight, reduction, denominator, empty, options, *parameters)
        if empty == "raise":
            self._raise_if_empty(input, sums[3].sum(0) if batch else sums[3], weight, reduction, denominator)
        denominator, divisor = (None, None) if denominator is None else loss_reduction.split(denominator, input)
        dtype = compute_dtype(input.dtype, target.dtype)
        code = loss_reduction.REDUCTION[reduction]
        return self.of_sums.call(
            sums, weight, denominator, divisor, code, empty == "nan", batch, dtype, *smooth, *parameters
        )

    def _raise_if_empty(self, input, count, weight, reduction, denominator):
        keep = count > 0 if weight is None else (count > 0) & (weight != 0)
        if reduction == "none":
            check.raise_if_empty(self.name, lambda: ~keep, input, "of the pixels")
        else:
            regions = f"losses {check.shown(keep)}"
            loss_reduction.raise_if_nothing_kept(self.name, keep, keep.shape, regions, denominator)

    def public(self):
        extra = "".join(f", float {name}={default}" for name, default in self.parameters.items())
        return super().public(
            "(Tensor input, Tensor target, *, Tensor? mask=None, Tensor? weight=None, "
            'str reduction="mean", Tensor? denominator=None, str empty="zero", bool squared_pred=False, '
            f"float smooth_nr=1e-5, float smooth_dr=1e-5, int? ignore_index=None, bool batch=False{extra}) -> Tensor",
            arguments=ARGUMENTS.replace(BY_REGION, self.reduction_text),
        )


def _read_as(target, input):
    """The dtype in which a kernel reads a target that is not floating: int64 for class indices, floating for values."""
    if target.dim() == input.dim() - 1:
        return torch.int64
    return torch.bfloat16 if target.dtype == torch.bool else torch.float32  # 0 and 1 are exact in 2 bytes


def quotient(value, total):
    """value / total; where total is 0 (an empty region without smoothing) 1, with gradient 0."""
    zero = total == 0
    return torch.where(zero, 1, value / torch.where(zero, 1, total))


# The text that replaces {arguments} in each docstring of the family.
ARGUMENTS = """\
        input: floating tensor (N, C, d1, ...) of probabilities: after softmax, or sigmoid.
        target: class indices (N, d1, ...), integers from 0 to C - 1, for at least two classes; or values of `input`'s
            shape: 0 and 1 for one class, one-hot, several classes a pixel, or soft. Differentiable where floating.
            Indices never become a one-hot tensor.
        mask: bool tensor, broadcastable to the pixels (N, d1, ...), or, with all of `input`'s dims, to `input`; True =
            keep. Masked-out pixels do not exist: NaN, inf or garbage there changes neither the loss nor a gradient, and
            their own gradient is exactly 0.
        weight: floating tensor (C,), a weight for each class; 0 means that the class does not exist. Differentiable.
        reduction: "mean" divides the sum over the regions by the count of those with a kept pixel (by the sum of their
            weights, with weights), "sum", or "none": (N, C), or (C,) with `batch`.
        denominator: number or 0-dim tensor that the mean divides by instead.
        empty: value of a mean or sum with nothing kept, and with "none" of a region without a kept pixel: "zero"
            (attached to the graph, zero gradients), "nan", or "raise" (ValueError; the host waits for the device, so
            the call cannot be compiled whole). With `denominator`, nothing is kept if that is 0; a call that keeps
            nothing of its own has the mean 0.
        squared_pred: True: the denominator sums the squares of `input` and `target` (V-Net, MONAI's name).
        smooth_nr: added to the numerator, at least 0, as MONAI's.
        smooth_dr: added to the denominator, at least 0. Both are added in fp64. Where the denominator is 0 the loss is
            0 with gradient 0.
        ignore_index: a class index whose pixels do not exist. It may be out of the range of the classes.
        batch: True: a region is a class of all images together. False: a class of each image.

    Returns:
        fp32 for fp16, bf16 and fp32 operands, fp64 if one is fp64: 0-dim, or of the regions' shape for "none". The sums
        are exact to fp32 in half, too.

    Raises:
        TypeError: `input` is not floating, class indices are not integers, `mask` is not bool, an option is of another
            type.
        ValueError: shapes do not fit, a `weight` not of C numbers, devices differ, unknown `reduction` or `empty`, a
            number out of range.
        IndexError: on the CPU, a class index of a kept pixel out of range (RuntimeError where the call is compiled). On
            CUDA such a pixel does not exist.
"""
