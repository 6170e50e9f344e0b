"""support= of the divergences of linear layers: over some classes, against all logits in fp64, with -inf."""

import math

import pytest
import torch

import safeops
from safeops.core import private_torch
from safeops.ops.linear import _chunks, _entries
from safeops.testing.memory import _peak_bytes
from tests.contract.classification.test_support import csr, example, given
from tests.ops import definitions
from tests.ops.record import DEVICE

NAMES = ["linear_kl_div", "linear_reverse_kl_div", "linear_js_div", "linear_tv"]
each = pytest.mark.parametrize("name", NAMES)
each_form = pytest.mark.parametrize("form", ["bool", "csr", "threshold"])
MASK = torch.arange(12, device=DEVICE).reshape(3, 4) % 4 != 1
KEYS = "input", "linear_weight", "linear_bias", "target", "target_weight", "target_bias"


def layers(dtype=torch.float64, teacher=True, seed=0):
    """Returns ({operand: tensor}, support). teacher: its layer; else its logits, with NaN and inf outside."""
    logits, _, support = example(dtype=dtype, seed=seed)
    g = torch.Generator().manual_seed(seed)
    shapes = ((3, 4, 6), (11, 6), (11,), (3, 4, 5), (11, 5), (11,))
    operands = [torch.randn(*shape, generator=g, dtype=torch.float64).to(DEVICE, dtype) for shape in shapes]
    operands = dict(zip(KEYS, operands))
    for key in ("input", "target"):
        operands[key][~MASK] = math.nan
    if not teacher:
        operands |= {"target": logits, "target_weight": None, "target_bias": None}
    return operands, support


def reference(name, operands, support, **options):
    rows = {key: torch.where(MASK.unsqueeze(-1), operands[key], 0) for key in ("input", "target")}
    x = rows["input"] @ operands["linear_weight"].mT + operands["linear_bias"]
    y = rows["target"]
    y = y if operands["target_weight"] is None else y @ operands["target_weight"].mT + operands["target_bias"]
    function = getattr(definitions, f"{name.removeprefix('linear_')}_with_logits")
    return function(*(torch.where(support, t, -math.inf) for t in (x, y)), **options)


def outcome(function, operands, keys=KEYS):
    """Returns (the loss, {operand: gradient}). keys: the operands that want one; without the teacher's the op runs in
    chunks."""
    leaves = {key: t if t is None else t.detach().requires_grad_(key in keys) for key, t in operands.items()}
    loss = function(leaves)
    upstream = torch.linspace(1, 2, loss.numel(), device=DEVICE, dtype=torch.float64).reshape(loss.shape)
    wanted = {key: t for key, t in leaves.items() if t is not None and key in keys}
    gradients = torch.autograd.grad((upstream.to(loss.dtype) * loss).sum(), list(wanted.values()))
    return loss.detach(), dict(zip(wanted, gradients))


def ours(name, operands, restriction, **options):
    return getattr(safeops, name)(**operands, **restriction, **options)


