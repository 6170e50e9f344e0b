"""Shared by losses with one class per row. Rows: all dims of input (N, C, d1, ...) but the classes, (N, d1, ...)."""

import torch

from safeops.core import check
from safeops.core.definitions import gathered, kept
from safeops.core.dtypes import FLOATING, LARGEST, compute_dtype
from safeops.core.loss_reduction import REDUCTION, validate_denominator, validate_options
from safeops.core.route import PLAIN
from safeops.core.row_loss import RowLoss

INDICES = (torch.int64, torch.int32, torch.uint8)

# ---- definition


def class_dim(input):
    return 1 if input.dim() > 1 else 0


def row_shape(input):
    """(N, C, d1, ...) -> (N, d1, ...); (C,) -> ()."""
    dim = class_dim(input)
    return (*input.shape[:dim], *input.shape[dim + 1 :])


def gather_classes(x):
    """Gather a DTensor along its classes if it is sharded over them: torch.gather cannot read such shards."""
    return gathered(x, (class_dim(x),))


def rows_of(classes, target, weight, mask, ignore_index, compute):
    """Returns (place: int64, the class of each row; keep: bool; class weight of each row, or None), in the rows' shape.

    A row that is not kept has class 0 and weight 0. A row with a class out of range is not kept: on the CPU,
    `refuse_missing_class` has raised before; on other devices the host does not wait for the values.
    """
    target = target.long()  # in uint8, -100 would be class 156
    keep = target != ignore_index
    if mask is not None:
        keep = keep & mask
    keep = keep & check.in_range(target, classes, keep)
    place = torch.where(keep, target, 0)
    if weight is None:
        return place, keep, None
    weights = (
        weight.to(compute).index_select(0, place.reshape(-1)).reshape(place.shape)
        if classes
        else weight.to(compute).sum().expand(keep.shape)
    )
    keep = kept(keep, weights)
    return place, keep, torch.where(keep, weights, 0)


# ---- checks


def is_watched(input):
    """True off the CPU while `safeops.debug.audit` looks for classes that do not exist. Then the definition runs, which
    reports them; a CUDA kernel masks their rows out silently."""
    return check.watchers and not input.is_cpu


def has_missing_class(target, mask, ignore_index, classes):
    """True if a kept row has a class out of range; False where the host may not read values.

    torch.gather checks the indices: on the CPU it raises, so that Python reads no value.
    """
    if not check.may_look(target) or (mask is not None and type(mask) not in PLAIN):
        return False
    counts = _counts(target, mask, ignore_index)
    indices = torch.where(counts, target.long() if classes else -1, 0)
    try:
        indices.new_zeros(()).expand(max(classes, 1)).gather(0, indices.reshape(-1))
    except (RuntimeError, IndexError):
        return True
    return False


def _counts(target, mask, ignore_index):
    """Bool: True where `mask` keeps a row and its class is not ignore_index, which may be None."""
    counts = torch.ones_like(target, dtype=torch.bool) if ignore_index is None else target.long() != ignore_index
    return counts if mask is None else counts & mask


def refuse_missing_class(name, target, mask, ignore_index, classes, of, shape, key="target"):
    """Raise IndexError for a class out of range. of, shape: name and shape of the tensor with the classes. key: the
    target's name. (`shape` comes as it is: as text it would make constants of traced sizes.)"""
    if has_missing_class(target, mask, ignore_index, classes):
        wrong = _counts(target, mask, ignore_index) & ((target < 0) | (target >= classes))
        first = target.expand(wrong.shape)[wrong][0].item()  # waits for a device, but the call fails anyway
        but = "" if ignore_index is None else f", and not ignore_index ({ignore_index})"
        raise IndexError(f"{name}: {key} {first} is out of range for the {classes} classes of {of} {tuple(shape)}{but}")


def validate_weight(name, weight):
    """Check the class weights, but not how many: a module does not know the number of classes."""
    if weight is not None:
        check.floating(name, "weight", weight)
        if weight.dim() != 1:
            raise ValueError(f"{name}: weight must have one number for each class, got shape {check.shown(weight)}")


