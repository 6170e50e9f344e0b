"""Why an op made a value that is not finite, and what to write instead."""

import math

import torch

from safeops.debug.common import advice
from safeops.debug.common.op import Slot
from safeops.debug.common.source import line

_SINGULAR = frozenset("log log2 log10 log1p sqrt acos asin acosh atanh".split())
_SINGULAR_AT_ZERO = frozenset("addcdiv div reciprocal rsqrt pow".split())
_LINEAR = frozenset("add sub mul sum copy clone _to_copy cat stack lerp".split())  # of finite operands they make no NaN


def explain(step, op, output, came_in, values):
    """Returns (kind, why, what to write instead)."""
    name = op.facts.name
    source = step.forward_of(op)
    instead = advice.of_logarithm(source.facts.name, _makers(step, source))
    instead = instead or advice.advice(name, None if op.in_engine else op.node)  # in_engine: a user's backward
    if op.facts.unfinished and output is not None and not came_in:
        return _brought(step, op, output)
    if came_in and op.node and op.node.endswith("AccumulateGrad"):
        return "came in", "the parameter's .grad held it before this step", advice.STALE
    if came_in:
        counts = step.counts(came_in[0])
        if step.is_times_mask(op):
            number = "NaN" if counts.nan else "inf"
            why = f"its input held {counts.kinds()}, {_source(step, came_in[0])}, and {number} * 0 is NaN"
            return "came in", f"{why}: a product does not mask", advice.FORWARD["mul"]
        if output is None and op.facts.selects:
            why = f"its input held {counts.kinds()}, {_source(step, came_in[0])}: masked after the arithmetic: its"
            return "came in", f"{why} gradient is NaN * 0; mask the operands before", advice.LATE
        if op.masked and counts.numel > 1:  # a safeops op does not read what its mask leaves out
            why = f"its input held {counts.kinds()}, {_source(step, came_in[0])}, and the mask keeps some of it"
            return "came in", why, advice.INVERTED
        if step.writer(came_in[0]) is None:
            why = f"no op that was watched made this: a tensor with {counts.kinds()} came in"
            return "came in", why, advice.CAME_IN
        why = f"its input held {counts.kinds()}, {_source(step, came_in[0])}; {name} made NaN of it"
        return "undefined", why, instead or advice.CAME_IN
    counts = step.counts(output)
    if op.on_purpose():
        return "came in", f"{name} wrote {counts.kinds()}, and nothing hid it", advice.CAME_IN
    if _written_in_between(step, op, counts, values):
        why = f"{name} makes no {counts.kinds()} of operands that were counted as finite: something that no op shows"
        return "came in", f"{why} wrote them in between (another rank's collective, say)", advice.CAME_IN
    wide = _in_double(op, values) if op.pick else None
    if wide is not None and not math.isfinite(wide):
        return "undefined", f"{_call(op, values)} is {wide:g}: there is no finite value for it", instead
    largest = torch.finfo(counts.dtype).max
    limit = f"{counts.type}, whose largest number is {largest:g}"
    if wide is not None:
        why = f"{_call(op, values)} is {wide:g}, too large for {limit}"
    else:
        top = max((step.counts(row).largest for row in op.inputs.values()), default=0)
        why = f"its operands are finite (at most {top:g}), and its result does not fit {limit}"
        if name in ("var", "std", "var_mean", "std_mean") and counts.nan:
            return "undefined", "there are not more elements than correction=", instead
        if _singular(step, op) or not _may_overflow(step, op, counts, top):
            return "undefined", f"{name} has no finite value for these operands (of at most {top:g})", instead
    size = top if wide is None else abs(wide)
    if _handled(step, op, counts) and size / step.scale() <= torch.finfo(counts.dtype).max:
        why += f"; the scale was {step.scale():g}"
        forward = step.recorder.by_sequence.get(op.sequence, op)
        return "scaled overflow", why, advice.SCALED_LOSS if forward.scaled else advice.SCALED
    return "overflow", why, advice.OVERFLOW if name.startswith("mul") else instead or advice.OVERFLOW


