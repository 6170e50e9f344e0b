"""Finding it: which line made the NaN, the device error, the unsafe pattern, the synchronisation.

with safeops.debug.trace(model):
    train_step()
"""

from safeops.debug._report import NonFiniteError, Report
from safeops.debug.trace import trace

__all__ = ["NonFiniteError", "Report", "trace"]