def validate_index(name, ignore_index):
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, (int, torch.SymInt)):
        raise TypeError(f"{name}: ignore_index must be an int, got {type(ignore_index).__name__}")
    if isinstance(ignore_index, int) and not -(2**63) <= ignore_index < 2**63:
        raise ValueError(f"{name}: ignore_index must be an integer of 64 bits, got {ignore_index}")


def validate_numbers(name, label_smoothing, z_loss):
    check.number(name, "label_smoothing", label_smoothing, minimum=0, maximum=1)
    check.number(name, "z_loss", z_loss, minimum=0, maximum=LARGEST)


class Classification(RowLoss):
    """The record of a loss with one class per row. takes_logits: True for logits, False for log probabilities."""

    takes_logits = False
    buffers = ("weight",)
    shards = "rows"
    visible = 3  # losses, keep, weights
    constant = ("weight",)

    def __init__(self, name, module, *raw):
        self.module = module
        super().__init__(name, *raw)

    def validate_buffer(self, name, key, x):
        validate_weight(name, x)

    def validate_indices(self, input, target, also=""):
        """also: the error's text on other targets that are allowed."""
        rows = row_shape(input)
        if target.dtype not in INDICES:
            indices = f"int64, int32 or uint8 (class indices){also}"
            remedy = "target.long()" if tuple(target.shape) == rows else self._remedy(input, target, also)
            raise TypeError(f"{self.name}: target must be {indices}, got {target.dtype}{check.say(remedy)}")
        if tuple(target.shape) != rows:
            raise ValueError(
                f"{self.name}: target {check.shown(target)} does not fit input {check.shown(input)}, whose dim "
                f"{class_dim(input)} are the classes: it must be {rows}{check.say(self._remedy(input, target, also))}"
            )

    def _remedy(self, input, target, also):
        if classes := check.of_one_hot("target", target, input.shape, class_dim(input)):
            return f"target.float() (probabilities), or {classes}" if also else classes
        return check.classes_first("input", input, target) or check.reshaped("target", target, row_shape(input))

    def validate_input(self, input, target):
        check.floating(self.name, "input", input)
        check.tensor(self.name, "target", target)
        if input.dim() == 0:
            raise ValueError(f"{self.name}: input must have a dim of classes, got shape ()")

    def validate_common(self, input, target, weight, mask, ignore_index):
        name, classes = self.name, input.shape[class_dim(input)]
        validate_weight(name, weight)
        if weight is not None and weight.shape[0] != classes:
            raise ValueError(
                f"{name}: weight {check.shown(weight)} must have one number for each of the {classes} classes of "
                f"input {check.shown(input)}"
            )
        check.mask(name, mask, "the rows", input, row_shape(input))
        validate_index(name, ignore_index)
        check.same_device(name, "input", input, target=target, mask=mask, weight=weight)
        if target.dtype in FLOATING:
            return
        refuse_missing_class(name, target, mask, ignore_index, classes, "input", input.shape)


def validate_reduction(name, input, reduction, denominator, empty):
    """Check the options of a reduction before any work, in the order that costs a valid call least."""
    words = reduction.__class__ is str and empty.__class__ is str  # (`in` may raise for others)
    if not words or reduction not in REDUCTION or empty not in check.EMPTY or denominator is not None:
        validate_options(name, reduction, empty)
        validate_denominator(name, reduction, denominator)
        if isinstance(input, torch.Tensor):
            check.same_device(name, "input", input, denominator=denominator)


def without_weight_0(name, row_weight, mask, input, rows=None):
    """`mask` with False for rows of row weight 0. rows: the rows' shape; None: the shape of the rows of `input`."""
    check.floating(name, "input", input)
    check.floating(name, "row_weight", row_weight)
    rows = row_shape(input) if rows is None else rows
    check.broadcasts_to(name, "row_weight", row_weight, "the rows", input, rows)
    check.mask(name, mask, "the rows", input, rows)
    check.same_device(name, "input", input, row_weight=row_weight, mask=mask)
    return kept(mask, row_weight)


