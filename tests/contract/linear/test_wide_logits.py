"""logits_dtype=torch.float32: the fp32 sums of half operands as logits; errors beside logits in half, bytes, routes."""

import pytest
import torch

import safeops
from safeops.ops.classification import cross_entropy
from safeops.ops.linear import _chunks, _rows
from safeops.testing.memory import _peak_bytes
from tests.contract.linear.test_linear_rows import shaped
from tests.ops import definitions
from tests.ops.record import DEVICE

WIDE = {"logits_dtype": torch.float32}
HALF = torch.bfloat16, torch.float16
each_half = pytest.mark.parametrize("dtype", HALF, ids=str)
DIVERGENCES = "linear_kl_div", "linear_reverse_kl_div", "linear_js_div", "linear_tv"
FUNCTIONS = "linear_cross_entropy", "linear_token_log_probs", *DIVERGENCES
each = pytest.mark.parametrize("name", FUNCTIONS)
ROWS, CLASSES, WIDTH = 24, 60, 16


def example(dtype, rows=ROWS, classes=CLASSES, width=WIDTH, largest=30.0, seed=0):
    """Returns (input, linear_weight, linear_bias, target, teacher's logits), with logits up to about `largest`."""
    g = torch.Generator().manual_seed(seed)
    x, w, b, y = (torch.randn(*shape, generator=g, dtype=torch.float64)
                  for shape in ((rows, width), (classes, width), (classes,), (rows, classes)))  # fmt: skip
    w *= largest / float((x @ w.mT).abs().max())
    target = torch.randint(classes, (rows,), generator=g)
    return *(t.to(DEVICE, dtype) for t in (x, w, b)), target.to(DEVICE), y.to(DEVICE, dtype)


def call(module, name, tensors, keep=None, **options):
    """Returns the results of the function `name` of a module, one for each row, as one tensor (results, rows)."""
    x, w, b, target, teacher = tensors
    function = getattr(module, name)
    options = {"linear_bias": b, "mask": keep, **options}
    if name in DIVERGENCES:
        return function(x, w, teacher, None, reduction="none", **options).unsqueeze(0)
    if name == "linear_cross_entropy":
        return function(x, w, target, reduction="none", **options).unsqueeze(0)
    return torch.stack(function(x, w, target, **options))


def outcome(module, name, tensors, **options):
    """Returns [results, gradients of input, weight and bias for a sum over the rows]."""
    leaves = [t.detach().requires_grad_() for t in tensors[:3]]
    results = call(module, name, (*leaves, *tensors[3:]), **options)
    upstream = torch.linspace(1, 2, results.numel(), device=DEVICE).reshape(results.shape).to(results.dtype)
    return [results.detach(), *torch.autograd.grad(results, leaves, upstream)]


def error(got, want):
    return float((got.double() - want).abs().max())


def relative(got, want):
    """Returns the root mean square of the error, as a share of that of the true values."""
    return float((got.double() - want).square().mean().sqrt() / want.square().mean().sqrt())


def wide(tensors):
    return [t.double() if t.is_floating_point() else t for t in tensors]


# ---- figures


@pytest.mark.parametrize("dtype, before", [(torch.bfloat16, 0.06), (torch.float16, 0.006)], ids=str)
def test_log_probabilities_of_logits_of_30(dtype, before):
    """An error of 1e-5 at most; of logits in half it is 0.06 and more (bf16), or 0.006 (fp16)."""
    tensors = example(dtype, 300, 5000, 64)
    want = call(definitions, "linear_token_log_probs", wide(tensors))
    got = call(safeops, "linear_token_log_probs", tensors, **WIDE)
    in_half = call(safeops, "linear_token_log_probs", tensors)
    assert got.dtype == torch.float32
    assert error(got[0], want[0]) <= 1e-5 and error(in_half[0], want[0]) >= before
    assert error(got[2], want[2]) <= 1e-5 and error(got[1], want[1]) <= 1e-5


