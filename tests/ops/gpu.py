"""The records' ops as calls on CUDA tensors of any size, for the GPU tests."""

import dataclasses

import torch

import safeops


@dataclasses.dataclass
class Case:
    """An op bound to its arguments. leaves: the differentiable inputs. call: (*leaves) -> the value."""

    call: object
    leaves: tuple

    def forward_backward(self, upstream=None):
        """Returns (value, gradients). The upstream gradient is all ones if None."""
        leaves = [x.detach().requires_grad_() for x in self.leaves]
        value = self.call(*leaves)
        upstream = torch.ones_like(value) if upstream is None else upstream
        return value.detach(), torch.autograd.grad(value, leaves, upstream)


def numbers(n, dtype, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(n, generator=generator, device="cuda", dtype=torch.float32).to(dtype)


def keep(n, seed):
    generator = torch.Generator("cuda").manual_seed(1000 + seed)
    return torch.rand(n, generator=generator, device="cuda") < 0.7


def indices(n, size, seed):
    """Returns n indices, some out of range on either side. One in seven is 3: long and short runs of duplicates."""
    generator = torch.Generator("cuda").manual_seed(2000 + seed)
    index = torch.randint(-size // 20 - 1, size + size // 20 + 1, (n,), generator=generator, device="cuda")
    return torch.where(torch.arange(n, device="cuda") % 7 == 0, min(3, size - 1), index)


def masked(name, scale=1, keyword="mask", **options):
    """Returns a function (n, dtype, seed) -> Case for an op of one tensor and a mask. scale: factor of the numbers."""

    def make(n, dtype, seed):
        mask, function = keep(n, seed), getattr(safeops, name)
        return Case(lambda x: function(x, **{keyword: mask}, **options), (numbers(n, dtype, seed) * scale,))

    return make
