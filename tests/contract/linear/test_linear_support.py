"""support= of linear_token_log_probs: the layer's logits over some classes, against all logits in fp64, with -inf."""

import math

import pytest
import torch

import safeops
from safeops.core import private_torch
from safeops.ops.linear import _chunks, _entries
from safeops.testing.memory import _peak_bytes
from tests.contract.classification import test_support as unfused
from tests.ops.record import DEVICE

NAME, WIDTH = "linear_token_log_probs", 6
each_form = pytest.mark.parametrize("form", ["bool", "csr", "int32", "threshold"])
each_outside = pytest.mark.parametrize("outside", ["-inf", "mask"])


def example(rows=(3, 4), classes=11, width=WIDTH, dtype=torch.float32, seed=0):
    """Returns ((input, weight, bias), target, support, mask). Input is NaN in rows that are not kept."""
    _, target, support = unfused.example(rows, classes, seed=seed)
    g = torch.Generator().manual_seed(seed)
    layer = [
        torch.randn(*shape, generator=g, dtype=torch.float64).to(DEVICE, dtype)
        for shape in ((*rows, width), (classes, width), (classes,))
    ]
    mask = torch.arange(target.numel(), device=DEVICE).reshape(rows) % 4 != 1
    layer[0][~mask] = math.nan
    target.view(-1)[-1:] = -100
    return layer, target, support, mask


def reference(layer, target, support, mask, **options):
    input, linear_weight, linear_bias = layer
    logits = torch.where(mask.unsqueeze(-1), input, 0) @ linear_weight.mT + linear_bias
    return unfused.reference(logits, target, support, mask, **options)


def ours(layer, target, support, mask, **options):
    input, linear_weight, linear_bias = layer
    support = support if isinstance(support, dict) else {"support": support}
    options = {"linear_bias": linear_bias, "mask": mask, **support, **options}
    *rows, count = safeops.linear_token_log_probs(input, linear_weight, target, **options)
    assert count.dtype == torch.int64 and count.dim() == 0
    return rows, int(count)


def outcome(function, layer, upstream):
    """Returns (the three results, the gradients of the layer for a weighted sum of them, the count)."""
    leaves = [t.detach().requires_grad_() for t in layer]
    rows, count = function(leaves)
    weights = 1, 0.5, -0.25
    total = sum(w * torch.where(r.isfinite(), u.to(r.dtype) * r, 0).sum() for w, r, u in zip(weights, rows, upstream))
    return [r.detach() for r in rows], torch.autograd.grad(total, leaves), count


def compare(form, dtype=torch.float32, tolerance=None, rows=(3, 4), options=(), **ours_alone):
    layer, target, support, mask = example(rows, dtype=dtype)
    options, tolerance = dict(options), tolerance or {torch.float64: 1e-12}.get(dtype, 1e-5)
    upstream = torch.linspace(1, 2, 3 * target.numel(), device=DEVICE, dtype=torch.float64).reshape(3, *rows)

    def call(layer):
        return ours(layer, target, unfused.given(form, support), mask, **options, **ours_alone)

    got = outcome(call, layer, upstream)
    wide = [t.double() for t in layer]
    want = outcome(lambda layer: reference(layer, target, support, mask, **options), wide, upstream)
    assert got[2] == want[2] > 0
    for g, w in zip(got[0], want[0]):
        assert g.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(g.double(), w, rtol=tolerance, atol=tolerance)
    assert all(g.dtype == dtype for g in got[1]) and not got[1][0][~mask].any()
    return got, want


def rounded_once(got, want, dtype, slack=2e-5):
    """Every gradient is within half a unit in the last place of the exact one, but for errors of fp32."""
    half = torch.finfo(dtype).eps / 2
    for g, w in zip(got[1], want[1]):
        assert ((g.double() - w).abs() <= half * w.abs() * 1.001 + slack).all()


@each_form
@each_outside
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_values_and_gradients(form, outside, dtype):
    got, want = compare(form, dtype, options={"outside": outside})
    assert got[0][0].isinf().any() == (outside == "-inf")
    rounded_once(got, want, dtype, 1e-12 if dtype == torch.float64 else 2e-5)


