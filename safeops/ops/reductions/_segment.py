"""Shared by segment_sum, segment_mean and segment_max, the reductions of packed sequences.

The rows of the input, along its first dim, are those of S sequences that follow each other: sequence s has the rows
[cu_seqlens[s], cu_seqlens[s + 1]). Instead of cu_seqlens, segment_ids may give each row's sequence, in any order: the
rows are then sorted (stably), the forward kernels read them through the sort's `order`, and backward looks up the ids.
A row of no sequence (an id out of range) is ignored.
"""

import torch
from torch.compiler import is_compiling

from safeops.core import check
from safeops.core.definitions import kept
from safeops.core.dtypes import compute_dtype, widens
from safeops.core.library import declare_raw
from safeops.core.op import Op
from safeops.core.private_torch import transforms_active
from safeops.core.symbolic import SYMBOLIC

INDICES = (torch.int64, torch.int32)

# ---- definition


def clamped(cu_seqlens, rows):
    """cu_seqlens, clamped to [0, rows] and made non-decreasing: on a GPU the host does not wait to check the values."""
    return cu_seqlens.clamp(0, rows).cummax(0).values


def sequence_of_rows(cu_seqlens, segment_ids, rows):
    """(rows,) int64: the sequence of each row, or S for a row of no sequence."""
    count = cu_seqlens.shape[0] - 1
    if segment_ids is not None:
        ids = segment_ids.long()
        return torch.where((ids < 0) | (ids > count), count, ids)
    bounds, place = clamped(cu_seqlens.long(), rows), torch.arange(rows, device=cu_seqlens.device)
    sequence = torch.searchsorted(bounds, place, right=True) - 1
    return torch.where(sequence < 0, count, sequence)


class Sequences:
    """The kept elements of a call, with methods that reduce them over each sequence."""

    def __init__(self, input, mask, weight, cu_seqlens, segment_ids):
        # an fp64 weight may be out of fp32's range: it makes the computation fp64
        self.compute = compute_dtype(input.dtype, *(() if weight is None else (weight.dtype,)))
        if widens(input):
            self.compute = torch.float64  # index_put adds terms one by one: in fp32 the error grows like their number
        self.shape, self.count = input.shape, cu_seqlens.shape[0] - 1
        self.place = sequence_of_rows(cu_seqlens, segment_ids, input.shape[0])
        self.keep = kept(mask, weight)  # None: all
        self.x = self.select(input.to(self.compute), 0)
        self.weight = None if weight is None else torch.where(self.keep, weight.to(self.compute), 0)

    def select(self, x, other):
        return x if self.keep is None else torch.where(self.keep, x, other)

    def zeros(self, dtype, value=0):
        """(S + 1, *rest), filled with value. The last entry is for rows that belong to no sequence."""
        return torch.full((self.count + 1, *self.shape[1:]), value, dtype=dtype, device=self.x.device)

    def sum(self, x):
        """The sums of x over each sequence, (S, *rest). index_put adds in a fixed order, on CUDA too."""
        x = x.expand(self.shape)
        return self.zeros(x.dtype).index_put((self.place,), x, accumulate=True)[: self.count]

    def number(self, which):
        """The number of elements of each sequence where `which` (bool) is True: int64, exact."""
        return self.sum(which.expand(self.shape).long())

    def kept_count(self):
        return self.number(torch.ones((), dtype=torch.bool, device=self.x.device) if self.keep is None else self.keep)

    def of_rows(self, results):
        """(T, *rest): for each row, its sequence's element of `results` (S, *rest); 0 for a row of no sequence."""
        return torch.cat([results, torch.zeros_like(results[:1]) if self.count else self.zeros(results.dtype)])[
            self.place
        ]

    def largest(self):
        """The largest kept element of each sequence. NaN if a kept element is NaN; -inf if none is kept."""
        with torch.no_grad():
            x = self.select(self.x, float("-inf")).expand(self.shape)
            index = self.place.reshape(-1, *(1,) * (x.dim() - 1)).expand(self.shape)
            lowest = self.zeros(x.dtype, float("-inf"))
            return torch.scatter_reduce(lowest, 0, index, x, "amax")[: self.count]


# ---- op

_SCHEMA = (
    "(Tensor input, Tensor? mask, Tensor? weight, Tensor cu_seqlens, Tensor? segment_ids=None, Tensor? order=None, "
    "bool empty_nan=False) -> (Tensor value, Tensor denominator)"
)


