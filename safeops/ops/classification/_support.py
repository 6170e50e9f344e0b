"""The support of a row: the classes that a sampler's top-p or top-k kept. All others do not exist.

    log p_c = x_c - log sum_{s in S} exp x_s   for c in S, else -inf

With a bool support the logits of the other classes are replaced by -inf, in a copy that the op reads in place of the
logits. With one in CSR form, the logits of its classes (its entries) are gathered, and summed by rows: torch ops on as
many elements as there are classes in all supports.
"""

import torch

from safeops.core import check
from safeops.core.dtypes import compute_dtype, wide_on_cpu
from safeops.ops.classification._logits import shaped
from safeops.ops.elementwise.masked_fill import masked_fill
from safeops.ops.reductions.segment_max import segment_max
from safeops.ops.reductions.segment_sum import segment_sum

INF, OUTSIDE, INTEGERS = float("inf"), ("-inf", "mask"), (torch.int64, torch.int32)

ARGUMENTS = """\
        support: the classes that exist for each row: a bool tensor (..., C), or a pair (offsets, classes) of integer
            tensors (CSR): `classes[offsets[i] : offsets[i + 1]]` are those of row i, in any order, with rows counted in
            the order of `target.flatten()`. Probabilities are renormalised over them: the other logits, whatever they
            hold, change nothing, and their gradient is 0. On the CPU, a kept row without a class, with a class twice or
            with one out of range raises ValueError; elsewhere, and in compiled code, such a row is masked out.
        outside: for a kept row whose target is not in its support: "-inf": its log_prob; "mask": it is masked out.
"""


def validate(name, support, outside, with_argmax, rows, classes, **of):
    """Check a support of rows of logits. Returns it as a bool tensor (*rows, C), or as the pair of a CSR form.

    of: the tensors that the logits are or come from, by their names in errors."""
    check.choice(name, "outside", outside, OUTSIDE)
    if support is None:
        if outside != OUTSIDE[0]:
            raise TypeError(f"{name}: outside={outside!r} needs support")
        return None
    if with_argmax:
        raise TypeError(f"{name}: with_argmax does not go with support")
    for key, x in of.items():
        check.no_dtensor(name, key, x)
    (first, reference), shown = next(iter(of.items())), " and ".join(f"{k} {check.shown(x)}" for k, x in of.items())
    parts = (support,) if isinstance(support, torch.Tensor) else tuple(support)
    if len(parts) not in (1, 2):
        raise TypeError(f"{name}: support must be a bool tensor or a pair (offsets, classes), got {len(parts)} parts")
    keys = ("support",) if len(parts) == 1 else ("support's offsets", "support's classes")
    for key, x in zip(keys, parts):
        check.tensor(name, key, x)
        check.no_dtensor(name, key, x)
    check.same_device(name, first, reference, **dict(zip(keys, parts)))
    if len(parts) == 1:
        (mask,) = parts
        if mask.dtype != torch.bool:
            raise TypeError(f"{name}: support must be bool, or a pair (offsets, classes), got {mask.dtype}")
        if mask.shape != (*rows, classes):
            raise ValueError(f"{name}: support {check.shown(mask)} must have the rows and classes of {shown}")
        return mask
    for key, x in zip(keys, parts):
        if x.dtype not in INTEGERS or x.dim() != 1:
            raise TypeError(f"{name}: {key} must be 1-dim, int64 or int32, got {x.dtype} {check.shown(x)}")
    if len(parts[0]) != rows.numel() + 1:
        raise ValueError(
            f"{name}: support's offsets {check.shown(parts[0])} must have one more element than there are rows, "
            f"{tuple(rows)}"
        )
    return parts