@each_form
def test_temperature_and_softcap(form):
    options = {"temperature": 0.5, "softcap": 3.0}
    rounded_once(*compare(form, options=options), torch.float32, 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half(dtype):
    """The CSR form has fp32 logits and slopes: errors of fp32, and gradients rounded once. Bool: as without support."""
    rounded_once(*compare("csr", dtype), dtype)
    compare("bool", dtype, 10 * torch.finfo(dtype).eps)
    got, want = compare("bool", dtype, logits_dtype=torch.float32)
    rounded_once(got, want, dtype, 20 * torch.finfo(dtype).eps)


@each_form
@pytest.mark.parametrize("at_once", [1, 4 * WIDTH])
def test_in_chunks_as_a_whole(form, at_once, monkeypatch):
    monkeypatch.setattr(_entries, "AT_ONCE", at_once)
    monkeypatch.setattr(_chunks, "CHUNK", at_once)
    rounded_once(*compare(form), torch.float32)


def test_weights_of_other_classes_are_not_read():
    """NaN in the weight and bias of a class that no support has: CSR does not see it."""
    layer, target, support, mask = example()
    support[..., 5], target[target == 5] = False, 2
    want = outcome(lambda layer: ours(layer, target, unfused.csr(support), mask), layer, torch.ones(3))
    layer[1][5], layer[2][5] = math.nan, math.nan
    got = outcome(lambda layer: ours(layer, target, unfused.csr(support), mask), layer, torch.ones(3))
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert not got[1][1][5].any() and not got[1][2][5].any()


def test_only_what_needs_a_gradient_gets_one():
    layer, target, support, mask = example()
    want = outcome(lambda layer: ours(layer, target, unfused.csr(support), mask, outside="mask"), layer, torch.ones(3))
    for place in range(3):
        leaves = [t.detach().requires_grad_(place == i) for i, t in enumerate(layer)]
        rows, _ = ours(leaves, target, unfused.csr(support), mask, outside="mask")
        (rows[0] + 0.5 * rows[1] - 0.25 * rows[2]).sum().backward()
        torch.testing.assert_close(leaves[place].grad, want[1][place])
        assert all(t.grad is None for i, t in enumerate(leaves) if i != place)


class Sizes(private_torch.TorchDispatchMode):
    """Records the largest number of elements of a tensor that an op makes, within the raw ops too."""

    inner = {_entries._forward: _entries._compute, _entries._backward: _entries._compute_backward}

    def __init__(self):
        super().__init__()
        self.largest, self.raw = 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in self.inner:
            self.raw.add(function)
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
    """Returns (layer of bf16, target, CSR support of `each` classes a row)."""
    layer, _, _, _ = example((1,), 3, width, torch.bfloat16)
    g = torch.Generator().manual_seed(1)
    x, w, b = (
        torch.randn(*s, generator=g).to(DEVICE, torch.bfloat16) for s in ((rows, width), (classes, width), (classes,))
    )
    some = torch.stack([torch.randperm(classes, generator=g)[:each] for _ in range(rows)]).to(DEVICE)
    return [x, w, b], some[:, 0].clone(), (torch.arange(rows + 1, device=DEVICE) * each, some.flatten())


def test_no_tensor_of_rows_by_classes(monkeypatch):
    """No op makes a tensor as large as a quarter of all logits, nor one of all entries' gathered rows."""
    monkeypatch.setattr(_entries, "AT_ONCE", 2**12)
    layer, target, support = of_some_classes(256, 1024, 16, 32)
    leaves = [t.requires_grad_() for t in layer]
    with Sizes() as sizes:
        rows = safeops.linear_token_log_probs(*leaves[:2], target, linear_bias=leaves[2], support=support)
        (rows.log_prob.sum() + rows.entropy.sum()).backward()
    assert sizes.raw == {_entries._forward, _entries._backward} and all(t.grad.any() for t in leaves)
    assert 1024 * 16 <= sizes.largest <= 256 * 1024 // 4 and sizes.largest < 256 * 32 * 16 // 4


@pytest.mark.parametrize("form", ["bool", "csr"])
def test_the_memory_of_a_step(form, monkeypatch):
    monkeypatch.setattr(_entries, "AT_ONCE", 2**14)
    monkeypatch.setattr(_chunks, "CHUNK", 2**15)
    layer, target, support = of_some_classes(256, 4096, 16, 8)
    if form == "bool":
        row = torch.arange(256, device=DEVICE).repeat_interleave(8)
        support, pair = torch.zeros(256, 4096, dtype=torch.bool, device=DEVICE), support
        support[row, pair[1]] = True

    def step():
        return outcome(lambda layer: ours(layer, target, support, None), layer, torch.ones(3, device=DEVICE))

    assert _peak_bytes(DEVICE, step) < 256 * 4096 * 2 / 2


@each_form
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,)], ids=str)
def test_sizes(form, shape):
    layer, target, support, mask = example((2,))
    of_rows = (t[: math.prod(shape)].reshape(shape + t.shape[1:]) for t in (layer[0], target, support))
    layer[0], target, support = (t.requires_grad_() if t.is_floating_point() else t for t in of_rows)
    layer[1].requires_grad_()
    rows, _ = ours(layer, target, unfused.given(form, support), None, outside="mask")
    assert all(r.shape == shape for r in rows)
    want = reference(layer, target, support, torch.ones_like(target, dtype=torch.bool), outside="mask")[0]
    for g, w in zip(rows, want):
        torch.testing.assert_close(g, w)
    assert all(t is not None for t in torch.autograd.grad(rows[0].sum(), (layer[0], layer[1])))


