"""support= of cross_entropy: the loss over the classes that a sampler kept, against logits of -inf in fp64."""

import math

import pytest
import torch

import safeops
from safeops.testing.memory import _peak_bytes
from tests.contract.classification.test_support import example, given
from tests.ops import definitions
from tests.ops.record import DEVICE

NAME = "cross_entropy"
each_form = pytest.mark.parametrize("form", ["bool", "csr", "int32", "threshold"])
MASK = torch.arange(12, device=DEVICE).reshape(3, 4) % 4 != 1
OPTIONS = {
    "mean": {},
    "masked sum": {"mask": MASK, "reduction": "sum"},
    "none": {"reduction": "none", "ignore_index": 2, "temperature": 0.5, "softcap": 4.0},
    "smoothing": {"mask": MASK, "label_smoothing": 0.25},
    "z-loss, weighted": {"z_loss": 0.125, "weight": torch.linspace(0, 2, 11, device=DEVICE).double()},
    "smoothing, weighted": {"label_smoothing": 0.25, "weight": torch.linspace(0, 2, 11, device=DEVICE).double()},
    "row weights": {"row_weight": (torch.arange(12, device=DEVICE) % 4).reshape(3, 4).double(), "z_loss": 0.125},
    "denominator": {"denominator": 5.0},
}


def images(dtype, seed=0):
    """Returns (logits (3, 11, 4), target, support); some targets are outside."""
    logits, target, support = example(dtype=dtype, seed=seed)
    target.view(-1)[-1] = -100
    return logits.movedim(-1, 1), target, support.movedim(-1, 1)


def reference(x, target, support, outside="-inf", dim=1, **options):
    """The loss of logits of -inf; the count of kept targets outside."""
    inside = support.gather(dim, target.clamp(min=0).unsqueeze(dim)).squeeze(dim)
    mask = options.pop("mask", None)
    keep = (target != -100) & (target != options.get("ignore_index", -100))
    for key in ("row_weight", "weight"):
        if key in options:
            keep = keep & ((options[key][target.clamp(min=0)] if key == "weight" else options[key]) != 0)
    keep = keep if mask is None else keep & mask
    computed = keep & inside if outside == "mask" else keep
    filled = torch.where(support, x, -math.inf)
    return definitions.cross_entropy(filled, target, mask=computed, **options), int((keep & ~inside).sum())


def outcome(function, x, *leaves):
    leaves = [t.detach().requires_grad_() for t in (x, *leaves)]
    loss, count = function(*leaves)
    upstream = torch.linspace(1, 2, loss.numel(), device=DEVICE, dtype=torch.float64).reshape(loss.shape)
    total = torch.where(loss.isfinite(), upstream.to(loss.dtype) * loss, 0).sum()
    return loss.detach(), int(count), torch.autograd.grad(total if loss.dim() else loss, leaves)