@each
@each_half
@pytest.mark.parametrize("chunk", [2**23, 2**7, 1])
def test_values_and_gradients(name, dtype, chunk, monkeypatch):
    """Values have fp32's error, gradients that of slopes and gradients rounded to half; with logits in half, both have
    a larger one."""
    monkeypatch.setattr(_chunks, "CHUNK", chunk)
    monkeypatch.setattr(_chunks, "UPCAST", 5 * WIDTH)
    tensors, eps = example(dtype), torch.finfo(dtype).eps
    want = outcome(definitions, name, wide(tensors))
    got, in_half = (outcome(safeops, name, tensors, **options) for options in (WIDE, {}))
    assert error(got[0], want[0]) <= 2e-5 and error(in_half[0], want[0]) >= 50 * error(got[0], want[0])
    assert [t.dtype for t in got] == [torch.float32] + [dtype] * 3
    assert all(relative(g, w) <= 0.5 * eps for g, w in zip(got[1:], want[1:]))
    assert all(relative(h, w) > 1.1 * relative(g, w) for g, h, w in zip(got[1:3], in_half[1:3], want[1:3]))


@each_half
@pytest.mark.parametrize("at_once", [1, 7, ROWS])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 20.0}], ids=str)
def test_gradients_made_with_the_loss(dtype, at_once, options, monkeypatch):
    monkeypatch.setattr(_rows, "rows_at_once", lambda *_, **__: at_once)
    x, w, b, target, _ = tensors = example(dtype)

    def step(module, x, w, b, **more):
        leaves = [t.detach().requires_grad_() for t in (x, w, b)]
        loss = module.linear_cross_entropy(*leaves[:2], target, linear_bias=leaves[2], **options, **more)
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    want = step(definitions, *wide(tensors)[:3])
    got, in_half = (step(safeops, x, w, b, **more) for more in (WIDE, {}))
    assert error(got[0], want[0]) <= 1e-5
    eps = torch.finfo(dtype).eps
    assert all(g.dtype == dtype and relative(g, w) <= 0.5 * eps for g, w in zip(got[1:], want[1:]))
    assert all(relative(h, w) > 1.1 * relative(g, w) for g, h, w in zip(got[1:3], in_half[1:3], want[1:3]))


def test_fp16_logits_beyond_fp16():
    """A logit of 1e6 does not fit fp16: with logits in half the loss is NaN."""
    x = torch.tensor([[1000.0]], dtype=torch.float16, device=DEVICE, requires_grad=True)
    w = torch.tensor([[1000.0], [999.5], [0.0]], dtype=torch.float16, device=DEVICE, requires_grad=True)
    target = torch.tensor([1], device=DEVICE)
    loss = safeops.linear_cross_entropy(x, w, target, **WIDE)
    loss.backward()
    assert loss == 500 and x.grad == 0.5 and torch.equal(w.grad[:, 0].cpu(), torch.tensor([1000.0, -1000, 0]).half())
    assert safeops.linear_cross_entropy(x, w, target).isnan()


# ---- what stays as it is


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_operands_own_dtype_is_the_default_bit_for_bit(name, dtype):
    tensors = example(dtype)
    for a, b in zip(outcome(safeops, name, tensors, logits_dtype=dtype), outcome(safeops, name, tensors)):
        assert torch.equal(a, b)


@each
def test_a_row_that_is_not_kept_and_a_class_without_weight(name):
    tensors = example(torch.bfloat16)
    x, w, b, target, teacher = (t.clone() for t in tensors)
    keep = torch.arange(ROWS, device=DEVICE) % 3 != 1
    x[~keep], teacher[~keep], b[50:], teacher[:, 50:] = torch.nan, torch.nan, -torch.inf, -torch.inf
    tensors = x, w, b, target % 50, teacher
    results, *gradients = outcome(safeops, name, tensors, keep=keep, **WIDE)
    want = outcome(definitions, name, wide((x, w[:50], b[:50], target % 50, teacher[:, :50])), keep=keep)
    assert error(results, want[0]) <= 2e-5 and not results[:, ~keep].any()
    assert not gradients[0][~keep].any() and not gradients[1][50:].any() and not gradients[2][50:].any()


# ---- bytes


