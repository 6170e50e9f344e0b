"""Divergences of a linear layer's logits from a teacher given by its best classes: fp64, chunks, memory, dtypes."""

import functools
import warnings

import pytest
import torch

import safeops
from safeops.ops.linear import _chunks
from safeops.testing.memory import _peak_bytes
from tests.ops import definitions
from tests.ops.record import DEVICE

INF = float("inf")
OF_LOGITS = {
    "linear_kl_div": "kl_div_with_logits",
    "linear_reverse_kl_div": "reverse_kl_div_with_logits",
    "linear_js_div": "js_div_with_logits",
    "linear_tv": "tv_with_logits",
}
EPS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
each = pytest.mark.parametrize("name", OF_LOGITS)
each_tail = pytest.mark.parametrize("tail", ["bucket", "renormalize"])


def example(rows=(6, 5), classes=50, best=7, dtype=torch.float32, seed=0, masked=True):
    """Returns (layer, {target_values, target_indices}, mask). Masked rows hold NaN, and indices out of range."""
    g = torch.Generator().manual_seed(seed)
    shapes = (*rows, 16), (classes, 16), (classes,), (*rows, classes)
    x, w, b, y = (torch.randn(*s, generator=g, dtype=torch.float64).to(DEVICE) for s in shapes)
    mask = (torch.rand(rows, generator=g) < 0.8).to(DEVICE)
    values, indices = (2 * y).log_softmax(-1).topk(best, -1)
    if masked:
        x[~mask], values[~mask], indices[~mask] = torch.nan, torch.nan, 99
    layer = [t.to(dtype) for t in (x, 0.3 * w, b)]
    return layer, {"target_values": values.to(dtype), "target_indices": indices}, mask


def outcome(function, layer, **options):
    """[loss, gradients of the layer's operands], for upstream gradients that differ by row."""
    x, w, b = leaves = [t.detach().requires_grad_() for t in layer]
    loss = function(x, w, linear_bias=b, **options)
    upstream = torch.linspace(1, 2, loss.numel(), device=DEVICE).reshape(loss.shape).to(loss.dtype)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, upstream)]


def unfused(name):
    """The divergence of all logits, in the operands' dtype."""

    def function(x, w, linear_bias=None, logits_dtype=None, mask=None, **options):
        x = x if mask is None else torch.where(mask.unsqueeze(-1), x, 0)
        return getattr(safeops, OF_LOGITS[name])(x @ w.mT + linear_bias, mask=mask, **options)

    return function


def truth(name):
    """The definition in plain torch: log probabilities of K classes, or of K + 1."""

    def function(
        x, w, target_values, target_indices, linear_bias=None, mask=None, temperature=1.0, tail="bucket", **rest
    ):
        keep = torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device) if mask is None else mask
        x, values = (torch.where(keep.unsqueeze(-1), t, 0) for t in (x, target_values))
        indices = torch.where(keep.unsqueeze(-1), target_indices, 0)
        log_q = ((x @ w.mT + linear_bias) / temperature).log_softmax(-1)
        own = log_q.gather(-1, indices)
        if tail == "bucket":
            others = log_q.scatter(-1, indices, -INF).logsumexp(-1, keepdim=True)
            remains = torch.where(keep.unsqueeze(-1), 1 - values.exp().sum(-1, keepdim=True), 0.5).log()
            own, values = torch.cat([own, others], -1), torch.cat([values, remains], -1)
        return getattr(definitions, OF_LOGITS[name])(own, values, mask=keep, **rest)

    return function


def wide(layer, known):
    return [t.double() for t in layer], {**known, "target_values": known["target_values"].double()}


def errors(got, want):
    return [float((g.double() - w).abs().max() / (w.abs().max() + 1e-3)) for g, w in zip(got, want, strict=True)]


def check(name, layer, known, tolerance=1e-5, **options):
    got = outcome(getattr(safeops, name), layer, **known, **options)
    of_fp64, known = wide(layer, known)
    want = outcome(truth(name), of_fp64, **known, **options)
    assert max(errors(got, want)) < tolerance, errors(got, want)
    assert [g.dtype for g in got[1:]] == [t.dtype for t in layer]
    return got


