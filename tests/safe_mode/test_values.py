"""In safe mode, calls other than losses have the twin's value where torch's breaks, and torch's value elsewhere."""

import pytest
import torch
import torch.nn.functional as F

import safeops
from safeops.core import private_torch

inf, nan = float("inf"), float("nan")
SCORES = torch.tensor([[1.0, 2.0, -inf], [-inf, -inf, -inf], [nan, 1.0, 0.0], [0.5, -3.0, 9.0]])


def in_mode(function, *args):
    """Returns (the function's result in safe mode, [(replaced function, twin)])."""
    with safeops.safe_mode() as report:
        result = function(*args)
    return result, [(x.function, x.twin) for x in report.replacements]


def gradient(function, x):
    x = x.clone().requires_grad_()
    function(x).backward()
    return x.grad


# ---- rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_rows_hidden_whole(name, dtype):
    x = SCORES.to(dtype)
    calls = [
        lambda x: getattr(torch, name)(x, 1),
        lambda x: getattr(F, name)(x, dim=-1),
        lambda x: getattr(x, name)(1),
        lambda x: getattr(torch.special, name)(x, -1),
    ]
    for call in calls:
        expected = call(x)
        assert expected[1].isnan().all()
        result, replaced = in_mode(call, x)
        assert [twin for _, twin in replaced] == [f"masked_{name}"] and result.dtype == dtype
        assert torch.equal(result[1], torch.full((3,), 0.0 if name == "softmax" else -inf, dtype=dtype))
        assert result[2].isnan().all(), "a kept NaN shows"
        tolerance = {"rtol": 1e-3, "atol": 1e-3} if dtype == torch.float16 else {}  # in fp16 torch rounds twice
        torch.testing.assert_close(result[::3], expected[::3], **tolerance)


def test_attention_modules_with_a_hidden_row():
    attention, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 3, 8)
    padding = torch.tensor([[False, False, True], [True, True, True]])

    def call():
        result, weights = attention(x, x, x, key_padding_mask=padding)
        gradients = torch.autograd.grad(result.square().sum(), attention.parameters())
        return result, weights, *gradients

    expected = call()
    result, replaced = in_mode(call)
    assert expected[0][1].isnan().all() and replaced == [("softmax", "masked_softmax")]
    for a, b in zip(result[:2], expected[:2]):
        torch.testing.assert_close(a[0], b[0])
    assert all(x.isfinite().all() for x in result) and torch.equal(result[1][1], torch.zeros(3, 3))
    with safeops.safe_mode():
        assert attention(x, x, x, key_padding_mask=padding, need_weights=False)[0].isfinite().all()


def test_a_hidden_row_has_no_gradient():
    result, _ = in_mode(gradient, lambda x: x[:2].softmax(1).square().sum(), SCORES)
    assert result.isfinite().all() and torch.equal(result[1], torch.zeros(3))


def test_softmax_in_another_dtype():
    x = SCORES.half()
    result, _ = in_mode(lambda: F.softmax(x, dim=1, dtype=torch.float64))
    assert result.dtype == torch.float64 and torch.equal(result[1], torch.zeros(3, dtype=torch.float64))


def test_rows_that_are_zero():
    x = torch.zeros(2, 3, dtype=torch.float16)
    assert F.normalize(x).isnan().all()
    (unit, cosine), replaced = in_mode(lambda: (F.normalize(x), F.cosine_similarity(x, x)))
    assert torch.equal(unit, x) and torch.equal(cosine, torch.zeros(2))
    assert [twin for _, twin in replaced] == ["normalize", "cosine_similarity"]


@pytest.mark.parametrize("call", [F.normalize, lambda x: F.normalize(x, dim=0, eps=2.0), lambda x: F.normalize(x, 1.0)])
def test_normalize_takes_torchs_call(call):
    x = torch.randn(4, 3, 2, dtype=torch.float64)
    expected = call(x)
    result, _ = in_mode(call, x)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-14)


def test_cosine_takes_torchs_call():
    x, y = torch.randn(2, 4, 3, dtype=torch.float64)
    for options in ({}, {"dim": 0}):
        expected = F.cosine_similarity(x, y, **options)
        result, _ = in_mode(lambda options=options: F.cosine_similarity(x, y, **options))
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-14)


# ---- fills


def test_a_fill_that_the_dtype_does_not_hold():
    x, mask = torch.zeros(3, dtype=torch.float16), torch.tensor([True, False, True])
    with pytest.raises(RuntimeError):
        x.masked_fill(mask, -1e9)
    for call in (lambda: x.masked_fill(mask, -1e9), lambda: x.clone().masked_fill_(mask, -1e9)):
        result, replaced = in_mode(call)
        assert torch.equal(result, torch.tensor([-65504, 0, -65504], dtype=torch.float16)) and len(replaced) == 1
    assert in_mode(lambda: x.masked_fill(mask, -inf))[1] == in_mode(lambda: x.masked_fill(mask, -1e4))[1] == []


# ---- half sums and norms


BIG = torch.full((4, 300), 300.0, dtype=torch.float16)


