"""A tensor as a few numbers: counts, sums, its largest magnitude, and a random projection to 64 numbers.

The projection is the same on each device, dtype and torch version, and needs no stored matrix. The elements are taken
in logical order as rows of 64. A hash of the row's number gives 64 random signs and one rotation: element i of row r is
multiplied by its sign and added to number (i + rotation) mod 64. So each element is read once, whatever the 64.

It is linear, and keeps lengths: for the difference d of two tensors, E |Pd|^2 = |d|^2 with a relative standard
deviation of at most sqrt(2 / 64) where d has many elements, and exactly where it has one. The length of a difference is
thus known from two sketches, to about an eighth, without either tensor (Charikar, Chen, Farach-Colton, 2002).
"""

import torch

SIZE = 64  # numbers of a projection
NAN, POSITIVE_INF, NEGATIVE_INF, ZEROS, LARGEST, SUM, SQUARES, STATS = range(8)  # indices in a sketch; then projection
_BLOCK = 1 << 20  # elements at a time: bounds the memory
_GOLDEN, _C1, _C2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of splitmix64 (Steele et al., 2014)


def sketch_of(x, start=0):
    """Returns (STATS + SIZE,) numbers, float64 (float32 on devices without it), on the device of x; nothing waits.

    x: a floating or complex tensor of any shape and layout. NaN and inf are counted, and are 0 in all that follows.
    start: index of the first element in the whole tensor, of which x is a part: the sketches of parts can be added.
    """
    x = x.detach().resolve_conj()
    flat = (torch.view_as_real(x) if x.is_complex() else x).resolve_neg().reshape(-1)
    wide = torch.float32 if flat.device.type == "mps" else torch.float64
    finite = flat.isfinite()
    counts = [flat.isnan().sum(), (flat == torch.inf).sum(), (flat == -torch.inf).sum(), (flat == 0).sum()]
    stats = torch.zeros(STATS + SIZE, dtype=wide, device=flat.device)
    stats[:LARGEST] = torch.stack(counts)
    start *= 2 if x.is_complex() else 1
    for begin in range(0, flat.numel(), _BLOCK):
        block = torch.where(finite[begin : begin + _BLOCK], flat[begin : begin + _BLOCK], 0).to(wide)
        stats[LARGEST] = torch.maximum(stats[LARGEST], block.abs().amax())
        stats[SUM] += block.sum()
        stats[SQUARES] += block.square().sum()
        stats[STATS:] += _project(block, start + begin)
    return stats


def signs(count, device):
    """`count` random signs as int64 numbers, the same on each device."""
    rows = torch.arange(-(-count // SIZE), dtype=torch.int64, device=device)
    return (2 * _bits(rows, 1) - 1).view(-1)[:count]


def _project(block, start):
    """The part of the projection that the elements [start, start + len(block)) of a tensor have."""
    before = start % SIZE
    after = -(before + len(block)) % SIZE
    values = torch.nn.functional.pad(block, (before, after)).view(-1, SIZE)
    rows = torch.arange(len(values), dtype=torch.int64, device=block.device) + start // SIZE
    places = torch.arange(SIZE, dtype=torch.int64, device=block.device)
    rotated = (places + (_hash(rows, 2) & (SIZE - 1))[:, None]) & (SIZE - 1)
    return torch.where(_bits(rows, 1).bool(), values, -values).gather(1, rotated).sum(0)


def _bits(rows, seed):
    places = torch.arange(SIZE, dtype=torch.int64, device=rows.device)
    return (_hash(rows, seed)[:, None] >> places) & 1


def _hash(rows, seed):
    """64 random bits for each row, by splitmix64 in int64: products wrap, and a shift must not copy the sign."""
    z = rows * _signed(_GOLDEN) + _signed(seed * _C1 % 2**64)
    z = (z ^ _shifted(z, 30)) * _signed(_C1)
    z = (z ^ _shifted(z, 27)) * _signed(_C2)
    return z ^ _shifted(z, 31)


def _shifted(z, by):
    return (z >> by) & ((1 << (64 - by)) - 1)


def _signed(constant):
    return constant - 2**64 if constant >= 2**63 else constant
