"""A run keeps an entry of each tensor; several ranks' entries become one."""

import dataclasses
import math

import torch

from safeops.debug.compare.projection import LARGEST, SQUARES, STATS, SUM

FORWARD, BACKWARD, PARAMETERS = PHASES = ("forward", "backward", "parameters")
RESULT = "(result)"  # in place of a module's name: what the step returned


@dataclasses.dataclass
class Entry:
    """The sketch of a module's output (phase "forward"), of its gradient ("backward"), or of the gradient of one of its
    parameters ("parameters").

    call: how many calls of the module came before. path: "" for a tensor, "[0]" or "['mask']" inside a structure, or
    the parameter's name. stats: the numbers of `projection.sketch_of`. of_all: the same for the tensors of all ranks,
    one after the other along the first dim, or None.
    """

    phase: str
    module: str
    kind: str  # the module's class
    call: int
    path: str
    shape: tuple
    dtype: str
    autocast: str | None  # the dtype of autocast, where it was on
    terms: int  # of the sums behind each of its numbers, as far as the module's parameters show
    stats: list
    of_all: list | None = None

    @property
    def key(self):
        return self.phase, self.module, self.call, self.path

    @property
    def norm(self):
        return math.sqrt(self.stats[SQUARES])

    @property
    def mean(self):
        return self.stats[SUM] / max(1, math.prod(self.shape))

    @property
    def nonfinite(self):
        return self.stats[:3]  # counts of NaN, inf, -inf

    def whole(self, ranks):
        """The entry of the tensors of all ranks together: with the batch's size of all."""
        return dataclasses.replace(self, shape=(self.shape[0] * ranks, *self.shape[1:]), stats=self.of_all)


def label(module, kind):
    """'blocks.1.attn (Attention)'; the class alone for the model itself."""
    return f"{module} ({kind})" if module and kind else module or kind


def together(entries):
    """One list of entries from those of each rank: [(entry, its part of the whole projection), ...] a rank.

    stats: the mean over the ranks, as DDP takes it of gradients. of_all: the ranks' tensors one after the other. A
    rank's loss is a mean over its part of the batch, and the ranks' mean is what is trained: so gradients are divided
    by the number of ranks there. An entry that not all ranks have is left out.
    """
    ranks = len(entries)
    others = [{entry.key: (entry, part) for entry, part in rank} for rank in entries]
    results = []
    for first, _ in entries[0]:
        of_key = [rank.get(first.key) for rank in others]
        if None in of_key:
            continue
        stats = torch.tensor([entry.stats for entry, _ in of_key], dtype=torch.float64, device="cpu")
        of_all = None
        if first.phase != PARAMETERS and first.shape and all(entry.shape == first.shape for entry, _ in of_key):
            of_all = stats.sum(0)
            of_all[LARGEST] = stats[:, LARGEST].amax()
            of_all[STATS:] = torch.tensor([part for _, part in of_key], dtype=torch.float64, device="cpu").sum(0)
            if first.phase == BACKWARD:
                of_all[[LARGEST, SUM]] /= ranks
                of_all[SQUARES] /= ranks**2
                of_all[STATS:] /= ranks
            of_all = of_all.tolist()
        mean = stats.mean(0)
        if not torch.equal(stats[:, STATS:], stats[:1, STATS:].expand(ranks, -1)):
            mean[SQUARES] = mean[STATS:].square().sum()  # a mean of different tensors: its length by its projection
        results.append(dataclasses.replace(first, stats=mean.tolist(), of_all=of_all))
    return results