def compare(form, dtype, outside, options):
    x, target, support = images(dtype)
    target[target == -100] = options.get("ignore_index", -100)

    def ours(x):
        result = safeops.cross_entropy(x, target, **given(form, support, 1), outside=outside, **options)
        assert result.outside.dtype == torch.int64 and result.outside.dim() == 0
        return result

    got = outcome(ours, x)
    want = outcome(lambda x: reference(x, target, support, outside, **options), x.double())
    assert got[1] == want[1] > 0 and got[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(got[0].double(), want[0], rtol=tolerance, atol=tolerance)
    eps = max(tolerance, torch.finfo(dtype).eps)
    assert got[2][0].dtype == dtype and not got[2][0][~support].any()
    torch.testing.assert_close(got[2][0].double(), want[2][0], rtol=eps, atol=eps)
    return got


@each_form
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_values_and_gradients(form, options):
    got = compare(form, torch.float64, "mask", options)
    assert got[0].isfinite().all() and got[2][0].any()


@each_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(form, dtype):
    compare(form, dtype, "mask", {"mask": MASK, "label_smoothing": 0.25, "z_loss": 0.125})


@each_form
def test_a_target_outside_has_an_infinite_loss(form):
    """Its gradient is that of the logsumexp, as F.cross_entropy of logits of -inf has it; other rows do not see it."""
    loss, _, (gradient,) = compare(form, torch.float64, "-inf", {"reduction": "none", "label_smoothing": 0.25})
    assert loss.isinf().any() and gradient.isfinite().all()
    x = torch.tensor([[1.0, 2.0, 0.5, 9.0]], dtype=torch.float64, device=DEVICE, requires_grad=True)
    target, support = torch.tensor([3], device=DEVICE), torch.tensor([[True, True, True, False]], device=DEVICE)
    for smoothing in (0.0, 0.25):
        got = safeops.cross_entropy(x, target, **given(form, support, 1), label_smoothing=smoothing)
        assert got.loss == math.inf and got.outside == 1
        gradient = torch.autograd.grad(got.loss, x)[0]
        p = x.detach()[0, :3].softmax(0)
        torch.testing.assert_close(gradient[0, :3], p - smoothing / 3)
        assert gradient[0, 3] == 0


@each_form
def test_weights_have_gradients(form):
    x, target, support = images(torch.float64)
    weight, row_weight = OPTIONS["smoothing, weighted"]["weight"], OPTIONS["row weights"]["row_weight"]

    def call(function, **options):
        def of(x, weight, row_weight):
            return function(x, target, weight=weight, row_weight=row_weight, **options)

        return outcome(of, torch.where(support, x, 0), weight + 0.5, row_weight + 0.5)

    options = {"label_smoothing": 0.25, "z_loss": 0.125, "outside": "mask"}
    got = call(safeops.cross_entropy, **given(form, support, 1), **options)
    torch.testing.assert_close(got, call(reference, support=support, **options), rtol=1e-10, atol=1e-10)


@each_form
def test_a_class_of_weight_0_is_not_outside(form):
    x, target = torch.zeros(2, 4, device=DEVICE), torch.tensor([3, 2], device=DEVICE)
    support, weight = (torch.arange(4, device=DEVICE) < 2).expand(2, 4), torch.tensor([1.0, 1, 1, 0], device=DEVICE)
    assert safeops.cross_entropy(x, target, weight, **given(form, support, 1), outside="mask").outside == 1


@each_form
def test_infinite_logits(form):
    """+inf at the class of the row alone is certain; every other +inf or NaN in a support is NaN; outside it is not."""
    inf, nan = math.inf, math.nan
    x = [
        [inf, 1, 2],
        [1, inf, 2],
        [inf, inf, 2],
        [nan, 1, inf],
        [-inf, 1, 2],
        [1, nan, inf],
        [inf, nan, 2],
        [1, -inf, 2],
    ]
    x, target = torch.tensor(x, device=DEVICE), torch.zeros(8, dtype=torch.int64, device=DEVICE)
    support = torch.ones(8, 3, dtype=torch.bool, device=DEVICE)
    support[5, 1:] = False
    for options in ({}, {"label_smoothing": 0.25}, {"z_loss": 0.5}):
        options = {"reduction": "none", **options}
        got = safeops.cross_entropy(x, target, **given(form, support, 1), **options).loss
        want = safeops.cross_entropy(x.masked_fill(~support, -inf), target, **options)
        torch.testing.assert_close(got, want, equal_nan=True)
        assert got[5].isfinite() and got[6].isnan() and got[7].isfinite()


@each_form
def test_logits_of_any_size(form):
    """A constant of the row changes nothing, and exp does not overflow."""
    x, target, support = images(torch.float64)
    got, want = (
        outcome(lambda x: safeops.cross_entropy(x, target, **given(form, support, 1), outside="mask"), x + shift)
        for shift in (1e4, 0)
    )
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@each_form
def test_masked_rows_do_not_exist(form):
    """NaN in a row, a support without a class, a target that is not a class: nothing of it counts."""
    x, target, support = images(torch.float32)
    want = outcome(lambda x: safeops.cross_entropy(x, target, **given(form, support, 1), mask=MASK), x)
    for garbage, kept in ((math.nan, False), (math.inf, True), (math.nan, True)):
        y, t, s = x.clone(), target.clone(), support.clone()
        y.movedim(1, -1)[~MASK], t[~MASK], s.movedim(1, -1)[~MASK] = garbage, 99, kept
        got = outcome(lambda x, t=t, s=s: safeops.cross_entropy(x, t, **given(form, s, 1), mask=MASK), y)
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@each_form
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_outside_and_masked_out_does_not_exist(form, garbage):
    x, target, support = images(torch.float32)
    outside = ~support.gather(1, target.clamp(min=0).unsqueeze(1)).squeeze(1)
    options = {**given(form, support, 1), "outside": "mask", "z_loss": 0.125, "label_smoothing": 0.25}
    want = outcome(lambda x: safeops.cross_entropy(x, target, **options), x)
    x.movedim(1, -1)[outside] = garbage
    got = outcome(lambda x: safeops.cross_entropy(x, target, **options), x)
    assert got[1] > 0 and not got[2][0].movedim(1, -1)[outside].any()
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_layouts():
    """One row without dims, no rows, and strided logits: the CSR form does not copy them."""
    for shape in ((11,), (0, 11), (2, 11, 0), (2, 11, 3, 2)):
        dim = 0 if len(shape) == 1 else 1
        rows = shape[:dim] + shape[dim + 1 :]
        logits, target, support = example((math.prod(rows),))
        logits, support = (t.reshape(*rows, 11).movedim(-1, dim) for t in (logits, support))
        target = target.reshape(rows)
        want, count = reference(logits.double(), target, support, "mask", dim=dim, reduction="none")
        for form in ("bool", "csr", "threshold"):
            got = safeops.cross_entropy(logits, target, **given(form, support, dim), outside="mask", reduction="none")
            torch.testing.assert_close(got.loss.double(), want, rtol=1e-5, atol=1e-5)
            assert got.outside == count
    x, classes = torch.randn(512, 2, 2048, device=DEVICE)[:, 1], torch.arange(512, device=DEVICE)
    support = torch.arange(513, device=DEVICE), classes
    with torch.no_grad():
        peak = _peak_bytes(DEVICE, lambda: safeops.cross_entropy(x, classes, support=support))
    assert peak < x.numel() * 4 / 4


@pytest.mark.parametrize("form", ["bool", "csr", "threshold"])
def test_a_row_without_a_support(form):
    """It raises on the CPU, and is masked out under vmap as elsewhere."""
    x, target, support = images(torch.float32)
    support[1, :, 2] = False
    if DEVICE == "cpu":
        with pytest.raises(ValueError, match=f"^{NAME}: support of row 6 has (no class|classes .*): each kept row"):
            safeops.cross_entropy(x, target, **given(form, support, 1))
    call = given(form, support, 1) | {"outside": "mask", "reduction": "none"}
    loss, count = torch.vmap(lambda x: tuple(safeops.cross_entropy(x, target, **call)))(x.unsqueeze(0))
    keep = torch.ones_like(target, dtype=torch.bool)
    keep[1, 2] = False
    want = safeops.cross_entropy(x, target, **given(form, support, 1), mask=keep, outside="mask", reduction="none")
    torch.testing.assert_close((loss[0], count[0]), tuple(want))


@pytest.mark.parametrize("form", ["bool", "csr", "threshold"])
def test_derivatives(form):
    logits, target, support = example((2,), 4, torch.float64)
    target = torch.where(support.gather(-1, target.unsqueeze(-1)).squeeze(-1), target, 2)  # (all are inside)
    x = torch.where(support, logits, 0).requires_grad_()

    def function(x):
        options = {"temperature": 0.5, "label_smoothing": 0.25, "z_loss": 0.125}
        return safeops.cross_entropy(x, target, **given(form, support, 1), **options).loss

    assert torch.autograd.gradcheck(function, x) and torch.autograd.gradgradcheck(function, x)
    gradient = torch.func.grad(function)(x.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(function(x), x)[0])
    tangent = torch.func.jvp(function, (x.detach(),), (torch.ones_like(x),))[1]
    torch.testing.assert_close(tangent, gradient.sum())


@pytest.mark.parametrize("form", ["bool", "csr", "threshold"])
def test_under_autocast_and_as_an_op(form):
    x, target, support = images(torch.bfloat16)
    want = safeops.cross_entropy(x, target, **given(form, support, 1), outside="mask")
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        got = safeops.cross_entropy(x, target, **given(form, support, 1), outside="mask")
    torch.testing.assert_close(tuple(got), tuple(want), rtol=0, atol=0)
    options = given(form, support, 1)
    options["support"] = list(options["support"]) if form == "csr" else [options["support"]]
    got = torch.ops.safeops.cross_entropy.support(x, target, **options, outside="mask")
    torch.testing.assert_close(got, tuple(want), rtol=0, atol=0)


def test_as_a_module():
    x, target, support = images(torch.float32)
    loss = safeops.nn.CrossEntropyLoss(label_smoothing=0.25, outside="mask")
    for form in ("bool", "csr", "threshold"):
        want = safeops.cross_entropy(x, target, **given(form, support, 1), label_smoothing=0.25, outside="mask")
        torch.testing.assert_close(tuple(loss(x, target, **given(form, support, 1))), tuple(want))
    with pytest.raises(ValueError, match="^CrossEntropyLoss: outside must be one of '-inf', 'mask', got 'drop'"):
        safeops.nn.CrossEntropyLoss(outside="drop")


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", ["csr", *(pytest.param(f, marks=pytest.mark.exhaustive) for f in ("bool", "threshold"))]
)
def test_compiled_and_exported(form):
    """Exported for any number of rows and, in CSR form, of classes in all supports."""

    def function(x, target, options):
        return tuple(safeops.cross_entropy(x, target, **options, label_smoothing=0.25, outside="mask"))

    class Loss(torch.nn.Module):
        def forward(self, x, target, options):
            return function(x, target, options)

    def operands(rows):
        logits, target, support = example((rows,), seed=rows)
        return logits, target, given(form, support, 1)

    def check(called, x, *rest):
        got, want = (outcome(lambda x, f=f: f(x, *rest), x) for f in (called, function))
        torch.testing.assert_close(got, want)

    check(torch.compile(function, fullgraph=True), *operands(12))
    rows, entries = torch.export.Dim("rows", min=2, max=99), torch.export.Dim("entries", min=3, max=999)
    sizes = {"support": ({0: rows + 1}, {0: entries})} if form == "csr" else dict.fromkeys(operands(2)[2], {0: rows})
    shapes = {0: rows}, {0: rows}, sizes
    program = torch.export.export(Loss(), operands(12), dynamic_shapes=shapes, strict=True).module()
    check(program, *operands(7))


