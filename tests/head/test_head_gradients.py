"""head_loss: gradients of hidden and of every parameter, against those of all logits at once."""

import contextlib
import copy
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import safeops
from safeops.head import _chunks
from tests.head.heads import HEADS, LoRA
from tests.head.steps import EPS, ROWS, STEPS, TARGET, C, D, InChunks, Whole, close, gradients, near


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", HEADS)
def test_every_head(name, step):
    """In fp64 they must be equal to 1e-13; in fp32 as near as those of all logits."""
    head, hidden = HEADS[name](D, C), torch.randn(ROWS, D)
    exact = copy.deepcopy(head).double()
    truth = gradients(Whole(), STEPS[step], exact, hidden.double())
    close(gradients(InChunks(), STEPS[step], exact, hidden.double()), truth, 1e-13)
    both = [gradients(losses, STEPS[step], head, hidden) for losses in (InChunks(), Whole())]
    near(*both, truth, EPS[torch.float32])


@pytest.mark.parametrize("step", ["mean", "rows"])
@pytest.mark.parametrize("dtype, scale", [(torch.bfloat16, 1.0), (torch.float16, 2.0**14)])
@pytest.mark.parametrize("name", ["lora", "int8", "softcap", "two layers"])
def test_halves(name, dtype, scale, step):
    """fp16 with the scale of GradScaler: gradients of every row are 1e-8 without it, below fp16's smallest number."""
    head, hidden = HEADS[name](D, C).to(dtype), torch.randn(ROWS, D).to(dtype)
    small = (lambda *args: STEPS[step](*args) / 2**12) if dtype == torch.float16 else STEPS[step]
    truth = gradients(Whole(), small, copy.deepcopy(head).double(), hidden.double(), scale)
    both = [gradients(losses, small, head, hidden, scale) for losses in (InChunks(), Whole())]
    near(*both, truth, EPS[dtype])


def test_halves_are_summed_over_chunks_in_fp32():
    """Each of 400 chunks gives 1 to the gradient: a sum in bf16 would stay at 256."""
    bias = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    hidden = torch.zeros(400 * 7, 2, dtype=torch.bfloat16)
    weight = torch.zeros(2800).index_fill_(0, torch.arange(0, 2800, 7), 2.0)
    with mock.patch.object(_chunks, "PARTS", 400):
        target = torch.zeros(2800, dtype=torch.long)
        loss = safeops.head_loss(lambda h: h + bias, hidden, target, row_weight=weight, reduction="sum")
        assert torch.autograd.grad(loss, bias)[0].tolist() == [-400, 400]


@pytest.mark.parametrize("scale", [1e9, float("inf"), float("nan")])
def test_a_scale_that_overflows_is_seen(scale):
    """GradScaler looks for inf or NaN in the gradients of parameters."""
    for dtype in EPS:
        head, hidden = HEADS["two layers"](D, C).to(dtype), torch.randn(ROWS, D).to(dtype)
        results = gradients(InChunks(), STEPS["mean"], head, hidden, scale)[2:]
        overflows = scale != 1e9 or dtype == torch.float16
        assert any(not d.isfinite().all() for d in results) == overflows


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", ["lora", "softcap", "tied"])
def test_under_autocast(name, step):
    """The head's products must be in bf16 in backward, too; also after the weight was cast in the same region."""
    head, hidden = HEADS[name](D, C), torch.randn(ROWS, D)
    truth = gradients(Whole(), STEPS[step], copy.deepcopy(head).double(), hidden.double())

    @contextlib.contextmanager
    def region():
        with torch.autocast("cpu", torch.bfloat16):
            head(hidden)
            yield

    shapes = []
    head.register_forward_hook(lambda module, args, output: shapes.append(len(output)))
    both = [gradients(losses, STEPS[step], head, hidden, region=region) for losses in (InChunks(), Whole())]
    near(*both, truth, EPS[torch.bfloat16])
    assert shapes.count(ROWS) == 3 and shapes.count(7) in (5, 10)  # (a cast weight must not end the chunks)
    assert float((both[0][1].double() - truth[1]).abs().max()) > 1e-4 * float(truth[1].abs().max())  # it is in half


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(step, reentrant):
    head, hidden, calls = LoRA(D, C, dropout=0.5).double(), torch.randn(ROWS, D, dtype=torch.float64), []
    head.register_forward_hook(lambda *_: calls.append(1))

    def saved(losses, head, hidden):
        return checkpoint(lambda hidden: STEPS[step](losses, head, hidden), hidden, use_reentrant=reentrant)

    torch.manual_seed(0)
    expected = gradients(InChunks(), STEPS[step], head, hidden)
    once, calls[:] = len(calls), []
    torch.manual_seed(0)
    close(gradients(InChunks(), saved, head, hidden), expected, 1e-13)
    assert len(calls) <= 3 * 6 and once in (6, 12)  # (its hooks of saved tensors must not run each chunk again)


