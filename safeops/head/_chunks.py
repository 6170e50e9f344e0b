"""A head and its loss in chunks of the rows, with the head's own forward and backward.

(1) The gradients of a mean or sum are computed with the loss: the slope of the reduction at each row is known before.
    `WithGradients` only multiplies them by the upstream gradient.
(2) With "none" and other upstream gradients for each row, and in fp16, whose range does not hold slopes of any scale,
    `Recomputed` runs the head again.

Nothing of a chunk is left when the next begins, so that two chunks of logits exist at most: logits and slopes.
"""

import torch
from torch.compiler import is_compiling

from safeops.core.private_torch import (
    caches_parametrizations,
    forward_ad,
    is_exporting,
    next_sequence,
    transforms_active,
)
from safeops.core.route import PLAIN
from safeops.head import _functions
from safeops.head._graph import SHARDED, captured, ends
from safeops.head._loss import NAME
from safeops.head._rows import select, validated, whole
from safeops.head._sums import Sums, edge_of, pull
from safeops.head._surroundings import Surroundings, own_saved_tensors

PARTS = 16  # a chunk has this share of all rows,
CHUNK = 2**20  # or this many logits,
FEWEST = 256, 1024  # or this many rows (CPU, GPU): with fewer, sums of the weight's gradient take longer than products


def takes(hidden):
    """True if the call can be cut into chunks."""
    if is_compiling() or is_exporting() or transforms_active() or forward_ad._current_level >= 0:
        return False
    # (a cached parametrization belongs to the graph of the chunk that made it)
    return type(hidden) in PLAIN and not caches_parametrizations()