@pytest.mark.slow
def test_a_row_without_a_support_is_masked_out_where_compiled():
    """Inductor reads bools that are viewed as bytes wrong: each row would have a class."""
    x, target, support = images(torch.float32)
    support[1, :, 2] = False
    keep = support.any(1)
    function = torch.compile(lambda x, s: safeops.cross_entropy(x, target, support=s, outside="mask"), fullgraph=True)
    want = safeops.cross_entropy(x, target, support=support, mask=keep, outside="mask")
    torch.testing.assert_close(tuple(function(x, support)), tuple(want))


def test_the_memory_of_a_step():
    """Bool: a copy of the logits, its gradient and two bytes a class. CSR: the gradient, which is all that is large."""
    logits = torch.randn(256, 4096, device=DEVICE)
    target, size = torch.zeros(256, dtype=torch.int64, device=DEVICE), logits.numel() * 4
    support = torch.arange(4096, device=DEVICE) < torch.full((256, 1), 16, device=DEVICE)
    for form, copies in (("bool", 3.6), ("csr", 1.6)):
        given_support = given(form, support, 1)

        def step(x, given_support=given_support):
            safeops.cross_entropy(x, target, **given_support).loss.backward()

        leaf = logits.clone().requires_grad_()
        assert _peak_bytes(DEVICE, lambda leaf=leaf, step=step: step(leaf)) < copies * size, form