# ---- values and gradients


@each
@each_tail
@pytest.mark.parametrize("chunk", [2**23, 2**7, 1])
def test_in_chunks_as_a_whole(name, tail, chunk, monkeypatch):
    monkeypatch.setattr(_chunks, "CHUNK", chunk)
    layer, known, mask = example()
    check(name, layer, known, mask=mask, temperature=0.75, tail=tail)
    _, dx, *_ = check(name, layer, known, mask=mask, reduction="none", tail=tail)
    assert not dx[~mask].any()
    weight = torch.where(mask, torch.rand(mask.shape, device=DEVICE), 0)
    known["target_indices"] = known["target_indices"].int()
    of_fp64, known_of_fp64 = wide(layer, known)
    options = {"denominator": 7.0, "tail": tail}
    want = outcome(unfused(name), of_fp64, **known_of_fp64, mask=mask, weight=weight.double(), **options)
    got = outcome(getattr(safeops, name), layer, **known, weight=weight, **options)
    assert max(errors(got, want)) < 1e-5


@each
@each_tail
@pytest.mark.parametrize("dtype", EPS)
def test_no_further_from_fp64_than_the_divergence_of_the_logits(name, tail, dtype, monkeypatch):
    monkeypatch.setattr(_chunks, "CHUNK", 2**7)
    layer, known, mask = example(dtype=dtype)
    of_fp64, known_of_fp64 = wide(layer, known)
    want = outcome(truth(name), of_fp64, **known_of_fp64, mask=mask, temperature=2.0, tail=tail)
    calls = [
        unfused(name),
        getattr(safeops, name),
        functools.partial(getattr(safeops, name), logits_dtype=torch.float32),
    ]
    rival, *ours = (errors(outcome(f, layer, **known, mask=mask, temperature=2.0, tail=tail), want) for f in calls)
    for error in ours:
        assert all(e <= r + EPS[dtype] for e, r in zip(error, rival)), (error, rival)
    assert ours[1][0] < 1e-5  # (fp32 sums of products: nothing is rounded to half before the loss)


def test_fp64():
    for name in OF_LOGITS:
        layer, known, mask = example(dtype=torch.float64)
        check(name, layer, known, 1e-12, mask=mask, temperature=0.75)
        check(name, layer, known, 1e-12, mask=mask, tail="renormalize")


@each
def test_all_classes_are_the_whole_teacher(name):
    layer, known, _ = example(best=50, masked=False)
    target = torch.empty(6, 5, 50, device=DEVICE).scatter_(-1, known["target_indices"], known["target_values"])
    want = outcome(lambda *t, **options: getattr(safeops, name)(*t, target, **options), layer)
    for tail in ("bucket", "renormalize"):
        assert max(errors(outcome(getattr(safeops, name), layer, **known, tail=tail), want)) < 1e-5


@each
def test_a_student_that_is_certain(name):
    """The others' probability, 1e-12 here, is a sum of their own: 1 minus the best classes' would be 0 in fp32."""
    layer, known, _ = example(masked=False)
    layer[2][:] = -30.0
    known["target_indices"] = torch.arange(7, device=DEVICE).expand(6, 5, 7)
    layer[2][:7] = 0.0
    check(name, layer, known)
    assert outcome(getattr(safeops, name), layer, **known)[1].any()


@each
def test_a_padded_vocabulary(name):
    """Classes at -inf count for nothing, also where nothing else is left."""
    layer, known, mask = example()
    layer[2][40:] = -INF
    known["target_indices"] = torch.where(known["target_indices"] < 99, known["target_indices"] % 10, 99)
    known = {key: t[..., :1] for key, t in known.items()}
    check(name, layer, known, mask=mask)
    layer, known, mask = example(best=1)
    known["target_values"], known["target_indices"] = known["target_values"] * 0 - 0.1, known["target_indices"] * 0
    layer[2][1:] = -INF
    got, want = (outcome(f, layer, **known, mask=mask) for f in (getattr(safeops, name), unfused(name)))
    assert all(torch.equal(g.isnan(), w.isnan()) and torch.equal(g.isinf(), w.isinf()) for g, w in zip(got, want))
    assert got[0].isinf() == (name == "linear_kl_div")


