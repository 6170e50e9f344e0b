"""A recorder in the training loop of another library: the part that both callbacks share."""

import warnings

from safeops.debug.recorder import checks
from safeops.debug.recorder.recorder import recorder
from safeops.debug.trace.report import NonFiniteError

ARGUMENTS = """
    Args:
        folder, steps, action, protect, save_weights, last: as `safeops.debug.recorder` has them.

    Attributes:
        recorder: the `safeops.debug.recorder` of the last training, or None before the first.
        reports: its findings.
"""


class Recorded:
    """Holds the options of a recorder until a training begins, and the recorder from then on."""

    def __init__(self, folder="flight", *, steps=2, action="raise", protect=True, save_weights=False, last=12):
        super().__init__()
        checks.options(None, steps, action, last)
        self._options = {
            "folder": folder, "steps": steps, "action": action, "protect": protect, "save_weights": save_weights,
            "last": last,
        }  # fmt: skip
        self.recorder = None

    @property
    def reports(self):
        return self.recorder.reports if self.recorder is not None else []

    def _open(self, model, optimizers, scaler):
        self.recorder = recorder(model, optimizers, scaler=scaler, **self._options)

    def _shut(self, error=None):
        """End the recording. error: the exception that ended the training, which a finding must not replace."""
        if self.recorder is None:
            return
        try:
            self.recorder.close()
        except NonFiniteError as finding:
            if error is None:
                raise
            warnings.warn(f"before the exception: {finding}", stacklevel=3)