def test_no_class_and_no_entry():
    """Nothing is kept: zeros, with gradients of 0."""
    x, w = (torch.ones(2, 3, device=DEVICE, requires_grad=True) for _ in range(2))
    support = torch.tensor([0, 0, 0], device=DEVICE), torch.tensor([], dtype=torch.int64, device=DEVICE)
    target = torch.tensor([-100, -100], device=DEVICE)
    rows, count = ours((x, w, None), target, support, None)
    assert count == 0 and not any(r.any() for r in rows)
    assert not any(g.any() for g in torch.autograd.grad(rows[0].sum(), (x, w)))


@pytest.mark.skipif(DEVICE != "cpu", reason="other devices mask such rows out")
@pytest.mark.parametrize("form", ["bool", "csr"])
def test_a_row_without_a_support_raises(form):
    layer, target, support, mask = example()
    support[1, 2] = False
    for keep in (mask, mask.clone()):
        keep[1, 2] = keep is mask
        if keep is mask:
            with pytest.raises(ValueError, match=f"^{NAME}: support of row 6 has (no class|classes .*): each kept row"):
                ours(layer, target, unfused.given(form, support), keep)
        else:
            rows, _ = ours(layer, target, unfused.given(form, support), keep)
            assert not any(r[1, 2].any() for r in rows)


@pytest.mark.parametrize("form", ["bool", "csr"])
def test_derivatives(form):
    layer, target, support, _ = example((2,), 4, 3, torch.float64)
    layer[0] = layer[0].nan_to_num(0.5)
    support, target = unfused.given(form, support), torch.tensor([2, 2], device=DEVICE)

    def function(*layer):
        return ours(layer, target, support, None, temperature=0.5)[0]

    leaves = [t.requires_grad_() for t in layer]
    assert torch.autograd.gradcheck(function, leaves) and torch.autograd.gradgradcheck(function, leaves)
    tangents = torch.func.jvp(lambda b: function(*layer[:2], b)[0], (layer[2],), (torch.ones(4).double(),))[1]
    assert tangents.abs().max() < 1e-12  # (a constant added to the logits changes nothing)