@each
def test_a_nan_of_another_class(name):
    """It shows in a bucket; renormalised, that class does not count."""
    layer, known, _ = example(masked=False)
    layer[2][3] = torch.nan
    known["target_values"] = known["target_values"].masked_fill(known["target_indices"] == 3, -torch.inf)  # no class
    assert all(t.isnan().any() for t in outcome(getattr(safeops, name), layer, **known))
    assert all(t.isfinite().all() for t in outcome(getattr(safeops, name), layer, **known, tail="renormalize"))


@each
def test_a_gradient_to_the_values(name):
    layer, known, _ = example(masked=False, dtype=torch.float64)
    values = known.pop("target_values").requires_grad_()
    for tail in ("bucket", "renormalize"):
        grads = [
            torch.autograd.grad(f(*layer[:2], linear_bias=layer[2], target_values=values, **known, tail=tail), values)[
                0
            ]
            for f in (getattr(safeops, name), unfused(name))
        ]
        torch.testing.assert_close(*grads)


@each_tail
def test_fp16_gradients_of_a_scaled_loss(tail):
    """Slopes of a mean over many rows are below fp16's range, times a loss scale above: gradients are in it."""
    layer, known, _ = example((4096,), masked=False, dtype=torch.float16)
    of_fp64, known_of_fp64 = wide(layer, known)
    want = outcome(truth("linear_kl_div"), of_fp64, **known_of_fp64, tail=tail)
    assert max(errors(outcome(safeops.linear_kl_div, layer, **known, tail=tail), want)) < 5e-3

    def small(*operands, **options):
        return safeops.linear_kl_div(*operands, **options) / 64

    sums = [d.double() * 2**20 for d in outcome(small, layer, **known, tail=tail)[2:]]  # (of slopes below 1e-7)
    assert max(errors(sums, [d * 2**14 for d in want[2:]])) < 2e-2
    leaf = layer[0].requires_grad_()
    loss = safeops.linear_kl_div(leaf, *layer[1:2], linear_bias=layer[2], **known, reduction="sum", tail=tail)
    (dx,) = torch.autograd.grad(loss * 1e7, leaf)
    assert dx.isinf().any() and not dx.isnan().any()


@each_tail
@pytest.mark.parametrize("rows, best", [((0,), 7), ((3, 0), 7), ((), 7), ((5,), 0)], ids=str)
def test_sizes(tail, rows, best):
    layer, known, _ = example((*rows, 1), masked=False)
    layer[0], known = layer[0][..., 0, :], {key: t[..., 0, :best] for key, t in known.items()}
    loss, *gradients = outcome(safeops.linear_kl_div, layer, **known, reduction="none", tail=tail)
    assert loss.shape == rows and [g.shape for g in gradients] == [t.shape for t in layer]
    assert best or (loss == 0).all() and not any(g.any() for g in gradients)


@each
@each_tail
def test_expanded_gradients(name, tail):
    layer, known, mask = example()
    results = []
    for upstream in (torch.ones((), device=DEVICE).expand(6, 5), torch.ones(6, 5, device=DEVICE)):
        x, w, b = leaves = [t.detach().requires_grad_() for t in layer]
        loss = getattr(safeops, name)(x, w, linear_bias=b, **known, mask=mask, reduction="none", tail=tail)
        results.append(torch.autograd.grad(loss, leaves, upstream))
    assert all(map(torch.equal, *results))


