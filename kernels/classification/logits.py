"""Logits as a loss reads them: softcap tanh(x / softcap), then divided by the temperature."""

import triton
import triton.language as tl

from ..engine.math import expm1_nonpositive

AS_THEY_ARE, SCALED, CAPPED = map(tl.constexpr, range(3))  # LOGITS


def logits_kind(temperature, softcap):
    """A plan's constants: LOGITS, how logits are read, and how many parameters `shaped` takes for that."""
    kind = CAPPED if softcap else SCALED if temperature != 1 else AS_THEY_ARE
    return {"LOGITS": kind.value, "parameters": len(logits_numbers(temperature, softcap))}


def logits_numbers(temperature, softcap):
    """The parameters of `shaped`. Quotients are computed here: they would take a thread forty instructions."""
    if softcap:
        return 1 / temperature, softcap, 1 / softcap
    return (1 / temperature,) if temperature != 1 else ()


@triton.jit
def tanh(x):
    less = -expm1_nonpositive(-2 * tl.abs(x))
    value = less / (2 - less)
    return tl.where(x < 0, -value, value)


@triton.jit
def shaped(x, parameters, LOGITS: tl.constexpr):
    """Returns (the logit as the loss reads it, its derivative). A class of -inf does not exist, and stays at -inf."""
    slope = 1.0
    if LOGITS != AS_THEY_ARE:
        slope = tl.full([1, 1], parameters[0], x.dtype)
    if LOGITS == CAPPED:
        t = tanh(x * tl.full([1, 1], parameters[2], x.dtype))
        x = tl.where(x == float("-inf"), x, t * tl.full([1, 1], parameters[1], x.dtype) * slope)
        slope *= 1 - t * t
    elif LOGITS == SCALED:
        x *= slope
    return x, slope
