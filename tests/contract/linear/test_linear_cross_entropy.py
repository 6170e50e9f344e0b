"""linear_cross_entropy beyond its record: chunks, reported failures, memory, rows and classes that are left out."""

import types

import pytest
import torch
import torch.nn.functional as F

import safeops
from safeops.ops.classification import cross_entropy
from safeops.ops.linear import _chunks, _rows
from safeops.testing.memory import _peak_bytes
from tests.contract.common import DEVICE, each_route, flags, on
from tests.ops import definitions
from tests.ops.linear.linear_cross_entropy import _twin

NAN, INF = float("nan"), float("inf")
NAME = "linear_cross_entropy"
each_reduction = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])


@pytest.fixture(params=["one class", "several classes", "one row", "several rows", "all"])
def chunk(request, monkeypatch):
    """Sets the size of a chunk of logits: one class, several classes, one row, several rows, all rows."""
    monkeypatch.setattr(_chunks, "CHUNK", {"one class": 1, "several classes": 40}.get(request.param, 2**23))
    rows = {"one row": 1, "several rows": 4, "all": 2**23}.get(request.param, 0)
    monkeypatch.setattr(_rows, "rows_at_once", lambda *_, **__: rows)
    monkeypatch.setattr(cross_entropy, "BLOCK", 40)  # elements of a block, in which a chunk of rows makes its slopes


@pytest.fixture(params=["kernel", "torch"])
def slopes(request, monkeypatch):
    """Computes the losses and their slopes (gradients to the logits) by the kernels, or by torch as without kernels."""
    if request.param == "torch":
        backward = cross_entropy._composite_backward
        record = types.SimpleNamespace(forward=cross_entropy._composite, backward=backward)
        monkeypatch.setattr(_rows, "_cross_entropy", record)
        monkeypatch.setattr(cross_entropy, "_backward", backward)
        monkeypatch.setattr(_rows, "_overwrite", cross_entropy._composite_overwrite)


def operands(rows=9, classes=23, width=6, dtype=torch.float64):
    shapes = (rows, width), (classes, width), (classes,)
    x, w, b = (torch.randn(shape, dtype=torch.float64, device=DEVICE).to(dtype).requires_grad_() for shape in shapes)
    return x, w, torch.randint(0, classes, (rows,), device=DEVICE), b


def outcome(function, *operands, upstream=None, **options):
    x, w, target, b = operands
    value = function(x, w, target, linear_bias=b, **options)
    upstream = torch.ones_like(value) if upstream is None else upstream.to(value.dtype)
    return [value, *torch.autograd.grad(value, (x, w, b), upstream)]


WEIGHT = torch.linspace(0.5, 1.5, 23, dtype=torch.float64)
OPTIONS = {
    "plain": {},
    "ignored": {"ignore_index": 3},
    "weighted": {"weight": WEIGHT},
    "smoothing": {"label_smoothing": 0.2},
    "z-loss": {"z_loss": 0.125},
    "z-loss, weighted": {"z_loss": 0.125, "weight": WEIGHT},
    "all": {"label_smoothing": 0.2, "z_loss": 0.125, "weight": WEIGHT},
    "shaped": {"temperature": 0.5, "softcap": 3.0},
    "row weights": {"row_weight": torch.tensor([0.5, 0, 2, 1, 1, 0.25, 3, 1, 0], dtype=torch.float64)},
}
OPTIONS["everything"] = OPTIONS["all"] | OPTIONS["shaped"] | OPTIONS["row weights"]


@each_reduction
@pytest.mark.parametrize("options", OPTIONS)
def test_every_option_in_chunks(chunk, slopes, options, reduction):
    """Chunks give a linear layer's loss and gradients; "none" scales each row by its upstream (Liger#1298, #678)."""
    tensors = operands()
    tensors[2][1] = 3
    options = {key: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for key, x in OPTIONS[options].items()}
    upstream = torch.randn(9 if reduction == "none" else (), dtype=torch.float64, device=DEVICE)
    got = outcome(safeops.linear_cross_entropy, *tensors, upstream=upstream, reduction=reduction, **options)
    # torch lacks temperature and row_weight; its z-loss beside class weights has another mean.
    known = not options.keys() & {"temperature", "row_weight"} and not {"z_loss", "weight"} <= options.keys()
    theirs = _twin if known else definitions.linear_cross_entropy
    want = outcome(theirs, *tensors, upstream=upstream, reduction=reduction, **options)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@each_reduction