def _fake(input, mask, weight, cu_seqlens, segment_ids=None, order=None, empty_nan=False):
    shape = (cu_seqlens.shape[0] - 1, *input.shape[1:])
    return input.new_empty(shape, dtype=compute_dtype(input.dtype)), input.new_empty(shape, dtype=torch.float64)


_segment_backward = declare_raw(
    "_segment_backward",
    "(Tensor grad, SymInt[] size, ScalarType dtype, Tensor? denominator, Tensor? input, Tensor? extreme, Tensor? mask, "
    "Tensor? weight, Tensor cu_seqlens, Tensor? segment_ids=None) -> Tensor",
    fake=lambda grad, size, dtype, *_: grad.new_empty(size, dtype=dtype),
    triton="reductions.segment_backward.segment_backward",
)


def _sorted(segment_ids, num_segments):
    """Returns (cu_seqlens, order) of a stable sort of the rows by their ids. order: the sorted rows' numbers. Rows with
    ids out of range are sorted before all sequences, or after them."""
    ids, order = segment_ids.sort(stable=True)
    segments = torch.arange(num_segments + 1, dtype=ids.dtype, device=ids.device)
    return torch.searchsorted(ids, segments), order


_segment_order = declare_raw(
    "_segment_order",
    "(Tensor segment_ids, SymInt num_segments) -> (Tensor cu_seqlens, Tensor order)",
    fake=lambda ids, count: (ids.new_empty(count + 1, dtype=torch.int64), ids.new_empty(ids.shape, dtype=torch.int64)),
    composite=_sorted,
)

# ---- checks


def _refuse_bounds(name, cu_seqlens, rows, shape):
    """Raise for wrong values of cu_seqlens if the host may read them. On other devices they are `clamped`."""
    if not check.may_look(cu_seqlens):
        return
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0:
        raise ValueError(f"{name}: cu_seqlens must start at 0, got {bounds[0]}")
    for s, (low, high) in enumerate(zip(bounds, bounds[1:])):
        if high < low:
            raise ValueError(f"{name}: cu_seqlens must not decrease, got {low} and then {high} at {s + 1}")
    if bounds[-1] != rows:
        raise ValueError(f"{name}: cu_seqlens must end at the {rows} rows of input {shape}, got {bounds[-1]}")


def _refuse_ids(name, segment_ids, num_segments):
    """Raise for ids out of range if the host may read them. On other devices rows with such ids are ignored."""
    if not check.may_look(segment_ids) or not segment_ids.numel():
        return
    index = segment_ids.long() if num_segments else torch.full_like(segment_ids, -1, dtype=torch.int64)
    try:  # torch.gather checks the indices: Python reads no value
        segment_ids.new_zeros(()).expand(max(num_segments, 1)).gather(0, index)
    except (RuntimeError, IndexError):
        outside = (segment_ids < 0) | (segment_ids >= num_segments)
        wrong = segment_ids[outside][0].item()  # the host waits, but the call fails anyway
        raise IndexError(f"{name}: segment id {wrong} is out of range for num_segments={num_segments}") from None


def _report(cu_seqlens, segment_ids, num_segments, rows):
    """Report wrong bounds or ids to `safeops.debug.audit`, on devices where they do not raise."""
    if segment_ids is not None:
        check.in_range(segment_ids, num_segments, torch.ones_like(segment_ids, dtype=torch.bool))
        return
    fixed = clamped(cu_seqlens, rows)
    ends = torch.cat([torch.zeros_like(fixed[:1]), fixed[1:-1], torch.full_like(fixed[:1], rows)])[: fixed.shape[0]]
    wrong = cu_seqlens != ends
    check.in_range(torch.where(wrong, -1, cu_seqlens), rows + 1, wrong)


# ---- record


