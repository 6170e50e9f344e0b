"""The selection ops on lines of every length and stride, and the cases that their kernels treat apart."""

import pytest
import torch

import safeops
from safeops.ops.selection._selection import summed_wide
from tests.contract.common import DEVICE, on, t


@pytest.mark.parametrize("length", [70_000, 20_000, 5_000])
def test_rows_longer_than_a_block(length):
    """Values and gradients equal torch's where several threads share a row and where a thread has several rows."""
    x = torch.randn(7, length, device=DEVICE)
    rows = t(True, False, True, True, False, True, False, dtype=torch.bool)
    at, g = rows.nonzero().squeeze(1), torch.randn(4, length, device=DEVICE)
    zeros = torch.zeros_like(x)
    for call, want, slope in (
        (lambda x: safeops.masked_compact(x, rows, capacity=4)[0], x[rows], zeros.index_copy(0, at, g)),
        (lambda x: safeops.masked_compact(x, rows, capacity=3)[0], x[rows][:3], zeros.index_copy(0, at[:3], g[:3])),
        (lambda x: safeops.masked_select(x, rows[:, None]), x[rows].flatten(), zeros.index_copy(0, at, g)),
        (lambda x: safeops.safe_index_select(x, 0, at), x[rows], zeros.index_copy(0, at, g)),
        (lambda x: safeops.safe_gather(x, 0, at[:, None].expand(4, length)), x[rows], zeros.index_copy(0, at, g)),
    ):
        for threads in (1, 3):
            was = torch.get_num_threads()
            torch.set_num_threads(threads)
            try:
                leaf = x.clone().requires_grad_()
                y = call(leaf)
                (dx,) = torch.autograd.grad(y, leaf, g[: len(want)].view(y.shape) if y.dim() > 1 else g.flatten())
            finally:
                torch.set_num_threads(was)
            assert y.equal(want) and dx.equal(slope)


WIDTHS = [torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128]


@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
@pytest.mark.parametrize("columns", [2, 3, 8, 31, 32])
def test_many_short_lines(dtype, columns):
    """Results are right where one loop takes several short lines, a chunk ends inside a line, and indices are stray."""
    x = torch.arange(1500 * columns, device=DEVICE).reshape(1500, columns).to(dtype)
    index = torch.randint(-1, columns + 1, (1500, columns), device=DEVICE)
    inside = (index >= 0) & (index < columns)
    for source in (x, x.t().contiguous().t()):
        for i in (index, index[:, 1:], index.int()):
            ok = inside[:, -i.shape[1] :]
            want = torch.where(ok, x.gather(1, torch.where(ok, i, 0).long()), 7)
            assert safeops.safe_gather(source, 1, i, fill_value=7).equal(want)
            if dtype == torch.float32:
                leaf = source.detach().requires_grad_()
                g = torch.randn(i.shape, device=DEVICE)
                (dx,) = torch.autograd.grad(safeops.safe_gather(leaf, 1, i), leaf, g)
                zeros = torch.zeros(x.shape, dtype=torch.float64, device=DEVICE)
                place, added = torch.where(ok, i, 0).long(), torch.where(ok, g, 0).double()
                summed, sizes = (zeros.scatter_add(1, place, x) for x in (added, added.abs()))
                assert ((dx - summed).abs() <= 4 * 2**-24 * sizes).all()  # fp32 sums of up to nine terms on a GPU


@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
def test_rows_whose_elements_lie_apart(dtype):
    x, rows = torch.arange(40 * 70, device=DEVICE).reshape(40, 70).to(dtype), t(3, 39, 40, 0, 3, dtype=torch.int64)
    for source in (x[:, ::2], x[:, ::3], x.t(), x[:, :1].expand(40, 70)):
        want = torch.cat([source, torch.full_like(source[:1], 9)])[rows.clamp(max=source.shape[0])]
        inside = torch.where(rows < source.shape[0], rows, source.shape[0])
        assert safeops.safe_index_select(source, 0, inside, fill_value=9).equal(want)


def test_one_pick_of_each_line_has_its_own_gradient():
    x = torch.zeros(3, 5, 4, device=DEVICE, requires_grad=True)
    index = torch.tensor([[[0, 4, 2, 1]]] * 3, device=DEVICE)
    g = torch.arange(1.0, 13, device=DEVICE).view(3, 1, 4)
    (dx,) = torch.autograd.grad(safeops.safe_gather(x, 1, index), x, g)
    assert dx.equal(torch.zeros(3, 5, 4, device=DEVICE).scatter(1, index, g))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int64])
def test_sums_of_duplicates_are_wide_on_every_device(dtype):
    widest = {torch.int64: torch.int64, torch.float64: torch.float64}.get(dtype, torch.float32)
    assert summed_wide(torch.ones(2, dtype=dtype, device="meta")).dtype == widest
    assert summed_wide(torch.ones(2, dtype=dtype)).dtype == (dtype if dtype == torch.int64 else torch.float64)


@pytest.mark.parametrize("name", ["safe_gather", "safe_index_select", "masked_compact"])
def test_bools_are_filled_with_bools(name):
    x, outside = t(False, dtype=torch.bool), t(5, dtype=torch.int64)
    if name == "masked_compact":
        assert safeops.masked_compact(x, x, capacity=2, fill_value=True)[0].all()
    else:
        assert getattr(safeops, name)(x, 0, outside, fill_value=True).all()


def test_an_empty_source_keeps_the_fills_sign_of_zero():
    out = safeops.safe_index_select(torch.zeros(2, 0), 1, torch.tensor([0, 7]), fill_value=-0.0)
    wanted = on("composite", "safe_index_select")(torch.zeros(2, 0), 1, torch.tensor([0, 7]), fill_value=-0.0)
    assert out.signbit().all() and wanted.signbit().all()


def test_a_capacity_that_is_a_size_exports_without_a_bound():
    class Positive(torch.nn.Module):
        def forward(self, x):
            return safeops.masked_compact(x, x > 0, capacity=x.shape[0])

    shapes = ({0: torch.export.Dim("n")},)
    program = torch.export.export(Positive(), (torch.randn(8, device=DEVICE),), dynamic_shapes=shapes)
    x = torch.randn(100, device=DEVICE)
    for got, want in zip(program.module()(x), Positive()(x)):
        assert got.equal(want)


SELECTIONS = {
    "safe_gather": lambda x: safeops.safe_gather(x, 0, x.long()),
    "safe_index_select": lambda x: safeops.safe_index_select(x, 0, t(1, dtype=torch.int64)),
    "masked_select": lambda x: safeops.masked_select(x, x > 0),
    "masked_compact": lambda x: safeops.masked_compact(x, x > 0, capacity=1)[0],
    "masked_scatter": lambda x: safeops.masked_scatter(x, x > 0, t(1.0)),
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_as_many_dims_as_there_is_room_for(name):
    """With as many dims as torch allows, a kernel that needs one more must refuse, not fail."""
    assert SELECTIONS[name](torch.ones([1] * 63, device=DEVICE)).numel() == 1
    try:
        assert SELECTIONS[name](torch.ones([1] * 64, device=DEVICE)).numel() == 1
    except (RuntimeError, ValueError) as error:
        assert "dim" in str(error)