@pytest.mark.parametrize("options", OPTIONS)
def test_the_routes_meet_in_fp32(chunk, options, reduction):
    tensors = operands(dtype=torch.float32)
    options = {key: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for key, x in OPTIONS[options].items()}
    got, want = (
        outcome(on(route, NAME), *tensors, reduction=reduction, **options) for route in ("kernel", "composite")
    )
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_is_no_worse_than_a_linear_layer(chunk, slopes, dtype):
    tensors = operands(60, 300, 40, dtype)
    truth = outcome(_twin, *(x.double() if x.is_floating_point() else x for x in tensors))
    theirs = outcome(_twin, *tensors)
    for got, other, want in zip(outcome(safeops.linear_cross_entropy, *tensors), theirs, truth):
        size = want.abs().max()
        assert (got.double() - want).abs().max() <= (other.double() - want).abs().max() + torch.finfo(dtype).eps * size
    assert got.dtype == dtype


@pytest.mark.slow
def test_many_small_contributions_to_half_gradients(monkeypatch):
    """Liger#512, axolotl#1601, xtuner#1747: half gradients must be accumulated in fp32, for in bf16 256 + 1 is 256.

    Each class has a probability of about 1 / C, so a chunk of classes adds little to the gradient of a row.
    """
    monkeypatch.setattr(_chunks, "CHUNK", 1)
    classes, rows = 2048, 4
    x = torch.ones(rows, 8, dtype=torch.bfloat16, device=DEVICE).requires_grad_()
    w = torch.ones(classes, 8, dtype=torch.bfloat16, device=DEVICE).requires_grad_()
    b = torch.zeros(classes, dtype=torch.bfloat16, device=DEVICE).requires_grad_()
    target = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    w.data[0] = 0  # else the gradient to a row of x, a sum over the classes, is 0
    got = outcome(safeops.linear_cross_entropy, x, w, target, b, reduction="sum")
    want = outcome(_twin, *(t.double() for t in (x, w)), target, b.double(), reduction="sum")
    for g, d in zip(got, want):
        assert (g.double() - d).abs().max() <= 2**-7 * d.abs().max()
    # The gradient to the weight is a sum over the rows, in one matrix product.
    rows = 4096
    x = torch.ones(rows, 8, dtype=torch.bfloat16, device=DEVICE).requires_grad_()
    w, b = w.detach()[:2].requires_grad_(), b.detach()[:2].requires_grad_()
    got = outcome(safeops.linear_cross_entropy, x, w, target.new_zeros(rows), b, reduction="sum")
    want = outcome(_twin, *(t.double() for t in (x, w)), target.new_zeros(rows), b.double(), reduction="sum")
    for g, d in zip(got, want):
        assert (g.double() - d).abs().max() <= 2**-7 * d.abs().max()


def most_bytes(rows, width, bytes_):
    """Returns the bytes allowed: two chunks, two copies of `input`, two of its fp32 gradient, 128 a row, and 1 MiB."""
    return 2 * _chunks.CHUNK * bytes_ + rows * width * (2 * bytes_ + 8) + 128 * rows + 2**20