@each_half
@pytest.mark.parametrize("rows, width, classes", [(8192, 1024, 131_072), (32_768, 1024, 131_072), (8192, 256, 32_000)])
def test_a_chunk_has_the_bytes_of_one_in_half(rows, width, classes, dtype):
    x, w = shaped(rows, width, classes, dtype)
    for options in ({}, {"low": False}, {"low": False, "need_weight": True}, {"need_weight": True}):
        in_half, in_fp32 = (_rows.rows_at_once(x, w, wide=wide, **options) for wide in (False, True))
        assert in_fp32 <= -(-in_half // 2) and (in_fp32 >= in_half // 2 - 64 or "need_weight" in options), options
    sizes = [next(_chunks.chunks_of(torch.empty(64, 4, dtype=dtype), torch.empty(2**18, 4, dtype=dtype), None, wide=k))
             for k in (False, True)]  # fmt: skip
    assert sizes[0][1].nbytes == sizes[1][1].nbytes and sizes[1][1].dtype == torch.float32


@each
def test_the_logits_never_exist(name, monkeypatch):
    """A step needs no more bytes than one with logits in half, but for the operands' blocks in fp32."""
    monkeypatch.setattr(_chunks, "CHUNK", 2**17)
    monkeypatch.setattr(_chunks, "UPCAST", 2**14)
    monkeypatch.setattr(cross_entropy, "BLOCK", 2**14)
    tensors = example(torch.bfloat16, 512, 8192)

    def peak(**options):
        return _peak_bytes(DEVICE, lambda: outcome(safeops, name, tensors, **options))

    in_half, in_fp32 = peak(), peak(**WIDE)
    assert in_fp32 <= in_half + 8 * 2**14 + 2**17 and in_fp32 < 512 * 8192 * 4 / 4


@pytest.mark.parametrize("rows", [0, 1, 2, 63, 64, 65, 200])
@each_half
def test_slopes_are_rounded_in_their_own_memory(rows, dtype):
    x = torch.randn(rows, 7, device=DEVICE)
    want = x.to(dtype)
    got = _chunks.narrowed(x, dtype)
    assert torch.equal(got, want) and got.data_ptr() == x.data_ptr()


# ---- routes


def test_by_the_definition():
    """Forward mode, second derivatives and vmap compute by the definition."""
    x, w, b, target, _ = tensors = example(torch.bfloat16, largest=3.0)

    def log_prob(x, w, b):
        return call(safeops, "linear_token_log_probs", (x, w, b, *tensors[3:]), **WIDE)[0]

    want = call(definitions, "linear_token_log_probs", wide(tensors))[0]
    value, tangent = torch.func.jvp(log_prob, (x, w, b), (x, w, b))
    assert error(value, want) <= 1e-5 and tangent.isfinite().all() and tangent.any()
    single = lambda x, t: safeops.linear_token_log_probs(x, w, t, linear_bias=b, **WIDE).log_prob  # noqa: E731
    assert error(torch.vmap(single)(x, target), want) <= 1e-5
    leaves = [t.detach().requires_grad_() for t in (x, w, b)]
    (slope,) = torch.autograd.grad(log_prob(*leaves).sum(), leaves[0], create_graph=True)
    second = torch.autograd.grad(slope.float().square().sum(), leaves)
    truth = [t.double().requires_grad_() for t in (x, w, b)]
    total = call(definitions, "linear_token_log_probs", (*truth, *tensors[3:]))[0].sum()
    (slope,) = torch.autograd.grad(total, truth[0], create_graph=True)
    for got, t in zip(second, torch.autograd.grad(slope.square().sum(), truth)):
        assert relative(got, t) <= 0.02


@each
def test_under_autocast(name):
    """Operands of two dtypes are cast to autocast's; its products are rounded by default, not with fp32 logits."""
    x, w, b, target, teacher = example(torch.bfloat16)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        mixed = (x.float(), w, b.float(), target, teacher)
        got, own = (outcome(safeops, name, mixed, logits_dtype=d) for d in (torch.float32, torch.bfloat16))
        with pytest.raises(ValueError, match=f"^{name}: logits_dtype .* torch.bfloat16 or torch.float32, got"):
            call(safeops, name, mixed, logits_dtype=torch.float16)
    for logits_dtype, results in ((torch.float32, got), (None, own)):
        for a, v in zip(results, outcome(safeops, name, (x, w, b, target, teacher), logits_dtype=logits_dtype)):
            torch.testing.assert_close(a, v, check_dtype=False, rtol=0, atol=0)


def test_class_probabilities():
    """All logits are in fp32 in any case, and the dtype is checked."""
    x, w, b, *_ = example(torch.bfloat16)
    q = torch.rand(ROWS, CLASSES, device=DEVICE).softmax(-1)
    a, v = (safeops.linear_cross_entropy(x, w, q, linear_bias=b, logits_dtype=d) for d in (None, torch.float32))
    assert torch.equal(a, v)
    with pytest.raises(ValueError, match="^linear_cross_entropy: logits_dtype"):
        safeops.linear_cross_entropy(x, w, q, linear_bias=b, logits_dtype=torch.float16)


def test_a_module():
    x, w, b, target, _ = example(torch.bfloat16)
    loss = safeops.nn.LinearCrossEntropyLoss(logits_dtype=torch.float32)(x, w, target, linear_bias=b)
    assert torch.equal(loss, safeops.linear_cross_entropy(x, w, target, linear_bias=b, **WIDE))
    for module in (safeops.nn.LinearCrossEntropyLoss, safeops.nn.LinearJSDivLoss):
        with pytest.raises(TypeError, match=f"^{module.__name__}: logits_dtype"):
            module(logits_dtype="float32")


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS[:3])
def test_compiled_whole(name):
    tensors = example(torch.bfloat16)
    function = torch.compile(lambda *t: call(safeops, name, t, **WIDE), fullgraph=True)
    leaves, others = ([t.detach().requires_grad_() for t in tensors[:3]] for _ in range(2))
    got, want = function(*leaves, *tensors[3:]), call(safeops, name, (*others, *tensors[3:]), **WIDE)
    torch.testing.assert_close(got, want)
    for a, v in zip(torch.autograd.grad(got.sum(), leaves), torch.autograd.grad(want.sum(), others)):
        torch.testing.assert_close(a, v)


