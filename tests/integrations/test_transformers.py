"""`ForCausalLMLoss` and `compute_loss_func` agree in value and gradient with transformers' own function in fp64."""

import inspect
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from safeops.integrations.transformers import ForCausalLMLoss, compute_loss_func
from safeops.testing.memory import _peak_bytes

VOCABULARY = 50
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COUNTS = {"none": None, "int": 19, "float": 19.0, "tensor": torch.tensor(19), "float tensor": torch.tensor(19.0)}
REPLICAS = {"of one": torch.tensor([19]), "of two": torch.tensor([[19], [19]])}  # shapes from nn.DataParallel


def truth(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **kwargs):
    """Computes transformers' function in fp64; the original converts all operands to fp32."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    logits, target = logits.double().reshape(-1, vocab_size), shift_labels.reshape(-1)
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = F.cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction)
    return loss if num_items_in_batch is None else loss / torch.as_tensor(num_items_in_batch).flatten()[0]


def batch(dtype=torch.float32, shape=(3, 9)):
    labels = torch.randint(VOCABULARY, shape)
    labels[0, :4] = labels[1, -3:] = -100  # a prompt in row 0, padding in row 1
    return (4 * torch.randn(*shape, VOCABULARY)).to(dtype).requires_grad_(), labels


def outcome(function, logits, *args, **kwargs):
    """Returns (loss, gradient of 3 * loss)."""
    loss = function(logits, *args, **kwargs)
    return loss.detach(), *torch.autograd.grad(3 * loss.sum(), logits)


def error(results, expected):
    """Returns the larger of the relative errors of the loss and the gradient."""
    return max(((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(results, expected))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("items", [*COUNTS.values(), *REPLICAS.values()], ids=[*COUNTS, *REPLICAS])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients(dtype, items, packed):
    logits, labels = batch(dtype)
    options = {"shift_labels": labels.reshape(1, -1)} if packed else {}
    labels = None if packed else labels
    loss, gradient = outcome(ForCausalLMLoss, logits, labels, VOCABULARY, items, **options)
    expected = outcome(truth, logits, labels, VOCABULARY, items, **options)
    assert loss.dtype == torch.float32 and loss.dim() == 0 and gradient.dtype == dtype
    assert error([loss], expected) < 3e-7 and error([gradient], expected[1:]) < max(3e-7, torch.finfo(dtype).eps)


@pytest.mark.parametrize("form", ["dict", "tuple", "list", "tensor"])
def test_what_models_give_to_the_trainer(form):
    logits, labels = batch()
    outputs = {"dict": {"logits": logits, "other": None}, "tuple": (logits, None), "list": [logits], "tensor": logits}
    loss = compute_loss_func(outputs[form], labels, num_items_in_batch=torch.tensor(19))
    assert torch.equal(loss, ForCausalLMLoss(logits, labels, VOCABULARY, 19))
    loss *= 2  # the Trainer multiplies the loss by the number of ranks, in place
    (gradient,) = torch.autograd.grad(loss, logits)
    expected = truth(logits, labels, VOCABULARY, 19) * 2
    assert error((loss.detach(), gradient), (expected.detach(), *torch.autograd.grad(expected, logits))) < 3e-7


def test_any_strides_index_dtype_and_option():
    logits, labels = batch()
    wide = F.pad(logits.detach(), (0, 14), value=torch.nan).transpose(0, 1).contiguous().transpose(0, 1)
    wide.requires_grad_()
    narrow = outcome(lambda x: ForCausalLMLoss(x[..., :VOCABULARY], labels, VOCABULARY), wide)
    loss, gradient = outcome(truth, logits, labels, VOCABULARY)
    assert error(narrow, (loss, F.pad(gradient, (0, 14)))) < 3e-7
    labels = labels.where(labels != -100, 7)
    for options in ({"ignore_index": 7}, {}):  # uint8 cannot hold -100, the label at the end of each row
        expected = outcome(truth, logits, labels, VOCABULARY, **options)
        for dtype in (torch.int64, torch.int32, torch.uint8):
            assert error(outcome(ForCausalLMLoss, logits, labels.to(dtype), VOCABULARY, **options), expected) < 3e-7
    smooth = F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].flatten(), label_smoothing=0.1)
    penalty = logits[:, :-1].logsumexp(-1).square().mean() * 1e-2
    for function, outputs in (ForCausalLMLoss, logits), (compute_loss_func, {"logits": logits}):
        rest = (VOCABULARY,) if function is ForCausalLMLoss else ()
        loss = function(outputs, labels, *rest, label_smoothing=0.1, z_loss=1e-2)
        torch.testing.assert_close(loss, smooth + penalty)


def test_labels_that_do_not_count_do_not_exist():
    logits, labels = batch()
    ignored = F.pad(labels, (0, 1), value=-100)[:, 1:] == -100
    dirty = torch.where(ignored[..., None], torch.nan, logits.detach()).requires_grad_()
    for clean, result in zip(
        outcome(ForCausalLMLoss, logits, labels, VOCABULARY), outcome(ForCausalLMLoss, dirty, labels, VOCABULARY)
    ):
        assert torch.equal(clean, result)
    nothing = torch.full_like(labels, -100)
    for options in ((dirty, nothing, VOCABULARY), (dirty, nothing, VOCABULARY, 19), (logits, labels, VOCABULARY, 0)):
        loss, gradient = outcome(ForCausalLMLoss, *options)
        assert loss == 0 and not gradient.any()
    for shape in ((0, 9), (3, 0)):
        empty = torch.zeros(*shape, VOCABULARY, requires_grad=True), torch.zeros(shape, dtype=torch.int64)
        assert outcome(ForCausalLMLoss, *empty, VOCABULARY)[0] == 0
    kept = dirty.detach().clone()
    kept[2, 3, 0] = torch.nan
    assert ForCausalLMLoss(kept, labels, VOCABULARY).isnan()


@pytest.mark.parametrize(
    "error, match, change",
    [
        (TypeError, "logits must be a tensor", {"logits": None}),
        (TypeError, "logits must be a floating", {"logits": torch.zeros(3, 9, 50, dtype=torch.int64)}),
        (ValueError, r"logits \(50,\) must be \(\.\.\., T, vocab_size\)", {"logits": torch.zeros(50)}),
        (ValueError, r"logits \(3, 9, 50\) .* which is 49", {"vocab_size": 49}),
        (TypeError, "labels must be a tensor, got NoneType", {"labels": None}),
        (TypeError, "labels must be int64, int32 or uint8", {"labels": torch.zeros(3, 9)}),
        (TypeError, "labels must be int64, int32 or uint8", {"labels": torch.zeros(3, 9, dtype=torch.bool)}),
        (ValueError, r"labels \(3, 8\) must have the shape \(3, 9\)", {"labels": torch.zeros(3, 8, dtype=torch.int64)}),
        (ValueError, r"shift_labels \(3, 8\)", {"shift_labels": torch.zeros(3, 8, dtype=torch.int64)}),
        (TypeError, "shift_labels must be int64", {"shift_labels": torch.zeros(3, 9)}),
        (ValueError, r"labels \(9, 3\) must have", {"labels": torch.zeros(9, 3, dtype=torch.int64)}),
        (
            IndexError,
            r"labels 50 is out of range for the 50 classes of logits \(3, 9, 50\)",
            {"labels": torch.full((3, 9), 50)},
        ),
        (IndexError, "shift_labels -1 is out of range", {"shift_labels": torch.full((27,), -1)}),
        (TypeError, "ignore_index must be an int", {"ignore_index": None}),
        (TypeError, "num_items_in_batch must be a number, got str", {"num_items_in_batch": "19"}),
        (TypeError, "num_items_in_batch must be a number, got bool", {"num_items_in_batch": True}),
        (ValueError, "num_items_in_batch must be at least 0, got -1", {"num_items_in_batch": -1}),
        (TypeError, "num_items_in_batch must be a real", {"num_items_in_batch": torch.tensor(True)}),
        (ValueError, r"one number, got shape \(2,\)", {"num_items_in_batch": torch.tensor([9, 10])}),
        (ValueError, r"one number, got shape \(0, 1\)", {"num_items_in_batch": torch.zeros(0, 1)}),
        (ValueError, "label_smoothing must be at most 1", {"label_smoothing": 2}),
        (ValueError, "z_loss must be at least 0", {"z_loss": -1}),
    ],
)
def test_bad_calls(error, match, change):
    logits, labels = batch()
    call = {"logits": logits, "labels": labels, "vocab_size": VOCABULARY, **change}
    with pytest.raises(error, match=match) as caught:
        ForCausalLMLoss(**call)
    assert str(caught.value).startswith("ForCausalLMLoss: ")


@pytest.mark.parametrize("outputs", [{}, (), None])
def test_outputs_without_logits(outputs):
    with pytest.raises(TypeError, match="logits must be a tensor, got NoneType"):
        compute_loss_func(outputs, batch()[1])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_as_large_as_the_logits_is_made(dtype, transposed):
    """Only the gradient, in the logits' dtype, may be as large as the logits; all else must be small."""
    logits = torch.randn(64, 4, 4096).transpose(0, 1) if transposed else torch.randn(4, 64, 4096)
    logits = logits.to(dtype).requires_grad_()
    labels = torch.randint(4096, (4, 64))
    rows = 64 * labels.numel() + 4096  # bytes for losses, two numbers a row, labels, and the reduction's workspace

    def forward():
        return ForCausalLMLoss(logits, labels, 4096, 200)

    loss = forward()
    assert _peak_bytes("cpu", forward) < rows
    backward = _peak_bytes("cpu", lambda: torch.autograd.grad(loss, logits, retain_graph=True))
    assert logits.nbytes <= backward < logits.nbytes + rows
    # The measurement notices large tensors: transformers' own function makes some.
    assert _peak_bytes("cpu", lambda: truth(logits, labels, 4096, 200)) > 8 * logits.numel()