@pytest.fixture
def one_thread():
    """Sets one thread: each thread of torch's matrix products allocates memory of its own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.skipif(DEVICE != "cpu", reason="measured by the CPU's profiler")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_logits_never_exist(monkeypatch, one_thread, dtype):
    monkeypatch.setattr(_chunks, "CHUNK", 2**20)
    rows, classes, width = 1024, 16384, 16
    x, w, target, b = operands(rows, classes, width, dtype)
    allowed = most_bytes(rows, width, dtype.itemsize)
    forward = _peak_bytes("cpu", lambda: safeops.linear_cross_entropy(x, w, target, linear_bias=b))
    loss = safeops.linear_cross_entropy(x, w, target, linear_bias=b)
    backward = _peak_bytes("cpu", lambda: torch.autograd.grad(loss, (x, w, b), retain_graph=True))
    assert forward <= allowed and backward <= allowed + x.nbytes + w.nbytes + b.nbytes
    logits = rows * classes * dtype.itemsize
    assert _peak_bytes("cpu", lambda: F.cross_entropy(F.linear(x, w, b), target)) >= logits > 3 * allowed


def test_a_language_model_keeps_an_eighth():
    assert most_bytes(4096, 1024, 2) <= 4096 * 131_072 * 2 / 8


def test_what_is_saved(monkeypatch):
    """The forward saves the operands, and at most two numbers for each row."""
    x, w, target, b = operands()
    kept = {}

    def note(t):
        kept[t.data_ptr()] = t.numel()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        safeops.linear_cross_entropy(x, w, target, linear_bias=b, reduction="none")
    for t in (x, w, target, b):
        kept.pop(t.data_ptr(), None)
    assert sum(kept.values()) <= 2 * 9


@each_route
@pytest.mark.parametrize("by", ["mask", "ignore_index", "weight"])
def test_a_row_that_does_not_exist(route, chunk, by):
    tensors = operands(5, 7)
    tensors[2][:] = torch.tensor([0, 3, 2, 3, 1])
    keep = tensors[2] != 3
    options = {
        "mask": {"mask": keep},
        "ignore_index": {"ignore_index": 3},
        "weight": {"weight": torch.where(torch.arange(7, device=DEVICE) == 3, 0.0, 1.0)},
    }[by]
    x, w, target, b = tensors
    want = outcome(_twin, x, w, torch.where(keep, target, -100), b)
    for garbage in (NAN, INF, 1e300):
        dirty = torch.where(keep[:, None], x.detach(), garbage).requires_grad_()
        torch.testing.assert_close(outcome(on(route, NAME), dirty, w, target, b, **options), want)
        upstream = torch.where(keep, 1.0, NAN)
        none = outcome(on(route, NAME), dirty, w, target, b, upstream=upstream, reduction="none", **options)
        assert (none[0][~keep] == 0).all() and (none[1][~keep] == 0).all() and all(t.isfinite().all() for t in none)


@each_route
def test_nothing_kept(route):
    x, w, target, b = operands(3, 7)
    target[:] = -100
    assert all((t == 0).all() for t in outcome(on(route, NAME), x, w, target, b))
    assert on(route, NAME)(x, w, target, empty="nan").isnan()
    with pytest.raises(ValueError, match=f'^{NAME}: empty="raise"'):
        on(route, NAME)(x, w, target, empty="raise")


@each_route
@pytest.mark.parametrize("smoothing", [0.0, 0.25])
def test_a_class_with_a_bias_of_minus_infinity_does_not_exist(route, chunk, smoothing):
    x, w, _, b = operands(5, 8)
    target, others = torch.tensor([0, 1, 6, 7, 0], device=DEVICE), [0, 1, 2, 4, 5, 6, 7]
    without = torch.where(target > 3, target - 1, target)
    b.data[3] = -INF
    got = outcome(on(route, NAME), x, w, target, b, label_smoothing=smoothing)
    short = (t.detach()[others].requires_grad_() for t in (w, b))
    w_short, b_short = short
    want = outcome(_twin, x, w_short, without, b_short, label_smoothing=smoothing)
    torch.testing.assert_close(got[:2], want[:2])
    assert (got[2][3] == 0).all() and got[3][3] == 0
    torch.testing.assert_close([t[others] for t in got[2:]], want[2:])
    loss = on(route, NAME)(x, w, torch.full_like(target, 3), linear_bias=b, reduction="none")
    assert (loss == INF).all()


def infinite_logits(at, target_class):
    """Returns operands for which row 1 has a logit of +inf (the product overflows) in each class of `at`."""
    x, w, target, b = operands(3, 7)
    with torch.no_grad():
        w[:, 0] = x[:, 0] = 0
        w[list(at), 0], x[1, 0] = 16, 1.7e308
    target[1] = target_class
    return x, w, target, b


@pytest.mark.parametrize("options", ["plain", "smoothing", "z-loss"])
def test_infinite_logits_are_those_of_cross_entropy(chunk, slopes, options):
    """A +inf logit makes loss and gradient NaN, as in cross_entropy, unless it is the target's alone (no options)."""
    for at, target_class in (((2,), 2), ((2,), 5), ((2, 5), 2), ((2, 3), 2)):
        tensors = infinite_logits(at, target_class)
        for reduction in ("mean", "none"):
            routes = definitions.linear_cross_entropy, *(on(route, NAME) for route in ("kernel", "composite"))
            want, *both = (outcome(f, *tensors, reduction=reduction, **OPTIONS[options]) for f in routes)
            assert want[0].isnan().any() == want[1].isnan().any() == (at != (target_class,) or options != "plain")
            for got in both:
                torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12, equal_nan=True)


