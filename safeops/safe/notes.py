"""The reports of this thread's safe modes, and the source line of a replaced call."""

import contextlib
import os
import sys
import threading

import torch

from safeops.core import PACKAGE
from safeops.core.private_torch import assume_constant_result, traced_frames
from safeops.debug.common.source import user_frames

_TORCH = os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), "")
# Files whose frames lie between the user's line and a replaced call: torch, safe mode, the debug tools.
_BETWEEN = (_TORCH, os.path.join(PACKAGE, "safe", ""), os.path.join(PACKAGE, "debug", ""))
_DEMO = os.path.join(PACKAGE, "demo", "")


class _Reports(threading.local):
    def __init__(self):
        self.stack = []


_reports = _Reports()


def reports():
    """The reports of the safe modes that this thread is in, the outermost first."""
    return _reports.stack


def active():
    return bool(_reports.stack)


@contextlib.contextmanager
def silent():
    """Inside, this thread has no reports: nothing is noted, and `active()` is False."""
    before, _reports.stack = _reports.stack, []
    try:
        yield
    finally:
        _reports.stack = before


def note(function, twin):
    if torch.compiler.is_compiling():
        return _note_traced(function, twin)
    where = place()
    for report in set(_reports.stack):
        report._note(function, twin, where)


def place():
    """(code, offset) of the user's frame, or None."""
    frames = user_frames(2, most=1)[0]
    return frames[0] if frames else None


def remark(function, text, where, reports):
    """Add a remark to the reports. True if it is new at this place for one of them."""
    return any([report._remark(function, text, where) for report in reports])


def called_by_safeops():
    """True if safeops code makes this call: such calls are not replaced."""
    if torch.compiler.is_compiling():
        return _traced_by_safeops()
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    return frame is not None and _is_ours(frame.f_code.co_filename)


def _is_ours(name):
    return name.startswith(PACKAGE) and not name.startswith(_DEMO)


# While Dynamo traces, the user's frames are not on the stack, but Dynamo knows their lines. It calls these functions.


@assume_constant_result
def _traced_by_safeops():
    place = _traced_place()
    return place is not None and _is_ours(place[0])


@assume_constant_result
def _note_traced(function, twin):
    for report in set(_reports.stack):
        report._note(function, twin, _traced_place(), traced=True)


def _traced_place():
    frames = [x for x in traced_frames() or () if not x.filename.startswith(_BETWEEN)]
    return (frames[-1].filename, frames[-1].lineno) if frames else None
