"""The slice's ops as calls on CUDA tensors of any size: what the GPU tests run them on."""

import dataclasses

import torch

import safeops

REDUCTIONS = ("sum", "mean", "var", "std", "amax", "amin", "norm", "sum_of_squares", "rms", "logsumexp")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclasses.dataclass
class Case:
    """An op bound to its arguments. `leaves` are the differentiable inputs; `call(*leaves)` runs the forward."""

    call: object
    leaves: tuple

    def forward_backward(self, upstream=None):
        """(value, gradients): two launches, with an upstream gradient of ones unless one is given."""
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


def masked_fill(n, dtype, seed):
    mask = keep(n, seed)
    return Case(lambda x: safeops.masked_fill(x, mask, -3.0), (numbers(n, dtype, seed),))


def safe_div(n, dtype, seed):
    y = numbers(n, dtype, seed + 1)
    # Away from 0, or exactly 0: neither quotient nor gradient leaves fp16's range, so that dtypes can be compared.
    divisor = torch.where(keep(n, seed), y + y.sign() * 0.25, 0)
    return Case(safeops.safe_div, (numbers(n, dtype, seed), divisor))


def unary(name):
    """Magnitudes from 0.25, so that no gradient leaves fp16's range, and stand-ins between them."""
    whole = ("safe_reciprocal", "safe_log", "safe_sqrt", "safe_rsqrt")

    def make(n, dtype, seed):
        x = numbers(n, dtype, seed)
        x = torch.where(keep(n, seed), x.abs() + 0.25, 0) if name in whole else x.clamp(-4, 4) / 4
        return Case(getattr(safeops, name), (x,))

    return make


def binary(name):
    def make(n, dtype, seed):
        a, b = numbers(n, dtype, seed), numbers(n, dtype, seed + 1)
        if name == "safe_pow":
            a, b = torch.where(keep(n, seed), a.abs() + 0.25, -1), b.clamp(-3, 3)
        elif name == "safe_atan2":
            a, b = a + a.sign() * 0.25, torch.where(keep(n, seed), b, 0)
        else:
            a, b = torch.where(keep(n, seed), a, 0), b.abs() + 0.25
        return Case(getattr(safeops, name), (a, b))

    return make


def reduction(name):
    def make(n, dtype, seed):
        mask = keep(n, seed)
        return Case(lambda x: getattr(safeops, name)(x, mask), (numbers(n, dtype, seed),))

    return make


def softmax(name):
    def make(n, dtype, seed):
        mask = keep(n, seed)  # values from 1 to nearly 0, not all of them below what fp16 holds
        return Case(lambda x: getattr(safeops, name)(x, mask), (numbers(n, dtype, seed) * 8,))

    return make


def normalize(n, dtype, seed):
    return Case(safeops.normalize, (numbers(n, dtype, seed),))


def cosine_similarity(n, dtype, seed):
    x, y = numbers(n, dtype, seed), numbers(n, dtype, seed + 1)
    return Case(safeops.cosine_similarity, (x, (x + y) / 2))


def loss(name, **parameters):
    def make(n, dtype, seed):
        mask, function = keep(n, seed), getattr(safeops, name)
        x, y = numbers(n, dtype, seed), numbers(n, dtype, seed + 1)
        return Case(lambda x, y: function(x, y, mask=mask, **parameters), (x, y))

    return make


def indices(n, below, seed):
    """Some out of range on either side, and one in seven names place 3: duplicates of every length."""
    generator = torch.Generator("cuda").manual_seed(2000 + seed)
    index = torch.randint(-below // 20 - 1, below + below // 20 + 1, (n,), generator=generator, device="cuda")
    return torch.where(torch.arange(n, device="cuda") % 7 == 0, min(3, below - 1), index)


def safe_gather(n, dtype, seed):
    index = indices(n, n, seed)
    return Case(lambda x: safeops.safe_gather(x, 0, index), (numbers(n, dtype, seed),))


def safe_index_select(n, dtype, seed):
    columns = 64 if n % 64 == 0 else 1  # packets, or one by one
    index = indices(n // columns, n // columns, seed)
    return Case(lambda x: safeops.safe_index_select(x.view(-1, columns), 0, index), (numbers(n, dtype, seed),))


def masked_compact(n, dtype, seed):
    mask = keep(n, seed)
    return Case(lambda x: safeops.masked_compact(x, mask, capacity=n // 2)[0], (numbers(n, dtype, seed),))


def masked_select(n, dtype, seed):
    mask = keep(n, seed)
    return Case(lambda x: safeops.masked_select(x, mask), (numbers(n, dtype, seed),))


def masked_scatter(n, dtype, seed):
    mask = keep(n, seed)
    leaves = numbers(n, dtype, seed), numbers(n // 2, dtype, seed + 1)
    return Case(lambda x, source: safeops.masked_scatter(x, mask, source), leaves)


# Ops of more than one launch: (kernels, memory operations) forward and backward; None where it depends on the size.
LAUNCHES = {
    "safe_gather": ((1, 0), None),
    "safe_index_select": ((1, 0), None),
    "masked_compact": ((2, 1), (1, 1)),
    "masked_scatter": ((1, 1), (1, 2)),
    "masked_select": ((2, 2), None),
}
# What they need beside their first output and their gradients, bytes an element: sorted keys, a mask's ranks.
WORKSPACE = {"safe_gather": 20, "safe_index_select": 20, "masked_compact": 5, "masked_select": 1}

OPS = {
    "masked_fill": masked_fill,
    "safe_div": safe_div,
    **{f"safe_{name}": unary(f"safe_{name}") for name in "reciprocal log sqrt rsqrt exp acos asin".split()},
    **{name: binary(name) for name in ("safe_pow", "safe_atan2", "xlogy")},
    **{f"masked_{name}": reduction(f"masked_{name}") for name in REDUCTIONS},
    "masked_softmax": softmax("masked_softmax"),
    "masked_log_softmax": softmax("masked_log_softmax"),
    "normalize": normalize,
    "cosine_similarity": cosine_similarity,
    "mse_loss": loss("mse_loss"),
    "l1_loss": loss("l1_loss"),
    "smooth_l1_loss": loss("smooth_l1_loss", beta=0.5),
    "huber_loss": loss("huber_loss", delta=0.5),
    "safe_gather": safe_gather,
    "safe_index_select": safe_index_select,
    "masked_compact": masked_compact,
    "masked_select": masked_select,
    "masked_scatter": masked_scatter,
}

# masked_select waits for the device, which tells it its size.
ASYNCHRONOUS = [name for name in OPS if name != "masked_select"]


def same(got, expected):
    """Bitwise equal, NaN for NaN: values and tuples of gradients."""
    if isinstance(got, torch.Tensor):
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
        assert got.dtype == expected.dtype and got.shape == expected.shape
        differs = (got.contiguous().view(bits) != expected.contiguous().view(bits)) & ~(got.isnan() & expected.isnan())
        assert not differs.any(), f"{differs.sum()} of {differs.numel()} elements differ"
        return
    assert len(got) == len(expected)
    for a, b in zip(got, expected):
        same(a, b)