@each_route
def test_a_kept_nan_shows(route, chunk):
    for place in range(3):
        tensors = operands(4, 7)
        with torch.no_grad():
            (tensors[0], tensors[1], tensors[3])[place].view(-1)[8 if place == 0 else 2] = NAN
        value, *grads = outcome(on(route, NAME), *tensors, reduction="none")
        assert value.isnan().tolist() == ([False, True, False, False] if place == 0 else [True] * 4)
        assert grads[0][1].isnan().all() and grads[1].isnan().any() and grads[2].isnan().all()


@each_route
@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 3), (2, 0, 3)], ids=str)
def test_shapes(route, shape):
    x = torch.randn(*shape, 4, dtype=torch.float64, device=DEVICE, requires_grad=True)
    w = torch.randn(5, 4, dtype=torch.float64, device=DEVICE, requires_grad=True)
    target = torch.randint(0, 5, shape, device=DEVICE)
    for dtype in (torch.int64, torch.int32, torch.uint8):
        value = on(route, NAME)(x, w, target.to(dtype), reduction="none")
        want = definitions.linear_cross_entropy(x, w, target, reduction="none")
        torch.testing.assert_close(value, want)
        assert value.shape == shape
        got, wanted = (torch.autograd.grad(v.sum(), (x, w)) for v in (value, want))
        torch.testing.assert_close(got, wanted)


def test_layouts(chunk):
    """Transposed, expanded and sliced operands must give the results of contiguous ones."""
    x, w, target, b = operands(6, 8)
    want = outcome(safeops.linear_cross_entropy, x, w, target, b, reduction="none")
    for change in (lambda t: t.mT.contiguous().mT, lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]]):
        strided = [change(t.detach()).requires_grad_() for t in (x, w)]
        got = outcome(safeops.linear_cross_entropy, *strided, target, b, reduction="none")
        torch.testing.assert_close(got, want)
    same = x.detach()[:1].expand(6, -1).requires_grad_()
    got = outcome(safeops.linear_cross_entropy, same, w, target, b.detach()[:1].expand(8).requires_grad_())
    want = outcome(_twin, same.detach().clone().requires_grad_(), w, target, b.detach()[:1].repeat(8).requires_grad_())
    torch.testing.assert_close(got, want)
    value = safeops.linear_cross_entropy(x, w, target, linear_bias=b, reduction="none")
    (grad,) = torch.autograd.grad(value.sum(), x)  # sum's upstream gradient has strides of 0
    torch.testing.assert_close(grad, outcome(_twin, x, w, target, b, reduction="none")[1])


