"""ctc_loss: torch's value, and no NaN in a gradient; triplet_margin_with_distance_loss: torch's for kept triplets."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import safeops
from safeops.ops.classification import _classification
from safeops.testing import Bad
from tests.contract.common import DEVICE
from tests.ops.bad_calls import BadIndex

FRAMES, BATCH, CLASSES, LABELS = 6, 4, 5, 3


def batch(seed, shortest=0):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(FRAMES, BATCH, CLASSES, dtype=torch.float64, generator=g).to(DEVICE).requires_grad_()
    labels = torch.randint(1, CLASSES, (BATCH, LABELS), generator=g)
    frames = torch.randint(shortest, FRAMES + 1, (BATCH,), generator=g)
    return logits, labels.to(DEVICE), frames, torch.randint(0, LABELS + 1, (BATCH,), generator=g)


@pytest.mark.parametrize("reduction, infinity", itertools.product(("none", "mean", "sum"), (False, True)))
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_value_and_gradient_are_torchs_where_those_are_finite(seed, packed, reduction, infinity):
    logits, labels, frames, lengths = batch(seed, shortest=5 * (seed % 2))
    log_probs = logits.log_softmax(-1)
    if packed:
        labels = torch.cat([row[:n] for row, n in zip(labels, lengths)])
    options = {"reduction": reduction, "zero_infinity": infinity}
    ours = safeops.ctc_loss(log_probs, labels, frames, lengths, **options)
    theirs = F.ctc_loss(log_probs, labels, frames, lengths, **options)
    torch.testing.assert_close(ours, theirs)
    (got,) = torch.autograd.grad(ours.sum(), logits, retain_graph=True)
    (want,) = torch.autograd.grad(theirs.sum(), logits)
    assert got.isfinite().all()
    assert infinity or seed or want.isnan().any()
    torch.testing.assert_close(torch.where(want.isnan(), 0, got), want.nan_to_num(0))


def test_classes_of_minus_infinity_padded_frames_and_masked_sequences():
    log_probs = torch.randn(FRAMES, BATCH, CLASSES, device=DEVICE).log_softmax(-1)
    dirty = log_probs.clone()
    dirty[:, :, 4] = -math.inf
    dirty[5, 1] = math.nan  # behind the last frame of sequence 1
    dirty[:, 2] = math.nan  # masked out
    labels = torch.tensor([[1, 2, 3], [1, 1, 2], [3, 3, 1], [4, 1, 1]], device=DEVICE)
    frames, lengths = (6, 5, 6, 6), (3, 3, 3, 1)  # sequence 3's label has probability 0
    keep = torch.tensor([True, True, False, True], device=DEVICE)
    for infinity, last in ((False, math.inf), (True, 0.0)):
        leaf = dirty.clone().requires_grad_()
        loss = safeops.ctc_loss(leaf, labels, frames, lengths, reduction="none", zero_infinity=infinity, mask=keep)
        want = F.ctc_loss(log_probs, labels, frames, lengths, reduction="none")
        torch.testing.assert_close(loss[:2], want[:2])
        assert loss[2] == 0 and loss[3] == last
        (grad,) = torch.autograd.grad(loss.sum(), leaf)
        assert grad.isfinite().all() and grad[:, 0].any()
        assert not grad[5, 1].any() and not grad[:, 2:].any() and not grad[..., 4].any()
    assert safeops.ctc_loss(dirty, labels, frames, lengths, reduction="none")[2].isnan()  # the NaN's sequence is kept


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_is_read_as_it_is_and_computed_in_fp32(dtype):
    logits, labels, frames, lengths = batch(0, shortest=5)
    half = logits.detach().log_softmax(-1).to(dtype).requires_grad_()
    wide = half.detach().float().requires_grad_()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        loss = safeops.ctc_loss(half, labels, frames.tolist(), lengths.tolist())
    want = F.ctc_loss(wide, labels, frames, lengths)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, want)
    (got,), (grad,) = torch.autograd.grad(loss, half), torch.autograd.grad(want, wide)
    torch.testing.assert_close(got, grad.to(dtype))


def test_one_sequence_none_and_no_frames():
    logits, labels, frames, lengths = batch(3, shortest=5)
    log_probs = logits.detach().log_softmax(-1)
    one = log_probs[:, 0], labels[0], frames[0], torch.tensor(LABELS)
    torch.testing.assert_close(safeops.ctc_loss(*one), F.ctc_loss(*one))
    assert safeops.ctc_loss(log_probs[:, :0], labels[:0], frames[:0], lengths[:0]) == 0
    empty = safeops.ctc_loss(log_probs[:0], labels, frames * 0, torch.tensor([0, 1, 0, 2]), reduction="none")
    assert empty.tolist() == [0, math.inf, 0, math.inf]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_weights_and_denominator_are_of_sequences(reduction):
    logits, labels, frames, lengths = batch(5, shortest=5)
    log_probs = logits.detach().log_softmax(-1)
    weight = torch.tensor([2.0, 0.0, 1.0, 3.0], device=DEVICE, requires_grad=True)
    loss = safeops.ctc_loss(log_probs, labels, frames, lengths, reduction=reduction, weight=weight)
    each = F.ctc_loss(log_probs, labels, frames, lengths, reduction="none")
    each = each / lengths.clamp(min=1).to(DEVICE) if reduction == "mean" else each
    want = {"none": each * weight, "sum": (each * weight).sum(), "mean": (each * weight).sum() / 6}[reduction]
    torch.testing.assert_close(loss, want)
    if reduction == "mean":
        got = safeops.ctc_loss(log_probs, labels, frames, lengths, weight=weight, denominator=4.0)
        torch.testing.assert_close(got, want * 6 / 4)


def test_a_sequence_with_a_label_out_of_range_does_not_exist_where_nobody_looks(monkeypatch):
    """Where nobody checks labels (as on CUDA), a wrong one must not reach torch, which reads beyond the classes."""
    monkeypatch.setattr(_classification, "has_missing_class", lambda *operands: False)
    logits, labels, frames, lengths = batch(1, shortest=5)
    lengths = torch.full_like(lengths, LABELS)
    log_probs = logits.detach().log_softmax(-1).requires_grad_()
    wrong = labels.clone()
    wrong[1, 0] = 10**7
    loss = safeops.ctc_loss(log_probs, wrong, frames, lengths, zero_infinity=True)
    keep = torch.arange(BATCH, device=DEVICE) != 1
    want = safeops.ctc_loss(log_probs, labels, frames, lengths, zero_infinity=True, mask=keep)
    torch.testing.assert_close(loss, want)
    (grad,) = torch.autograd.grad(loss, log_probs)
    assert not grad[:, 1].any() and grad.any()


NAME = "ctc_loss"
PROBS, TABLE = torch.zeros(4, 2, 3).log_softmax(-1), torch.tensor([[1, 2], [1, 1]])
COUNTS, LENGTHS = torch.tensor([4, 3]), torch.tensor([2, 1])
GOOD = PROBS, TABLE, COUNTS, LENGTHS


def instead(i, x):
    return (*GOOD[:i], x, *GOOD[i + 1 :]), {}


@pytest.mark.parametrize(
    "bad",
    [
        Bad(*instead(0, None), TypeError, (NAME, "log_probs", "tensor", "NoneType")),
        Bad(*instead(0, PROBS.long()), TypeError, (NAME, "log_probs", "floating", "torch.int64")),
        Bad(*instead(0, PROBS[0, 0]), ValueError, (NAME, "log_probs", "(T, N, C)", "(3,)")),
        Bad(*instead(1, [1, 2]), TypeError, (NAME, "targets", "tensor", "list")),
        Bad(*instead(1, TABLE.float()), TypeError, (NAME, "targets", "integers", "torch.float32")),
        Bad(*instead(1, TABLE[:1]), ValueError, (NAME, "targets", "(1, 2)", "(N, S)")),
        BadIndex(*instead(1, TABLE + 2), IndexError, (NAME, "targets 3", "3 classes", "log_probs")),
        Bad(*instead(2, COUNTS.float()), TypeError, (NAME, "input_lengths", "integers", "torch.float32")),
        Bad(*instead(2, COUNTS[:1]), ValueError, (NAME, "input_lengths", "(1,)", "(2,)")),
        Bad(*instead(2, COUNTS + 1), ValueError, (NAME, "input_lengths", "0 to 4", "5")),
        Bad(*instead(3, LENGTHS + 1), ValueError, (NAME, "target_lengths", "0 to 2", "3")),
        Bad(*instead(3, -LENGTHS), ValueError, (NAME, "target_lengths", "0 to 2", "-2")),
        Bad(GOOD, {"blank": 3}, ValueError, (NAME, "blank", "3 classes", "got 3")),
        Bad(GOOD, {"blank": 1.0}, TypeError, (NAME, "blank", "int", "float")),
        Bad(GOOD, {"zero_infinity": 1}, TypeError, (NAME, "zero_infinity", "True or False")),
        Bad(GOOD, {"mask": torch.ones(3, dtype=torch.bool)}, ValueError, (NAME, "mask", "(3,)", "(2,)")),
        Bad(GOOD, {"reduction": "average"}, ValueError, (NAME, "reduction", "average")),
        Bad(GOOD, {"empty": "skip"}, ValueError, (NAME, "empty", "skip")),
    ],
)
def test_named_errors(bad):
    with pytest.raises(bad.error) as caught:
        safeops.ctc_loss(*bad.args, **bad.kwargs)
    assert all(part in str(caught.value) for part in bad.words), str(caught.value)


# ---- triplet_margin_with_distance_loss


def taxicab(a, b):
    return (a - b).abs().sum(-1)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("distance", [None, taxicab])
def test_any_distance_is_torchs(distance, swap, reduction):
    x = [torch.randn(6, 4, device=DEVICE, requires_grad=True) for _ in range(3)]
    options = {"distance_function": distance, "margin": 1.5, "swap": swap, "reduction": reduction}
    ours = safeops.triplet_margin_with_distance_loss(*x, **options)
    theirs = F.triplet_margin_with_distance_loss(*x, **options)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours.sum(), x), torch.autograd.grad(theirs.sum(), x))


def test_a_triplet_that_is_not_kept_reaches_no_parameter_of_the_distance():
    scale = torch.ones(4, device=DEVICE, requires_grad=True)
    x = torch.randn(3, 6, 4, device=DEVICE)
    clean = x.clone().requires_grad_()
    x[:, 2] = math.nan
    x.requires_grad_()
    keep = torch.arange(6, device=DEVICE) != 2

    def distance(a, b):
        return ((a - b) * scale).norm(dim=-1)

    loss = safeops.triplet_margin_with_distance_loss(*x, distance_function=distance, mask=keep)
    want = safeops.triplet_margin_with_distance_loss(*clean[:, keep], distance_function=distance)
    torch.testing.assert_close(loss, want)
    got, wants = torch.autograd.grad(loss, (x, scale)), torch.autograd.grad(want, (clean, scale))
    torch.testing.assert_close(got, wants)
    assert not got[0][:, 2].any() and got[1].any()


def test_the_distance_gets_the_operands_as_they_are():
    """As in torch, the distance function gets the caller's operands (half, indices of a table, one anchor for all) and
    the caller's autocast; the loss of the distances is computed in fp32."""
    project = torch.nn.Linear(4, 4, device=DEVICE).bfloat16()
    x = torch.randn(3, 6, 4, device=DEVICE).bfloat16()
    table = torch.nn.Embedding(9, 4, device=DEVICE)
    words = torch.randint(9, (3, 6), device=DEVICE)

    def projected(a, b):
        return (project(a) - project(b)).square().sum(-1)

    def looked_up(a, b):
        assert torch.is_autocast_enabled(DEVICE)
        return taxicab(table(a), table(b))

    for distance, operands in ((projected, x), (looked_up, words), (projected, (x[0][:1], x[1], x[2]))):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = safeops.triplet_margin_with_distance_loss(*operands, distance_function=distance)
            want = F.triplet_margin_with_distance_loss(*operands, distance_function=distance)
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, want.float(), rtol=2e-2, atol=2e-2)


