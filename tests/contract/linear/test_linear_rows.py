"""linear_cross_entropy in chunks of rows, which makes gradients in the forward: when, products, memory, backward."""

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import safeops
from safeops.ops.classification import cross_entropy
from safeops.ops.linear import _chunks, _rows
from safeops.testing.memory import _peak_bytes
from tests.contract.common import DEVICE, each_route, on
from tests.contract.linear.test_linear_cross_entropy import operands, outcome
from tests.ops.linear.linear_cross_entropy import _twin

NAN, INF = float("nan"), float("inf")
NAME = "linear_cross_entropy"
each_sum = pytest.mark.parametrize("reduction", ["mean", "sum"])
on_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="counted by the CPU's profiler")


@pytest.fixture(params=[1, 4, 9], ids=lambda n: f"{n} at once")
def rows(request, monkeypatch):
    monkeypatch.setattr(_rows, "rows_at_once", lambda *_, **__: request.param)


@pytest.fixture
def by_classes(monkeypatch):
    """Returns a function that switches to chunks of classes, where the backward makes the gradients."""
    return lambda: monkeypatch.setattr(_rows, "rows_at_once", lambda *_, **__: 0)


def products(work, size):
    """Returns work()'s multiplications in matrix products / `size`: a product of a chunk counts as a fraction."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        work()
    first = {"aten::mm": 0, "aten::addmm": 1, "aten::addmm_": 1}  # index of the first factor among the operands
    shapes = [e.input_shapes[first[e.name] :] for e in profiler.events() if e.name in first]
    return sum(n * k * m for (n, k), (_, m), *_ in shapes) / size


# ---- the rows of a chunk


def shaped(rows, width, classes, dtype):
    x, w = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((rows, width), (classes, width)))
    return x, w


@pytest.mark.parametrize("rows, width, classes", [(8192, 1024, 131_072), (32_768, 1024, 131_072), (8192, 256, 32_000)])
def test_low_memory_is_an_eighth_of_the_logits(rows, width, classes):
    """A chunk's logits, with the fp32 buffer for the gradient of a half weight, fit an eighth of all logits' bytes."""
    largest = (rows * classes // 8 - cross_entropy.BLOCK) // classes
    for dtype in (torch.float64, torch.float32):
        assert _rows.rows_at_once(*shaped(rows, width, classes, dtype), True) == largest
    x, w = shaped(rows, width, classes, torch.bfloat16)
    assert _rows.rows_at_once(x, w) == max(largest, _rows.FEWEST)
    size = _rows.rows_at_once(x, w, True)
    assert (size > 0) == (rows >= 32 * width and rows >= 32_768)  # 0: chunks of classes are cheaper
    assert size == 0 or classes * (size * 2 + width * 4) + cross_entropy.BLOCK * 2 <= rows * classes * 2 / 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_small_chunks_are_not_worth_their_pass_over_the_weights_gradient(dtype):
    assert _rows.rows_at_once(*shaped(512, 8, 2**19, dtype), True) == 0
    x, w = (torch.empty(shape, dtype=dtype) for shape in ((512, 8), (2**19, 8)))
    assert _rows.rows_at_once(x, w) == 56 if DEVICE == "cpu" else 1024
    x, w = (torch.empty(shape, dtype=dtype) for shape in ((1, 8), (2**24, 8)))
    assert _rows.rows_at_once(x, w) == 1 if DEVICE == "cpu" else 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 4096, 8192, 12_288, 12_289, 65_536, 100_000])
def test_a_gpu_takes_8192_rows_at_a_time(rows, dtype):
    """A GPU takes 8192 rows at a time; all, if a half weight's fp32 buffer would cost more than the other rows' logits.
    Memory beside the gradients is then a third of a layer's with its loss, which holds the logits three times."""
    x, w = shaped(rows, 4096, 128_256, dtype)
    size = _rows.rows_at_once(x, w, True, low=False)
    assert size == rows if rows <= (8192 if dtype == torch.float32 else 12_288) else 4096 < size <= 8192
    assert -(-rows // size) * size - rows < -(-rows // size)  # the last chunk is short by less than a row per chunk
    assert _rows.rows_at_once(x, w, low=False) <= 4096


@on_cpu
@each_sum
def test_three_products(rows, by_classes, reduction):
    """A step takes three products: less one for a gradient that is not asked for, plus one for reduction="none"."""
    x, w, target, b = operands()
    size, options = x.shape[0] * x.shape[1] * len(w), {"linear_bias": b, "reduction": reduction}

    def count(x, w, **more):
        loss = []
        forward = products(lambda: loss.append(safeops.linear_cross_entropy(x, w, target, **options | more)), size)
        if not loss[0].requires_grad:
            return forward, 0
        return forward, products(lambda: loss[0].sum().backward(), size)

    assert count(x, w) == (3, 0)
    assert count(x, w.detach()) == count(x.detach(), w) == (2, 0)
    assert count(x.detach(), w.detach()) == (1, 0)  # only the bias gets a gradient
    with torch.no_grad():
        assert count(x, w) == (1, 0)
    assert count(x, w, reduction="none") == (1, 3)
    by_classes()
    assert count(x, w) == (1, 3)


def test_a_chunk_takes_nine_launches(monkeypatch):
    """A chunk launches three products, the loss, the slopes and small ops: no number grows with the classes."""
    x, w, target, b = operands(9, 23, 6, torch.float32)
    launches = []
    for size in (1, 9):
        monkeypatch.setattr(_rows, "rows_at_once", lambda *_, size=size, **__: size)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            safeops.linear_cross_entropy(x, w, target, linear_bias=b)
        inside = [e.name for e in profiler.events() if e.cpu_parent and e.cpu_parent.name == f"safeops::_{NAME}"]
        views = ("slice", "unsqueeze", "mT", "new_empty", "empty", "expand", "detach", "reshape", "to")
        launches.append(sum(name.removeprefix("aten::") not in views for name in inside))
    assert launches[0] - launches[1] == 8 * 9


# ---- memory


@on_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory(monkeypatch, dtype):
    """Beside the gradients, a step needs at most an eighth of the logits."""
    monkeypatch.setattr(_chunks, "CHUNK", 2**18)
    monkeypatch.setattr(cross_entropy, "BLOCK", 2**16)
    rows, classes, width = 8192, 1024, 128
    x, w, target, b = operands(rows, classes, width, dtype)
    assert _rows.rows_at_once(x, w, True)

    def step():
        return torch.autograd.grad(safeops.linear_cross_entropy(x, w, target, linear_bias=b), (x, w, b))

    eighth = rows * classes * dtype.itemsize / 8
    of_input = x.numel() * 4 if dtype == torch.float32 else x.numel() * 6  # half: made in fp32, then copied
    peak = _peak_bytes("cpu", step)
    of_weight = w.numel() * (4 if dtype == torch.float32 else 2)
    assert peak <= eighth + of_weight + of_input + 200 * rows + 2**19


def test_what_is_kept_for_backward(rows):
    """The weight's saved gradient is returned itself by the last backward, and freed."""
    x, w, target, b = operands()
    loss = safeops.linear_cross_entropy(x, w, target, linear_bias=b)
    node = loss.grad_fn
    while "LinearCrossEntropy" not in node.name():
        node = next(next_node for next_node, _ in node.next_functions if next_node)
    (kept,) = (t.data_ptr() for t in node.saved_tensors if t is not None and t.shape == w.shape and t is not w)
    assert torch.autograd.grad(loss, w, retain_graph=True)[0].data_ptr() != kept
    assert torch.autograd.grad(loss, w)[0].data_ptr() == kept
    with pytest.raises(RuntimeError, match="freed"):
        node.saved_tensors  # noqa: B018


# ---- on a GPU


@pytest.fixture
def wide_sums(monkeypatch):
    """Imitates CUDA on the CPU: addmm takes out_dtype, so that products of half factors are summed in fp32."""
    addmm = torch.addmm

    def summed(to, a, b, *, beta=1, out, out_dtype=None):
        a, b = (a, b) if out_dtype is None else (a.to(out_dtype), b.to(out_dtype))
        assert out.dtype == out_dtype or out_dtype is None
        return addmm(to, a, b, beta=beta, out=out)

    if DEVICE == "cpu":
        monkeypatch.setattr(_chunks, "sums_wide", lambda device: True)
        monkeypatch.setattr(torch, "addmm", summed)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sums_in_fp32_are_no_worse_than_a_layer_with_a_loss_in_fp32(rows, wide_sums, dtype, reduction):
    """Liger#1391: summing chunks of the weight's gradient in half loses bits; here they are summed in fp32."""
    x, w, target, _ = operands(9, 23, 6, dtype)
    denominator = {"denominator": 7} if reduction == "mean" else {}
    options = {"reduction": reduction, **denominator}

    def theirs(x, w):
        return _twin(x, w, target, **options)

    def eager(x, w):
        loss = F.cross_entropy(F.linear(x, w).float(), target, reduction="none" if reduction == "none" else "sum")
        return loss / 7 if denominator else loss

    def gradients(f, x, w):
        value = f(x, w)
        return torch.autograd.grad(value, (x, w), torch.ones_like(value))

    truth = gradients(theirs, *(t.detach().double().requires_grad_() for t in (x, w)))
    others = gradients(eager, x, w)
    ours = gradients(lambda x, w: safeops.linear_cross_entropy(x, w, target, **options), x, w)
    for got, other, want in zip(ours, others, truth):
        error, allowed = ((d.double() - want).square().mean().sqrt() for d in (got, other))
        assert error <= 1.25 * allowed + 1e-12


# ---- backward


@each_sum
def test_a_backward_that_is_repeated(rows, reduction):
    """Each backward returns gradients of its own, which the caller may overwrite."""
    x, w, target, b = operands()
    want = outcome(_twin, x, w, target, b, reduction=reduction)[1:]
    loss = safeops.linear_cross_entropy(x, w, target, linear_bias=b, reduction=reduction)
    for last in (False, False, True):
        got = torch.autograd.grad(loss, (x, w, b), 2 * torch.ones_like(loss), retain_graph=not last)
        torch.testing.assert_close(got, tuple(2 * d for d in want))
        for d in got:
            d.zero_()


def test_several_losses_of_one_graph(rows):
    x, w, target, b = operands()
    want = outcome(_twin, x, w, target, b)[1:]
    loss = sum(k * safeops.linear_cross_entropy(x, w, target, linear_bias=b) for k in (1.0, 0.5))
    torch.testing.assert_close(torch.autograd.grad(loss, (x, w, b)), tuple(1.5 * d for d in want))


@each_route
@each_sum
@pytest.mark.parametrize("upstream", [NAN, INF, 0.0])
@pytest.mark.parametrize("by", ["mask", "ignore_index", "weight"])
def test_upstream_does_not_reach_a_row_that_does_not_exist(route, rows, reduction, upstream, by):
    x, w, target, b = operands(9, 7)
    target[:] = torch.tensor([0, 3, 2, 3, 1, 6, 5, 3, 4])
    keep = target != 3
    options = {
        "mask": {"mask": keep},
        "ignore_index": {"ignore_index": 3},
        "weight": {"weight": torch.where(torch.arange(7, device=DEVICE) == 3, 0.0, 1.0)},
    }[by]
    dirty = torch.where(keep[:, None], x.detach(), NAN).requires_grad_()
    tensors = dirty, w, target, b
    upstream = torch.tensor(upstream, device=DEVICE)
    _, dx, dw, db = outcome(on(route, NAME), *tensors, upstream=upstream, reduction=reduction, **options)
    assert (dx[~keep] == 0).all()
    if upstream == 0:
        assert all((d == 0).all() for d in (dx, dw, db))
    else:
        assert not any(d.isfinite().any() for d in (dx[keep], dw[:3], db[:3]))


@each_route
@pytest.mark.parametrize("empty", ["zero", "nan"])
def test_nothing_kept(route, rows, empty):
    x, w, target, b = operands()
    target[:] = -100
    for reduction in ("mean", "sum"):
        for upstream in (1.0, NAN):
            upstream = torch.tensor(upstream, device=DEVICE)
            value, *grads = outcome(
                on(route, NAME), x, w, target, b, reduction=reduction, upstream=upstream, empty=empty
            )
            assert value.isnan() if empty == "nan" else value == 0
            assert all((d == 0).all() for d in grads)
    with pytest.raises(ValueError, match=f'^{NAME}: empty="raise"'):
        on(route, NAME)(x, w, target, empty="raise")


@each_route
@pytest.mark.parametrize("shape", [(0, 4, 5), (3, 0, 5), (0, 4, 0), (0, 0, 0)], ids=str)
def test_sizes_of_0(route, shape):
    n, width, classes = shape
    x, w, target, b = operands(n, max(classes, 1), width)
    w, b = (t.detach()[:classes].requires_grad_() for t in (w, b))
    value, *grads = outcome(on(route, NAME), x, w, target, b)
    assert [d.shape for d in grads] == [x.shape, w.shape, b.shape] and value.isfinite()
    torch.testing.assert_close(value, value.new_tensor(float(classes if n else 1)).log(), atol=5, rtol=0)


def test_the_denominators_gradient(rows):
    x, w, target, b = operands()
    denominator = torch.tensor(4.0, dtype=torch.float64, device=DEVICE, requires_grad=True)
    loss = safeops.linear_cross_entropy(x, w, target, linear_bias=b, denominator=denominator)
    (slope,) = torch.autograd.grad(loss, denominator)
    torch.testing.assert_close(slope, -loss.detach() / 4)


def test_a_scaled_gradient_in_half_is_rounded_once(rows):
    """A scaled gradient beyond fp16 is inf, which GradScaler sees; one scaled back from below its range stays."""
    x, w, target, b = operands(9, 7, dtype=torch.float16)
    for scale in (2.0**17, 2.0**-17):
        x, w = x.detach().mul(scale**-0.5).requires_grad_(), w.detach().mul(2**-6).requires_grad_()
        upstream = torch.tensor(scale, device=DEVICE)
        got = outcome(safeops.linear_cross_entropy, x, w, target, b, upstream=upstream, reduction="sum")
        want = outcome(_twin, *(t.double() for t in (x, w)), target, b.double(), upstream=upstream, reduction="sum")
        assert (scale < 1) == want[3].half().isfinite().all()
        for g, d in zip(got[1:], want[1:]):
            assert torch.equal(g.isfinite(), d.half().isfinite())
            error = (g.double() - d).abs()[g.isfinite()]
            assert (error <= 2**-7 * d.abs().max() + torch.finfo(torch.float16).smallest_normal * 2**-10).all()


@pytest.mark.parametrize(
    "options", [{}, {"weight": (2.0**17, 2.0**17)}, {"z_loss": 2.0**16}], ids=lambda o: ",".join(o)
)
def test_a_mean_in_fp16_whose_sum_does_not_fit(options):
    """The slopes for an upstream gradient of 1, or their sum over rows, exceed fp16; the mean's gradient does not."""
    options = {k: torch.tensor(v, device=DEVICE) if k == "weight" else v for k, v in options.items()}
    rows = 4096
    x = torch.full((rows, 2), 256.0, dtype=torch.float16, device=DEVICE, requires_grad=True)
    w = torch.tensor([[0.0, 0.25], [0.125, 0.125]], dtype=torch.float16, device=DEVICE, requires_grad=True)
    b, target = (
        torch.zeros(2, dtype=torch.float16, device=DEVICE, requires_grad=True),
        torch.zeros(rows).long().to(DEVICE),
    )
    assert _rows.rows_at_once(x, w, True)
    upstream = torch.tensor(1 / options.get("z_loss", 1), device=DEVICE)
    got = outcome(safeops.linear_cross_entropy, x, w, target, b, upstream=upstream, **options)[1:]
    wide = (t.detach().double().requires_grad_() for t in (x, w, b))
    x, w, b = wide
    want = outcome(_twin, x, w, target, b, upstream=upstream, **options)[1:]
    for g, d in zip(got, want):
        assert d.abs().max() > 0
        torch.testing.assert_close(g.double(), d, rtol=2**-8, atol=float(d.abs().max()) * 2**-9)


# ---- callers


@each_sum
def test_batched_gradients(reduction):
    """Several upstream gradients at once each give their own gradient."""
    x, w, target, _ = operands(3, 4, 2)
    wide = torch.tensor([1.0, -2.0], dtype=torch.float32, device=DEVICE)
    loss = safeops.linear_cross_entropy(x, w, target, reduction=reduction)
    one = torch.autograd.grad(loss, x, retain_graph=True)[0]
    many = torch.autograd.grad(loss, x, wide.to(loss.dtype), is_grads_batched=True)[0]
    torch.testing.assert_close(many, torch.stack([one, -2 * one]))


def test_no_classes_and_no_row_kept():
    x, w = torch.ones(3, 4, device=DEVICE, requires_grad=True), torch.ones(0, 4, device=DEVICE, requires_grad=True)
    ignored = torch.full((3,), -100, device=DEVICE)
    loss = safeops.linear_cross_entropy(x, w, ignored)
    dx, dw = torch.autograd.grad(loss, (x, w))
    assert loss == 0 and (dx == 0).all() and dw.shape == w.shape


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_loss_keeps_the_gradient_of_the_products(strict):
    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(7, 4, generator=torch.Generator().manual_seed(0)))

        def forward(self, x, target):
            return safeops.linear_cross_entropy(x, self.weight, target)

    loss, x, target = Loss(), torch.eye(4), torch.tensor([0, 3, 6, 1])
    program = torch.export.export(loss, (x, target), strict=strict).module()
    program(x, target).backward()
    loss(x, target).backward()
    torch.testing.assert_close(program.weight.grad, loss.weight.grad)


