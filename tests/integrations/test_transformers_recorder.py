"""transformers' `SafeopsRecorder` names the line of a NaN, keeps it from the weights, and changes nothing else."""

import subprocess
import sys

import pytest
import torch

BAD = 3  # the batch whose log is -inf


def model():
    from transformers import LlamaConfig, LlamaForCausalLM

    class Model(LlamaForCausalLM):
        def forward(self, input_ids, labels, scale, **options):
            output = super().forward(input_ids=input_ids, labels=labels, **options)
            output.loss = output.loss + (output.logits.mean() * scale.log()).mean() * 1e-3  # HERE
            return output

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        attention_dropout=0.1,
    )  # fmt: skip
    return Model(config)


def data(bad=BAD):
    tokens = torch.randint(50, (12, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row, "scale": torch.tensor(float(i // 2 != bad - 1))}
            for i, row in enumerate(tokens)]  # fmt: skip


def trainer_of(model, data, folder, *callbacks, **options):
    from transformers import Trainer, TrainingArguments

    class Ordered(Trainer):
        def _get_train_sampler(self, *args):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    arguments = TrainingArguments(
        folder, **{"max_steps": 6, **options}, per_device_train_batch_size=2, use_cpu=True, report_to="none",
        save_strategy="no", disable_tqdm=True, learning_rate=0.01,
    )  # fmt: skip
    return Ordered(model, arguments, train_dataset=data, callbacks=list(callbacks))


@pytest.fixture
def recorder(tmp_path):
    from safeops.integrations.transformers import SafeopsRecorder

    return lambda **options: SafeopsRecorder(tmp_path / "flight", **options)


@pytest.mark.slow  # it imports transformers, which `make test-slow` installs
@pytest.mark.parametrize("late", [False, True])
def test_a_nan_is_named_and_the_weights_are_those_before_it(recorder, tmp_path, late):
    from safeops.debug import NonFiniteError

    expected, stopped, callback = model(), model(), recorder()
    trainer_of(expected, data(0), tmp_path, max_steps=BAD - 1, lr_scheduler_type="constant").train()
    trainer = trainer_of(stopped, data(), tmp_path, *[] if late else [callback], lr_scheduler_type="constant")
    if late:
        trainer.add_callback(callback)
    with pytest.raises(NonFiniteError) as caught:
        trainer.train()
    report = caught.value.report
    assert (report.step, report.op) == (BAD, "log") and [report] == callback.reports
    assert "# HERE" in report.line.text and report.line.function == "forward"
    assert all(torch.equal(a, b) for a, b in zip(stopped.parameters(), expected.parameters()))
    assert "log(0) is -inf" in (tmp_path / "flight" / f"step-{BAD}" / "report.txt").read_text()
    assert late or "ended" in repr(callback.recorder) and "training_step" not in vars(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2, "max_steps": 3}, {"bf16": True}], ids=str)
def test_a_finite_training_is_the_same_to_the_bit(recorder, tmp_path, options):
    results, callback = [], recorder()
    for callbacks in ((), (callback,)):
        trained = model()
        trainer = trainer_of(trained, data(0), tmp_path, *callbacks, logging_steps=1, **options)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        results.append(([p.tolist() for p in trained.parameters()], losses, torch.rand(1).item()))
    assert results[0] == results[1] and callback.recorder.number == 6 and not callback.recorder.found
    assert "training_step" not in vars(trainer) and "ended" in repr(callback.recorder)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 3, "max_steps": 2}], ids=str)
def test_a_warning_goes_on_without_the_step(recorder, tmp_path, options):
    trained, callback = model(), recorder(action="warn")
    with pytest.warns(UserWarning, match=f"step {BAD}: the loss is not finite: log has no finite value"):
        trainer_of(trained, data(), tmp_path, callback, **options).train()
    assert all(p.isfinite().all() for p in trained.parameters())
    assert callback.recorder.number == 6 and callback.recorder.found == 1


@pytest.mark.slow
def test_an_exception_of_the_training_passes_and_ends_the_recording(recorder, tmp_path):
    callback = recorder()
    trainer = trainer_of(model(), data(0), tmp_path, callback)
    get_rate = trainer._get_learning_rate
    trainer._get_learning_rate = lambda: 1 / 0 if trainer.state.global_step == 2 else get_rate()
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert "ended" in repr(callback.recorder) and callback.recorder.number == 3
    assert "training_step" not in vars(trainer) and not trainer.optimizer.optimizer._optimizer_step_pre_hooks
    trainer._get_learning_rate = get_rate
    trainer.train()  # and a later training has a recorder of its own
    assert callback.recorder.number == 6


@pytest.mark.slow
@pytest.mark.parametrize("change, match", [({"action": "stop"}, "recorder: action"), ({"last": -1}, "recorder: last")])
def test_bad_options_are_refused_when_it_is_made(recorder, change, match):
    with pytest.raises(ValueError, match=match):
        recorder(**change)


@pytest.mark.slow
def test_it_is_a_callback_of_the_trainer_alone(recorder):
    from transformers import TrainerCallback

    assert isinstance(recorder(), TrainerCallback)
    with pytest.raises(RuntimeError, match=r"SafeopsRecorder: no transformers\.Trainer calls this callback"):
        recorder().on_train_begin(None, None, None)


@pytest.mark.slow
def test_without_the_library_the_loss_is_there_and_the_callback_is_not():
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from safeops.integrations.transformers import ForCausalLMLoss\n"
        "from safeops.integrations.transformers import SafeopsRecorder"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: SafeopsRecorder: a callback for transformers, not installed here" in run.stderr