class SegmentReduction(Op):
    """The record of a segment reduction. Forward reads input, mask and weight once; backward writes the gradient."""

    constant = ("weight",)
    reads = ("input", "mask", "weight", "cu_seqlens", "segment_ids")  # backward needs no `order`
    compiled = ("cpu", "cuda")
    example = "torch.tensor([0.5, 3.0, 1.0]), cu_seqlens=torch.tensor([0, 2, 3])"

    def __init__(self, name, finish):
        """finish: a function (Sequences, count) -> (value, denominator). count: (S, *rest), number of kept elements."""

        def composite(input, mask, weight, cu_seqlens, segment_ids=None, order=None, empty_nan=False):
            k = Sequences(input, mask, weight, cu_seqlens, segment_ids)
            count = k.kept_count()
            nothing = float("nan") if empty_nan else 0.0
            if weight is not None and weight.requires_grad:
                # segment_max does not depend on the weight: this unused branch makes weight's gradient 0, not None.
                nothing = torch.where(torch.zeros_like(count, dtype=torch.bool), weight.sum(), nothing)
            value, denominator = finish(k, count)
            value = torch.where(count > 0, value, nothing)
            return value.to(compute_dtype(input.dtype)), denominator.to(torch.float64)

        forward = declare_raw(
            f"_{name}", _SCHEMA, fake=_fake, composite=composite, triton=f"reductions.segment_sum.{name}"
        )
        super().__init__(name, forward, _segment_backward, lambda *operands: composite(*operands)[0])

    def prepare(self, input, cu_seqlens, segment_ids, num_segments, mask, weight, empty):
        order, rows = None, input.shape[0]
        if segment_ids is not None or num_segments is not None or empty != "zero":
            self._validate(input, cu_seqlens, segment_ids, num_segments, mask, weight, empty)
        if check.watchers and not input.is_cpu and not is_compiling():
            _report(cu_seqlens, segment_ids, num_segments, rows)
        if segment_ids is not None:
            segment_ids = segment_ids.contiguous()
            if transforms_active():  # the definition runs: of cu_seqlens it needs only the length, and no order
                cu_seqlens = segment_ids.new_zeros(num_segments + 1)
            else:
                cu_seqlens, order = _segment_order(segment_ids, num_segments)
        elif not cu_seqlens.is_cpu and cu_seqlens.dtype in INDICES:
            cu_seqlens = clamped(cu_seqlens, rows)
        if empty == "raise":
            self._refuse_values(input, cu_seqlens if order is None else None, segment_ids, num_segments)
            keep = kept(mask, None if weight is None else weight.detach())
            k = Sequences(input.detach(), keep, None, cu_seqlens, segment_ids)
            check.raise_if_empty(self.name, lambda: k.kept_count() == 0, input, 0)
        return cu_seqlens.dtype in INDICES, (input, mask, weight, cu_seqlens, segment_ids, order, empty == "nan")

    def validate(self, *arguments):
        self._validate(*arguments)
        self._refuse_values(*arguments[:4])

    def _refuse_values(self, input, cu_seqlens, segment_ids, num_segments):
        if segment_ids is not None:
            _refuse_ids(self.name, segment_ids, num_segments)
        else:
            _refuse_bounds(self.name, cu_seqlens, input.shape[0], check.shown(input))

    def _validate(self, input, cu_seqlens, segment_ids, num_segments, mask, weight, empty):
        """Raise for wrong shapes, dtypes and devices, without reading values."""
        name = self.name
        check.floating(name, "input", input, numbers=True)
        for key, x in (("input", input), ("mask", mask), ("weight", weight)):
            if isinstance(x, torch.Tensor):
                check.no_dtensor(name, key, x)  # a packed batch belongs to one rank
        if input.dim() == 0:
            raise ValueError(f"{name}: input must have a first dim of rows, got shape ()")
        check.mask(name, mask, "input", input)
        check.weight(name, weight, "input", input)
        if (cu_seqlens is None) == (segment_ids is None):
            which = "both" if segment_ids is not None else "neither"
            raise ValueError(f"{name}: pass cu_seqlens or segment_ids, got {which} (input {check.shown(input)})")
        key, rows = ("cu_seqlens", cu_seqlens) if segment_ids is None else ("segment_ids", segment_ids)
        check.tensor(name, key, rows)
        check.no_dtensor(name, key, rows)
        if rows.dtype not in INDICES:
            raise TypeError(f"{name}: {key} must be int64 or int32, got {rows.dtype}")
        self._validate_count(num_segments, required=segment_ids is not None)
        if segment_ids is not None and segment_ids.shape != input.shape[:1]:
            raise ValueError(
                f"{name}: segment_ids {check.shown(segment_ids)} must have one id for each row of input "
                f"{check.shown(input)}"
            )
        if segment_ids is None and (cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0):
            raise ValueError(
                f"{name}: cu_seqlens must have one dim of num_segments + 1 bounds, got {check.shown(cu_seqlens)}"
            )
        if segment_ids is None and num_segments is not None and num_segments != cu_seqlens.shape[0] - 1:
            raise ValueError(
                f"{name}: num_segments {num_segments} is not that of cu_seqlens {check.shown(cu_seqlens)}, which has "
                "one bound more"
            )
        check.choice(name, "empty", empty, check.EMPTY)
        check.same_device(name, "input", input, mask=mask, weight=weight)
        if rows.device != input.device:
            raise ValueError(f"{name}: {key} is on {rows.device}, input on {input.device}")

    def _validate_count(self, num_segments, required):
        if num_segments is None:
            if required:
                raise ValueError(f"{self.name}: segment_ids needs num_segments: to count them the host would wait")
            return
        if isinstance(num_segments, bool) or not isinstance(num_segments, (int, SYMBOLIC[0])):
            raise TypeError(f"{self.name}: num_segments must be an int, got {type(num_segments).__name__}")
        if num_segments < 0 or num_segments >= 2**63 - 1:
            raise ValueError(f"{self.name}: num_segments must be at least 0 and fit 64 bits, got {num_segments}")

    def validate_operands(self, input, mask, weight, cu_seqlens, segment_ids=None, order=None, empty_nan=False):
        self._validate(input, cu_seqlens, None, None, mask, weight, "zero")
        for key, rows in (("segment_ids", segment_ids), ("order", order)):
            if rows is not None and (rows.dtype not in INDICES or rows.shape != input.shape[:1]):
                raise ValueError(f"{self.name}: {key} must have an integer for each row, got {check.shown(rows)}")

    def public(self):
        schema = (
            "(Tensor input, *, Tensor? cu_seqlens=None, Tensor? segment_ids=None, SymInt? num_segments=None, "
            'Tensor? mask=None, Tensor? weight=None, str empty="zero") -> Tensor'
        )
        return super().public(schema, arguments=ARGUMENTS)


