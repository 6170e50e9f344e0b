"""The mode itself, and whether a thread is in it."""

import contextlib
import threading

from torch.overrides import TorchFunctionMode

from safeops.core.private_torch import top_function_mode
from safeops.safe.rules import RULES


class _Mode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        rule = RULES.get(func)
        if rule is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return rule(func, args, kwargs or {})


# One for all, without a state: torch.compile takes a function under it for compiled, whichever safe mode it meets.
_MODE = _Mode()


class _Thread(threading.local):
    out = False


_thread = _Thread()


def enter():
    _MODE.__enter__()


def leave():
    if not _thread.out:
        _MODE.__exit__(None, None, None)
    _thread.out = False


def step_out():
    """Out of the mode until `step_in`, where there is nothing to replace: each call of torch costs a microsecond in it.
    False under a mode that was entered since: then this one stays."""
    if _thread.out or top_function_mode() is not _MODE:
        return False
    _MODE.__exit__(None, None, None)
    _thread.out = True
    return True


def step_in():
    """Back, if this thread has not left the mode in the meantime."""
    if _thread.out:
        _thread.out = False
        _MODE.__enter__()


@contextlib.contextmanager
def outside():
    out = step_out()
    try:
        yield
    finally:
        if out:
            step_in()
