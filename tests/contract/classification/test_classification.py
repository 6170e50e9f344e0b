"""cross_entropy and nll_loss beyond their records: reported failures, infinite logits, invalid classes, parity."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import safeops
from safeops.testing.memory import _peak_bytes
from tests.contract.common import DEVICE, each_route, flags, grad_of, on, t, tensor
from tests.ops import definitions

INF, NAN = float("inf"), float("nan")
each_loss = pytest.mark.parametrize("name", ["cross_entropy", "nll_loss"])
on_the_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="elsewhere nobody may wait for the indices")


def classes(*values):
    return torch.tensor(values, device=DEVICE)


def both(function, x, *args, **kwargs):
    """Returns (value, gradient of its sum)."""
    x = x.detach().requires_grad_()
    value = function(x, *args, **kwargs)
    return value.detach(), grad_of(value.sum(), x)


# ---- reported failures


@each_route
@each_loss
def test_every_target_ignored(name, route):
    """pytorch#70348, #116349: torch returns NaN when no target is kept."""
    x, target = torch.randn(3, 5, device=DEVICE, requires_grad=True), torch.full((3,), -100, device=DEVICE)
    assert getattr(F, name)(x, target).isnan()
    loss = on(route, name)(x, target)
    assert loss == 0 and torch.equal(grad_of(loss, x), torch.zeros_like(x))
    assert on(route, name)(x, target, empty="nan").isnan()
    with pytest.raises(ValueError, match=f"{name}: empty"):
        on(route, name)(x, target, empty="raise")


@each_route
def test_half_sums_of_nll(route):
    """pytorch#85791: nll_loss must not sum in half, where a sum beyond 65504 is inf."""
    log_p = torch.full((2, 3, 20_000), -7.5, device=DEVICE, dtype=torch.float16)
    target = torch.ones(2, 20_000, dtype=torch.int64, device=DEVICE)
    assert F.nll_loss(log_p, target, reduction="sum").isinf()
    assert on(route, "nll_loss")(log_p, target, reduction="sum") == 300_000
    assert on(route, "nll_loss")(log_p, target) == 7.5


@each_route
def test_logits_are_the_callers(route):
    """Liger#343, unsloth#5002: they write the gradient over the caller's logits; here the logits stay as they are."""
    x = torch.randn(4, 300, device=DEVICE).requires_grad_()
    before, version = x.detach().clone(), x._version
    first = grad_of(on(route, "cross_entropy")(x, classes(0, 299, 7, -100)), x)
    assert torch.equal(x, before) and x._version == version
    again = on(route, "cross_entropy")(x, classes(0, 299, 7, -100))
    assert torch.equal(grad_of(again, x), first)


@on_the_cpu
@each_route
@each_loss
def test_a_class_that_does_not_exist(name, route):
    """pytorch#15508, #1204: class 255 of 3. On CUDA torch raises a device assert, and the context is lost."""
    x, target = torch.randn(2, 3), torch.tensor([1, 255])
    with pytest.raises(IndexError):
        getattr(F, name)(x, target)
    with pytest.raises(IndexError, match=f"{name}: target 255 is out of range for the 3 classes"):
        on(route, name)(x, target)
    want = on(route, name)(x[:1], target[:1])
    assert torch.equal(on(route, name)(x, target, ignore_index=255), want)
    assert torch.equal(on(route, name)(x, target, mask=flags(True, False)), want)


@each_route
@each_loss
def test_no_reduction_with_weights(name, route):
    """Liger#968: Liger's gradients are wrong for reduction="none" with class weights."""
    x, target, w = torch.randn(6, 5, device=DEVICE), classes(0, 4, 2, 2, -100, 1), tensor([0.5, 2.0, 0.25, 1.0, 3.0])
    upstream = tensor([1.0, -2.0, 0.5, 3.0, 7.0, 0.0])
    results = []
    for function in (on(route, name), getattr(F, name)):
        leaf = x.clone().requires_grad_()
        value = function(leaf, target, weight=w, reduction="none")
        results.append((value, torch.autograd.grad(value, leaf, upstream)[0]))
    for got, want in zip(*results):
        torch.testing.assert_close(got, want)