class LinearSegments(SegmentReduction):
    """The record of segment_sum (mean=False) or segment_mean (mean=True: the total is divided by its denominator)."""

    linear, reads = 1, ("mask", "weight", "cu_seqlens", "segment_ids")

    def __init__(self, name, mean):
        self.mean, self.saved = mean, ("denominator",) if mean else ()

        def finish(k, count):
            total = k.sum(k.x if k.weight is None else k.x * k.weight)
            denominator = count if k.weight is None else k.sum(k.weight)
            return (total / torch.where(count > 0, denominator, 1).to(total.dtype) if mean else total), denominator

        super().__init__(name, finish)

    def gradients(self, grad, needs, operands, results):
        x, denominator = operands.input, results.denominator if self.mean else None
        return (self.backward(grad, x.shape, x.dtype, denominator, None, None, *operands[1:5]),)


# The text that replaces {arguments} in each docstring of the family.
ARGUMENTS = """\
        input: (T, *rest) floating tensor of any strides: the rows of all sequences.
        cu_seqlens: (S + 1,) int32 or int64: sequence s has the rows from cu_seqlens[s] up to cu_seqlens[s + 1]. It
            starts at 0, does not decrease, and ends at T. Pass this or `segment_ids`.
        segment_ids: (T,) int32 or int64: the sequence of each row, from 0 to S - 1, in any order. The result is that
            of the rows sorted by it, bit for bit.
        num_segments: S, required with `segment_ids`: to find it the host would wait for the device.
        mask: bool tensor, broadcastable to `input`; True = keep. None keeps all.
        weight: floating tensor, broadcastable to `input`; 0 means the same as masked out.
        empty: the result of a sequence without kept elements: "zero" (attached to the graph, zero gradients), "nan", or
            "raise" (ValueError before any work; the host waits for the device, so the call cannot be compiled whole).

    Returns:
        (S, *rest): fp32 for fp16, bf16 and fp32 input, fp64 for fp64. The bits of a result do not depend on the other
        sequences, nor on its place among them.

    Raises:
        IndexError: on the CPU, an id that is not from 0 to S - 1; raised before anything is written (RuntimeError where
            the call is compiled). On other devices, and under torch.func's transforms, such a row is left out.
        TypeError: `input` or `weight` is not floating, `mask` is not bool, bounds or ids are not int32 or int64.
        ValueError: both or neither of `cu_seqlens` and `segment_ids`, ids without `num_segments`, shapes do not fit,
            devices differ, unknown `empty`. On the CPU, `cu_seqlens` that does not start at 0, decreases, or does not
            end at T (RuntimeError where the call is compiled); elsewhere it is clamped to bounds that do not decrease.
"""
