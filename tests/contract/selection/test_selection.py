"""Reported failures that selection answers: what the plain pattern still does in torch, and what safeops does."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DynamicOutputShapeException

import safeops
from safeops.core.op import registry
from safeops.testing import no_synchronisation
from safeops.testing.compare import assert_same_bits
from tests.contract.common import DEVICE, each_route, equal, flags, grad_of, leaf, on

KERNELS = all(op.runs_on(DEVICE) for op in registry.values() if op.family == "selection")
ON_CPU = DEVICE == "cpu"


def integers(*values):
    return torch.tensor(values, device=DEVICE)


# ---- a size that only the device knows


def packed(x, keep):
    return safeops.masked_compact(x, keep, capacity=4)


def test_pytorch_12461_78549_boolean_indexing_synchronises():
    x, keep = leaf([1.0, math.nan, 3.0]), flags(True, False, True)
    with pytest.raises((AssertionError, RuntimeError), match="synchroni"):
        with no_synchronisation(DEVICE):
            x[keep]
    packed(x, keep)
    with no_synchronisation(DEVICE):
        values, index, count = packed(x, keep)
        grad = grad_of(values.sum(), x)
    assert equal(values, [1, 3, 0, 0]) and equal(index, [0, 2, -1, -1]) and count == 2 and equal(grad, [1, 0, 1])


@pytest.mark.parametrize("source", [[7.0, 8.0], [7.0]])
def test_boolean_assignment_synchronises_and_wants_the_exact_count(source):
    x, keep, source = leaf([1.0, math.nan, 3.0]), flags(True, False, True), leaf(source)
    with pytest.raises((AssertionError, RuntimeError), match="synchroni|shape mismatch"):
        with no_synchronisation(DEVICE):
            x.clone()[keep] = torch.cat([source, source])[:2]
    if ON_CPU and len(source) < 2:  # on CUDA: a device assert
        with pytest.raises(RuntimeError, match="Number of elements of source"):
            x.masked_scatter(keep, source)
    safeops.masked_scatter(x, keep, source)
    with no_synchronisation(DEVICE):
        ours = safeops.masked_scatter(x, keep, source)
        to_x, to_source = torch.autograd.grad(ours.sum(), (x, source))
    last = 8.0 if len(source) == 2 else 3.0
    assert ours[0] == 7 and ours[1].isnan() and ours[2] == last
    assert equal(to_x, [0, 1, 2 - len(source)]) and equal(to_source, [1] * len(source))


def test_a_size_that_depends_on_data_has_no_fake_result():
    """torch has no fake result where a size depends on data; our fixed capacity gives torch.export a shape."""
    meta = torch.empty(5, 3, device="meta")
    with pytest.raises(NotImplementedError):
        meta[meta > 0]
    assert [t.shape for t in packed(meta, meta > 0)] == [(4,), (4,), ()]
    assert packed(meta, meta[:, 0] > 0)[0].shape == (4, 3)
    with FakeTensorMode():
        x = torch.empty(5, 3, device=DEVICE, requires_grad=True)
        with pytest.raises(DynamicOutputShapeException):
            x[x > 0]
        values, _, _ = packed(x, x[:, 0] > 0)
        assert values.shape == (4, 3) and grad_of(values.sum(), x).shape == (5, 3)


def test_a_size_that_depends_on_data_breaks_the_graph():
    x, keep = leaf([1.0, math.nan, 3.0]), flags(True, False, True)
    plain = torch._dynamo.explain(lambda x, keep: x[keep].square().sum())(x, keep)
    assert plain.graph_break_count == 1 and "nonzero" in str(plain.break_reasons[0].reason)
    with pytest.raises(torch._dynamo.exc.UserError, match="data-dependent"):  # in a whole graph the size is unknown
        torch.compile(lambda x, keep: x[keep].chunk(2)[0].sum(), backend="eager", fullgraph=True)(x, keep)
    ours = torch.compile(lambda x, keep: packed(x, keep)[0].chunk(2)[0].sum(), backend="aot_eager", fullgraph=True)
    loss = ours(x, keep)
    assert equal(loss, 4) and equal(grad_of(loss, x), [1, 0, 1])


@pytest.mark.skipif(ON_CPU, reason="captures a CUDA graph")
def test_boolean_indexing_is_not_capturable():
    x, keep = torch.tensor([1.0, 2.0, 3.0], device=DEVICE), flags(True, False, True)
    packed(x, keep)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values, _, count = packed(x, keep)
    keep.logical_not_()
    graph.replay()
    assert count == 1 and equal(values, [2, 0, 0, 0])


def test_an_overflow_is_told_by_the_count_and_writes_nothing_else():
    x = leaf(torch.arange(100.0).tolist())
    values, index, count = packed(x, torch.ones(100, dtype=torch.bool, device=DEVICE))
    assert count == 100 and equal(values, [0, 1, 2, 3]) and equal(index, [0, 1, 2, 3])
    assert grad_of(values.sum(), x).sum() == 4


# ---- more elements than an int32 counts


# Masks and inputs are expanded, or only a few of their elements are read. Results with more than 2^31 elements
# (masked_scatter's, gradients) are not tested: each takes half a minute, in the loops that other results use.
LARGE = pytest.mark.skipif(not KERNELS, reason="the composite would need 16 GiB")


@LARGE
def test_pytorch_51871_60267_compact_more_than_int_max():
    shape = (3, 2**30)
    keep = flags(False, False, True)[:, None].expand(shape)
    x = torch.tensor([[2.0], [4.0], [6.0]], dtype=torch.bfloat16, device=DEVICE).expand(shape)
    result = safeops.masked_compact(x, keep, capacity=3)
    values, index, count = result.values, result.index, result.count
    assert count == 2**30 and equal(values, [6, 6, 6]) and torch.equal(index, integers(2**31, 2**31 + 1, 2**31 + 2))
    assert packed(x, flags(True, True, True)[:, None].expand(shape))[2] == 3 * 2**30


@LARGE
def test_pytorch_51871_60267_select_from_more_than_int_max():
    rows = torch.arange(2**15 + 1, dtype=torch.int32, device=DEVICE)[:, None]
    shape = (2**15 + 1, 2**16)
    ours = safeops.masked_select(rows.expand(shape), (rows == 2**15).expand(shape))
    assert ours.shape == (2**16,) and (ours == 2**15).all()


@LARGE
def test_fla_1080_offsets_beyond_2_to_the_31():
    n = 2**31 + 8
    x = torch.empty(n, dtype=torch.int8, device=DEVICE)
    x[3], x[n - 1] = 7, 5
    index = integers(n - 1, 3, -1, n)
    for ours in (safeops.safe_gather(x, 0, index), safeops.safe_index_select(x, 0, index)):
        assert equal(ours, [5, 7, 0, 0])
    assert equal(safeops.safe_index_select(x.view(n // 2, 2), 0, integers(n // 2 - 1, 1, n // 2))[:, 1], [5, 7, 0])


# ---- duplicate indices


def picks(x, index, dim=0):
    """Yields the rows `index` of a matrix, picked by each of the two indexed ops."""
    yield safeops.safe_index_select(x, dim, index)
    yield safeops.safe_gather(x, dim, index[:, None].expand(-1, x.shape[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [7, 5000])
def test_pytorch_88096_55516_duplicates_are_deterministic(dtype, rows):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 16, generator=g).to(dtype).to(DEVICE).requires_grad_()
    index = torch.randint(-1, rows + 1, (20_000,), generator=g).to(DEVICE)
    upstream = torch.randn(20_000, 16, generator=g).to(dtype).to(DEVICE)
    before, first = torch.get_num_threads(), None
    try:
        for threads in (1, 2, 3, 2, 1):
            torch.set_num_threads(threads)
            grads = [torch.autograd.grad(out, x, upstream)[0] for out in picks(x, index)]
            first = first or grads
            for grad, want in zip(grads, first):
                assert_same_bits("gradient", grad, want, f"with {threads} threads, again")
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(20, 3000), (7, 257, 100), (3, 5, 6000), (1, 40, 1025)])
def test_gradients_beside_many_columns(dtype, shape):
    """Gradients of duplicate rows are right for more columns than the cache holds, and for dtypes and strides that pass
    through a buffer."""
    dim = len(shape) - 2
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(shape[dim], (9, *shape[1:]) if dim == 0 else shape, generator=generator)
    x = torch.zeros(shape, dtype=dtype, device=DEVICE, requires_grad=True)
    for laid in (index, index[..., :1].expand_as(index)):
        grad = torch.randint(-3, 4, (2, *index.shape), generator=generator).to(dtype)
        for g in (grad[0], torch.stack([grad[1], grad[0]], -1)[..., 1]):
            (got,) = torch.autograd.grad(safeops.safe_gather(x, dim, laid.to(DEVICE)), x, g.to(DEVICE))
            want = torch.zeros(shape, dtype=torch.float64).scatter_add(dim, laid, g.double())
            assert equal(got.double(), want.tolist())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_gradients_of_duplicates_add_up_in_fp32(dtype):
    """4096 gradients of 1 for one row must add up to 4096: a sum in half stops where adding 1 no longer changes it."""
    x, index = torch.zeros(3, 16, dtype=dtype, device=DEVICE, requires_grad=True), integers(*[0] * 4096)
    stops = 2.0 / torch.finfo(dtype).eps
    if ON_CPU:
        for plain in (x[index], F.embedding(index, x)):
            assert equal(grad_of(plain.sum(), x)[0], [stops] * 16) and stops < 4096
    for ours in picks(x, index):
        assert equal(grad_of(ours.sum(), x), [[4096] * 16, [0] * 16, [0] * 16])


def test_half_gradients_are_no_further_from_the_truth_than_torch():
    g = torch.Generator().manual_seed(1)
    x = torch.zeros(5, 8, dtype=torch.float16, device=DEVICE, requires_grad=True)
    index = torch.randint(5, (3000,), generator=g).to(DEVICE)
    upstream = torch.rand(3000, 8, generator=g).half().to(DEVICE)
    truth = torch.zeros(5, 8, dtype=torch.float64, device=DEVICE).index_add(0, index, upstream.double())
    theirs = (torch.autograd.grad(x[index], x, upstream)[0].double() - truth).abs().max()
    for out in picks(x, index):
        ours = (torch.autograd.grad(out, x, upstream)[0].double() - truth).abs()
        assert (ours <= truth * 2**-11 * 1.01).all() and ours.max() <= theirs + 1e-3
        assert not ON_CPU or theirs > 10 * ours.max()


def test_a_gradient_that_overflows_half_is_inf():
    x, index = leaf([[1.0]], torch.float16), integers(0, 0)
    for ours in picks(x, index):
        assert torch.autograd.grad(ours, x, torch.full_like(ours, 6e4))[0].isposinf().all()


# ---- indices out of range


@pytest.mark.parametrize("bad", [-1, -100, 3, 255, 2**31, -(2**63)])
def test_pytorch_1204_15508_an_index_out_of_range(bad):
    x, index = leaf([[1.0], [2.0], [3.0]]), integers(2, bad, 0)
    if ON_CPU:  # on CUDA torch's assert makes the device unusable
        for plain in (lambda: x.index_select(0, index), lambda: x.gather(0, index[:, None])):
            with pytest.raises((IndexError, RuntimeError), match="out of (range|bounds)"):
                plain()
    for ours in picks(x, index):
        assert equal(ours, [[3], [0], [1]])
        upstream = torch.tensor([[1.0], [math.nan], [1.0]], device=DEVICE)
        assert equal(torch.autograd.grad(ours, x, upstream)[0], [[1], [0], [1]])
    assert equal(safeops.safe_index_select(x, 0, index, fill_value=-7.0), [[3], [-7], [1]])


def test_pytorch_15508_class_index_255_of_3():
    """The negative log likelihood of a segmentation with border pixels labeled 255, which is no class."""
    scores, target = leaf([[1.0, 2.0, 0.5], [0.0, 1.0, 1.0]]), integers(1, 255)
    if ON_CPU:
        with pytest.raises(IndexError, match="out of bounds"):
            F.nll_loss(scores.log_softmax(1), target)
    ours = -safeops.safe_gather(scores.log_softmax(1), 1, target[:, None]).squeeze(1)
    loss = safeops.masked_mean(ours, target < 3)
    want = F.cross_entropy(scores[:1], target[:1])
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(grad_of(loss, scores), grad_of(want, scores))


@each_route
@pytest.mark.parametrize("value", [2**53 + 1, -(2**53) - 1, 2**62 + 1, 2**63 - 1, 2**63 + 12345, 7])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64, torch.float64])
def test_a_stand_in_of_64_bits_is_exact(route, value, dtype):
    def op(name):
        return getattr(safeops, name) if route == "kernel" else on("composite", name)

    x, index = torch.tensor([1, 2], device=DEVICE).to(dtype), integers(-1, 1)
    info = None if dtype.is_floating_point else torch.iinfo(dtype)
    want = float(value) if info is None else max(info.min, min(info.max, value))
    assert op("safe_gather")(x, 0, index, fill_value=value).tolist() == [want, 2]
    assert op("safe_index_select")(x, 0, index, fill_value=value).tolist() == [want, 2]
    got = op("masked_compact")(x, flags(False, True), capacity=2, fill_value=value)
    assert [t.tolist() for t in got] == [[2, want], [1, -1], 1]


# ---- complex


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@each_route
def test_complex_operands_broadcast_by_their_mask(route, dtype):
    def op(name):
        return getattr(safeops, name) if route == "kernel" else on("composite", name)

    z = torch.tensor([[3 + 4j, 1j]], dtype=dtype, device=DEVICE, requires_grad=True)
    source = torch.tensor([2j, 5.0, -1j], dtype=dtype, device=DEVICE, requires_grad=True)
    mask = flags([True, False], [True, True])
    weight = torch.tensor([1 + 2j, 3j, -2.0], dtype=dtype, device=DEVICE)
    for x in (z, z.conj()):
        for create_graph in (False, True):
            picked = op("masked_select")(x, mask)
            assert torch.equal(picked, torch.masked_select(x, mask))
            loss = (picked * weight.conj()).real.sum()
            got = torch.autograd.grad(loss, z, create_graph=create_graph)[0]
            want = torch.autograd.grad((torch.masked_select(x, mask) * weight.conj()).real.sum(), z)[0]
            assert torch.equal(got, want)

            placed = op("masked_scatter")(x, mask, source)
            grads = torch.autograd.grad((placed * placed.conj()).real.sum(), (z, source), create_graph=create_graph)
            plain = x.expand(2, 2).masked_scatter(mask, source)
            want = torch.autograd.grad((plain * plain.conj()).real.sum(), (z, source))
            assert torch.equal(placed, plain) and all(torch.equal(g, w) for g, w in zip(grads, want))