@pytest.mark.parametrize("autocast", [torch.float16, torch.bfloat16], ids=str)
def test_under_autocast(autocast):
    """Operands of one dtype are computed in it. Operands of several dtypes (half activations, fp32 parameters) are
    computed in autocast's dtype, as in a linear layer."""
    x, w, target, b = operands(dtype=torch.float32)
    plain = outcome(safeops.linear_cross_entropy, x, w, target, b)
    with torch.autocast(DEVICE, dtype=autocast):
        assert all(torch.equal(a, c) for a, c in zip(outcome(safeops.linear_cross_entropy, x, w, target, b), plain))
        half = x.detach().to(autocast).requires_grad_()
        mixed = outcome(safeops.linear_cross_entropy, half, w, target, b)
    assert [t.dtype for t in mixed] == [torch.float32, autocast, torch.float32, torch.float32]
    all_half = [t.detach().to(autocast).requires_grad_() for t in (w, b)]
    want = outcome(safeops.linear_cross_entropy, half, all_half[0], target, all_half[1])
    assert all(torch.equal(a, c.to(a.dtype)) for a, c in zip(mixed, want))


def test_a_scaled_gradient_beyond_fp16_is_infinite_and_others_are_not():
    """A gradient beyond fp16 is inf, which GradScaler looks for; the other gradients are right, although the slopes
    (gradients to the logits) do not fit fp16."""
    x, w, target, b = operands(4, 7, dtype=torch.float16)
    x, w = x.detach().mul(2**-6).requires_grad_(), w.detach().mul(2**-6).requires_grad_()
    upstream = torch.full((4,), 2.0**17, device=DEVICE)
    got = outcome(safeops.linear_cross_entropy, x, w, target, b, upstream=upstream, reduction="none")
    want = outcome(_twin, *(t.double() for t in (x, w)), target, b.double(), upstream=upstream, reduction="none")
    assert want[3].half().isinf().any() and want[1].half().isfinite().all()
    for g, d in zip(got[1:], want[1:]):
        assert torch.equal(g.isfinite(), d.half().isfinite())
        assert ((g.double() - d).abs()[g.isfinite()] <= 2**-7 * d.abs().max()).all()


def test_there_are_chunks(monkeypatch):
    """With reduction="none", logits are made in chunks of at most CHUNK elements, compiled or not."""
    sizes = []
    chunks = _chunks.chunks_of

    def watched(*operands):
        for part, logits in chunks(*operands):
            sizes.append(logits.numel())
            yield part, logits

    monkeypatch.setattr(_chunks, "CHUNK", 40)
    monkeypatch.setattr(_chunks, "chunks_of", watched)
    tensors = operands()
    for function in (safeops.linear_cross_entropy, torch.compile(safeops.linear_cross_entropy, backend="aot_eager")):
        sizes.clear()
        got = outcome(function, *tensors, reduction="none")
        assert sum(sizes) == 9 * 23 and max(sizes) <= 40
        torch.testing.assert_close(got, outcome(_twin, *tensors, reduction="none"))


@each_route
@pytest.mark.parametrize("size", [1e3, 1e9])
def test_logits_far_from_zero(route, size):
    x, w = torch.ones(2, 1, requires_grad=True), torch.full((4, 1), size, requires_grad=True)
    bias, target = torch.zeros(4, requires_grad=True), torch.tensor([1, 3])
    loss = on(route, "linear_cross_entropy")(x, w, target, linear_bias=bias, reduction="sum")
    torch.testing.assert_close(loss, 2 * torch.tensor(4.0).log(), rtol=1e-6, atol=0)
    dx, dw, db = torch.autograd.grad(loss, (x, w, bias))
    want = 0.5 - torch.tensor([0.0, 1.0, 0.0, 1.0])
    torch.testing.assert_close((dx, dw[:, 0], db), (torch.zeros(2, 1), want, want), rtol=1e-6, atol=1e-6 * size)


@each_route
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_row_that_does_not_exist_has_no_gradient_beside_what_is_not_finite(route, bad):
    x, w = torch.randn(3, 3, requires_grad=True), torch.randn(4, 3)
    w[3, 1] = bad
    for options in (
        {"mask": torch.tensor([True, False, True])},
        {"ignore_index": 1},
        {"weight": torch.tensor([1.0, 0, 1, 1])},
    ):
        loss = on(route, "linear_cross_entropy")(x, w, torch.tensor([0, 1, 2]), label_smoothing=0.1, **options)
        (dx,) = torch.autograd.grad(loss, x)
        assert (dx[1] == 0).all() and not dx[::2].isfinite().all()


