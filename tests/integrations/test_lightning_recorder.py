"""Lightning's `SafeopsRecorder` names the line of a NaN, keeps it from the weights, and changes nothing else."""

import subprocess
import sys

import pytest
import torch

BAD = 3  # the batch whose log is -inf
MANUAL, CLOSURE = "manual", "closure"


def module(how="automatic"):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            linear, norm = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8)
            self.network = torch.nn.Sequential(linear, norm, torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
            self.automatic_optimization = how != MANUAL
            self.logged = self.losses = 0

        def loss(self, x):
            self.losses += 1
            result = self.network(x).square().mean() * x[:, :1].log().mean().exp()
            return result + self.network(x).sum() * x[:, :1].log().sum() * 1e-3  # HERE

        def training_step(self, batch, index):
            loss = self.loss(batch["x"][0])
            self.log("loss", loss, on_step=True, on_epoch=True)
            if how == MANUAL:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return {"loss": loss} if how == CLOSURE else loss

        def configure_optimizers(self):
            if how == CLOSURE:
                return torch.optim.LBFGS(self.parameters(), lr=0.01, max_iter=2)
            return torch.optim.Adam(self.parameters(), 0.01)

    torch.manual_seed(0)
    return Module()


def data(bad=BAD):
    x = torch.rand(6, 4, 4, generator=torch.Generator().manual_seed(1)) + 0.5
    if bad:
        x[bad - 1, 2] = 0
    return torch.utils.data.DataLoader([{"x": [batch]} for batch in x], batch_size=None)


def fit(module, loader, *callbacks, **options):
    import lightning

    torch.manual_seed(2)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=list(callbacks), **options,
    )  # fmt: skip
    trainer.fit(module, loader)
    return trainer


def state(module):
    return torch.cat([x.detach().flatten().double() for x in module.state_dict().values()])


@pytest.fixture
def recorder(tmp_path):
    from safeops.integrations.lightning import SafeopsRecorder

    return lambda **options: SafeopsRecorder(tmp_path / "flight", **options)


@pytest.mark.slow  # it imports lightning, which `make test-slow` installs
@pytest.mark.parametrize("how", ["automatic", MANUAL, CLOSURE])
def test_a_nan_is_named_and_the_weights_are_those_before_it(recorder, how, tmp_path):
    from safeops.debug import NonFiniteError

    expected, stopped, callback = module(how), module(how), recorder()
    loader = data(bad=0)
    fit(expected, loader, limit_train_batches=BAD - 1)
    with pytest.raises(NonFiniteError) as caught:
        fit(stopped, data(), callback)
    report = caught.value.report
    assert (report.step, report.op) == (BAD, "log") and report is callback.reports[0] and len(callback.reports) == 1
    assert "# HERE" in report.line.text and report.line.function == "loss"
    assert all(torch.equal(a, b) for a, b in zip(stopped.parameters(), expected.parameters()))
    assert "log(0) is -inf" in (tmp_path / "flight" / f"step-{BAD}" / "report.txt").read_text()
    assert callback.recorder.number == BAD and "ended" in repr(callback.recorder)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}], ids=str)
@pytest.mark.parametrize("how", ["automatic", MANUAL, CLOSURE])
def test_a_finite_training_is_the_same_to_the_bit(recorder, how, options):
    if how == MANUAL and "accumulate_grad_batches" in options:
        pytest.skip("Lightning does not accumulate under manual optimization")
    results, callback = [], recorder()
    for callbacks in ((), (callback,)):
        trained = module(how)
        trainer = fit(trained, data(bad=0), *callbacks, **options)
        metrics = {key: value.item() for key, value in trainer.callback_metrics.items()}
        results.append((state(trained).tolist(), metrics, torch.rand(1).item(), trained.losses))
        assert "training_step" not in vars(trainer.strategy) and not {"log", "log_dict"} & vars(trained).keys()
    assert results[0] == results[1] and callback.recorder.number == 6 and not callback.recorder.found


@pytest.mark.slow
@pytest.mark.parametrize("how", ["automatic", MANUAL])
def test_a_warning_goes_on_without_the_step(recorder, how):
    trained, callback = module(how), recorder(action="warn")
    with pytest.warns(UserWarning, match=f"step {BAD}: the loss is not finite: log has no finite value"):
        trainer = fit(trained, data(), callback)
    assert trainer.global_step >= 5 and state(trained).isfinite().all() and callback.recorder.found == 1
    assert callback.recorder.number == 6


@pytest.mark.slow
def test_an_accumulated_gradient_is_named_at_its_micro_batch(recorder):
    from safeops.debug import NonFiniteError

    callback = recorder()
    with pytest.raises(NonFiniteError, match=f"step {BAD}: "):
        fit(module(), data(), callback, accumulate_grad_batches=4)
    assert callback.recorder.number == BAD and "# HERE" in callback.reports[0].line.text


@pytest.mark.slow
def test_an_exception_of_the_training_passes_and_ends_the_recording(recorder):
    callback, broken = recorder(), module()
    broken.on_train_batch_start = lambda batch, index: 1 / 0 if index == 2 else None
    with pytest.raises(ZeroDivisionError):
        fit(broken, data(bad=0), callback)
    assert "ended" in repr(callback.recorder) and callback.recorder.number == 2
    (optimizer,) = [broken.optimizers().optimizer]
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.slow
def test_a_step_that_fetches_its_batch_says_that_it_cannot_run_again(recorder):
    class Fetching(type(module())):
        def training_step(self, dataloader_iter):
            batch, _, _ = next(dataloader_iter)
            return self.loss(batch["x"][0])

    torch.manual_seed(0)
    trained, callback = Fetching(), recorder(action="record")
    with pytest.warns(UserWarning, match="will not be replayed: training_step takes dataloader_iter"):
        fit(trained, data(), callback)
    (report,) = callback.reports
    assert "fetches its batch itself" in report.why and report.step == BAD and state(trained).isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("change, error, match", [
    ({"action": "stop"}, ValueError, "recorder: action must be one of"),
    ({"steps": 0}, ValueError, "recorder: steps must be an int, at least 1, got 0"),
])  # fmt: skip
def test_bad_options_are_refused_when_it_is_made(recorder, change, error, match):
    with pytest.raises(error, match=match):
        recorder(**change)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_it_is_a_callback_of_the_package_that_the_script_imports(tmp_path):
    code = (
        "import pytorch_lightning, sys; from safeops.integrations.lightning import SafeopsRecorder as kind\n"
        "assert issubclass(kind, pytorch_lightning.Callback) and 'lightning.pytorch' not in sys.modules\n"
        f"pytorch_lightning.Trainer(accelerator='cpu', logger=False, callbacks=[kind({str(tmp_path)!r})])"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_lightning_is_not_imported():
    code = "import sys, safeops.integrations.lightning; assert not {'lightning', 'pytorch_lightning'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_without_the_library_one_line_says_so():
    code = (
        "import sys; sys.modules['lightning'] = sys.modules['pytorch_lightning'] = None\n"
        "from safeops.integrations.lightning import SafeopsRecorder"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: SafeopsRecorder: a callback for PyTorch Lightning, not installed here" in run.stderr
