"""Divergences of rows of logits: parity with torch, reported failures, top-k targets, routes."""

import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import safeops
from safeops.core.op import registry
from safeops.testing.memory import _peak_bytes
from tests.ops import definitions
from tests.ops.record import DEVICE

INF = float("inf")
NAMES = ["kl_div_with_logits", "reverse_kl_div_with_logits", "js_div_with_logits", "tv_with_logits"]
each = pytest.mark.parametrize("name", NAMES)


def logits(*shape, dtype=torch.float32, seed=0, scale=2.0):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (scale * x).to(DEVICE, dtype)


def gradients(name, x, y, **options):
    leaves = [t.clone().requires_grad_() for t in (x, y)]
    loss = getattr(safeops, name)(*leaves, **options)
    return loss.detach(), *torch.autograd.grad(loss, leaves)


def close(got, want, tolerance=1e-5):
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


def truth(name, x, y, **options):
    leaves = [t.double().clone().requires_grad_() for t in (x, y)]
    loss = getattr(definitions, name)(*leaves, **options)
    return loss.detach(), *torch.autograd.grad(loss, leaves)


# ---- values


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kl_div_is_torchs_of_both_log_softmaxes(dtype):
    x, y = logits(6, 300, dtype=dtype), logits(6, 300, dtype=dtype, seed=1)
    log_p = [t.double().log_softmax(-1) for t in (x, y)]
    close(safeops.kl_div_with_logits(x, y), F.kl_div(*log_p, reduction="batchmean", log_target=True))
    close(safeops.reverse_kl_div_with_logits(x, y), F.kl_div(*log_p[::-1], reduction="batchmean", log_target=True))


def test_js_div_is_between_both_divergences():
    """As beta -> 0, js_div / beta -> KL(target || input); as beta -> 1, js_div / (1 - beta) -> KL(input || target)."""
    x, y = logits(6, 30, dtype=torch.float64), logits(6, 30, dtype=torch.float64, seed=1)
    small = 0.001
    close(safeops.js_div_with_logits(x, y, beta=small) / small, safeops.kl_div_with_logits(x, y), 0.05)
    close(safeops.js_div_with_logits(x, y, beta=1 - small) / small, safeops.reverse_kl_div_with_logits(x, y), 0.05)
    close(safeops.js_div_with_logits(x, y), safeops.js_div_with_logits(y, x), 1e-12)


def test_no_number_of_a_definition_is_rounded_to_fp32():
    x, y = logits(6, 30, dtype=torch.float64), logits(6, 30, dtype=torch.float64, seed=1)
    for name in ("js_div_with_logits", "kl_div_with_logits", "reverse_kl_div_with_logits", "tv_with_logits"):
        options = {"reduction": "none", "temperature": 0.7, **({"beta": 0.1} if name.startswith("js") else {})}
        function = functools.partial(getattr(safeops, name), **options)
        close(torch.func.vmap(function)(x, y), function(x, y), 1e-13)


@each
def test_equal_logits_have_no_divergence(name):
    x = logits(5, 4097)
    loss, dx, dy = gradients(name, x, x.clone())
    assert loss == 0 and not dx.abs().max() > 1e-8 and not dy.abs().max() > 1e-8


@pytest.mark.slow
@each
def test_one_tensor_twice_compiled(name):
    """pytorch#183604: js_div(p, p) fails under torch.compile."""
    x = logits(5, 40).requires_grad_()
    loss = torch.compile(lambda x: getattr(safeops, name)(x, x), fullgraph=True)(x)
    (dx,) = torch.autograd.grad(loss, x)
    assert abs(loss) < 1e-6 and dx.abs().max() < 1e-6


@pytest.mark.slow
@each
def test_a_mean_of_any_number_of_rows_exports_strictly(name):
    class Loss(torch.nn.Module):
        def forward(self, x, y):
            return getattr(safeops, name)(x, y)

    x, y, rows = logits(5, 7), logits(5, 7, seed=1), torch.export.Dim("n", min=2, max=100)
    program = torch.export.export(Loss(), (x, y), dynamic_shapes=({0: rows},) * 2, strict=True).module()
    close(program(x[:3], y[:3]), Loss()(x[:3], y[:3]))


# ---- reported failures