@each_route
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 2, 1, 1])], ids=["plain", "weighted"])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_nothing_kept_beside_what_is_not_finite(route, reduction, weight, bad):
    x, w, target, b = operands(3, 4, 3, dtype=torch.float32)
    w.data[3, 1] = bad
    options = {"weight": weight if weight is None else weight.to(DEVICE), "label_smoothing": 0.1, "ignore_index": 0}
    value, *grads = outcome(on(route, NAME), x, w, target * 0, b, reduction=reduction, **options)
    assert all((t == 0).all() for t in (value, *grads))


@each_route
def test_vectors_of_nothing(route):
    loss = on(route, "linear_cross_entropy")(torch.zeros(2, 0), torch.zeros(3, 0), torch.tensor([0, 2]))
    torch.testing.assert_close(loss, torch.tensor(3.0).log())


def test_on_a_device_without_autocast():
    x, w, target = torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(2, dtype=torch.int64)
    assert safeops.linear_cross_entropy(*(t.to("meta") for t in (x, w, target))).device.type == "meta"
    assert safeops.info_nce_loss(x.to("meta"), x.to("meta")).device.type == "meta"


@pytest.mark.slow
def test_a_compiled_call_refuses_a_class_out_of_range():
    compiled = torch.compile(safeops.linear_cross_entropy, backend="aot_eager", fullgraph=True)
    with pytest.raises(IndexError, match="linear_cross_entropy: target 9 is out of range for the 5 classes"):
        compiled(torch.randn(2, 8), torch.randn(5, 8), torch.tensor([0, 9]))


def test_export():
    class Call(torch.nn.Module):
        def forward(self, x, w, target):
            return safeops.linear_cross_entropy(x, w, target, label_smoothing=0.1)

    x, w, target, _ = operands(dtype=torch.float32)
    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(Call(), (x, w, target), dynamic_shapes=({0: rows}, None, {0: rows}))
    for n in (9, 4):
        got, want = (f(x[:n], w, target[:n]) for f in (program.module(), Call()))
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(torch.autograd.grad(got, x), torch.autograd.grad(want, x))


def test_frozen_operands():
    """Each operand's gradient alone equals its gradient among all three; without a bias the loss is the layer's."""
    x, w, target, b = operands()
    every = outcome(safeops.linear_cross_entropy, x, w, target, b)
    for i, leaf in enumerate((x, w, b)):
        fixed = [t if t is leaf else t.detach() for t in (x, w, b)]
        loss = safeops.linear_cross_entropy(fixed[0], fixed[1], target, linear_bias=fixed[2])
        torch.testing.assert_close(torch.autograd.grad(loss, leaf)[0], every[i + 1])
    mask = flags(*[True] * 9)
    loss = safeops.linear_cross_entropy(x, w, target, mask=mask)
    torch.testing.assert_close(loss, F.cross_entropy(F.linear(x, w), target))


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 2.0**-10, 2.0**12])
def test_half_slopes_of_many_rows_do_not_vanish(scale):
    """p / N is below fp16's smallest number: the slopes must be scaled before they are rounded."""
    rows, classes, width = 32768, 256, 8
    x, w = (torch.randn(rows, width).half(), (torch.randn(classes, width) / 8).half())
    target = torch.randint(0, 16, (rows,))

    def gradients(loss, dtype):
        leaves = [t.to(DEVICE, dtype, copy=True).requires_grad_() for t in (x, w)]
        return torch.autograd.grad(loss(*leaves, target.to(DEVICE)) * scale, leaves)

    got = gradients(safeops.linear_cross_entropy, torch.float16)
    want = gradients(lambda x, w, target: F.cross_entropy(x @ w.mT, target), torch.float64)
    for g, true in zip(got, want):
        assert g.dtype == torch.float16
        rounded = float((true.half().double() - true).norm())
        assert float((g.double() - true).norm()) <= 1.5 * rounded + 1e-3 * float(true.norm())


