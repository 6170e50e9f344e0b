"""Logits as a loss reads them: softcap tanh(x / softcap), then over the temperature."""

import torch

from safeops.core import check
from safeops.core.dtypes import LARGEST, SMALLEST
from safeops.core.symbolic import as_float


def is_zero(number):
    """False of a tensor, which stands for a number that a trace knows by a symbol."""
    return not isinstance(number, torch.Tensor) and number == 0


def shaped(x, temperature, softcap, dtype=None):
    """The logits as a loss reads them, in `dtype` where that changes them; softcap: 0 for none. A class of -inf does
    not exist, and stays at -inf."""
    if is_zero(softcap) and is_zero(temperature - 1):
        return x
    x = x.to(dtype or x.dtype)
    if not is_zero(softcap):
        x = torch.where(x == float("-inf"), float("-inf"), capped(x, softcap))
    return x if is_zero(temperature - 1) else x / temperature


def capped(x, softcap):
    """softcap tanh(x / softcap). Of a tensor it is known only when the trace runs whether it is 0, which is no cap."""
    if not isinstance(softcap, torch.Tensor):
        return softcap * torch.tanh(x / softcap)
    cap = torch.where(softcap == 0, 1, softcap)
    return torch.where(softcap == 0, x, cap * torch.tanh(x / cap))


def slope_of_shape(x, temperature, softcap):
    """The derivative of `shaped`."""
    return (1 - torch.tanh(x / softcap).square() if softcap else 1) / temperature


def as_floats(name, temperature, softcap):
    """(temperature, softcap) as the raw ops take them: a softcap of None is 0."""
    if temperature.__class__ is not float or not SMALLEST <= temperature <= LARGEST:
        validate_logits(name, temperature, None)
        temperature = as_float(temperature)
    if softcap is None:
        return temperature, 0.0
    validate_logits(name, 1.0, softcap)
    return temperature, as_float(softcap)


def validate_logits(name, temperature, softcap):
    for key, value in {"temperature": temperature, "softcap": softcap}.items():
        if key == "temperature" or value is not None:
            check.number(name, key, value, above=0, maximum=LARGEST)
