"""support= of the divergences: both rows over the classes that a sampler kept, against logits of -inf in fp64."""

import math

import pytest
import torch

import safeops
from safeops.testing.memory import _peak_bytes
from tests.contract.classification.test_support import csr, example, given
from tests.ops import definitions
from tests.ops.record import DEVICE

NAMES = ["kl_div_with_logits", "reverse_kl_div_with_logits", "js_div_with_logits", "tv_with_logits"]
each = pytest.mark.parametrize("name", NAMES)
each_form = pytest.mark.parametrize("form", ["bool", "csr", "int32", "threshold"])
MASK = torch.arange(12, device=DEVICE).reshape(3, 4) % 4 != 1
OPTIONS = {
    "mean": {},
    "masked sum": {"mask": MASK, "reduction": "sum"},
    "none": {"temperature": 0.5, "reduction": "none"},
    "weighted": {"weight": (torch.arange(12, device=DEVICE) % 3).reshape(3, 4).double(), "temperature": 2.0},
    "denominator": {"mask": MASK, "denominator": 5.0},
}


def pair(dtype=torch.float64):
    """Returns (logits, the target's, support): NaN and inf stand outside of the support."""
    x, _, support = example(dtype=dtype)
    y, _, _ = example(dtype=dtype, seed=1)
    y = torch.where(
        y.isfinite() | ~support, y, torch.linspace(-2, 2, y.numel(), device=DEVICE).reshape(y.shape).to(dtype)
    )
    return x, y, support


def reference(name, x, y, support, **options):
    return getattr(definitions, name)(*(torch.where(support, t, -math.inf) for t in (x, y)), **options)


def outcome(function, *leaves):
    """Returns (the loss, the gradients of the leaves)."""
    leaves = [t.detach().requires_grad_() for t in leaves]
    loss = function(*leaves)
    upstream = torch.linspace(1, 2, loss.numel(), device=DEVICE, dtype=torch.float64).reshape(loss.shape)
    return loss.detach(), torch.autograd.grad((upstream.to(loss.dtype) * loss).sum(), leaves)


def compare(name, form, dtype, options):
    x, y, support = pair(dtype)
    got = outcome(lambda x, y: getattr(safeops, name)(x, y, **given(form, support), **options), x, y)
    want = outcome(lambda x, y: reference(name, x, y, support, **options), x.double(), y.double())
    tolerance = 1e-11 if dtype == torch.float64 else 1e-5
    assert got[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(got[0].double(), want[0], rtol=tolerance, atol=tolerance)
    eps = max(tolerance, torch.finfo(dtype).eps)
    for g, w in zip(got[1], want[1]):
        assert g.dtype == dtype and not g[~support].any() and g.any()
        torch.testing.assert_close(g.double(), w, rtol=eps, atol=eps)


@each
@each_form
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_values_and_gradients(name, form, options):
    compare(name, form, torch.float64, options | ({"beta": 0.25} if name.startswith("js") else {}))


@each
@each_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(name, form, dtype):
    compare(name, form, dtype, {"mask": MASK, "temperature": 2.0})


@each
@each_form
def test_probabilities_of_0(name, form):
    """Classes of -inf within the support: limits, as over all classes."""
    x, y, support = pair()
    x, y = (torch.where(support, t, -math.inf) for t in (x, y))
    x[0, 0, 2] = y[0, 0, 2] = y[0, 1, 2] = x[0, 2, 2] = -math.inf
    got = getattr(safeops, name)(x, y, **given(form, support), reduction="none")
    want = getattr(safeops, name)(x, y, reduction="none")
    torch.testing.assert_close(got, want)
    assert got[0, 0].isfinite() and got.isinf().any() == ("kl" in name)


@each
@each_form
def test_logits_of_any_size(name, form):
    """A constant of the row changes nothing, and exp does not overflow."""
    x, y, support = pair()
    function = getattr(safeops, name)
    got, want = (
        outcome(lambda x, y: function(x, y, **given(form, support)), x + shift, y - shift) for shift in (1e4, 0)
    )
    torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-8)