@pytest.mark.parametrize("form", ["bool", "csr"])
def test_under_autocast(form):
    layer, target, support, mask = example()
    mixed = [layer[0].bfloat16(), *layer[1:]]
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        got = outcome(lambda t: ours(t, target, unfused.given(form, support), mask), mixed, torch.ones(3))
    half = [t.bfloat16() for t in layer]
    want = outcome(lambda t: ours(t, target, unfused.given(form, support), mask), half, torch.ones(3))
    for g, w in zip((*got[0], *got[1]), (*want[0], *want[1])):
        torch.testing.assert_close(g, w, check_dtype=False)
    assert got[1][1].dtype == torch.float32


def test_the_op_itself():
    layer, target, support, mask = example()
    op = torch.ops.safeops.linear_token_log_probs.support
    options = {"linear_bias": layer[2], "mask": mask, "outside": "mask"}
    for form in ([support], list(unfused.csr(support))):
        want = safeops.linear_token_log_probs(*layer[:2], target, support=support, **options)
        for g, w in zip(op(*layer[:2], target, support=form, **options), want):
            torch.testing.assert_close(g, w)


def test_a_linear_head_takes_it():
    layer, target, support, mask = example()
    head = torch.nn.Linear(WIDTH, 11, device=DEVICE)
    options = {"mask": mask, "support": unfused.csr(support), "outside": "mask"}
    got = safeops.head_loss(head, layer[0], target, loss="token_log_probs", **options)
    want = safeops.linear_token_log_probs(layer[0], head.weight, target, linear_bias=head.bias, **options)
    torch.testing.assert_close(tuple(got), tuple(want))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["bool", "csr"])
def test_compiled_whole(form):
    layer, target, support, mask = example()

    def function(x, w, b, s):
        return safeops.linear_token_log_probs(x, w, target, linear_bias=b, mask=mask, **s)

    compiled = torch.compile(function, fullgraph=True)
    outcomes = []
    for call in (compiled, function):
        leaves = [t.detach().requires_grad_() for t in layer]
        results = call(*leaves, unfused.given(form, support))
        outcomes.append((*results, *torch.autograd.grad((results.entropy + results.logsumexp).sum(), leaves)))
    torch.testing.assert_close(*outcomes)


@pytest.mark.slow
def test_raw_ops():
    (x, w, b), target, support, _ = example((3,))
    row, classes = torch.tensor([0, 0, 1, 2]), torch.tensor([4, 3, 2, 10])
    operands = x.nan_to_num(0).requires_grad_(), w, row, classes, row < 2, b
    tests = "test_schema", "test_faketensor"
    torch.library.opcheck(torch.ops.safeops._linear_entries, operands, test_utils=tests)
    needs = True, False, True
    torch.library.opcheck(
        torch.ops.safeops._linear_entries_backward, (torch.ones(4), *operands, *needs), test_utils=tests
    )


X, W, T = torch.zeros(2, 3), torch.zeros(5, 3), torch.tensor([0, 4])
S, OFFSETS = torch.ones(2, 5, dtype=torch.bool), torch.tensor([0, 1, 2])


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"support": S.float()}, TypeError, "support must be bool.*torch.float32"),
        ({"support": S[:, :3]}, ValueError, r"support \(2, 3\).*input \(2, 3\) and linear_weight \(5, 3\)"),
        ({"support": (OFFSETS.float(), T)}, TypeError, "support's offsets must be 1-dim, int64 or.*torch.float32"),
        ({"support": (OFFSETS[:2], T)}, ValueError, r"support's offsets \(2,\).*one more element.*\(2,\)"),
        ({"support": S.to("meta")}, ValueError, "support is on meta, input on"),
        ({"support": (OFFSETS, T.to("meta"))}, ValueError, "support's classes.*meta"),
        ({"support": S, "outside": "drop"}, ValueError, "outside.*'-inf'.*'mask'.*drop"),
        ({"outside": "mask"}, TypeError, "outside='mask' needs support"),
    ],
    ids=lambda x: None,
)  # fmt: skip
def test_bad_calls(options, error, words):
    with pytest.raises(error, match=f"^{NAME}: {words}"):
        safeops.linear_token_log_probs(X, W, T, **options)