def compare(name, form, dtype=torch.float64, tolerance=1e-11, teacher=True, keys=KEYS, **options):
    options = {"mask": MASK, "temperature": 2.0, **options}
    operands, support = layers(dtype, teacher)
    got = outcome(lambda t: ours(name, t, given(form, support), **options), operands, keys)
    wide = {key: t if t is None else t.double() for key, t in operands.items()}
    want = outcome(lambda t: reference(name, t, support, **options), wide)
    assert got[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(got[0].double(), want[0], rtol=tolerance, atol=tolerance)
    for key, g in got[1].items():
        assert g.dtype == dtype and g.any()
        eps = max(tolerance, torch.finfo(dtype).eps)
        torch.testing.assert_close(g.double(), want[1][key], rtol=eps, atol=eps, msg=lambda text, key=key: key + text)


@each
@each_form
@pytest.mark.parametrize("teacher", [True, False], ids=["layer", "logits"])
def test_values_and_gradients(name, form, teacher):
    compare(name, form, teacher=teacher, reduction="none", **({"beta": 0.25} if "js" in name else {}))


@each_form
def test_means(form):
    weight = (torch.arange(12, device=DEVICE) % 3).reshape(3, 4).double()
    compare("linear_js_div", form, weight=weight)
    compare("linear_kl_div", form, denominator=5.0)


@each
def test_half(name):
    """CSR has fp32 logits; a bool support those of the layer, in half or, by logits_dtype, in fp32."""
    for dtype in (torch.bfloat16, torch.float16):
        compare(name, "csr", dtype, 2e-5)
        compare(name, "bool", dtype, 10 * torch.finfo(dtype).eps, keys=KEYS[:3])
    compare(name, "csr", torch.float32, 1e-5)
    compare(name, "threshold", torch.float32, 1e-5)


@each
@each_form
def test_in_chunks_as_a_whole(name, form, monkeypatch):
    for module, key in ((_entries, "AT_ONCE"), (_chunks, "CHUNK")):
        monkeypatch.setattr(module, key, 24)
    for teacher in (True, False):
        compare(name, form, torch.float32, 1e-5, teacher, KEYS[:3])


@each_form
def test_the_teachers_logits_are_not_written(form):
    operands, support = layers(teacher=False)
    before = operands["target"].clone()
    ours("linear_tv", operands, given(form, support), mask=MASK)
    assert torch.equal(before.nan_to_num(5), operands["target"].nan_to_num(5))


def test_weights_of_other_classes_are_not_read():
    operands, support = layers()
    support[..., 5] = False
    want = outcome(lambda t: ours("linear_js_div", t, {"support": csr(support)}, mask=MASK), operands)
    for key in KEYS[1:]:
        if key != "target":
            operands[key][5] = math.nan
    got = outcome(lambda t: ours("linear_js_div", t, {"support": csr(support)}, mask=MASK), operands)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


class Sizes(private_torch.TorchDispatchMode):
    """Records the largest number of elements of a tensor that an op makes, within the raw ops of entries too."""

    inner = {_entries._forward: _entries._compute, _entries._backward: _entries._compute_backward}
    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in self.inner:
            names = [x.name for x in private_torch.schema(function).arguments]
            left_out = [None if name == "linear_bias" else True for name in names[len(args) :]]
            with self:
                return self.inner[function](*args, *left_out)
        results = function(*args, **(kwargs or {}))
        for x in results if isinstance(results, (tuple, list)) else (results,):
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.numel())
        return results


def of_some_classes(rows, classes, width, each):
    """Returns (operands, CSR support of `each` classes a row)."""
    g = torch.Generator().manual_seed(1)
    shapes = ((rows, width), (classes, width), (classes,), (rows, width), (classes, width), (classes,))
    operands = dict(zip(KEYS, (torch.randn(*s, generator=g).to(DEVICE, torch.bfloat16) for s in shapes)))
    some = torch.stack([torch.randperm(classes, generator=g)[:each] for _ in range(rows)]).to(DEVICE)
    return operands, (torch.arange(rows + 1, device=DEVICE) * each, some.flatten())


def test_no_tensor_of_rows_by_classes(monkeypatch):
    monkeypatch.setattr(_entries, "AT_ONCE", 2**12)
    operands, support = of_some_classes(256, 1024, 16, 32)
    with Sizes() as sizes:
        outcome(lambda t: ours("linear_js_div", t, {"support": support}), operands)
    assert 1024 * 16 <= sizes.largest <= 256 * 1024 // 4 and sizes.largest < 256 * 32 * 16 // 4


@pytest.mark.parametrize("form", ["bool", "csr"])
def test_the_memory_of_a_step(form, monkeypatch):
    monkeypatch.setattr(_entries, "AT_ONCE", 2**14)
    monkeypatch.setattr(_chunks, "CHUNK", 2**15)
    operands, support = of_some_classes(256, 4096, 16, 8)
    if form == "bool":
        mask = torch.zeros(256, 4096, dtype=torch.bool, device=DEVICE)
        mask[torch.arange(256, device=DEVICE).repeat_interleave(8), support[1]] = True
        support = mask
    students = {key: t.detach().requires_grad_(key in KEYS[:3]) for key, t in operands.items()}

    def step():
        ours("linear_js_div", students, {"support": support}).backward()

    assert _peak_bytes(DEVICE, step) < 2 * 256 * 4096 * 2


@pytest.mark.parametrize("rows", [(), (0,), (3, 0), (1,)], ids=str)
@each_form
def test_sizes(rows, form):
    operands, support = layers()
    operands = {
        key: t.reshape(12, -1)[: math.prod(rows)].reshape(*rows, t.shape[-1]) if key in ("input", "target") else t
        for key, t in operands.items()
    }
    support = support.reshape(12, -1)[: math.prod(rows)].reshape(*rows, 11)
    got = outcome(lambda t: ours("linear_kl_div", t, given(form, support), reduction="none"), operands, KEYS[:3])
    assert got[0].shape == rows and got[0].isfinite().all()
    want = [operands[k] @ operands[w].mT + operands[b] for k, w, b in (KEYS[:3], KEYS[3:])]
    want = definitions.kl_div_with_logits(*(torch.where(support, t, -math.inf) for t in want), reduction="none")
    torch.testing.assert_close(got[0], want)