@each
@each_form
def test_masked_rows_do_not_exist(name, form):
    x, y, support = pair(torch.float32)
    function = getattr(safeops, name)
    want = outcome(lambda x, y: function(x, y, **given(form, support), mask=MASK), x, y)
    for garbage, kept in ((math.nan, False), (math.inf, True), (math.nan, True)):
        a, b, s = x.clone(), y.clone(), support.clone()
        a[~MASK], b[~MASK], s[~MASK] = garbage, -garbage, kept
        got = outcome(lambda x, y, s=s: function(x, y, **given(form, s), mask=MASK), a, b)
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("rows", [(), (0,), (3, 0), (1,)], ids=str)
@each
def test_sizes_and_strides(name, rows):
    x, y, support = (t[: math.prod(rows)].reshape(*rows, 11) for t in (t.reshape(-1, 11) for t in pair()))
    want = reference(name, x, y, support, reduction="none")
    for form in ("bool", "csr", "threshold"):
        apart = (torch.stack([t, t], -1)[..., 0] for t in (x, y))
        got = getattr(safeops, name)(*apart, **given(form, support), reduction="none")
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("form", ["bool", "csr", "threshold"])
def test_a_row_without_a_support(form):
    """It raises on the CPU; elsewhere, as under vmap, it is masked out, and no mean counts it."""
    x, y, support = pair()
    support[1, 2] = False
    for name in NAMES:
        function = getattr(safeops, name)
        if DEVICE == "cpu":
            with pytest.raises(ValueError, match=f"^{name}: support of row 6 has (no class|classes .*): each kept row"):
                function(x, y, **given(form, support))
        keep = torch.ones_like(MASK)
        keep[1, 2] = False
        options = given(form, support)
        got = torch.vmap(lambda x, f=function, o=options: f(x, y, **o))(x.unsqueeze(0))[0]
        torch.testing.assert_close(got, function(x, y, **given(form, support), mask=keep))


@each
@pytest.mark.parametrize("form", ["bool", "csr", "threshold"])
def test_derivatives(name, form):
    x, y, support = (t[0, :2, :5].contiguous() for t in pair())
    x, y = (torch.where(support, t, 0).requires_grad_() for t in (x, y))

    def function(x, y):
        return getattr(safeops, name)(x, y, **given(form, support), temperature=0.5)

    assert torch.autograd.gradcheck(function, (x, y)) and torch.autograd.gradgradcheck(function, (x, y))
    operands = x.detach(), y.detach()
    gradient = torch.func.grad(function)(*operands)
    torch.testing.assert_close(gradient, torch.autograd.grad(function(x, y), x)[0])
    tangent = torch.func.jvp(function, operands, tuple(torch.ones_like(t) for t in operands))[1]
    assert abs(tangent) < 1e-12  # (a constant added to the logits changes nothing)


@each
def test_under_autocast_as_an_op_and_as_a_module(name):
    x, y, support = pair(torch.bfloat16)
    module = next(m for m in vars(safeops.nn).values() if getattr(m, "op", None) and m.op.name == name)
    for form in ("bool", "csr", "threshold"):
        options = given(form, support)
        want = getattr(safeops, name)(x, y, **options)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            got = getattr(safeops, name)(x, y, **options)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        torch.testing.assert_close(module()(x, y, **options), want, rtol=0, atol=0)
        options["support"] = list(options["support"]) if form == "csr" else [options["support"]]
        got = getattr(torch.ops.safeops, name)(x, y, **options)
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", [NAMES[0], *(pytest.param(n, marks=pytest.mark.exhaustive) for n in NAMES[1:])])
@pytest.mark.parametrize(
    "form", ["bool", *(pytest.param(f, marks=pytest.mark.exhaustive) for f in ("csr", "threshold"))]
)
def test_compiled_and_exported(name, form):
    x, y, support = pair(torch.float32)

    class Loss(torch.nn.Module):
        def forward(self, x, y, options):
            return getattr(safeops, name)(x, y, **options)

    options = given(form, support)
    want = outcome(lambda x, y: Loss()(x, y, options), x, y)
    compiled = torch.compile(Loss(), fullgraph=True)
    torch.testing.assert_close(outcome(lambda x, y: compiled(x, y, options), x, y), want)
    program = torch.export.export(Loss(), (x, y, options), strict=True).module()
    torch.testing.assert_close(outcome(lambda x, y: program(x, y, options), x, y), want)


