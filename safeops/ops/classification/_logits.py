"""Softcap and temperature: a loss reads a logit x as softcap tanh(x / softcap) / temperature."""

import torch

from safeops.core import check
from safeops.core.dtypes import LARGEST, SMALLEST
from safeops.core.symbolic import as_float


def is_zero(number):
    """True if a number is 0. False for a tensor, which stands for a symbolic number of a trace."""
    return not isinstance(number, torch.Tensor) and number == 0


def shaped(x, temperature, softcap, dtype=None):
    """Logits with softcap (0: none) and temperature, in `dtype`; x as it is where neither changes it. A logit of -inf
    stays -inf: the class does not exist."""
    if is_zero(softcap) and is_zero(temperature - 1):
        return x
    x = x.to(dtype or x.dtype)
    if not is_zero(softcap):
        x = torch.where(x == float("-inf"), float("-inf"), capped(x, softcap))
    return x if is_zero(temperature - 1) else x / temperature


def capped(x, softcap):
    """softcap tanh(x / softcap). A tensor softcap may turn out to be 0, no cap, when the traced program runs."""
    if not isinstance(softcap, torch.Tensor):
        return softcap * torch.tanh(x / softcap)
    cap = torch.where(softcap == 0, 1, softcap)
    return torch.where(softcap == 0, x, cap * torch.tanh(x / cap))


def slope_of_shape(x, temperature, softcap):
    """The derivative of `shaped` at x."""
    return (1 - torch.tanh(x / softcap).square() if softcap else 1) / temperature


def as_floats(name, temperature, softcap):
    """Returns (temperature, softcap) as the raw ops take them: floats, with softcap 0 for None."""
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