X = (torch.ones(2, 3),) * 3


@pytest.mark.parametrize(
    "args, options, error, parts",
    [
        (X, {"distance_function": 1}, TypeError, ("distance_function", "int")),
        ((X[0], torch.ones(3), X[0]), {}, ValueError, ("positive", "(3,)", "(2, 3)")),
        ((X[0], [1.0], X[0]), {}, TypeError, ("positive", "list")),
        (X, {"distance_function": lambda a, b: a[:, 0] > 0}, TypeError, ("distance_function's result", "bool")),
        (X, {"margin": 0.0}, ValueError, ("margin", "0.0")),
        (X, {"mask": torch.ones(2)}, TypeError, ("mask", "bool")),
        (X, {"mask": torch.ones(3) > 0}, ValueError, ("mask", "(3,)", "(2, 3)")),
        (X, {"weight": torch.ones(2, 3, 1)}, ValueError, ("weight", "(2, 3, 1)", "(2, 3)")),
    ],
)
def test_what_it_refuses(args, options, error, parts):
    with pytest.raises(error) as caught:
        safeops.triplet_margin_with_distance_loss(*args, **{"distance_function": taxicab, **options})
    assert all(part in str(caught.value) for part in ("triplet_margin_with_distance_loss", *parts)), str(caught.value)
