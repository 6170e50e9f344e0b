"""Lists of tensors of every dtype, layout and kind of value, for the scans over lists."""

from types import SimpleNamespace

import torch

from safeops.ops.lists import clip_grad_norm_, grad_norm, health

scans = SimpleNamespace(**{**vars(clip_grad_norm_), **vars(grad_norm), **vars(health)})

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
ODD = (0.0, -0.0, 2.0**-14, 2.0**-25, 2.0**-26, 1e-40, 1e-300, 6e4, -3e38, 1e300, torch.inf, -torch.inf, torch.nan)


def values(*shape, dtype, seed=0, odd=0.1):
    """Returns random magnitudes from 1e-9 to 1e3; a share `odd` of the elements has values special in some dtype."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g, dtype=torch.float64)
    x = x * 10 ** (torch.rand(shape, generator=g, dtype=torch.float64) * 12 - 9)
    special = torch.tensor(ODD, dtype=torch.float64)[torch.randint(len(ODD), shape, generator=g)]
    return torch.where(torch.rand(shape, generator=g) < odd, special, x).to(dtype)


def layouts(dtype, odd=0.1):
    """Returns a tensor for each layout that a member of a list can have."""
    x = lambda *shape: values(*shape, dtype=dtype, seed=len(shape) + shape[0] if shape else 0, odd=odd)  # noqa: E731
    return [
        x(5, 7),
        x(),
        x(0, 3),
        x(5000),
        x(3001)[1:],  # its first element is not aligned
        x(30, 41).t(),
        x(2, 3, 5, 6).to(memory_format=torch.channels_last),
        x(60, 6)[::3, ::2],
        x(2, 5, 3, 4).permute(2, 0, 3, 1),
        x(8, 1, 9)[:, 0],
    ]


def expanded(dtype, odd=0.1):
    """Returns tensors with elements that share memory, which may be read but not written."""
    x = values(40, 1, dtype=dtype, odd=odd)
    return [x.expand(40, 50), x[0, 0].expand(7), x.reshape(40)[:6].expand(3, 6).t()]


def many(dtype, odd=0.1):
    """Returns more tensors than one launch takes, some of them empty."""
    return [values(i % 7 * 5, dtype=dtype, seed=i, odd=odd) for i in range(230)]


def finite(tensors):
    return [x.nan_to_num(0.0, 1000.0, -1000.0) for x in tensors]


def writable(tensors):
    """Returns writable copies with the same strides."""
    return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x) for x in tensors]