@each_tail
def test_packed_sequences(tail):
    """Rows of several sequences without padding: the mean of each sequence is `segment_mean` of its rows."""
    layer, known, _ = example((11,), masked=False, dtype=torch.float64)
    ends = torch.tensor([0, 4, 5, 11], device=DEVICE)

    def by_sequence(x, w, linear_bias, **known):
        loss = safeops.linear_kl_div(x, w, linear_bias=linear_bias, **known, reduction="none", tail=tail)
        return safeops.segment_mean(loss, cu_seqlens=ends)

    def one_by_one(x, w, linear_bias, **known):
        parts = [slice(a, b) for a, b in zip(ends[:-1].tolist(), ends[1:].tolist())]
        of_part = [{key: t[part] for key, t in known.items()} for part in parts]
        return torch.stack([truth("linear_kl_div")(x[part], w, linear_bias=linear_bias, **known, tail=tail)
                            for part, known in zip(parts, of_part)])  # fmt: skip

    assert max(errors(outcome(by_sequence, layer, **known), outcome(one_by_one, layer, **known))) < 1e-12


# ---- routes


@each
@each_tail
def test_second_derivatives(name, tail):
    (x, w, b), known, _ = example((2,), classes=5, best=2, masked=False, dtype=torch.float64)
    layer = x[:, :3], w[:, :3], b

    def function(x, w, b):
        return getattr(safeops, name)(x, w, linear_bias=b, **known, temperature=0.5, tail=tail)

    leaves = [t.clone().requires_grad_() for t in layer]
    assert torch.autograd.gradcheck(function, leaves) and torch.autograd.gradgradcheck(function, leaves)


@each_tail
def test_transforms(tail):
    layer, known, _ = example((3,), masked=False)

    def loss(x, values, indices):
        known = {"target_values": values[None], "target_indices": indices[None]}
        return safeops.linear_kl_div(x[None], layer[1], linear_bias=layer[2], **known, tail=tail)

    operands = layer[0], *known.values()
    want = outcome(safeops.linear_kl_div, layer, **known, reduction="sum", tail=tail)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        grads, values = torch.func.vmap(torch.func.grad_and_value(loss))(*operands)
    torch.testing.assert_close(values.sum(), want[0])
    torch.testing.assert_close(grads, want[1])


@each_tail
def test_autocast(tail):
    layer, known, mask = example()
    mixed = layer[0].bfloat16(), *layer[1:]
    with torch.autocast(DEVICE, torch.bfloat16):
        got = outcome(safeops.linear_kl_div, mixed, **known, mask=mask, tail=tail)
    want = outcome(safeops.linear_kl_div, [t.bfloat16() for t in layer], **known, mask=mask, tail=tail)
    assert [g.dtype for g in got] == [torch.float32, torch.bfloat16, torch.float32, torch.float32]
    assert all(torch.equal(g.double(), w.double()) for g, w in zip(got, want))


@pytest.mark.slow
@each_tail
def test_compiled_whole(tail):
    layer, known, mask = example()
    function = torch.compile(safeops.linear_kl_div, fullgraph=True)
    got, want = (outcome(f, layer, **known, mask=mask, tail=tail) for f in (function, safeops.linear_kl_div))
    assert max(errors(got, [w.double() for w in want])) < 1e-5


@pytest.mark.slow
@each_tail
def test_exports_for_any_number_of_rows(tail):
    class Loss(torch.nn.Module):
        def forward(self, x, w, values, indices):
            return safeops.linear_kl_div(x, w, target_values=values, target_indices=indices, tail=tail)

    layer, known, _ = example((5,), masked=False)
    operands, rows = (*layer[:2], *known.values()), torch.export.Dim("n", min=2, max=100)
    dims = {0: rows}, None, {0: rows}, {0: rows}
    program = torch.export.export(Loss(), operands, dynamic_shapes=dims).module()
    few = [t if d is None else t[:3] for t, d in zip(operands, dims)]
    torch.testing.assert_close(program(*few), Loss()(*few), rtol=1e-4, atol=1e-5)