def test_labels_and_their_number_are_taken_to_the_logits_device():
    logits, labels = batch()
    for items in (None, torch.tensor(19), torch.tensor([[19], [19]])):
        assert ForCausalLMLoss(logits.to("meta"), labels, VOCABULARY, items).device.type == "meta"


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("items", [None, torch.tensor(19)], ids=["none", "tensor"])
def test_compiled_whole(items, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(ForCausalLMLoss, fullgraph=True, dynamic=dynamic)
    for shape in ((3, 9), (2, 12)):
        logits, labels = batch(torch.bfloat16, shape)
        results = outcome(compiled, logits, labels, VOCABULARY, items)
        assert error(results, outcome(truth, logits, labels, VOCABULARY, items)) < torch.finfo(torch.bfloat16).eps
    results = outcome(compiled, logits, None, VOCABULARY, items, shift_labels=labels.flatten())
    expected = outcome(truth, logits, None, VOCABULARY, items, shift_labels=labels)
    assert error(results, expected) < torch.finfo(torch.bfloat16).eps


def test_transformers_is_not_imported():
    code = "import sys, safeops.integrations.transformers; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- beside transformers


def theirs():
    from transformers.loss.loss_utils import ForCausalLMLoss as function

    return function


def llama(dtype=torch.float32):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    return LlamaForCausalLM(config).to(dtype)


def trained(model, function, **inputs):
    """Returns (loss, gradients of all weights in one vector)."""
    model.loss_function = function
    loss = model(input_ids=torch.arange(27).reshape(3, 9), **inputs).loss
    return loss.detach(), torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


@pytest.mark.slow  # it imports transformers, which `make test-slow` installs
def test_the_call_is_that_of_transformers():
    expected, result = (inspect.signature(f).parameters for f in (theirs(), ForCausalLMLoss))
    assert [(p.name, p.default, p.kind) for p in expected.values()] == [
        (p.name, p.default, p.kind) for p in result.values() if p.kind is not p.KEYWORD_ONLY
    ]


@pytest.mark.slow
def test_a_sixth_of_the_memory():
    logits = torch.randn(4, 64, 4096).bfloat16().requires_grad_()
    labels = torch.randint(4096, (4, 64))

    def peak(function):
        return _peak_bytes("cpu", lambda: torch.autograd.grad(function(logits, labels, 4096, 200), logits))

    assert peak(ForCausalLMLoss) < 1.02 * logits.nbytes and peak(theirs()) >= 6 * logits.nbytes


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("items", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_model_takes_it(dtype, items, packed):
    labels = batch()[1]
    inputs = {"labels": labels}
    if packed:  # in each row a sequence ends in the middle
        inputs["shift_labels"] = F.pad(labels, (0, 1), value=-100)[:, 1:].index_fill(1, torch.tensor([4]), -100)
    if items is not None:
        inputs["num_items_in_batch"] = items
    expected = trained(llama(dtype).double(), truth, **inputs)
    ours, other = (trained(llama(dtype), function, **inputs) for function in (ForCausalLMLoss, theirs()))
    assert error(ours, expected) <= 1.05 * error(other, expected) + 2e-7
    assert error(other, expected) < (1e-6 if dtype == torch.float32 else 0.02)


@pytest.mark.slow
def test_the_trainer_takes_both_and_the_model_sees_logits_in_half(tmp_path):
    from transformers import Trainer, TrainingArguments

    labels, seen = batch(shape=(4, 9))[1], []
    data = [{"input_ids": row.clamp(min=0), "labels": row} for row in labels]

    def watch(function):
        def watched(logits, *args, **kwargs):
            loss = function(logits, *args, **kwargs)
            logits = logits if isinstance(logits, torch.Tensor) else logits["logits"]
            seen.append((logits.dtype, loss.dtype, int(kwargs["num_items_in_batch"])))
            return loss

        return watched

    arguments = TrainingArguments(
        tmp_path, max_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=2, use_cpu=True, bf16=True,
        report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    model = llama()
    model.loss_function = watch(ForCausalLMLoss)
    Trainer(model, arguments, train_dataset=data).train()
    Trainer(llama(), arguments, train_dataset=data, compute_loss_func=watch(compute_loss_func)).train()
    count = int((labels[:, 1:] != -100).sum())  # in both micro-batches of the step
    assert seen == [(dtype, torch.float32, count) for dtype in (torch.bfloat16,) * 2 + (torch.float32,) * 2]


@pytest.mark.slow
def test_a_compiled_model_takes_it():
    torch._dynamo.reset()
    labels = batch()[1]
    model = llama()
    expected = trained(model, ForCausalLMLoss, labels=labels)
    model.forward = torch.compile(model.forward, fullgraph=True)
    assert error(trained(model, ForCausalLMLoss, labels=labels), expected) < 1e-6


@pytest.mark.slow
def test_a_vocabulary_that_is_a_symbol_compiles():
    loss = torch.compile(lambda x, y: ForCausalLMLoss(x, y, 9), fullgraph=True, dynamic=True)
    logits, labels = torch.randn(2, 5, 9), torch.randint(9, (2, 5))
    torch.testing.assert_close(loss(logits, labels), ForCausalLMLoss(logits, labels, 9))