def weighed(loss, keep, weights, row_weight):
    """Multiply losses and class weights by the rows' weights. Returns (losses, weights that a mean divides by), in fp64
    if the rows' weights are: fp32 may not hold them."""
    factor = torch.where(keep, row_weight.to(compute_dtype(loss.dtype, row_weight.dtype)), 0)
    return loss * factor, factor if weights is None else weights * factor


def normalized_weight(weight, x, dim, target, mask, ignore_index, row_weight):
    """The class weights, scaled so that their mean over the kept rows is 1: (C,), in x's dtype or a wider one.

    They give the z-losses z_i, which have no class weight, a mean of their own. Row i has the cross entropy c_i, the
    row weight r_i and the weight w_i of its class:
    (1) scaled weights: w'_i = w_i sum_i r_i / sum_i r_i w_i
    (2) sum_i r_i (w'_i c_i + z_i) / sum_i r_i w'_i = sum_i r_i w_i c_i / sum_i r_i w_i + sum_i r_i z_i / sum_i r_i

    x: the logits, or the last layer's weight; `dim` is its dim of classes. mask: must exclude rows of row weight 0.
    """
    # DTensors are gathered: rows_of flattens the rows, which uneven shards do not allow.
    target, mask, row_weight = (t if t is None else gathered(t, range(t.dim())) for t in (target, mask, row_weight))
    w = weight.double()  # converted once: autograd adds the parts of its gradient in fp64 and rounds only the sum
    _, keep, weights = rows_of(x.shape[dim], target, w, mask, ignore_index, w.dtype)
    rows = keep.double() if row_weight is None else torch.where(keep, row_weight, 0).double()
    count, total = rows.sum(), (rows * weights).sum()  # noqa: SO105
    nothing = total == 0
    # NaN if the row weights add up to 0 (count) but not times the class weights (total): the z-loss has no mean.
    scale = torch.where(nothing, 1, torch.where(count == 0, torch.nan, count) / torch.where(nothing, 1, total))
    dtype = compute_dtype(x.dtype, weight.dtype)
    scaled, least = (w * scale).to(dtype), torch.finfo(dtype).tiny
    return torch.where((scaled == 0) & (w != 0), least, scaled)  # (a weight that underflows must not mask its rows out)


# The text that replaces {arguments} in each docstring of these losses.
ARGUMENTS = """\
        weight: (C,) floating tensor, a weight for each class. A row whose class has weight 0 is masked out.
            Differentiable.
        mask: bool tensor, broadcastable to the rows' shape (N, d1, ...); True = keep. Masked-out rows do not exist:
            NaN, inf or garbage there changes neither the loss nor a gradient, and their own gradient is exactly 0.
        reduction: "mean" divides the sum by the number of kept rows (with class weights and class indices, by the sum
            of the kept rows' class weights, as torch does), "sum", or "none": a loss for each row, 0 if it is not kept.
        ignore_index: a row of this class is masked out.
        denominator: number or 0-dim tensor that the mean divides by instead. For exact gradient accumulation pass the
            number of kept rows (or the sum of their weights) of all micro-batches, for data parallel training
            `safeops.distributed.global_count`. Each loss is then a share: the mean over all rows is the sum over the
            micro-batches, averaged over the ranks.
        empty: value of a mean or sum with nothing kept: "zero" (attached to the graph, zero gradients), "nan", or
            "raise" (ValueError; the host waits for the device, so the call cannot be compiled whole). With
            `denominator`, nothing is kept if that is 0; a call that keeps nothing of its own has the mean 0.

    Returns:
        fp32 for fp16, bf16 and fp32 operands, fp64 if one is fp64: 0-dim, or of shape (N, d1, ...) for "none".

    Raises:
        IndexError: on the CPU, a row that `mask` keeps has a class that does not exist and is not `ignore_index`; it is
            raised before anything is written (RuntimeError where the call is compiled). On other devices, and under
            torch.func's transforms, such a row is masked out.
        TypeError: an operand or option is of another type or dtype.
        ValueError: shapes do not fit, devices differ, unknown `reduction` or `empty`, a number out of range.
"""
