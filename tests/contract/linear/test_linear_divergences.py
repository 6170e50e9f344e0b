"""Divergences with the last layer, in chunks: parity with the divergence of the logits, memory, dtypes."""

import pytest
import torch

import safeops
from safeops.ops.linear import _chunks
from safeops.testing.memory import _peak_bytes
from tests.ops import definitions
from tests.ops.record import DEVICE

OF_LOGITS = {
    "linear_kl_div": "kl_div_with_logits",
    "linear_reverse_kl_div": "reverse_kl_div_with_logits",
    "linear_js_div": "js_div_with_logits",
    "linear_tv": "tv_with_logits",
}
each = pytest.mark.parametrize("name", OF_LOGITS)


def example(rows=(6, 5), classes=50, dtype=torch.float32, seed=0):
    """Returns (the student's layer, the teacher's layer, mask); the masked rows hold NaN."""
    generator = torch.Generator().manual_seed(seed)

    def layer(width):
        shapes = (*rows, width), (classes, width), (classes,)
        x, w, b = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in shapes)
        return [t.to(DEVICE, dtype) for t in (x, 0.3 * w, b)]

    student, teacher = layer(16), layer(24)
    mask = (torch.rand(rows, generator=generator) < 0.8).to(DEVICE)
    student[0][~mask] = teacher[0][~mask] = torch.nan
    return student, teacher, mask


def outcome(function, student, teacher, **options):
    leaves = [t.detach().requires_grad_() for t in student]
    x, w, b = leaves
    y, v, c = teacher
    loss = function(x, w, y, v, linear_bias=b, target_bias=c, **options)
    upstream = torch.linspace(1, 2, loss.numel(), device=DEVICE).reshape(loss.shape).to(loss.dtype)
    return loss.detach(), *torch.autograd.grad(loss, leaves, upstream)


def check(name, student, teacher, tolerance=1e-5, **options):
    got = outcome(getattr(safeops, name), student, teacher, **options)
    wide = [[t.double() for t in layer] for layer in (student, teacher)]
    for g, w in zip(got, outcome(getattr(definitions, name), *wide, **options)):
        scale = float(w.abs().max()) + 1e-3
        torch.testing.assert_close(g.double() / scale, w / scale, rtol=tolerance, atol=tolerance)
    return got


@each
@pytest.mark.parametrize("chunk", [2**23, 2**7, 1])
def test_in_chunks_as_a_whole(name, chunk, monkeypatch):
    monkeypatch.setattr(_chunks, "CHUNK", chunk)
    student, teacher, mask = example()
    check(name, student, teacher, mask=mask, temperature=0.75)
    check(name, student, teacher, mask=mask, reduction="none")


@each
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.bfloat16, 4e-2), (torch.float16, 1e-2)])
def test_dtypes(name, dtype, tolerance, monkeypatch):
    monkeypatch.setattr(_chunks, "CHUNK", 2**7)
    student, teacher, mask = example(dtype=dtype)
    if name == "linear_tv" and dtype == torch.bfloat16:
        tolerance = 0.3  # the gradient has the sign of p - q, which rounding a logit can change
    (_, *gradients) = check(name, student, teacher, tolerance, mask=mask)
    assert all(g.dtype == dtype for g in gradients)


@each
def test_a_teacher_by_its_logits(name):
    student, (y, v, c), mask = example()
    got = outcome(getattr(safeops, name), student, (y @ v.mT + c, None, None), mask=mask)
    for g, w in zip(got, outcome(getattr(safeops, name), student, (y, v, c), mask=mask)):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)


@each
def test_the_divergence_of_the_logits(name):
    (x, w, b), (y, v, c), mask = example(dtype=torch.float64)
    got = getattr(safeops, name)(x, w, y, v, linear_bias=b, target_bias=c, mask=mask, temperature=0.5)
    keep = mask.unsqueeze(-1)
    logits = [torch.where(keep, t, 0) for t in (x @ w.mT + b, y @ v.mT + c)]
    want = getattr(safeops, OF_LOGITS[name])(*logits, mask=mask, temperature=0.5)
    torch.testing.assert_close(got, want)


@each
def test_a_gradient_to_the_teacher(name):
    """The gradient to the teacher's operands is that of the divergence of the logits."""
    student, teacher, _ = example((3,), classes=5, dtype=torch.float64)
    student, teacher = ([t.nan_to_num(0) for t in layer] for layer in (student, teacher))
    y = teacher[0].requires_grad_()
    loss = getattr(safeops, name)(*student[:2], y, teacher[1])
    want = getattr(safeops, OF_LOGITS[name])(student[0] @ student[1].mT, y @ teacher[1].mT)
    torch.testing.assert_close(torch.autograd.grad(loss, y), torch.autograd.grad(want, y))


@each
def test_rows_that_do_not_exist(name):
    student, teacher, mask = example()
    _, dx, *_ = outcome(getattr(safeops, name), student, teacher, mask=mask)
    assert not dx[~mask].any()
    loss, *gradients = outcome(getattr(safeops, name), student, teacher, mask=torch.zeros_like(mask))
    assert loss == 0 and not any(g.any() for g in gradients)


@each
@pytest.mark.parametrize("shape", [(0,), (3, 0), ()], ids=str)
def test_sizes(name, shape):
    layers = [[x.nan_to_num(0)[: 1 if shape == () else 0].reshape(*shape, x.shape[-1]), *rest]
              for x, *rest in example((5,))[:2]]  # fmt: skip
    loss, *gradients = outcome(getattr(safeops, name), *layers, reduction="none")
    assert loss.shape == shape and [g.shape for g in gradients] == [layers[0][0].shape, (50, 16), (50,)]


@each
def test_the_logits_never_exist(name, monkeypatch):
    monkeypatch.setattr(_chunks, "CHUNK", 2**16)
    student, teacher, mask = example((512,), classes=8192, dtype=torch.bfloat16)

    def step():
        return outcome(getattr(safeops, name), student, teacher, mask=mask)

    assert _peak_bytes(DEVICE, step) < 512 * 8192 * 2 / 2


@pytest.mark.slow
@each
def test_compiled_whole(name):
    student, teacher, mask = example()
    function = torch.compile(getattr(safeops, name), fullgraph=True)
    got, want = (outcome(f, student, teacher, mask=mask) for f in (function, getattr(safeops, name)))
    for g, w in zip(got, want):
        torch.testing.assert_close(g, w)


@each
def test_second_derivatives(name):
    student, teacher, _ = example((3,), classes=5, dtype=torch.float64)
    x, w, b = (t.nan_to_num(0).requires_grad_() for t in student)
    y, v, c = (t.nan_to_num(0) for t in teacher)

    def function(x, w, b):
        return getattr(safeops, name)(x, w, y, v, linear_bias=b, target_bias=c, temperature=0.5)

    assert torch.autograd.gradcheck(function, (x, w, b)) and torch.autograd.gradgradcheck(function, (x, w, b))


@pytest.mark.slow
@each
def test_exports_for_any_number_of_rows(name):
    class Loss(torch.nn.Module):
        def forward(self, x, w, y):
            return getattr(safeops, name)(x, w, y, None)

    student, teacher, _ = example((5,))
    x, w, y = student[0].nan_to_num(0), student[1], teacher[0].nan_to_num(0) @ teacher[1].mT
    rows = torch.export.Dim("n", min=2, max=100)
    program = torch.export.export(Loss(), (x, w, y), dynamic_shapes=({0: rows}, None, {0: rows})).module()
    torch.testing.assert_close(program(x[:3], w, y[:3]), Loss()(x[:3], w, y[:3]), rtol=1e-4, atol=1e-5)