@pytest.mark.parametrize("wanted", ["hidden", "parameters", "none"])
@pytest.mark.parametrize("step", STEPS)
def test_what_is_wanted(step, wanted):
    head, hidden = HEADS["two layers"](D, C).double(), torch.randn(ROWS, D, dtype=torch.float64)
    head.requires_grad_(wanted == "parameters")
    hidden.requires_grad_(wanted == "hidden")
    leaves = [x for x in (hidden, *head.parameters()) if x.requires_grad]
    results, expected = (STEPS[step](losses, head, hidden) for losses in (InChunks(), Whole()))
    assert results.requires_grad == expected.requires_grad == bool(leaves)
    if leaves:
        close(*(torch.autograd.grad(x, leaves) for x in (results, expected)), 1e-13)
    with torch.no_grad():
        assert not STEPS[step](InChunks(), head, hidden.detach().requires_grad_()).requires_grad


def test_options_that_want_gradients():
    """Class weights, weights of rows, and the teacher's operands."""
    head, hidden = HEADS["two layers"](D, C).double(), torch.randn(ROWS, D, dtype=torch.float64, requires_grad=True)
    weight, row_weight = (torch.rand(n, dtype=torch.float64, requires_grad=True) for n in (C, ROWS))
    denominator = torch.tensor(7.0, dtype=torch.float64, requires_grad=True)
    states, layer = torch.randn(ROWS, 5, dtype=torch.float64, requires_grad=True), nn.Linear(5, C).double()
    values = torch.rand(ROWS, 3, dtype=torch.float64).log_softmax(-1).requires_grad_()
    probabilities = torch.rand(ROWS, C, dtype=torch.float64).softmax(-1).requires_grad_()
    indices = torch.arange(ROWS * 3).reshape(ROWS, 3) % C
    best = {"target_values": values - 0.1, "target_indices": indices}
    teacher = {"target_weight": layer.weight, "target_bias": layer.bias}
    cases = [
        ("cross_entropy", (TARGET,), {"weight": weight, "row_weight": row_weight, "z_loss": 0.1}, [weight, row_weight]),
        ("cross_entropy", (TARGET,), {"denominator": denominator, "weight": weight}, [weight, denominator]),
        ("cross_entropy", (probabilities,), {"label_smoothing": 0.1}, [probabilities]),
        ("kl_div", (states,), {**teacher, "weight": row_weight}, [states, layer.weight, layer.bias, row_weight]),
        ("kl_div", (None,), best, [values]),
    ]
    for loss, operands, options, leaves in cases:
        results = safeops.head_loss(head, hidden, *operands, loss=loss, **options)
        if "target_weight" in options:
            operands, options = (layer(states),), {"weight": row_weight}
        expected = getattr(Whole(), loss)(head, hidden, *operands, **options)
        inputs = [hidden, *leaves, *head.parameters()]
        close(*(torch.autograd.grad(x, inputs) for x in (results, expected)), 1e-12)


@pytest.mark.parametrize("step", STEPS)
def test_functions_and_what_they_capture(step):
    """A closure's leaves, tensors with a graph of their own, and both a tensor and what it was computed from."""
    hidden = torch.randn(ROWS, D, dtype=torch.float64)
    weight, log_scale = torch.randn(C, D, dtype=torch.float64), torch.zeros(C, dtype=torch.float64)
    for kind in ("leaf", "graph", "both"):
        results = []
        for losses in (InChunks(), Whole()):
            leaves = [x.detach().requires_grad_() for x in (hidden, weight, log_scale)]
            x, w, s = leaves
            scale = s.exp() if kind != "both" else w.sum(1)
            late = {"leaf": lambda h: h @ w.T * s.exp(), "graph": lambda h: h @ w.T * scale}  # noqa: B023
            loss = STEPS[step](losses, late.get(kind, late["graph"]), x.tanh())
            results.append(torch.autograd.grad(loss, leaves, allow_unused=kind == "both")[: 2 if kind == "both" else 3])
        close(*results, 1e-13)