class Entries:
    """The entries of a CSR support: a class of a row each.

    row, classes: (entries,), 0 where an entry is not `real`: beyond the offsets, or a class out of range. index: of the
    flattened logits. right: (count,), rows that have classes, none twice and none out of range."""

    def __init__(self, offsets, classes, count, size):
        offsets, classes, self.count = offsets.long(), classes.long(), count
        place = torch.arange(len(classes), device=classes.device)
        row = torch.searchsorted(offsets[1:].contiguous(), place, right=True)
        of_row = (row < count) & (place >= offsets[0])
        self.real = of_row & (classes >= 0) & (classes < size)
        self.row, self.classes = (torch.where(self.real, x, 0) for x in (row, classes))
        self.index = self.row * size + self.classes
        sorted_index = torch.where(self.real, self.index, -1 - place).sort().values
        twice = sorted_index[1:] == sorted_index[:-1]
        wrong = offsets.new_zeros(count + 1, dtype=torch.bool)  # (what is right is written to the last element)
        wrong = wrong.scatter(0, torch.where(of_row & ~self.real, row, count), True)
        wrong = wrong.scatter(0, torch.where(twice, sorted_index[1:] // max(size, 1), count), True)[:-1]
        within = (offsets[:-1] >= 0) & (offsets[1:] <= len(classes))
        self.right = (offsets.diff() > 0) & within & ~wrong

    def reduce(self, function, x, keep):
        """function: `segment_sum` or `segment_max`, of the real entries x of the rows that `keep` keeps."""
        mask = self.real & keep[self.row]
        return function(x, segment_ids=self.row, num_segments=self.count, mask=mask)


def refuse_rows(name, right, keep, classes, listed):
    """Raise if a kept row has no support. listed(row): its classes, as text. Only where the host may read values."""
    if check.may_look(keep) and check.may_look(right) and bool((keep & ~right).any()):
        row = (keep & ~right).flatten().nonzero()[0].item()
        raise ValueError(
            f"{name}: support of row {row} has {listed(row)}: each kept row needs classes in [0, {classes}), none of "
            "them twice"
        )


def _listed(offsets, classes, row):
    some = classes[max(0, int(offsets[row])) : max(0, int(offsets[row + 1]))].tolist()
    return f"classes {some[:8]}"[:-1] + (", ...]" if len(some) > 8 else "]")


def kept_rows(target, mask, ignore_index, classes):
    """Bool: the rows that the mask and the target keep; and the class of each, 0 where it is not kept."""
    index = target.long()
    keep = (index != ignore_index) & (index >= 0) & (index < classes)
    keep = keep if mask is None else keep & mask
    return keep, torch.where(keep, index, 0)


def of_rows(name, support, outside, target, mask, ignore_index):
    """Returns (the mask of the rows to compute, how many kept rows have a target outside of their support).
    support: (*rows, C), bool."""
    classes = support.shape[-1]
    keep, index = kept_rows(target, mask, ignore_index, classes)
    # (the largest byte: on the CPU, aten's any() of bools takes ten times as long)
    right = support.view(torch.uint8).amax(-1) > 0 if classes else support.any(-1)
    refuse_rows(name, right, keep, classes, lambda row: "no class")
    keep = keep & right
    inside = support.gather(-1, index.unsqueeze(-1)).squeeze(-1) if classes else keep
    return keep & inside if outside == "mask" else keep, (keep & ~inside).sum()


def restrict(logits, support):
    """The logits (*rows, C), with -inf at classes that do not exist."""
    return masked_fill(logits, ~support, -INF)


def of_logits(name, support, outside, logits, target, mask, ignore_index, temperature, softcap):
    """`of_entries` of logits (*rows, C)."""
    flat = logits.reshape(-1)

    def gather(entries, exists):
        return torch.where(exists, flat[entries.index], 0)  # select before arithmetic: NaN * 0 is NaN

    options = target, mask, ignore_index, temperature, softcap
    return of_entries(name, support, outside, gather, flat[:0].sum(), logits.shape[-1], *options)


def of_entries(name, support, outside, gather, nothing, size, target, mask, ignore_index, temperature, softcap):
    """Returns (log probability, entropy and logsumexp of each row: (3, *rows); how many kept rows have a target outside
    of their support), with a support in CSR form, of rows of `size` classes.

    gather(entries, exists): the logit of each entry, 0 where it does not exist. nothing: 0, but in the graph."""
    rows, compute = target.shape, compute_dtype(nothing.dtype)
    entries = Entries(*support, rows.numel(), size)
    keep, index = (x.reshape(-1) for x in kept_rows(target, mask, ignore_index, size))
    refuse_rows(name, entries.right, keep, size, lambda row: _listed(*support, row))
    keep = keep & entries.right
    if not len(entries.row) or not rows.numel() or not size:  # no row has a class: all are masked out
        return (nothing.to(compute) + torch.zeros((3, *rows), device=nothing.device)).to(compute), keep.sum()
    exists = entries.real & keep[entries.row]
    x = shaped(wide_on_cpu(gather(entries, exists).to(compute)), temperature, softcap)

    def total(x):
        return entries.reduce(segment_sum, x, keep)

    own = exists & (entries.classes == index[entries.row])
    inside = total(own.to(x.dtype)) > 0
    count = (keep & ~inside).sum()
    infinite = x.detach() == INF
    certain = total((own & infinite).to(x.dtype)) == 1  # +inf at the row's class alone: its results are limits
    certain = certain & (total(infinite.to(x.dtype)) == 1) & (total(x.detach().isnan().to(x.dtype)) == 0)
    x = torch.where(certain[entries.row], 0, x)
    maximum = entries.reduce(segment_max, x.detach(), keep)
    exp_sum = torch.where(keep, total((x - maximum[entries.row]).exp()), 1)
    log_sum = maximum + exp_sum.log()
    log_p = x - log_sum[entries.row]
    p = log_p.exp()
    entropy = -total(p * torch.where(p == 0, 0, log_p))
    log_prob = torch.where(inside, total(torch.where(own, x, 0)), -INF) - log_sum
    results = [torch.where(certain, limit, row) for row, limit in ((log_prob, 0), (entropy, 0), (log_sum, INF))]
    keep = keep & inside if outside == "mask" else keep
    return torch.where(keep, torch.stack(results), 0).to(compute).reshape(3, *rows), count
