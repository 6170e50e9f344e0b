"""Stand-ins for tensors whose sizes and strides are symbols (trace.py)."""

from math import prod

import torch


class Sized:
    """A tensor of given sizes and strides, without elements, with those methods of torch.Tensor that launchers call."""

    def __init__(self, shape, steps, dtype, device, beyond=0):
        self.shape, self.steps, self.dtype, self.device = shape, steps, dtype, device
        self.beyond = beyond  # the address modulo 16, in bytes

    @classmethod
    def contiguous(cls, shape, dtype, device):
        return cls(shape, tuple([prod([max(n, 1) for n in shape[d + 1 :]]) for d in range(len(shape))]), dtype, device)

    def view(self, shape, steps):
        return Sized(tuple(shape), tuple(steps), self.dtype, self.device, self.beyond)

    def stride(self, d=None):
        return self.steps if d is None else self.steps[d]

    def dim(self):
        return len(self.shape)

    def numel(self):
        return prod(self.shape)

    def element_size(self):
        return self.dtype.itemsize

    def is_floating_point(self):
        return self.dtype.is_floating_point

    def get_device(self):
        return self.device.index

    def data_ptr(self):
        return self.beyond

    def is_contiguous(self):
        return not self.numel() or self._fills(range(self.dim()))

    def _fills(self, order):
        """True if the elements follow each other in memory, without gaps, the last dimension of `order` fastest."""
        count = 1
        for d in reversed(order):
            if self.shape[d] != 1:
                if self.steps[d] != count:
                    return False
                count = count * self.shape[d]
        return True

    def unsqueeze(self, d):
        d %= self.dim() + 1
        step = self.shape[d] * self.steps[d] if d < self.dim() else 1
        return self.view((*self.shape[:d], 1, *self.shape[d:]), (*self.steps[:d], step, *self.steps[d:]))

    def squeeze(self, d):
        if self.shape[d] != 1:
            return self
        return self.view(self.shape[:d] + self.shape[d + 1 :], self.steps[:d] + self.steps[d + 1 :])

    def movedim(self, source, destination):
        order = list(range(self.dim()))
        order.insert(destination, order.pop(source))
        return self.view((self.shape[d] for d in order), (self.steps[d] for d in order))

    def expand(self, shape):
        steps, lead = [], len(shape) - self.dim()
        for d in reversed(range(len(shape))):
            if d >= lead:
                size, step = self.shape[d - lead], self.steps[d - lead]
                if size != shape[d] and size != 1:  # (a trace notes the comparison of symbols)
                    raise ValueError(f"shape {self.shape} does not expand to {shape}")
            else:
                size, step = 1, shape[d + 1] * steps[0] if steps else 1
            steps.insert(0, 0 if size == 1 and shape[d] != 1 else step)
        return self.view(shape, steps)

    def __getitem__(self, where):
        if where == 0:
            return self.view(self.shape[1:], self.steps[1:])
        shape, steps, d = [], [], 0
        for part in where:  # None adds a dimension, slice(None) keeps one
            old = part is not None
            if old and part != slice(None):
                raise NotImplementedError(f"index {part}")
            shape.append(self.shape[d] if old else 1)
            steps.append(self.steps[d] if old else self.shape[d] * self.steps[d] if d < self.dim() else 1)
            d += old
        return self.view(shape, steps)

    def new_empty(self, size, dtype=None):
        return Sized.contiguous((size,), dtype or self.dtype, self.device)

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        if function is not torch.empty_like:
            raise NotImplementedError(function.__name__)
        (x,), dtype = arguments, (options or {}).get("dtype")
        return Sized(x.shape, x.steps if x._dense() else x._packed(), dtype or x.dtype, x.device)

    def _dense(self):
        order = sorted(range(self.dim()), key=self.steps.__getitem__, reverse=True)
        return self.is_contiguous() or self._fills(order)

    def _packed(self):
        """Strides without gaps, with the dimensions in this tensor's memory order, as torch.empty_like has them."""
        order = list(range(self.dim()))[::-1]  # nearest in memory first
        for end in range(1, len(order)):  # insertion sort, as in torch: stride 0 equals every other
            at = end
            for before in range(end - 1, -1, -1):
                sign = self._farther(order[before], order[at])
                if sign < 0:
                    break
                if sign:
                    order[before], order[at] = order[at], order[before]
                    at = before
        steps, count = [0] * len(order), 1
        for d in order:
            steps[d] = count
            count = count * max(self.shape[d], 1)
        return tuple(steps)

    def _farther(self, a, b):
        """1 where dimension a lies farther apart in memory than b, -1 where nearer, 0 where torch leaves it open."""
        if self.steps[a] == 0 or self.steps[b] == 0:
            return 0
        if self.steps[a] != self.steps[b]:
            return 1 if self.steps[a] > self.steps[b] else -1
        return 1 if self.shape[a] > self.shape[b] else 0