@pytest.mark.parametrize(
    "call, value",
    [
        (lambda x: x.sum(), 360000),
        (torch.sum, 360000),
        (lambda x: (x * x / x).mean(), 300),
        (lambda x: (x * 200).norm(), 60000 * 1200**0.5),
        (lambda x: torch.norm(x * 200), 60000 * 1200**0.5),
        (lambda x: torch.linalg.norm((x * 200).flatten()), 60000 * 1200**0.5),
        (lambda x: torch.linalg.vector_norm(x * 200, 1), 60000 * 1200),
    ],
)
def test_half_reductions_are_fp32(call, value):
    if value < 1000:  # 300: its square is inf in half before the reduction, which cannot mend it
        assert in_mode(call, BIG)[0].isinf()
        return
    assert call(BIG).isinf()
    result, replaced = in_mode(call, BIG)
    assert result.dtype == torch.float32 and len(replaced) == 1
    assert result.item() == pytest.approx(value, rel=1e-6)


def test_rows_of_half_meet_half_weights():
    """Reductions with `dim` stay half, since the next layer of a half network has half weights."""
    x, weight = torch.randn(4, 8, 5, dtype=torch.float16), torch.randn(2, 8, dtype=torch.float16)
    for autocast in (False, True):
        with torch.autocast("cpu", torch.float16, enabled=autocast):
            expected = F.linear(x.mean(-1), weight), x.sum(1), x.norm(dim=1)
            result, replaced = in_mode(lambda: (F.linear(x.mean(-1), weight), x.sum(1), x.norm(dim=1)))
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(result, expected)) and not replaced


# ---- what shows only when a result is used


@pytest.mark.parametrize(
    "select",
    [
        lambda x, b: torch.where(b != 0, x / b, 0.0),
        lambda x, b: torch.where(b == 0, torch.zeros(()), torch.div(x, b)),
        lambda x, b: (x / b).where(b != 0, torch.full_like(x, 7)),
        lambda x, b: torch.where(b != 0, 3 / (b * x), x),
    ],
)
def test_the_division_that_where_selects_from(select):
    x, b = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 0.0, 4.0])
    expected = select(x, b)
    (loss, result), replaced = in_mode(lambda: (select(x, b), gradient(lambda x: select(x, b).sum(), x)))
    assert torch.equal(loss, expected)
    assert ("where", "apply_where") in replaced
    plain = gradient(lambda x: select(x, b).sum(), x)
    assert result.isfinite().all() and plain[1].isnan() and torch.allclose(result[::2], plain[::2])


def test_pairs_of_calls_under_transforms():
    x, b = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 0.0, 4.0])

    def loss(x):
        return torch.where(b != 0, x / b, 0.0).sum() + (x * (b > 0)).sum()

    slope = torch.tensor([1.5, 0.0, 1.25])
    assert torch.func.grad(loss)(x)[1].isnan()
    result, replaced = in_mode(torch.func.grad(loss), x)
    assert torch.equal(result, slope) and ("where", "apply_where") in replaced
    assert torch.equal(in_mode(torch.func.vmap(torch.func.grad(loss)), torch.stack([x, x]))[0][1], slope)


