"""`SafeopsRecorder` for PyTorch Lightning."""

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Mapping

from safeops.debug.recorder.body import Call, Unreadable
from safeops.debug.recorder.recorder import _Step
from safeops.integrations._recorded import ARGUMENTS, Recorded

# The library has two packages: the one that the script has imported comes first.
NAMES = sorted(("lightning.pytorch", "pytorch_lightning"), key=lambda name: name not in sys.modules)


def _callback():
    for name in NAMES:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name).Callback
    raise ImportError("SafeopsRecorder: a callback for PyTorch Lightning, not installed here: pip install lightning")


class SafeopsRecorder(Recorded, _callback()):
    __doc__ = f"""`safeops.debug.recorder` for PyTorch Lightning: `Trainer(callbacks=[SafeopsRecorder("flight")])`.

    A step begins with each `training_step` and ends with its batch. A replay calls `training_step` again on the copied
    batch, then backward with the hooks of backward; what the module logs is dropped. Under manual optimization it ends
    at the update that the step's numbers did not reach. A `training_step` that takes `dataloader_iter` fetches its
    batch itself: such a step is kept from the weights, and cannot run again.
    {ARGUMENTS}
    Raises:
        NonFiniteError: a step was not finite and `action` is "raise": at the end of its batch.
        TypeError, ValueError, OSError: as `safeops.debug.recorder`, at the begin of the training.

    Example:
        >>> trainer = lightning.Trainer(callbacks=[SafeopsRecorder("flight")])  # doctest: +SKIP
    """

    _step = _strategy = None

    def on_train_start(self, trainer, pl_module):
        if not trainer.optimizers:
            return
        strategy = trainer.strategy
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._open(strategy.model, trainer.optimizers, scaler)
        self._strategy, self._training_step = strategy, strategy.training_step
        fetches = "dataloader_iter" in inspect.signature(pl_module.training_step).parameters
        body = _unreadable if fetches else functools.partial(Call, functools.partial(self._again, trainer))

        def training_step(*args, **kwargs):
            if self._step is None:  # (LBFGS calls it more than once a batch)
                step = _Step(self.recorder, (args, kwargs), body, args, kwargs)
                step.__enter__()
                self._step = step
            return self._training_step(*args, **kwargs)

        strategy.training_step = training_step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self._end()

    def on_train_end(self, trainer, pl_module):
        self._restore()
        self._shut()

    def on_exception(self, trainer, pl_module, exception):
        self._end(exception)
        self._restore()
        self._shut(exception)

    def _end(self, error=None):
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(type(error) if error else None, error, None)

    def _restore(self):
        if self._strategy is not None:
            del self._strategy.training_step
            self._strategy = None

    def _again(self, trainer, *args, **kwargs):
        """The forward and backward of one batch, as the Trainer's loops run them."""
        module = trainer.lightning_module
        with _without_logging(module):
            result = self._training_step(*args, **kwargs)
            loss = result.get("loss") if isinstance(result, Mapping) else result
            if module.automatic_optimization and loss is not None:
                trainer.strategy.backward(loss / trainer.accumulate_grad_batches, trainer.optimizers[0])


def _unreadable(args, kwargs):
    raise Unreadable("training_step takes dataloader_iter, and fetches its batch itself")


@contextlib.contextmanager
def _without_logging(module):
    own = {name: vars(module)[name] for name in ("log", "log_dict") if name in vars(module)}
    module.log = module.log_dict = lambda *args, **kwargs: None
    try:
        yield
    finally:
        del module.log, module.log_dict
        vars(module).update(own)
