"""Find the line of the user's code that is running. Every op asks for it, so it is kept as a bare code position, and
becomes text only for a report."""

import dataclasses
import linecache
import os
import sys
import sysconfig

import torch

from safeops.core import PACKAGE, private_torch

_OWN = (
    PACKAGE,
    os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), ""),
    os.path.join(os.path.dirname(os.path.normpath(PACKAGE)), "safeops_lint", ""),  # (the command's main is there)
)
_EXAMPLES = os.path.join(PACKAGE, "demo", "")  # part of the package, but treated as a user's code
_STDLIB = os.path.join(sysconfig.get_path("stdlib"), "")
_PACKAGES = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("purelib", "platlib"))
_TORCH = _OWN[1]
_THROUGH = {os.path.join(_TORCH, "nn", "init.py"): "init", os.path.join(_TORCH, "amp", "grad_scaler.py"): "scaler"}
_is_internal: dict[str, bool] = {}  # file name -> belongs to torch, to safeops or to Python itself


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of source: where it is, what it says, and the columns [begin, end) of the expression that ran."""

    file: str
    number: int
    function: str
    text: str = ""
    begin: int = 0
    end: int = 0

    def __str__(self):
        where = f"{_shorter(self.file)}:{self.number} in {self.function}"
        if not self.text.strip():
            return where
        lead = len(self.text) - len(self.text.lstrip())
        shown = f"{where}\n    {self.text.strip()}"
        if lead <= self.begin < self.end and self.end - self.begin < len(self.text.strip()):
            shown += f"\n    {' ' * (self.begin - lead)}{'^' * (self.end - self.begin)}"
        return shown

    @property
    def short(self):
        return f"{_shorter(self.file, 2)}:{self.number}"


def user_frames(depth=1, most=4):
    """Returns (frames, within, through).

    frames: the innermost `most` frames outside torch, safeops and the standard library, innermost first, as (code,
    offset) pairs. within: True if the autograd engine called these frames (a recomputation, a custom backward).
    through: "init" if they called torch.nn.init, "scaler" if they called GradScaler, else None."""
    frames, frame, within, through = [], sys._getframe(depth), False, None
    while frame is not None:
        code = frame.f_code
        name = code.co_filename
        internal = _is_internal.get(name)
        if internal is None:
            internal = _is_internal[name] = _internal(name)
        if not internal:
            frames.append((code, frame.f_lasti))
            if len(frames) == most:
                break
        elif not frames:
            through = through or _THROUGH.get(name)
        elif code.co_name == private_torch.RUNS_ENGINE:
            within = True
        elif code.co_name == "_run_code" and "runpy" in name:
            break  # runpy started this script: the frames further out are the starter's
        frame = frame.f_back
    return frames, within, through


def user_lines(depth=1, most=4):
    return [line(pair) for pair in user_frames(depth + 1, most)[0]]


def called_by(name, depth=1, file="", most=12):
    """True if a function `name`, in a file whose name ends with `file`, is among the innermost `most` frames."""
    frame = sys._getframe(depth)
    for _ in range(most):
        if frame is None:
            return False
        if frame.f_code.co_name == name and frame.f_code.co_filename.endswith(file):
            return True
        frame = frame.f_back
    return False


def line(pair):
    """The Line of a (code, offset) pair."""
    code, offset = pair
    number, end_number, begin, end = _position(code, offset)
    text = linecache.getline(code.co_filename, number).rstrip("\n")
    if end_number != number:  # the expression goes on in the next line
        end = len(text)
    return Line(code.co_filename, number, code.co_name, text, begin or 0, end or 0)


def traceback_frames(traceback):
    """The user's frames of an exception, innermost first, as (code, offset) pairs."""
    pairs = []
    while traceback is not None:
        if not _internal(traceback.tb_frame.f_code.co_filename):
            pairs.append((traceback.tb_frame.f_code, traceback.tb_lasti))
        traceback = traceback.tb_next
    return pairs[::-1]


def traceback_lines(traceback):
    return [line(pair) for pair in traceback_frames(traceback)]


def _position(code, offset):
    """(line, last line, first column, last column) of the instruction at `offset`; columns from Python 3.11."""
    if sys.version_info >= (3, 11):
        for i, position in enumerate(code.co_positions()):
            if i == offset // 2 and position[0] is not None:
                number, end_number, begin, end = position
                text = linecache.getline(code.co_filename, number)
                return number, end_number, *(len(text.encode()[: x or 0].decode(errors="ignore")) for x in (begin, end))
    number = code.co_firstlineno
    for begin, end, candidate in code.co_lines():
        if begin <= offset < end and candidate is not None:
            number = candidate
    return number, number, 0, 0


def _internal(name):
    if name.startswith(_EXAMPLES):
        return False
    if name.startswith(_PACKAGES):  # site-packages may lie inside the standard library's folder
        return name.startswith(_OWN)
    return name.startswith(_OWN) or name.startswith(_STDLIB) or name.startswith("<frozen")


def _shorter(name, parts=None):
    relative = os.path.relpath(name) if os.path.isabs(name) else name
    name = relative if len(relative) < len(name) else name
    return os.path.join(*name.split(os.sep)[-parts:]) if parts else name