X, T = torch.zeros(2, 5), torch.tensor([0, 4])
S, LEAST, OFFSETS = torch.ones(2, 5, dtype=torch.bool), torch.zeros(2), torch.tensor([0, 1, 2])


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"support": X}, TypeError, "support must be bool.*or floating with support_threshold.*torch.float32"),
        ({"support": T}, TypeError, "support must be bool.*torch.int64"),
        ({"support": 3}, TypeError, "support must be a tensor or a pair of tensors, got int"),
        ({"support": S.T}, ValueError, r"support \(5, 2\).*input \(2, 5\)"),
        ({"support": (OFFSETS[:2], T)}, ValueError, r"support's offsets \(2,\).*one more element.*\(2,\)"),
        ({"support_threshold": LEAST}, TypeError, "support_threshold needs support, the sampler's logits"),
        ({"support": S, "support_threshold": LEAST}, TypeError, "support_threshold needs a floating.*got torch.bool"),
        ({"support": (OFFSETS, T), "support_threshold": LEAST}, TypeError, "support_threshold needs.*got a pair"),
        ({"support": X, "support_threshold": 0.5}, TypeError, "support_threshold must be a tensor, got float"),
        ({"support": X, "support_threshold": T}, TypeError, "support_threshold must be a floating.*torch.int64"),
        ({"support": X, "support_threshold": X}, ValueError, r"support_threshold \(2, 5\).*each of the rows \(2,\)"),
        ({"support": X, "support_threshold": LEAST.to("meta")}, ValueError, "support_threshold is on meta, input on"),
        ({"support": X.to("meta"), "support_threshold": LEAST}, ValueError, "support is on meta, input on"),
        ({"support": S, "outside": "drop"}, ValueError, "outside must be one of '-inf', 'mask', got 'drop'"),
        ({"outside": "mask"}, TypeError, "outside='mask' needs support"),
        ({"support": S, "label_smoothing": 1.0}, ValueError, "label_smoothing must be below 1 with support"),
        ({"support": S, "temperature": 0.0}, ValueError, "temperature.*0.0"),
        ({"support": S, "reduction": "average"}, ValueError, "reduction.*average"),
    ],
    ids=lambda x: None,
)  # fmt: skip
def test_bad_calls(options, error, words):
    with pytest.raises(error, match=f"^{NAME}: {words}"):
        safeops.cross_entropy(X, T, **options)


def test_probabilities_are_refused():
    with pytest.raises(TypeError, match=f"^{NAME}: support needs a target of class indices, got torch.float32"):
        safeops.cross_entropy(X, X.softmax(1), support=S)
