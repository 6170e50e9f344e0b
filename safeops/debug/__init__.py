"""Find the source line that made a NaN, a device error, an unsafe pattern or a synchronization.

with safeops.debug.trace(model):
    train_step()
"""

from safeops.debug.audit.audit import Finding, audit
from safeops.debug.compare.compare import compare
from safeops.debug.compare.comparison import Comparison, Difference
from safeops.debug.compare.sketch import sketch
from safeops.debug.errors.locate_errors import LocatedError, locate_errors
from safeops.debug.no_sync import SynchronizationError, no_sync
from safeops.debug.page.history import ModuleCounts
from safeops.debug.recorder.recorder import recorder
from safeops.debug.recorder.report import Recording
from safeops.debug.trace.report import NonFiniteError, Report
from safeops.debug.trace.trace import trace

for _error in (LocatedError, NonFiniteError, SynchronizationError):
    _error.__module__ = __name__  # where users catch it

__all__ = [
    "Comparison",
    "Difference",
    "Finding",
    "LocatedError",
    "ModuleCounts",
    "NonFiniteError",
    "Recording",
    "Report",
    "SynchronizationError",
    "audit",
    "compare",
    "locate_errors",
    "no_sync",
    "recorder",
    "sketch",
    "trace",
]
