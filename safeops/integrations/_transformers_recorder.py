"""`SafeopsRecorder` for Hugging Face's Trainer."""

import functools
import sys

from safeops.integrations._recorded import ARGUMENTS, Recorded

try:
    from transformers import Trainer, TrainerCallback
except ModuleNotFoundError as error:
    raise ImportError(
        "SafeopsRecorder: a callback for transformers, not installed here: pip install transformers accelerate"
    ) from error


class SafeopsRecorder(Recorded, TrainerCallback):
    __doc__ = f"""`safeops.debug.recorder` for transformers' Trainer: `Trainer(callbacks=[SafeopsRecorder("flight")])`.

    Each call of `trainer.training_step`, one micro-batch, is a step; the update that follows it does nothing if the
    step was not finite. A replay calls `training_step` again on the copied inputs.
    {ARGUMENTS}
    Raises:
        NonFiniteError: a step was not finite and `action` is "raise": at the end of `training_step`.
        TypeError, ValueError, OSError: as `safeops.debug.recorder`, at the begin of the training.
        RuntimeError: no `transformers.Trainer` calls it.

    Example:
        >>> trainer = Trainer(model, arguments, callbacks=[SafeopsRecorder("flight")])  # doctest: +SKIP
    """

    _trainer = None

    def on_init_end(self, args, state, control, **kwargs):
        """Wrap `train`, which calls no callback after an exception."""
        trainer = _calling_trainer()
        train = trainer.train

        @functools.wraps(train)
        def recorded(*args, **kwargs):
            try:
                result = train(*args, **kwargs)
            except BaseException as error:
                self._end(error)
                raise
            self._end()
            return result

        trainer.train = recorded

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
        self._end()  # (of a training that a callback added later could not see end)
        trainer = _calling_trainer()
        optimizer = trainer.optimizer if optimizer is None else optimizer
        self._open(trainer.model_wrapped, optimizer, getattr(trainer.accelerator, "scaler", None))
        self._trainer, training_step = trainer, trainer.training_step

        @functools.wraps(training_step)
        def recorded(*args, **kwargs):
            return self.recorder.run(training_step, *args, **kwargs)

        trainer.training_step = recorded

    def on_train_end(self, args, state, control, **kwargs):
        self._end()

    def _end(self, error=None):
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            del trainer.training_step
            self._shut(error)


def _calling_trainer():
    """The Trainer that calls this callback. It passes its model and optimizer, but not itself."""
    frame = sys._getframe(2)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer):
            return owner
        frame = frame.f_back
    raise RuntimeError("SafeopsRecorder: no transformers.Trainer calls this callback")