class Chunks:
    """One call: how its rows are cut, and the tensors with gradients that its head uses."""

    def __init__(self, call, loss, hidden):
        self.call, self.loss, self.parts, self.tensors, self.begin = call, loss, [], {}, next_sequence()
        self.surroundings = Surroundings(hidden.device)
        self.needs_hidden = torch.is_grad_enabled() and hidden.requires_grad
        self.linear = False  # True if the upstream gradient of each row's loss is known before

    def run(self, hidden):
        """Returns (the rows' results, or the reduced loss; other results without gradient); True if it is reduced."""
        rows, first = len(hidden), max(-(-len(hidden) // PARTS), FEWEST[hidden.is_cuda])
        self.parts = [slice(0, min(rows, first))]
        sums = results = slope = None
        with own_saved_tensors():
            for part in self.parts:  # (begin_rows adds to them)
                x, logits = self.logits(hidden, part)
                if not self.find(x, logits):
                    break
                if sums is None:
                    self.begin_rows(hidden, logits)
                    sums = Sums(many=len(self.parts) > 1)
                z = logits.detach().requires_grad_(self.linear and logits.requires_grad)
                with torch.set_grad_enabled(self.linear):
                    of_part = self.loss.rows(z, part, {})
                results = results or [t.new_empty((*t.shape[:-1], rows)) for t in of_part]
                for t, of_rows in zip(results, of_part):
                    t[..., part] = of_rows.detach()
                if z.requires_grad:
                    slope = self.loss.slope(of_part[0]) if slope is None else slope
                    (slopes,) = torch.autograd.grad(of_part[0], z, slope[part])
                    edge = edge_of(logits)
                    del z, logits, of_part, of_rows  # free the logits
                    self.pull(sums, edge, slopes, hidden, x, part)
                    del slopes, edge
                z = logits = of_part = of_rows = x = None
            else:
                return self.attach(hidden, results, sums)
        self.surroundings.rewind()
        return whole(self.call, self.loss, hidden, {}), False

    def logits(self, hidden, part):
        """Returns (the rows of a chunk as a leaf, their logits)."""
        x = select(self.loss.keep, hidden.detach(), part).detach().requires_grad_(self.needs_hidden)
        return x, validated(self.call(x), x)

    def begin_rows(self, hidden, logits):
        """Set what follows from the first chunk: the classes, the other chunks, and whether slopes are known before."""
        self.loss.begin(logits)
        done, rows = len(logits), len(hidden)
        size = max(done, CHUNK // max(1, logits.shape[1]))
        many = max(1, -(-(rows - done) // max(1, size)))
        size = max(1, -(-(rows - done) // many))
        self.parts += [slice(first, min(first + size, rows)) for first in range(done, rows, size)]
        fp16 = any(t.dtype == torch.float16 for t in (hidden, logits, *self.tensors.values()))
        self.linear = logits.requires_grad and not fp16 and self.loss.is_linear()

    def find(self, x, logits):
        """Add the tensors that the head of a chunk uses. False if one is made outside of the call in a way that its
        gradient cannot be cut off there."""
        if not logits.requires_grad:
            return True
        leaves, older, names = ends(edge_of(logits), self.begin)
        if SHARDED in names:
            raise RuntimeError(
                f"{NAME}: head calls a module of fully_shard that could not be found in it, so that each chunk would "
                "reduce its gradients: pass that module as head"
            )
        leaves.pop(id(x), None)
        self.tensors.update(leaves)
        known = {(t.grad_fn, t.output_nr) for t in self.tensors.values() if t.grad_fn is not None}
        if older := [edge for edge in older if edge not in known]:
            with self.surroundings.again():
                tensors = captured(lambda: self.call(x), older, self.tensors)
            if tensors is None:
                return False
            self.tensors.update((id(t), t) for t in tensors)
        return True

    def pull(self, sums, edge, slopes, hidden, x, part):
        inputs = [*[x] * self.needs_hidden, *self.tensors.values()]
        grads = pull([edge], [slopes], inputs)
        if self.needs_hidden:
            sums.put(hidden, part, grads[0])
        for t, d in zip(inputs[self.needs_hidden :], grads[self.needs_hidden :]):
            sums.add(t, d)

    def attach(self, hidden, results, sums):
        """The results, with a node that returns the gradients."""
        tensors, operands = list(self.tensors.values()), self.loss.tensors()
        needs = self.needs_hidden or tensors or operands
        self.tensors = {}
        if self.linear:
            value = self.loss.finish(*results)
            gradients = [sums.hidden, *(sums.shared.get(id(t)) for t in tensors)]
            return (_functions.WithGradients.apply(self, (value,), gradients, hidden, *tensors),), True
        if not torch.is_grad_enabled() or not needs:
            return tuple(results), False
        arguments = self, tuple(results), tuple(operands), hidden, *operands.values(), *tensors
        return _functions.Recomputed.apply(*arguments), False

    def gradients(self, grad, hidden, operands, tensors):
        """The gradients from an upstream gradient of each row: the head runs again, chunk by chunk."""
        sums = Sums(many=len(self.parts) > 1)
        self.tensors = {id(t): t for t in tensors}
        with own_saved_tensors(), torch.enable_grad(), self.surroundings.again():
            for part in self.parts:
                x, logits = self.logits(hidden, part)
                z = logits.detach().requires_grad_(logits.requires_grad)
                copies = {
                    key: (t[part] if self.loss.is_cut(key) else t).detach().requires_grad_()
                    for key, t in operands.items()
                }
                results = self.loss.rows(z, part, copies)[0]
                inputs = [*[z] * z.requires_grad, *copies.values()]
                grads = pull([results], [grad[..., part]], inputs)
                for (key, t), d in zip(operands.items(), grads[z.requires_grad :]):
                    if self.loss.is_cut(key):
                        sums.put_operand(key, t, part, d)
                    else:
                        sums.add(t, d)
                if z.requires_grad:
                    edge, slopes = edge_of(logits), grads[0]
                    del z, logits, results, inputs, grads
                    self.pull(sums, edge, slopes, hidden, x, part)
                z = logits = results = inputs = grads = slopes = edge = None
        return sums