def test_the_raw_ops_and_their_fakes():
    (x, w, b), known, _ = example((5,), masked=False)
    operands = x, w, b, known["target_indices"], None, 0.75, False
    results = torch.ops.safeops._linear_best_classes(*operands)
    backward = torch.ones_like(results[0]), results[1], *operands, True, False, True
    for op, arguments in (("_linear_best_classes", operands), ("_linear_best_classes_backward", backward)):
        tests = "test_schema", "test_faketensor"
        torch.library.opcheck(getattr(torch.ops.safeops, op), arguments, test_utils=tests)


# ---- memory


@each_tail
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_eighth_of_the_logits_beside_the_gradients(tail, dtype, monkeypatch):
    monkeypatch.setattr(_chunks, "CHUNK", 2**18)
    layer, known, _ = example((1024,), classes=8192, best=8, masked=False, dtype=dtype)

    def step():
        return outcome(safeops.linear_kl_div, layer, **known, tail=tail)

    gradients = sum(t.numel() * (t.element_size() + 4) for t in layer)  # (sums in fp32, rounded once)
    entries = known["target_indices"].numel() * 48
    logits = 1024 * 8192 * layer[0].element_size()
    assert _peak_bytes(DEVICE, step) < logits / 8 + gradients + entries


# ---- bad calls


@each
def test_indices_out_of_range(name):
    layer, known, mask = example()
    known["target_indices"][mask.nonzero()[0].split(1)] = 50
    for tail in ("bucket", "renormalize"):
        with pytest.raises(IndexError, match=rf"^{name}: target_indices 50 .* 50 classes .*linear_weight"):
            getattr(safeops, name)(*layer[:2], **known, mask=mask, tail=tail)
    # under vmap the indices cannot be read: one out of range is left out
    layer, known, _ = example((3,), masked=False)
    want = unfused(name)(*layer[:2], linear_bias=layer[2], **known, tail="renormalize", reduction="none")
    values, indices = (torch.cat([t, t[:, :1] * 0 + 50], -1) for t in known.values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = torch.func.vmap(
            lambda x, v, i: getattr(safeops, name)(x, layer[1], linear_bias=layer[2], target_values=v, target_indices=i,
                                                   tail="renormalize")
        )(layer[0], values, indices)  # fmt: skip
    torch.testing.assert_close(got, want)


def test_a_row_without_an_index_in_range_is_0():
    """Where indices are not read, such as in vmap and on a GPU, nothing is left of such a row."""
    layer, known, _ = example((3,), masked=False)
    indices = torch.full_like(known["target_indices"], 50)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for tail in ("bucket", "renormalize"):
            loss = torch.func.vmap(
                lambda x, i: safeops.linear_kl_div(x, layer[1], target_values=known["target_values"][0],  # noqa: B023
                                                   target_indices=i, tail=tail)  # noqa: B023
            )(layer[0], indices)  # fmt: skip
            assert not loss.abs().max() > 1e-6


@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
@pytest.mark.parametrize("index", [-1, 10**6, 0])
def test_an_entry_of_minus_infinity_is_no_class(tail, index):
    """Value and gradients must be those of the shorter list, and of a row without a class 0."""
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 4, generator=g, dtype=torch.float64).requires_grad_() for n in (3, 7))
    values, indices = torch.randn(3, 7, generator=g, dtype=torch.float64).log_softmax(-1).topk(3)
    padded, places = values.clone(), indices.clone()
    padded[:, 2], places[:, 2] = -INF, index
    padded[2] = -INF
    keep = torch.tensor([True, True, False])
    for function in (
        lambda **known: safeops.linear_js_div(x, w, tail=tail, reduction="sum", **known),
        lambda **known: safeops.js_div_with_logits(x @ w.T, tail=tail, reduction="sum", **known),
    ):
        pairs = []
        for v, i, mask in ((padded, places, None), (values[:, :2], indices[:, :2], keep)):
            v = v.clone().requires_grad_()
            loss = function(target_values=v, target_indices=i, mask=mask)
            d = torch.autograd.grad(loss, (x, w, v))
            pairs.append((loss, *d[:2], d[2][:, :2]))
        for got, want in zip(*pairs):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