def test_second_order():
    x, w, target, b = operands(4, 5, 2)
    assert _rows.rows_at_once(x, w, True)
    call = lambda x, w: safeops.linear_cross_entropy(x, w, target, linear_bias=b)  # noqa: E731
    assert torch.autograd.gradgradcheck(call, (x, w))
    assert torch.autograd.gradgradcheck(lambda w: call(x.detach(), w), (w,))


@pytest.mark.parametrize("rows", [4, 9])
def test_opcheck(rows):
    x, w, target, b = (t.detach() for t in operands(dtype=torch.float32))
    for needs in ((True, True, True), (True, False, False), (False, True, False)):
        arguments = x, w, target, b, None, target != 3, None, None, -100, 0.1, 0.0, 1.0, 0.0, True, rows, *needs
        torch.library.opcheck(torch.ops.safeops._linear_cross_entropy, arguments)


@pytest.mark.slow
def test_compiled(monkeypatch):
    """Row counts unknown to the trace, on either side of the bound for chunks of rows, run the right one."""
    torch.compiler.reset()
    monkeypatch.setattr(_chunks, "CHUNK", 2**8)
    monkeypatch.setattr(cross_entropy, "BLOCK", 2**6)
    compiled = torch.compile(safeops.linear_cross_entropy, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows, with_loss in {2000: True, 1500: True, 500: False}.items():
        x, w, target, b = operands(rows, 23, 6, torch.float32)
        assert (_rows.rows_at_once(x, w, True) > 0) == with_loss
        torch.testing.assert_close(outcome(compiled, x, w, target, b), outcome(_twin, x, w, target, b))


def test_checkpointed(rows):
    x, w, target, b = operands()
    call = lambda x, w: safeops.linear_cross_entropy(x, w, target, linear_bias=b)  # noqa: E731
    want = torch.autograd.grad(call(x, w), (x, w, b))
    for reentrant in (False, True):
        loss = checkpoint(call, x, w, use_reentrant=reentrant)
        for t in (x, w, b):
            t.grad = None
        loss.backward()
        torch.testing.assert_close((x.grad, w.grad, b.grad), want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_no_rows_with_a_z_loss(dtype):
    x = torch.randn(0, 3, dtype=dtype, device=DEVICE, requires_grad=True)
    w = torch.randn(5, 3, dtype=dtype, device=DEVICE, requires_grad=True)
    target = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    loss = safeops.linear_cross_entropy(x, w, target, z_loss=1e-4)
    loss.backward()
    assert loss == 0 and not w.grad.any() and x.grad.shape == x.shape