def test_the_memory_of_a_step():
    """CSR: the two gradients, and nothing else of the logits' size."""
    x, y = torch.randn(2, 256, 4096, device=DEVICE)
    support = csr(torch.arange(4096, device=DEVICE) < torch.full((256, 1), 16, device=DEVICE))

    def step():
        outcome(lambda x, y: safeops.js_div_with_logits(x, y, support=support), x, y)

    assert _peak_bytes(DEVICE, step) < 3 * x.numel() * 4


X = torch.zeros(2, 5)
S, LEAST, OFFSETS, T = torch.ones(2, 5, dtype=torch.bool), torch.zeros(2), torch.tensor([0, 1, 2]), torch.tensor([0, 4])
BEST = {"target_values": X[:, :2], "target_indices": torch.tensor([[0, 1], [2, 3]])}


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"support": X}, TypeError, "support must be bool.*or floating with support_threshold.*torch.float32"),
        ({"support": 3}, TypeError, "support must be a tensor or a pair of tensors, got int"),
        ({"support": S.T}, ValueError, r"support \(5, 2\).*input \(2, 5\) and target \(2, 5\)"),
        ({"support": (OFFSETS[:2], T)}, ValueError, r"support's offsets \(2,\).*one more element.*\(2,\)"),
        ({"support_threshold": LEAST}, TypeError, "support_threshold needs support, the sampler's logits"),
        ({"support": S, "support_threshold": LEAST}, TypeError, "support_threshold needs a floating.*got torch.bool"),
        ({"support": X, "support_threshold": X}, ValueError, r"support_threshold \(2, 5\).*each of the rows \(2,\)"),
        ({"support": S.to("meta")}, ValueError, "support is on meta, input on"),
        ({"support": S, "temperature": 0.0}, ValueError, "temperature.*0.0"),
        ({"support": S, "target": None, **BEST}, TypeError, "support does not go with target_values"),
    ],
    ids=lambda x: None,
)  # fmt: skip
@each
def test_bad_calls(name, options, error, words):
    with pytest.raises(error, match=f"^{name}: {words}"):
        getattr(safeops, name)(X, **{"target": X, **options})


@pytest.fixture
def mesh():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_a_dtensor_is_refused_by_name(mesh):
    """The losses that take DTensors refuse them beside a support, and a support that is one."""
    from torch.distributed.tensor import distribute_tensor

    x, s, w, t = (distribute_tensor(x, mesh) for x in (X, S, torch.zeros(5, 5), T))
    for key, call in (
        ("input", lambda: safeops.cross_entropy(x, t, support=S)),
        ("support", lambda: safeops.cross_entropy(X, T, support=s)),
        ("support_threshold", lambda: safeops.cross_entropy(X, T, support=X, support_threshold=x[:, 0])),
        ("logits", lambda: safeops.token_log_probs(x, t, support=(OFFSETS, T))),
        ("input", lambda: safeops.kl_div_with_logits(x, x, support=S)),
        ("support", lambda: safeops.tv_with_logits(X, X, support=s)),
        ("input", lambda: safeops.linear_js_div(x, w, x, w, support=S)),
        ("input", lambda: safeops.linear_token_log_probs(x, w, t, support=S)),
    ):
        with pytest.raises(TypeError, match=f"^[a-z_]+: {key} must be no DTensor"):
            call()