# ---- rows and classes that are left out


@each_route
@each_loss
@pytest.mark.parametrize("shape", [(4, 5), (4, 300), (4, 5, 6)], ids=str)
def test_rows_that_do_not_exist(name, route, shape):
    """A row left out by mask, by ignore_index or by a class of weight 0 brings no NaN, and its gradient is 0."""
    function, rows = on(route, name), (shape[0], *shape[2:])
    x = torch.randn(shape, device=DEVICE)
    x[1:] = NAN
    target = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    target[2], target[3] = -100, 3
    mask, w = torch.ones(rows, dtype=torch.bool, device=DEVICE), torch.ones(shape[1], device=DEVICE)
    mask[1], w[3] = False, 0
    for reduction in ("mean", "sum", "none"):
        leaf = x.clone().requires_grad_()
        value = function(leaf, target, mask=mask, weight=w, reduction=reduction)
        want = function(x[:1], target[:1], weight=w, reduction=reduction)
        torch.testing.assert_close(value[:1] if reduction == "none" else value, want)
        upstream = torch.ones_like(value)
        if reduction == "none":
            assert (value[1:] == 0).all()
            upstream[1:] = NAN
        (grad,) = torch.autograd.grad(value, leaf, upstream)
        assert (grad[1:] == 0).all() and grad[0].isfinite().all()