@each
def test_a_padded_vocabulary(name):
    """Classes at -inf in both operands count for nothing; at -inf in the target alone, only the reverse KL is inf."""
    x, y = logits(4, 50), logits(4, 50, seed=1)
    x[:, 40:] = y[:, 40:] = -INF
    for got, want in zip(gradients(name, x, y), gradients(name, x[:, :40], y[:, :40])):
        close(got if got.dim() == 0 else got[:, :40], want)
        assert got.dim() == 0 or not got[:, 40:].any()
    y[:, 30:] = -INF
    got, want = gradients(name, x, y), truth(name, x, y)
    assert got[0].isinf() == want[0].isinf() == (name == "reverse_kl_div_with_logits")
    if not got[0].isinf():
        for g, w in zip(got, want):
            close(g, w)


@each
@pytest.mark.parametrize("classes", [3, 257, 50257])
def test_vocabularies_that_256_does_not_divide(name, classes):
    """verl#2899: any vocabulary size works, not only multiples of 256."""
    x, y = logits(3, classes), logits(3, classes, seed=1)
    for got, want in zip(gradients(name, x, y), truth(name, x, y)):
        close(got, want)


@each
def test_strided_logits(name):
    """Strided views (without the last token, without the last classes) give the results of contiguous copies."""
    x, y = logits(2, 5, 60), logits(2, 5, 70, seed=1)
    view, cut = x[:, :-1], y[:, 1:, :60]
    for got, want in zip(gradients(name, view, cut), gradients(name, view.contiguous(), cut.contiguous())):
        close(got, want)


@each
def test_no_row_kept(name):
    x, y = logits(2, 5), torch.full((2, 5), torch.nan, device=DEVICE)
    loss, dx, dy = gradients(name, x, y, mask=torch.zeros(2, dtype=torch.bool, device=DEVICE))
    assert loss == 0 and not dx.any() and not dy.any()


@each
def test_nearly_certain_rows_in_bfloat16(name):
    """Liger#1329: where p rounds to 1 in bf16, loss and gradients stay exact."""
    x, y = torch.zeros(2, 100, dtype=torch.bfloat16, device=DEVICE), torch.zeros(2, 100, device=DEVICE)
    x[:, 0], y[:, 0] = 30, 40
    for got, want in zip(gradients(name, x, y), truth(name, x, y)):
        close(got, want, 1e-5 if got.dtype == torch.float32 else 1e-2)


@each
@pytest.mark.parametrize("temperature", [0.7, 3.0])
def test_large_logits_over_a_temperature(name, temperature):
    """Rows of equal logits of any size are one distribution, with divergence 0, although x / temperature is rounded."""
    x, y = torch.full((2, 400), -1e30, device=DEVICE), torch.zeros(2, 400, device=DEVICE)
    loss, dx, dy = gradients(name, x, y, temperature=temperature)
    assert abs(loss) < 1e-6 and dx.abs().max() < 1e-6 and dy.abs().max() < 1e-6
    x, y = logits(2, 400) * 1e9, logits(2, 400, seed=1) * 1e9
    for got, want in zip(gradients(name, x, y, temperature=temperature), truth(name, x, y, temperature=temperature)):
        if want.dim():
            close(got * temperature, want * temperature, 1e-4 * max(1.0, float(want.abs().max())))
        else:
            close(got, want, 1e-4)


@each
def test_logits_far_from_zero(name):
    x, y = logits(3, 40), logits(3, 40, seed=1)
    for got, want in zip(gradients(name, x + 4096, y - 8192), truth(name, x + 4096, y - 8192)):
        close(got, want)


# ---- memory and routes


@each
def test_nothing_as_large_as_the_logits_but_the_gradient(name):
    x, y = logits(64, 8192, dtype=torch.bfloat16), logits(64, 8192, dtype=torch.bfloat16, seed=1)
    x.requires_grad_()

    def step():
        return torch.autograd.grad(getattr(safeops, name)(x, y), x)

    assert _peak_bytes(DEVICE, step) < 1.1 * x.numel() * x.element_size()


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func.name())
        return func(*args, **(kwargs or {}))


@each
def test_takes_its_kernel_both_ways(name):
    x, y = logits(4, 9).requires_grad_(), logits(4, 9, seed=1)
    with Recorder() as recorder:
        getattr(safeops, name)(x, y, weight=torch.ones(4, device=DEVICE)).backward()
    raw = name.removeprefix("reverse_")
    assert {f"safeops::_{raw}", f"safeops::_{raw}_backward"} < set(recorder.ops)
    assert not any("softmax" in op for op in recorder.ops)


# ---- a target given by its top-k classes


def best(y, count, temperature=1.0):
    values, indices = (y.double() / temperature).log_softmax(-1).topk(count, -1)
    return {"target_values": values, "target_indices": indices, "temperature": temperature}