@pytest.mark.skipif(DEVICE != "cpu", reason="other devices mask such rows out")
@each_form
def test_a_row_without_a_support_raises(form):
    operands, support = layers()
    support[1, 2] = False
    for name in NAMES:
        with pytest.raises(ValueError, match=f"^{name}: support of row 6 has (no class|classes .*): each kept row"):
            ours(name, operands, given(form, support), mask=MASK)
    keep = MASK.clone()
    keep[1, 2] = False
    assert ours("linear_tv", operands, given(form, support), mask=keep).isfinite()


@pytest.mark.parametrize("form", ["bool", "csr"])
@pytest.mark.parametrize("name", NAMES[:1] + NAMES[2:3])
def test_derivatives(name, form):
    operands, support = layers()
    part = {1: slice(5), 2: (slice(5), slice(4)), 3: (0, slice(2), slice(4))}
    operands = {key: t[part[t.dim()]] for key, t in operands.items()}
    leaves = [t.nan_to_num(0.5).contiguous().requires_grad_() for t in operands.values()]

    def function(*leaves):
        return ours(name, dict(zip(KEYS, leaves)), given(form, support[0, :2, :5]), temperature=0.5)

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)
    operands = [t.detach() for t in leaves]
    gradient = torch.func.grad(function)(*operands)
    torch.testing.assert_close(gradient, torch.autograd.grad(function(*leaves), leaves[0])[0])
    tangent = torch.func.jvp(lambda b: function(*operands[:2], b, *operands[3:]), (operands[2],),
                             (torch.ones_like(operands[2]),))[1]  # fmt: skip
    assert abs(tangent) < 1e-12  # (a constant added to the logits changes nothing)


@each_form
def test_under_autocast_as_an_op_and_as_a_module(form):
    operands, support = layers(torch.float32)
    half = {key: t.bfloat16() for key, t in operands.items()}
    restriction = given(form, support)
    want = ours("linear_kl_div", half, restriction, mask=MASK)
    mixed = {key: half[key] if key in ("input", "target") else t for key, t in operands.items()}
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        torch.testing.assert_close(ours("linear_kl_div", mixed, restriction, mask=MASK), want)
    torch.testing.assert_close(safeops.nn.LinearKLDivLoss()(**half, **restriction, mask=MASK), want)
    restriction["support"] = [restriction["support"]] if form != "csr" else list(restriction["support"])
    torch.testing.assert_close(torch.ops.safeops.linear_kl_div(**half, **restriction, mask=MASK), want)


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", ["bool", *(pytest.param(f, marks=pytest.mark.exhaustive) for f in ("csr", "threshold"))]
)
def test_compiled_and_exported(form):
    operands, support = layers(torch.float32)
    restriction = given(form, support)

    class Loss(torch.nn.Module):
        def forward(self, operands, restriction):
            return safeops.linear_js_div(**operands, **restriction, mask=MASK)

    want = outcome(lambda t: Loss()(t, restriction), operands)
    compiled = torch.compile(Loss(), fullgraph=True)
    torch.testing.assert_close(outcome(lambda t: compiled(t, restriction), operands), want)
    program = torch.export.export(Loss(), (operands, restriction), strict=True).module()
    torch.testing.assert_close(outcome(lambda t: program(t, restriction), operands), want)


X, W = torch.zeros(2, 3), torch.zeros(5, 3)
S, OFFSETS, T = torch.ones(2, 5, dtype=torch.bool), torch.tensor([0, 1, 2]), torch.tensor([0, 4])
BEST = {"target_values": X[:, :2], "target_indices": torch.tensor([[0, 1], [2, 3]]), "target": None}


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"support": S.float()}, TypeError, "support must be bool.*torch.float32"),
        ({"support": S[:, :3]}, ValueError, r"support \(2, 3\).*input \(2, 3\) and linear_weight \(5, 3\)"),
        ({"support": (OFFSETS[:2], T)}, ValueError, r"support's offsets \(2,\).*one more element.*\(2,\)"),
        ({"support": S.to("meta")}, ValueError, "support is on meta, input on"),
        ({"support_threshold": X[:, 0]}, TypeError, "support_threshold needs support, the sampler's logits"),
        ({"support": S.float(), "support_threshold": X}, ValueError, r"support_threshold \(2, 3\).*the rows \(2,\)"),
        ({"support": S, "target_weight": None, **BEST}, TypeError, "support does not go with target_values"),
    ],
    ids=lambda x: None,
)  # fmt: skip
@each
def test_bad_calls(name, options, error, words):
    with pytest.raises(error, match=f"^{name}: {words}"):
        getattr(safeops, name)(X, W, **{"target": X, "target_weight": W, **options})