@each_route
@pytest.mark.parametrize("length", [4, 40, 3000])
def test_a_class_of_minus_infinity_does_not_exist(route, length):
    """A class with logit -inf changes neither the loss nor a gradient; torch's smoothed loss would be inf."""
    x = torch.randn(3, length, dtype=torch.float64, device=DEVICE)
    x[:, length // 2] = -INF
    others = [c for c in range(length) if c != length // 2]
    target = classes(0, length - 1, 1)
    without = classes(0, length - 2, 1)
    w = torch.rand(length, dtype=torch.float64, device=DEVICE) + 0.5
    assert F.cross_entropy(x, target, label_smoothing=0.1).isinf()
    for options in ({}, {"label_smoothing": 0.1}, {"label_smoothing": 0.1, "z_loss": 0.01}):
        for weight in (None, w):
            short = None if weight is None else w[others]
            got, grad = both(on(route, "cross_entropy"), x, target, weight=weight, **options)
            want, grad_want = both(on(route, "cross_entropy"), x[:, others], without, weight=short, **options)
            torch.testing.assert_close(got, want)
            torch.testing.assert_close(grad[:, others], grad_want)
            assert (grad[:, length // 2] == 0).all()
    q = torch.rand(3, length, dtype=torch.float64, device=DEVICE)
    q[:, length // 2] = 0
    operands = (x, q), (x[:, others], q[:, others])
    got, want = (on(route, "cross_entropy")(a, b, label_smoothing=0.1) for a, b in operands)
    torch.testing.assert_close(got, want)


@each_route
@pytest.mark.parametrize("length", [3, 40, 3000])
def test_infinite_logits(route, length):
    def one(place, value, target):
        x = torch.zeros(1, length, device=DEVICE)
        x[0, place] = value
        loss, grad = both(on(route, "cross_entropy"), x, classes(target), reduction="none")
        return loss.item(), grad[0]

    for last in (1, length - 1):
        loss, grad = one(last, INF, last)  # torch's loss is NaN
        assert loss == 0 and (grad == 0).all()
        loss, grad = one(last, -INF, last)
        assert loss == INF and grad[last] == -1 and grad.isfinite().all()
        loss, grad = one(last, -INF, 0)
        assert loss < INF and grad[last] == 0
        assert all(x != x for x in (one(last, INF, 0)[0], one(last, NAN, 0)[0], one(slice(None), -INF, 0)[0]))
        assert one(slice(0, 2), INF, 0)[0] != one(slice(0, 2), INF, 0)[0]
        assert one(last, INF, 0)[1].isnan().all()


@each_route
@pytest.mark.parametrize("length", [3, 40, 3000])
@pytest.mark.parametrize("bits", [0x7F800001, 0x7FC001FF, 0x7FFFFFFF, -1], ids=hex)
def test_any_nan_shows(route, length, bits):
    """A NaN logit gives a NaN loss, whatever its bits: the kernels compute exp from bits, and must not hide a NaN."""
    x = torch.zeros(2, length)
    x.view(torch.int32)[1, 2] = bits
    loss, grad = both(on(route, "cross_entropy"), x.to(DEVICE), classes(0, 1), reduction="none")
    assert loss.isnan().tolist() == grad.isnan().all(1).tolist() == [False, True]


# ---- values


SHAPES = [((6, 5), -1), ((6, 40), -1), ((2, 5, 3), 1), ((2, 6, 4, 3), 1), ((5,), 0)]


@each_loss
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape, dim", SHAPES, ids=str)
def test_torchs_own(name, reduction, shape, dim):
    g = torch.Generator().manual_seed(5)
    x = torch.randn(shape, generator=g, dtype=torch.float64).log_softmax(dim).to(DEVICE)
    n = shape[dim]
    rows = shape[:1] + shape[2:] if len(shape) > 1 else ()
    target = torch.randint(0, n, rows, generator=g).to(DEVICE)
    if rows:
        target.view(-1)[0] = 2
    w = (torch.rand(n, generator=g, dtype=torch.float64) + 0.5).to(DEVICE)
    targets = [target, target.int(), target.to(torch.uint8)]
    smoothings = (0.0, 0.2, 1.0) if name == "cross_entropy" else (0.0,)
    if name == "cross_entropy":
        targets.append(torch.rand(shape, generator=g, dtype=torch.float64).to(DEVICE))
    for y, weight, smoothing, ignored in itertools.product(targets, (None, w), smoothings, (-100, 2)):
        probabilities = y.is_floating_point()
        options = {"weight": weight, "reduction": reduction}
        if smoothing:
            options["label_smoothing"] = smoothing
        if not probabilities and rows:
            options["ignore_index"] = ignored
        got, grad = both(getattr(safeops, name), x, y, **options)
        want, grad_want = both(getattr(F, name), x, y if probabilities else y.long(), **options)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(grad, grad_want)


@each_route
@pytest.mark.parametrize("length", [4, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_logits_far_from_zero(route, length, dtype):
    """A row of equal logits, however large, has loss log C and softmax 1 / C."""
    f, target = on(route, "cross_entropy"), classes(1, 3)
    probabilities = torch.full((2, length), 1 / length, device=DEVICE)
    limit = 2.0**1000 if dtype == torch.float64 else torch.finfo(dtype).max  # fp64: the row's sum must fit, too
    for size in (-1e5, -1e9, 1e17, -limit, limit):
        x = torch.full((2, length), size, dtype=dtype, device=DEVICE)
        for options in ({}, {"label_smoothing": 0.25}, {"weight": torch.ones(length, device=DEVICE)}):
            for logits in (x, torch.stack([x, x], 2)[:, :, 0]):  # each row contiguous, then strided
                loss, grad = both(f, logits, target, reduction="none", **options)
                torch.testing.assert_close(
                    loss.double(), loss.new_tensor([length] * 2).double().log(), rtol=1e-5, atol=0
                )
                target_factor = 1 - options.get("label_smoothing", 0.0)
                want = target_factor * (probabilities - F.one_hot(target, length))
                torch.testing.assert_close(
                    grad.float(), want, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-9
                )
        _, grad = both(lambda q, x=x: f(x, q.to(dtype), reduction="none"), probabilities)
        torch.testing.assert_close(grad, torch.full_like(grad, math.log(length)), rtol=1e-2, atol=0)
    x = (torch.randn(2, length, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 3e4).to(
        DEVICE, dtype
    )
    got, want = both(f, x, target)[1], both(F.cross_entropy, x.double(), target)[1]
    assert (got.double() - want).abs().max() <= (4e-3 if dtype == torch.bfloat16 else 1e-6) * want.abs().max()


@on_the_cpu
@each_route
def test_narrow_indices_are_numbers(route):
    """Indices are compared as integers: -100 is not 156 in uint8, and 2**32 is not 0 in int32."""
    x, w = torch.randn(3, 200), torch.randn(200, 8)
    narrow, small = torch.tensor([156, 5, 7], dtype=torch.uint8), torch.tensor([0, 1, 0], dtype=torch.int32)
    for call in (
        lambda target, **k: on(route, "cross_entropy")(x, target, **k),
        lambda target, **k: on(route, "nll_loss")(x, target, **k),
        lambda target, **k: on(route, "linear_cross_entropy")(x[:, :8], w, target, **k),
    ):
        assert torch.equal(call(narrow), call(narrow.long()))
        assert torch.equal(call(small, ignore_index=2**32), call(small.long()))
        plain = torch.func.vmap(lambda _, call=call: call(small, ignore_index=2**32))(torch.zeros(1))
        torch.testing.assert_close(plain[0], call(small.long()))
    for name in ("cross_entropy", "nll_loss"):
        with pytest.raises(IndexError, match=f"{name}: target 156 is out of range for the 100 classes"):
            on(route, name)(x[:, :100], narrow)
    with pytest.raises(IndexError, match="linear_cross_entropy: target 156 is out of range for the 100 classes"):
        on(route, "linear_cross_entropy")(x[:, :8], w[:100], narrow)


@each_route
def test_the_classes_own_gradient_is_not_the_difference_of_halves(route):
    """p - 1 is computed in fp32: p = 0.9951 rounds to 0.9961 in bf16, and p - 1 would be off by a fifth."""
    x = t(6.0, 0.0, 0.0, dtype=torch.bfloat16, grad=True)
    grad = grad_of(on(route, "cross_entropy")(x, classes(0).squeeze()), x)
    want = x.detach().double().softmax(0)[0] - 1
    assert abs(grad[0].item() / want.item() - 1) < 2**-8
    naive = x.detach().softmax(0)[0] - 1
    assert abs(naive.item() / want.item() - 1) > 2**-4


@each_route
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows, length", [(2, 262_144), (40, 50_257)])  # few rows: cut into slices; many: read whole
def test_large_vocabularies(route, dtype, rows, length):
    g = torch.Generator().manual_seed(3)
    x = (torch.randn(rows, length, generator=g) * 4).to(dtype).to(DEVICE)
    target = torch.randint(0, length, (rows,), generator=g).to(DEVICE)
    target[0] = length - 1
    options = {"label_smoothing": 0.1, "z_loss": 1e-4}
    got, grad = both(on(route, "cross_entropy"), x, target, **options)
    want, grad_want = both(definitions.cross_entropy, x.double(), target, **options)
    assert got.dtype == torch.float32 and abs(got.item() / want.item() - 1) < 2**-20
    # The gradient is computed in fp32, which rounds p - 1, and is rounded once more to the dtype of x.
    allowed = 2**-20 / rows + torch.finfo(dtype).eps * grad_want.abs()
    assert ((grad.double() - grad_want).abs() <= allowed).all()


@on_the_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_as_large_as_the_logits(dtype):
    x = torch.randn(256, 32_000).to(dtype).requires_grad_()
    target = torch.randint(0, 32_000, (256,))
    little = 256 * 64 + 65_536
    assert _peak_bytes("cpu", lambda: safeops.cross_entropy(x, target)) <= little
    loss = safeops.cross_entropy(x, target)
    assert _peak_bytes("cpu", lambda: torch.autograd.grad(loss, x, retain_graph=True)) <= x.nbytes + little
    assert _peak_bytes("cpu", lambda: F.cross_entropy(x, target)) >= x.nbytes  # torch keeps the log probabilities


def test_no_copy_of_a_transposed_layout():
    """For logits (N, L, V).transpose(1, 2), as language models pass them, the gradient must have the logits'
    strides."""
    x = torch.randn(2, 7, 50, device=DEVICE).transpose(1, 2).requires_grad_()
    target = torch.randint(0, 50, (2, 7), device=DEVICE)
    grad = grad_of(safeops.cross_entropy(x, target), x)
    assert grad.stride() == x.stride()
    torch.testing.assert_close(grad, grad_of(F.cross_entropy(x, target), x))


@each_loss
def test_the_mean_over_micro_batches(name):
    """With `denominator`, the losses of the parts add up to the mean over all rows."""
    function, x = getattr(safeops, name), torch.randn(8, 5, dtype=torch.float64, device=DEVICE)
    target = classes(0, 1, -100, -100, -100, 3, 4, 2)
    expected = function(x, target)
    parts = sum(function(x[i : i + 4], target[i : i + 4], denominator=5) for i in (0, 4))
    torch.testing.assert_close(parts, expected)


@each_loss
def test_module(name):
    module = {"cross_entropy": "CrossEntropyLoss", "nll_loss": "NLLLoss"}[name]
    x, target, w = torch.randn(3, 5), torch.tensor([0, 4, 2]), torch.rand(5)
    ours, theirs = getattr(safeops.nn, module)(weight=w), getattr(torch.nn, module)(weight=w)
    assert list(ours.state_dict()) == list(theirs.state_dict()) == ["weight"]
    torch.testing.assert_close(ours(x, target), theirs(x, target))
    assert ours.half().weight.dtype == torch.float16
    with pytest.raises(ValueError, match=rf"{module}: weight .*\(2, 5\)"):
        getattr(safeops.nn, module)(weight=torch.ones(2, 5))


@on_the_cpu
def test_where_nobody_may_look_a_missing_class_is_left_out():
    x, target = torch.randn(2, 3, 5), torch.tensor([[0, 4, 9], [-3, 2, 1]])
    got = torch.vmap(lambda x, y: safeops.cross_entropy(x, y, reduction="none"))(x, target)
    assert (got[0, 2] == 0) and (got[1, 0] == 0) and (got != 0).sum() == 4


@on_the_cpu
@each_route
@pytest.mark.parametrize("name", ["cross_entropy", "nll_loss", "linear_cross_entropy", "multi_margin_loss"])
def test_a_missing_class_is_found_whatever_the_default_device(name, route):
    x, target = torch.eye(3), torch.tensor([0, 3, 1])
    operands = (x, x, target) if name == "linear_cross_entropy" else (x, target)
    with torch.device("meta"), pytest.raises(IndexError, match=f"^{name}: target 3 is out of range"):
        on(route, name)(*operands)


@each_route
@pytest.mark.parametrize("name", ["cross_entropy", "linear_cross_entropy"])
def test_a_half_gradient_of_class_weights_is_rounded_once(name, route):
    """The gradient is a sum over rows and a part of the smoothing: both are added before the one rounding to half."""
    x = torch.randn(64, 5, generator=torch.Generator().manual_seed(0)).double().to(DEVICE)
    eye, target = torch.eye(5).to(x), torch.arange(64, device=DEVICE) % 5
    operands = (x, eye, target) if name == "linear_cross_entropy" else (x, target)
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        weight = torch.linspace(0.5, 1.5, 5, device=DEVICE).bfloat16().to(dtype).requires_grad_()
        loss = on(route, name)(*operands, weight=weight, label_smoothing=0.5)
        results.append(torch.autograd.grad(loss, weight)[0])
    assert torch.equal(results[0], results[1].bfloat16())


@pytest.mark.parametrize("denominator", [0.0, torch.tensor(0.0), torch.tensor(torch.nan)])
def test_nothing_kept_is_0_whatever_the_denominator(denominator):
    x = torch.randn(2, 3, requires_grad=True)
    loss = safeops.cross_entropy(x, torch.tensor([-100, -100]), denominator=denominator)
    assert loss == 0 and not torch.autograd.grad(loss, x)[0].any()


@each_route
@pytest.mark.parametrize("name", ["cross_entropy", "nll_loss"])
def test_the_gradient_of_class_weights_is_the_same_on_any_threads(name, route):
    """The order of the additions must not depend on threads. (An index's backward adds by atomics, on a CPU too.)"""
    rows = 100_000
    x, target = torch.randn(rows, 5, device=DEVICE).log_softmax(1), torch.randint(0, 5, (rows,), device=DEVICE)
    threads, result = torch.get_num_threads(), set()
    try:
        for count in (1, 2, 2, 2, 2):
            torch.set_num_threads(count)
            weight = torch.linspace(0.5, 1.5, 5, device=DEVICE).requires_grad_()
            loss = on(route, name)(x, target, weight=weight)
            result.add(tuple(torch.autograd.grad(loss, weight)[0].tolist()))
    finally:
        torch.set_num_threads(threads)
    assert len(result) == 1


@pytest.mark.parametrize("name", ["cross_entropy", "nll_loss"])
@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 2**70])
def test_ignore_index_has_64_bits(name, value):
    with pytest.raises(ValueError, match=f"^{name}: ignore_index must be an integer of 64 bits, got {value}"):
        getattr(safeops, name)(torch.zeros(2, 3, device=DEVICE), t(0, 1, dtype=torch.int64), ignore_index=value)


@each_route
@pytest.mark.parametrize("row_weight", [False, True])
def test_the_z_loss_has_its_own_mean(route, row_weight):
    """The z-loss is a mean without class weights, so scaling all class weights must not change the loss or make NaN."""
    x, w = torch.randn(64, 50, dtype=torch.float64, device=DEVICE), torch.rand(50, device=DEVICE) + 0.1
    target, mask = torch.randint(0, 50, (64,), device=DEVICE), torch.rand(64, device=DEVICE) > 0.3
    r = torch.rand(64, device=DEVICE) if row_weight else None
    cross_entropy, options = on(route, "cross_entropy"), {"mask": mask, "row_weight": r}
    z = 0.5 * safeops.masked_mean(x.logsumexp(1).square(), mask, weight=r)
    for scale in (1.0, 1e-30, 1e30):
        got, grad = both(cross_entropy, x, target, weight=w * scale, z_loss=0.5, **options)
        want = cross_entropy(x, target, w * scale, **options) + z
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
        assert grad.isfinite().all()
    nothing = cross_entropy(x, target, w, mask=mask & False, z_loss=0.5)
    assert nothing == 0


@each_route
def test_row_weights_beside_a_weighted_z_loss(route):
    """With class weights and z-loss, a row weight of 0 has gradient 0, row weights that sum to 0 give NaN, and the
    gradient of half class weights is rounded once."""
    x, target, w = torch.eye(3, device=DEVICE), torch.arange(3, device=DEVICE), tensor([1.0, 2.0, 5.0])
    cross_entropy = on(route, "cross_entropy")
    r = tensor([1.0, 1.0, 0.0]).requires_grad_()
    assert grad_of(cross_entropy(x, target, w, row_weight=r, z_loss=0.1), r)[2] == 0
    assert cross_entropy(x, target, w, row_weight=tensor([1.0, -1.0, 0.0]), z_loss=0.1).isnan()
    far = cross_entropy(x, target, tensor([1e-20, 1e30, 1.0]), z_loss=0.1) - 0.1 * x.logsumexp(1).square().mean()
    torch.testing.assert_close(far, cross_entropy(x, target, tensor([1e-20, 1e30, 1.0])))
    half = tensor([1.0, 2.0, 5.0], torch.bfloat16).requires_grad_()
    wide = half.detach().double().requires_grad_()
    x = torch.randn(3, 3, dtype=torch.float64, device=DEVICE)
    got, want = (grad_of(cross_entropy(x, target, y, z_loss=0.1), y) for y in (half, wide))
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=0)
