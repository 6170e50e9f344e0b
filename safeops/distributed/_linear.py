"""A rank's part of a linear layer and of its rows, for losses that go through a linear layer's logits in chunks."""

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from safeops.distributed._layout import Uncovered, local, share_rows, shared


class LayerPart:
    """A rank's part of a call: rows, and classes of the linear layer.

    A mesh dim shards the rows, the classes or neither. If it shards both (sequence parallel), the rows are gathered.
    Classes stay sharded along the first mesh dim that shards them; along others, and if their shards are strided
    (FSDP's), they are gathered.

    x: (rows, D). linear_weight: (local classes, D). linear_bias: (local classes,) or None. first: the index of the
    rank's first class. part: the mesh dim that shards the classes, or None. shape: of all rows.
    """

    def __init__(self, input, linear_weight, linear_bias, teacher=()):
        """teacher: pairs (DTensor, its dim of classes), whose shards count as the layer's do."""
        sharded = (linear_weight, 0), *teacher
        if not all(isinstance(x, DTensor) for x in (input, *(x for x, _ in sharded))):
            raise Uncovered
        self.mesh, self.shape = input.device_mesh, input.shape[:-1]
        if self.mesh.get_coordinate() is None:
            raise Uncovered
        dims = range(self.mesh.ndim)
        parts = [i for i in dims if any(_is_shard(x.placements[i], dim) for x, dim in sharded)]
        self.part, self.everywhere = parts[0] if parts else None, [Replicate()] * self.mesh.ndim
        self.rows = [
            p if type(p) is Shard and p.dim < input.dim() - 1 and i != self.part else Replicate()
            for i, p in enumerate(input.placements)
        ]
        x = local(input, input.shape, self.rows)
        self.local_rows, self.x = x.shape[:-1], _flat(x)
        self.linear_weight, self.linear_bias = self.of_layer(linear_weight), self.of_layer(linear_bias)
        self.first, classes = 0, len(linear_weight)
        if self.part is not None:
            self.first = min(classes, -(-classes // self.mesh.size(self.part)) * self.mesh.get_local_rank(self.part))

    def by_class(self, placements, dim):
        """The placements of a tensor whose dim `dim` has the classes."""
        return [Shard(dim) if i == self.part else p for i, p in enumerate(placements)]

    def of_layer(self, x):
        """The rank's classes of a tensor (C, ...), or None."""
        return None if x is None else local(x, x.shape, self.by_class(self.everywhere, 0))

    def of_rows(self, x):
        """The rank's rows of a tensor (*rows,) as one dim, or None."""
        return None if x is None else local(x, self.shape, self.rows).reshape(-1)

    def vectors(self, x, with_classes=False):
        """The rank's rows of a tensor (*rows, E), and of its last dim the rank's classes if it has them: (rows, E)."""
        placements = self.by_class(self.rows, x.dim() - 1) if with_classes else self.rows
        return _flat(local(x, x.shape, placements))

    def gradient_of_rows(self, grad):
        """The rank's rows of an upstream gradient (*rows,) or (k, *rows): (rows,) or (k, rows)."""
        more = grad.dim() - len(self.shape)
        placements = [Shard(p.dim + more) if p.is_shard() else p for p in self.rows]
        return local(grad, grad.shape, placements).reshape(*grad.shape[:more], self.x.shape[0])

    def share(self, result):
        """A result (rows,) or (k, rows), or an empty one that the op left out, as a DTensor."""
        if result.shape[-1:] != self.x.shape[:1]:
            return shared(result, self.mesh, result.shape, self.everywhere)
        return share_rows(result.view(*result.shape[:-1], *self.local_rows), self.mesh, self.shape, self.rows)

    def gradients(self, compute, layer, needs):
        """The gradients of `layer`, (input, linear_weight, linear_bias), laid out as they are.

        compute(finish=): their terms on this rank. `finish` adds up those of the input over the ranks."""
        of_rows = [Partial() if i == self.part else p for i, p in enumerate(self.rows)]
        of_classes = self.by_class([Partial() if p.is_shard() else p for p in self.rows], 0)

        def added(d, like, placements):
            """Add up the ranks' terms of a gradient and lay it out as its operand `like`; the host does not wait."""
            strides = torch.empty(like.shape, device="meta").stride()
            d = DTensor.from_local(d, self.mesh, placements, run_check=False, shape=like.shape, stride=strides)
            return d.redistribute(placements=[Replicate() if p.is_partial() else p for p in like.placements])

        def finish(d_input):
            return added(d_input.view(*self.local_rows, self.x.shape[1]), layer[0], of_rows)

        d_input, *others = compute(finish=finish)
        others = [added(d, x, of_classes) if need else None for d, x, need in zip(others, layer[1:], needs[1:])]
        return [d_input if needs[0] else None, *others]


def _is_shard(placement, dim):
    return type(placement) is Shard and placement.dim == dim


def _flat(x):
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])
