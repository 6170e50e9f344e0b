"""Finding it: which line made the NaN, the device error, the unsafe pattern, the synchronisation.

    with safeops.debug.trace(model):
        train_step()
"""

from safeops.debug._report import NonFiniteError, Report
from safeops.debug.locate_errors import LocatedError, locate_errors
from safeops.debug.no_sync import SynchronizationError, no_sync
from safeops.debug.trace import trace

__all__ = ["LocatedError", "NonFiniteError", "Report", "SynchronizationError", "locate_errors", "no_sync", "trace"]