def _brought(step, op, output):
    """The cause of a NaN or inf in the result of a collective whose operands on this rank are finite."""
    counts, top = step.counts(output), max((step.counts(row).largest for row in op.inputs.values()), default=0)
    limit = torch.finfo(counts.dtype).max
    if not counts.nan and "reduce" in op.facts.name and top > limit / 65536:
        why = f"its operands are finite on this rank (at most {top:g}), and the sum over the ranks does not fit"
        return "overflow", f"{why} {counts.type}, whose largest number is {limit:g}", advice.OVERFLOW
    return "came in", f"its operands are finite on this rank: {counts.kinds()} came from another rank", advice.CAME_IN


def _written_in_between(step, op, counts, values):
    """True if the operands were finite when they were counted, and not when the op read them."""
    if values:
        return not all(math.isfinite(values[slot.pick]) for slot in op.slots() if slot.pick is not None)
    top = max((step.counts(row).largest for row in op.inputs.values()), default=0)
    plain = op.facts.name.removeprefix("_foreach_").rstrip("_") in _LINEAR
    return bool(op.inputs) and plain and not _may_overflow(step, op, counts, top)


def _singular(step, op):
    """True if the op cannot have overflowed: its function never does, or has a pole at 0 and an operand holds a 0. For
    ops whose operands' values were not kept."""
    name = op.facts.name.removeprefix("_foreach_").rstrip("_")
    zero = any(step.counts(row).zero for row in op.inputs.values())
    return name in _SINGULAR or name in _SINGULAR_AT_ZERO and zero


def _may_overflow(step, op, counts, top):
    """True if a sum of products of the operands, of magnitude up to `top`, could leave the dtype's range."""
    terms = max((step.counts(row).numel for row in op.inputs.values()), default=1)
    return max(top, 1.0) ** 2 * terms > torch.finfo(counts.dtype).max


def _makers(step, op):
    """The names of up to 4 ops that made the op's first operand, the last first."""
    names = []
    while len(names) < 4 and op.inputs and (op := step.writer(next(iter(op.inputs.values())))):
        names.append(op.facts.name)
    return names


def _source(step, row):
    """Where the bad values of a row came from: 'from full at train.py:3'."""
    while (maker := step.writer(row)) is not None and (earlier := step.bad_inputs(maker)):
        row = earlier[0]
    if maker is None:
        return "from a tensor that came in so"
    return f"from {maker.facts.name}" + (f" at {line(maker.frames[0]).short}" if maker.frames else "")


def _handled(step, op, counts):
    """True if GradScaler handles this overflow: it is a scaled value in fp16, and the scale can still fall."""
    scale = step.scale()
    return bool(op.node or op.scaled) and scale is not None and scale > 1 and counts.dtype is torch.float16


class _Unknown(Exception):
    """An operand's value was not kept."""


def _in_double(op, values):
    """The op's true value: computed in fp64 from the picked values. None if it cannot be computed."""

    def fill(x):
        if isinstance(x, Slot):
            if x.pick is None:
                raise _Unknown
            return torch.tensor(values[x.pick], dtype=torch.float64)
        if isinstance(x, tuple):
            return [fill(y) for y in x]
        return torch.float64 if isinstance(x, torch.dtype) else x

    try:
        result = op.func(*(fill(x) for x in op.arguments), **{name: fill(x) for name, x in op.keywords.items()})
    except (_Unknown, RuntimeError, TypeError, ValueError, NotImplementedError):
        return None
    return result.item() if isinstance(result, torch.Tensor) and result.numel() == 1 else None


def _call(op, values):
    """The call with the picked values, as text: 'div(1, 0)'."""
    shown = []
    for x in op.arguments:
        if isinstance(x, Slot):
            shown.append("..." if x.pick is None else f"{values[x.pick]:g}")
        elif isinstance(x, (int, float)) and not isinstance(x, bool):
            shown.append(f"{x:g}")
    return f"{op.facts.name}({', '.join(shown)})"