# ---- masked garbage and weights far from 1


@pytest.mark.parametrize("by", ["mask", "ignore_index", "row_weight"])
@pytest.mark.parametrize("options", [{}, {"z_loss": 0.01}, {"reduction": "sum"}, {"reduction": "none"}], ids=str)
def test_garbage_of_a_masked_row_reaches_no_other_gradient_in_fp16(by, options):
    """Garbage in a masked row must not change the power of two that scales the slopes into fp16's range."""
    x, w, target, b = operands(8, 5, 4, torch.float16)
    x = x.detach()
    if by == "ignore_index":
        target[7] = -100
    else:
        kept = torch.arange(8, device=DEVICE) < 7
        options = options | {by: kept if by == "mask" else 1e5 * kept}
    results = []
    for garbage in (0.0, NAN, INF, 6e4):
        x[7] = garbage
        dirty = x.clone().requires_grad_()
        upstream = torch.tensor(1e-3, device=DEVICE)
        upstream = upstream.expand(8) if options.get("reduction") == "none" else upstream
        results.append(outcome(safeops.linear_cross_entropy, dirty, w, target, b, upstream=upstream, **options))
    assert all(t.isfinite().all() for t in results[0])
    for other in results[1:]:
        assert all(torch.equal(a, c) for a, c in zip(results[0], other))


def test_a_class_weight_that_no_row_has_reaches_no_gradient_in_fp16():
    x, w, target, b = operands(8, 5, 4, torch.float16)
    target[:] = torch.arange(8, device=DEVICE) % 4
    results = []
    for unused in (1.0, NAN, 1e30):
        weight = torch.tensor([1.0, 1e5, 2.0, 1.0, unused], device=DEVICE)
        results.append(outcome(safeops.linear_cross_entropy, x, w, target, b, weight=weight, reduction="sum"))
    for other in results[1:]:
        assert all(torch.equal(a, c) for a, c in zip(results[0], other))


@pytest.mark.parametrize("name", ["cross_entropy", NAME])
@pytest.mark.parametrize("size", [1e-50, 1e-44, 1e45, 1e200])
@pytest.mark.parametrize("leaf", [False, True])
def test_row_weights_that_fp32_does_not_hold(name, size, leaf):
    x, w, target, b = operands(8, 5, 4, torch.float32)
    logits = (x @ w.mT + b).detach().requires_grad_()
    row_weight = (torch.linspace(0.5, 2, 8, dtype=torch.float64, device=DEVICE) * size).requires_grad_(leaf)

    def step(function, *operands):
        value = function(*operands, target, row_weight=row_weight)
        return value, *torch.autograd.grad(value, operands)

    leaves = (logits,) if name == "cross_entropy" else (x, w)
    got = step(getattr(safeops, name), *leaves)
    want = step(getattr(definitions, name), *(t.detach().double().requires_grad_() for t in leaves))
    assert got[0].dtype == torch.float32
    torch.testing.assert_close([t.double() for t in got], list(want), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["cross_entropy", NAME])
def test_the_gradient_of_one_weight_for_all_rows_is_rounded_once(name):
    rows = 20_000
    x, w, target, _ = operands(rows, 5, 4, torch.float32)
    row_weight = torch.ones(1, dtype=torch.float16, device=DEVICE, requires_grad=True)
    leaves = (x @ w.mT,) if name == "cross_entropy" else (x, w)
    options = {"row_weight": row_weight, "denominator": 1e9}
    (got,) = torch.autograd.grad(getattr(safeops, name)(*leaves, target, **options), row_weight)
    want = definitions.cross_entropy((x @ w.mT).double(), target, reduction="sum") / 1e9
    torch.testing.assert_close(got.double(), want.detach().expand(1), rtol=2**-10, atol=2**-24)
