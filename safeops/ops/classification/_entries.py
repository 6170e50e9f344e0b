"""The entries of a support in CSR form: a class of a row each. Softmax, and sums over a row, are over its entries.

The logits of the entries are gathered, and summed by rows: torch ops on as many elements as there are classes in all
supports.
"""

import torch

from safeops.core.dtypes import compute_dtype, wide_on_cpu
from safeops.ops.classification._logits import is_zero, shaped
from safeops.ops.classification._support import INF, kept_rows, refuse_rows
from safeops.ops.reductions.segment_max import segment_max
from safeops.ops.reductions.segment_sum import segment_sum


class Entries:
    """The entries of the rows that `keep` (*rows) keeps, of `size` classes each.

    row, classes: (entries,), 0 where an entry is not real: beyond the offsets, or a class out of range. exists:
    (entries,), True where an entry is real and its row is kept. keep: (count,), without the rows that have no class,
    one twice or one out of range; they raise where the host may look."""

    def __init__(self, name, support, keep, size):
        offsets, classes = (x.long() for x in support)
        keep, self.count = keep.reshape(-1), keep.numel()
        count = self.count
        if not count or not size:  # there is nothing to gather from
            classes = classes[:0]
        place = torch.arange(classes.shape[0], device=classes.device)
        row = torch.searchsorted(offsets[1:].contiguous(), place, right=True)
        of_row = (row < count) & (place >= offsets[0])
        real = of_row & (classes >= 0) & (classes < size)
        self.row, self.classes = (torch.where(real, x, 0) for x in (row, classes))
        index = self.row * size + self.classes
        sorted_index = torch.where(real, index, -1 - place).sort().values
        twice = sorted_index[1:] == sorted_index[:-1]
        wrong = offsets.new_zeros(count + 1, dtype=torch.bool)  # (what is right is written to the last element)
        wrong = wrong.scatter(0, torch.where(of_row & ~real, row, count), True)
        wrong = wrong.scatter(0, torch.where(twice, sorted_index[1:] // max(size, 1), count), True)[:-1]
        within = (offsets[:-1] >= 0) & (offsets[1:] <= classes.shape[0])
        right = (offsets.diff() > 0) & within & ~wrong
        refuse_rows(name, right, keep, size, lambda row: _listed(offsets, classes, row))
        self.keep = keep & right
        self.exists = real & self.keep[self.row]

    def gather(self, x):
        """The elements of x (*rows, size), in any layout, at the entries; 0 where one does not exist."""
        place, index = self.row, [self.classes]
        for length in reversed(x.shape[:-1]):  # (no reshape, which copies all of a strided x)
            index.insert(0, place % length)
            place = place // length
        return torch.where(self.exists, x[tuple(index)], 0)  # select before arithmetic: NaN * 0 is NaN

    def total(self, x):
        """The sum of x (entries,) over each row: (count,)."""
        return segment_sum(x, segment_ids=self.row, num_segments=self.count, mask=self.exists)

    def log_softmax(self, x):
        """Returns (log softmax of x (entries,) over each row, logsumexp of each row)."""
        maximum = segment_max(x.detach(), segment_ids=self.row, num_segments=self.count, mask=self.exists)
        x = x - maximum[self.row]
        log_total = torch.where(self.keep, self.total(x.exp()), 1).log()
        return x - log_total[self.row], maximum + log_total

    def own(self, class_index):
        """Bool: the entries of their row's class, class_index (*rows); and the rows whose class is in their support."""
        own = self.exists & (self.classes == class_index.reshape(-1)[self.row])
        return own, self.total(own.float()) > 0

    def count_outside(self, inside, outside):
        """How many rows are not `inside`. With outside="mask" they and their entries are left out from here on."""
        count = (self.keep & ~inside).sum()
        if outside == "mask":
            self.keep = self.keep & inside
            self.exists = self.exists & self.keep[self.row]
        return count

    def certain(self, x, own):
        """Bool, (count,): True for a row in which the logit x of its class alone is +inf: its results are limits."""
        infinite, nothing = x.detach() == INF, x.detach().isnan()
        own, others, nothing = (self.total(t.float()) for t in (own & infinite, infinite & ~own, nothing))
        return (own == 1) & (others == 0) & (nothing == 0)


def _listed(offsets, classes, row):
    some = classes[max(0, int(offsets[row])) : max(0, int(offsets[row + 1]))].tolist()
    return f"classes {some[:8]}"[:-1] + (", ...]" if len(some) > 8 else "]")


def log_probs(name, support, outside, gather, size, target, mask, ignore_index, temperature, softcap):
    """Returns (log probability, entropy and logsumexp of each row: (3, *rows); how many kept rows have a target outside
    of their support), of rows of `size` classes. gather(entries): the logits of the entries, 0 where one does not
    exist."""
    keep, index = kept_rows(target, mask, ignore_index, size)
    entries = Entries(name, support, keep, size)
    own, inside = entries.own(index)
    count = entries.count_outside(inside, outside)  # before the gather: rows that are left out may hold NaN
    x = gather(entries)
    compute = compute_dtype(x.dtype)
    x = shaped(wide_on_cpu(x.to(compute)), temperature, softcap)
    keep, total = entries.keep, entries.total
    certain = entries.certain(x, own)
    x = torch.where(certain[entries.row], 0, x)
    log_p, log_sum = entries.log_softmax(x)
    p = log_p.exp()
    entropy = -total(p * torch.where(p == 0, 0, log_p))
    log_prob = torch.where(inside, total(torch.where(own, x, 0)), -INF) - log_sum
    results = [torch.where(certain, limit, row) for row, limit in ((log_prob, 0), (entropy, 0), (log_sum, INF))]
    return torch.where(keep, torch.stack(results), 0).to(compute).reshape(3, *target.shape), count


def losses(entries, x, class_index, weights, weight, label_smoothing, z_loss):
    """The cross entropy of each row, (count,), as `_losses` of cross_entropy.py has it for all classes; inf where the
    row's class is not in its support.

    x: (entries,) logits, 0 where an entry does not exist. weights: (*rows), the weight of each row's class, or None.
    weight: (C,), or None."""
    own, inside = entries.own(class_index)
    certain = entries.certain(x, own) & (label_smoothing == 0) & (z_loss == 0)
    x = torch.where(certain[entries.row], 0, x)
    log_p, log_sum = entries.log_softmax(x)
    loss = log_sum - torch.where(inside, entries.total(torch.where(own, x, 0)), -INF)
    loss = loss if weights is None else loss * weights.reshape(-1)
    if not is_zero(label_smoothing):
        exists = x != -INF
        terms = torch.where(exists, log_p, 0)
        terms = terms if weight is None else terms * weight[entries.classes]
        even = entries.total(terms) / torch.where(entries.keep, entries.total(exists.to(x.dtype)), 1)
        loss = (1 - label_smoothing) * loss - label_smoothing * even
    if not is_zero(z_loss):
        loss = loss + z_loss * log_sum.square()
    return torch.where(entries.keep & ~certain, loss, 0)
