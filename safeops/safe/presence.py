"""The function mode that replaces calls, and whether a thread is in it."""

import contextlib
import types

import torch
from torch.overrides import TorchFunctionMode

from safeops.core.private_torch import function_mode_stack, is_tracing, top_function_mode
from safeops.safe.rules import RULES


class _Mode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        rule = RULES.get(func)
        if rule is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return rule(func, args, kwargs or {})


# One mode without state for all safe modes, so that torch.compile does not compile a function again for each.
_MODE = _Mode()


def enter():
    _MODE.__enter__()


def is_inside():
    return _MODE in function_mode_stack()


def leave():
    _MODE.__exit__(None, None, None)


@contextlib.contextmanager
def outside():
    """Leave the mode where nothing is to be replaced: each torch call costs a microsecond in it. If another function
    mode was entered after it, it stays."""
    if top_function_mode() is not _MODE:
        yield
        return
    leave()
    try:
        yield
    finally:
        enter()


@contextlib.contextmanager
def inside():
    enter()
    try:
        yield
    finally:
        leave()


def _opened(function):
    """The rule of a torch function whose inner calls are replaced too. The function first passes itself to the mode, so
    that its body runs outside the mode. The rule calls, inside the mode, a copy that does not pass itself."""
    unasked = {name: lambda *tensors: False for name in ("has_torch_function", "has_torch_function_variadic")}
    copy = types.FunctionType(function.__code__, function.__globals__ | unasked, function.__name__)
    copy.__defaults__, copy.__kwdefaults__ = function.__defaults__, function.__kwdefaults__

    def rule(func, args, kwargs):
        if torch.compiler.is_compiling() or is_tracing():
            return func(*args, **kwargs)
        with inside():
            return copy(*args, **kwargs)

    return rule


def _or_opened(rule, function):
    """A rule that calls the twin if `rule` takes the call, else torch's function as `_opened` does."""
    opened = _opened(function)
    return lambda func, args, kwargs: rule(lambda *args, **kwargs: opened(func, args, kwargs), args, kwargs)


# (nn.MultiheadAttention uses its softmax when it returns the weights)
RULES[torch.nn.functional.multi_head_attention_forward] = _opened(torch.nn.functional.multi_head_attention_forward)
_triplets = torch.nn.functional.triplet_margin_with_distance_loss
RULES[_triplets] = _or_opened(RULES[_triplets], _triplets)