@each
def test_all_classes_are_the_whole_target(name):
    x, y = logits(4, 12), logits(4, 12, seed=1)
    close(getattr(safeops, name)(x, **best(y, 12, 2.0)), getattr(safeops, name)(x, y, temperature=2.0))


@each
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_rest_is_one_class(name, dtype):
    x, y = logits(4, 12, dtype=dtype), logits(4, 12, seed=1)
    known = best(y, 3, 0.75)
    rest = [(t.double() / 0.75).log_softmax(-1) for t in (x, y)]
    rest = [t.scatter(-1, known["target_indices"], -INF).logsumexp(-1, keepdim=True) for t in rest]
    leaf = x.double().requires_grad_()
    own = (leaf / 0.75).log_softmax(-1)
    others = own.scatter(-1, known["target_indices"], -INF).logsumexp(-1, keepdim=True)
    mine = torch.cat([own.gather(-1, known["target_indices"]), others], -1)
    want = getattr(definitions, name)(mine, torch.cat([known["target_values"], rest[1]], -1))
    (slope,) = torch.autograd.grad(want, leaf)
    x.requires_grad_()
    got = getattr(safeops, name)(x, **known)
    close(got.detach(), want.detach())
    close(torch.autograd.grad(got, x)[0], slope, 1e-5 if dtype == torch.float64 else 1e-2)


@each
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_renormalised_target(name, dtype):
    """Both distributions are divided by their sums over the target's classes; in a row without any, the loss is 0."""
    x, y = logits(4, 12, dtype=dtype), logits(4, 12, seed=1)
    known = best(y, 3, 0.75)
    leaf, x = x.double().requires_grad_(), x.requires_grad_()
    own = (leaf / 0.75).softmax(-1).gather(-1, known["target_indices"])
    p = known["target_values"].exp()
    want = getattr(definitions, name)((own / own.sum(-1, keepdim=True)).log(), (p / p.sum(-1, keepdim=True)).log())
    got = getattr(safeops, name)(x, **known, tail="renormalize")
    close(got.detach(), want.detach())
    slopes = (torch.autograd.grad(loss, t)[0] for loss, t in ((got, x), (want, leaf)))
    close(*slopes, 1e-5 if dtype == torch.float64 else 1e-2)
    one = getattr(safeops, name)(x, **{**known, **best(y, 1, 0.75)}, tail="renormalize")
    assert not one.abs() > 1e-6 and not torch.autograd.grad(one, x)[0].abs().max() > 1e-6


@each
def test_best_classes_of_rows_that_do_not_exist(name):
    x, y = logits(3, 12), logits(3, 12, seed=1)
    keep = torch.tensor([True, False, True], device=DEVICE)
    known = best(y, 3)
    want = getattr(safeops, name)(x, **known, mask=keep)
    x[1], known["target_values"][1], known["target_indices"][1] = torch.nan, torch.nan, 99
    x.requires_grad_()
    got = getattr(safeops, name)(x, **known, mask=keep)
    (dx,) = torch.autograd.grad(got, x)
    assert torch.equal(got.detach(), want) and not dx[1].any() and dx.isfinite().all()


@each
def test_rounded_probabilities_leave_no_infinity(name):
    """Probabilities rounded to half may add up to more than 1: the rest must not become log of a negative number."""
    x, y = logits(3, 12), logits(3, 12, seed=1, scale=20.0)
    known = best(y, 5)
    known["target_values"] = (known["target_values"] + 0.01).bfloat16()
    x.requires_grad_()
    loss = getattr(safeops, name)(x, **known)
    assert loss.isfinite() and torch.autograd.grad(loss, x)[0].isfinite().all()


@each
def test_best_classes_under_transforms(name):
    """Under vmap indices cannot be checked: a target index out of range is left out, not an error."""
    x, y = logits(3, 12), logits(3, 12, seed=1)
    known = best(y, 4)
    known.pop("temperature")
    want = [getattr(safeops, name)(x[i : i + 1], **{k: t[i : i + 1] for k, t in known.items()}) for i in range(3)]
    known["target_indices"] = torch.cat([known["target_indices"], torch.full((3, 1), 12, device=DEVICE)], -1)
    known["target_values"] = F.pad(known["target_values"], (0, 1))
    function = functools.partial(getattr(safeops, name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = torch.func.vmap(
            lambda x, v, i: function(x[None], target_values=v[None], target_indices=i[None])
        )(x, *known.values())  # fmt: skip
    close(got, torch.stack(want))


def test_each_op_has_its_own_record():
    assert {name for name in registry if name.endswith("_with_logits")} >= set(NAMES)