def test_no_work_is_added_where_nothing_is_replaced():
    class Count(private_torch.TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.ops = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.ops.append(func)
            return func(*args, **(kwargs or {}))

    def calls():
        x = torch.ones(3, requires_grad=True)
        mask = x > 0
        return x.sum(), x.mean(), torch.where(mask, x, x), x / 2, x * mask, x[mask], mask.float()[:, None], x.norm()

    with Count() as plain:
        calls()
    with safeops.safe_mode(), Count() as safe:
        calls()
    assert len(safe.ops) == len(plain.ops) + 1  # one more op: a view of the mask


def test_a_division_that_was_written_to_is_not_redone():
    x = torch.ones(3, requires_grad=True)
    b = torch.tensor([2.0, 0.0, 4.0])

    def call():
        quotient = x / b
        quotient += 1
        return torch.where(b != 0, quotient, 0.0)

    expected = call()
    result, replaced = in_mode(call)
    assert torch.equal(result, expected) and not replaced


MASK = torch.tensor([[True, False, True], [False, True, True]])
ERROR = torch.tensor([[1.0, nan, 2.0], [inf, 3.0, 5.0]])


@pytest.mark.parametrize("as_mask", [lambda m: m, lambda m: m.float(), lambda m: m.to(torch.float32)[:, :]])
def test_a_masked_product_that_is_summed(as_mask):
    def calls(x):
        m = as_mask(MASK)
        return (x * m).sum(), (m * x).sum(1), torch.sum(x * m, 0, True), (x * m).mean(), (x * m).sum() / m.sum()

    for result, expected in zip(in_mode(calls, ERROR)[0], calls(ERROR.masked_fill(~MASK, 0))):
        torch.testing.assert_close(result, expected)
    assert torch.equal(in_mode(gradient, lambda x: calls(x)[0], ERROR)[0], MASK.float())


def test_masks_keep_their_meaning_through_views():
    x = torch.stack([ERROR, ERROR], 1)  # (2, 2, 3)
    for view in (lambda m: m[:, None], lambda m: m.unsqueeze(1), lambda m: m.unsqueeze(1).expand_as(x)):
        result, _ = in_mode(lambda view=view: (x * view(MASK.float())).sum())
        assert result == 22


def test_a_mask_that_was_written_to_is_none():
    def call():
        m = MASK.float()
        m *= 2
        return (torch.ones(2, 3) * m).sum()

    assert in_mode(call) == (8, [])


def test_a_half_count_is_exact():
    mask = torch.ones(300, 300, dtype=torch.bool)
    assert in_mode(lambda: mask.half().sum())[0] == 90000


@pytest.mark.parametrize(
    "mean", [lambda x, m: x[m].mean(), lambda x, m: x.masked_select(m).mean(0), lambda x, m: x[m.nonzero()].mean()]
)
def test_the_mean_of_nothing(mean):
    x = torch.randn(4, requires_grad=True)
    result, replaced = in_mode(mean, x, x > 0)
    assert torch.equal(result, mean(x, x > 0)) and not replaced
    nothing = torch.zeros(4, dtype=torch.bool)
    assert mean(x, nothing).isnan()
    result, replaced = in_mode(mean, x, nothing)
    assert result == 0 and replaced == [("mean", "masked_mean")]
    assert torch.equal(torch.autograd.grad(result, x)[0], torch.zeros(4))


def test_results_that_die_leave_nothing():
    from safeops.safe import origins

    x = torch.randn(4, requires_grad=True)
    with safeops.safe_mode():
        for _ in range(3):
            (x * (x > 0)).sum()
        kept = [x * (x > 0) for _ in range(origins.PRODUCTS + 3)]
        assert len(origins._memory.products) == origins.PRODUCTS
        del kept
        assert not origins._memory.products
        product = x * (x > 0)
        assert origins._memory.products
    assert not origins._memory.products
    assert product.sum().isfinite()


# ---- clip_grad_norm_


def test_clipping():
    from torch.nn.utils import clip_grad_norm_  # as scripts import it

    def clipped(**options):
        weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.float16))
        weight.grad = torch.full((4,), 60000.0, dtype=torch.float16)
        return clip_grad_norm_([weight], 1.0, **options), weight.grad

    assert clipped()[0].isinf()
    (norm, grad), replaced = in_mode(clipped)
    assert norm == 120000 and torch.equal(grad, torch.full((4,), 0.5, dtype=torch.float16))
    assert replaced == [("clip_grad_norm_", "clip_grad_norm_")]
    assert in_mode(lambda: clipped(error_if_nonfinite=True))[0][0] == 120000
    assert clipped()[0].isinf(), "and torch's outside"


def test_clipping_raises_as_torchs():
    weight = torch.nn.Parameter(torch.zeros(4))
    weight.grad = torch.full((4,), nan)
    with safeops.safe_mode(), pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16,) * 2, (torch.float16, torch.float32), (torch.float32,) * 2])
def test_a_cosine_has_torchs_dtype(dtypes):
    """A cosine is at most 1, so it needs no fp32; its dtype must stay torch's, since half weights may multiply it."""
    a, b = (torch.randn(4, 8).to(dtype) for dtype in dtypes)
    for autocast in (False, True):
        with torch.autocast("cpu", enabled=autocast):
            theirs = torch.nn.functional.cosine_similarity(a, b)
            with safeops.safe_mode() as report:
                ours = torch.nn.functional.cosine_similarity(a, b)
        assert ours.dtype == theirs.dtype and report.replacements
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


# ---- the report remarks on values that the mode does not mend


def exponential(x, mask):
    return (torch.exp(x) * mask).sum()


def test_a_finite_sum_over_gradients_that_are_nan():
    x, mask = torch.tensor([1.0, 1000.0, 2.0], requires_grad=True), torch.tensor([True, False, True])
    with safeops.safe_mode() as report:
        for _ in range(2):
            loss = exponential(x, mask)
        assert loss.isfinite() and not report.remarks
        with pytest.warns(UserWarning, match="mask first") as warned:
            (gradient,) = torch.autograd.grad(loss, x)
        exponential(x, mask).backward()
        exponential(x[:1], mask[:1]).backward()
    assert gradient[1].isnan() and len(warned) == 1, "it is said once"
    line = exponential.__code__.co_firstlineno + 1
    remark = "finite, but the gradient behind the mask is NaN: mask first"
    assert [tuple(x) for x in report.remarks] == [("sum", remark, __file__, line, 2)]
    assert f"sum at {__file__}:{line} is {remark}" in str(report)


def test_nan_in_the_data_is_no_remark():
    """A NaN in the data that the mask hides, and that gets no gradient, must not cause a remark."""
    x, mask = torch.tensor([1.0, nan, 2.0], requires_grad=True), torch.tensor([True, False, True])
    with safeops.safe_mode() as report:
        (gradient,) = torch.autograd.grad((x * mask).sum() + ((x - 1).relu() * mask.float()).mean(), x)
    assert torch.equal(gradient, torch.tensor([1.0, 0.0, 1 + 1 / 3])) and not report.remarks