@pytest.mark.slow
def test_raw_ops():
    x, w, b, target, teacher = example(torch.bfloat16, 5, 7, 4)
    x = x.requires_grad_()
    for op, arguments in (
        (torch.ops.safeops._linear_token_log_probs, (x, w, target, b, None, None, -100, 1.0, 0.0, True)),
        (torch.ops.safeops._linear_kl_div, (x, w, b, teacher, None, None, None, 1.0, 0.5, True)),
    ):
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


# ---- on a GPU


@each_half
def test_torch_takes_the_call_of_a_gpu(dtype, monkeypatch):
    """On CUDA the logits are one call of torch.mm or addmm with out_dtype, into a buffer. Here without values."""
    monkeypatch.setattr(_chunks, "sums_wide", lambda device: True)
    x, w, b = (torch.empty(*s, dtype=dtype, device="meta") for s in ((4, 8), (6, 8), (6,)))
    for bias in (None, b):
        buffer = torch.empty(4, 6, device="meta")
        assert _chunks.logits_of(x, w, bias, buffer, True) is buffer
        logits = _chunks.logits_of(x, w, bias, wide=True)
        assert logits.dtype == torch.float32 and logits.shape == (4, 6)


@each
@pytest.mark.skipif(DEVICE != "cpu", reason="imitates CUDA")
def test_as_on_cuda(name, monkeypatch):
    """Results are those of the CPU where torch.mm and addmm give sums in fp32, as on CUDA."""
    mm, addmm, wide_calls = torch.mm, torch.addmm, []

    def widened(*factors, out_dtype):
        wide_calls.append(out_dtype)
        return [f if out_dtype is None else f.to(out_dtype) for f in factors]

    def summed_mm(a, b, out_dtype=None, out=None):
        return mm(*widened(a, b, out_dtype=out_dtype), out=out)

    def summed_addmm(to, a, b, *, beta=1, out=None, out_dtype=None):
        assert out_dtype is None or to.dtype == out_dtype
        return addmm(to, *widened(a, b, out_dtype=out_dtype), beta=beta, out=out)

    tensors = example(torch.bfloat16)
    want = outcome(definitions, name, wide(tensors))
    monkeypatch.setattr(_chunks, "sums_wide", lambda device: True)
    monkeypatch.setattr(torch, "mm", summed_mm)
    monkeypatch.setattr(torch, "addmm", summed_addmm)
    got = outcome(safeops, name, tensors, **WIDE)
    assert torch.float32 in wide_calls and error(got[0], want[0]) <= 2e-5
    assert all(relative(g, t) <= 0.5 * 2**-7 for g, t in zip(got[1:], want[1:]))
