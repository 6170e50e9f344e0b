"""Ops are right for more than 2^31 elements, where a 32-bit offset would read or write at a wrong place."""

import pytest
import torch

import safeops

N = 2**31 + 2**12 + 5
ROWS, COLUMNS = 2**16 + 1, 2**15 + 8  # more than 2^31 elements, in rows of whole 16-byte packets
GIB = 2**30


@pytest.fixture(autouse=True)
def room():
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < 40 * GIB:
        pytest.skip(f"needs 40 GiB of free GPU memory, has {free // GIB}")


def chunks(n, size=2**27):
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))


def pattern(n, dtype):
    """Returns small numbers. Each differs from its neighbors and from the element 2^31 further on."""
    x = torch.empty(n, dtype=dtype, device="cuda")
    for part in chunks(n):
        i = torch.arange(part.start, part.stop, device="cuda")
        x[part] = ((i % 1021) + (i >> 31) * 7).to(dtype) / 64
    return x


def mask_of(n):
    mask = torch.empty(n, dtype=torch.bool, device="cuda")
    for part in chunks(n):
        mask[part] = torch.arange(part.start, part.stop, device="cuda") % 3 != 0
    return mask


def equal_in_chunks(n, got, expected):
    for part in chunks(n):
        assert torch.equal(got(part), expected(part)), f"differs between {part.start} and {part.stop}"


def test_masked_fill():
    x, mask = pattern(N, torch.float16), mask_of(N)
    out = safeops.masked_fill(x, mask, -1.0)
    equal_in_chunks(N, lambda p: out[p], lambda p: torch.where(mask[p], -1.0, x[p]))


def test_masked_fill_shifted():
    """masked_fill of an unaligned operand is right: it takes the general kernel with 64-bit indices."""
    x, mask = pattern(N + 1, torch.float16)[1:], mask_of(N + 1)[1:]
    out = safeops.masked_fill(x, mask, -1.0)
    equal_in_chunks(N, lambda p: out[p], lambda p: torch.where(mask[p], -1.0, x[p]))


@pytest.mark.parametrize("columns", [COLUMNS, COLUMNS - 1], ids=["rows", "general"])
def test_masked_fill_broadcast(columns):
    x = pattern(ROWS * columns, torch.float16).view(ROWS, columns)
    mask = torch.arange(ROWS, device="cuda")[:, None] % 3 == 0
    out = safeops.masked_fill(x, mask, -1.0)
    for rows in (slice(0, 99), slice(ROWS // 2, ROWS // 2 + 99), slice(ROWS - 999, ROWS)):
        assert torch.equal(out[rows], torch.where(mask[rows], -1.0, x[rows]))


def test_safe_div():
    x = pattern(N, torch.float16)
    out = safeops.safe_div(x, x)  # safe_div gives 0 for 0 / 0
    equal_in_chunks(N, lambda p: out[p], lambda p: (x[p] != 0).half())


def total(x, mask):
    return sum(torch.where(mask[p], x[p], 0).sum(dtype=torch.float64).item() for p in chunks(N))


def test_masked_mean():
    x, mask = pattern(N, torch.float16).requires_grad_(), mask_of(N)
    count = sum(int(mask[p].sum()) for p in chunks(N))
    mean = safeops.masked_mean(x, mask)
    assert abs(mean.item() * count / total(x.detach(), mask) - 1) < 1e-5
    (gradient,) = torch.autograd.grad(mean, x, torch.tensor(count * 0.5, device="cuda"))
    equal_in_chunks(N, lambda p: gradient[p], lambda p: torch.where(mask[p], 0.5, 0.0).half())


def test_mse_loss():
    x, mask = pattern(N, torch.float16).requires_grad_(), mask_of(N)
    y = torch.zeros(1, dtype=torch.float16, device="cuda").expand(N)
    loss = safeops.mse_loss(x, y, mask=mask, reduction="sum")
    truth = sum(torch.where(mask[p], x[p].float() ** 2, 0).sum(dtype=torch.float64).item() for p in chunks(N))
    assert abs(loss.item() / truth - 1) < 1e-5
    (gradient,) = torch.autograd.grad(loss, x, torch.tensor(0.5, device="cuda"))
    equal_in_chunks(N, lambda p: gradient[p], lambda p: torch.where(mask[p], x.detach()[p], 0))


def test_safe_gather():
    x = pattern(N, torch.float16)
    index = torch.tensor([N - 1, 5, 2**31, -1, N, 2**31 - 1], device="cuda")
    expected = torch.where((index >= 0) & (index < N), x[index.clamp(0, N - 1)], 0)
    assert torch.equal(safeops.safe_gather(x, 0, index), expected)
    many = safeops.safe_gather(x[:8], 0, torch.full((1,), 3, device="cuda").expand(N))
    equal_in_chunks(N, lambda p: many[p], lambda p: x[3].expand(p.stop - p.start))


def test_safe_index_select():
    x = pattern(ROWS * COLUMNS, torch.float16).view(ROWS, COLUMNS).requires_grad_()
    index = torch.tensor([ROWS - 1, 0, ROWS, 0], device="cuda")
    value = safeops.safe_index_select(x, 0, index)
    assert torch.equal(value, torch.where(index[:, None] < ROWS, x.detach()[index.clamp(max=ROWS - 1)], 0))
    (gradient,) = torch.autograd.grad(value, x, torch.ones_like(value))
    wanted = torch.zeros(ROWS, device="cuda")
    wanted[0], wanted[-1] = 2, 1
    for rows in (slice(0, 99), slice(ROWS // 2, ROWS // 2 + 99), slice(ROWS - 999, ROWS)):
        assert torch.equal(gradient[rows], wanted[rows, None].half().expand(-1, COLUMNS))


def test_masked_compact():
    """masked_compact is right where ranks (counts of kept elements before an element) exceed 2^31, and where there are
    more tiles than a block reads at once to find its rank."""
    x, mask = pattern(N, torch.float16), torch.ones(N, dtype=torch.bool, device="cuda")
    mask[::1000] = False
    mask[-1000:] = True
    values, index, result = safeops.masked_compact(x, mask, capacity=N)
    count = int(result)
    assert count == sum(int(mask[p].sum()) for p in chunks(N))
    kept = mask[-1000:].nonzero().squeeze(1) + N - 1000
    assert torch.equal(index[count - 1000 : count], kept) and torch.equal(values[count - 1000 : count], x[kept])
    assert (index[count:] == -1).all() and not values[count:].any()
