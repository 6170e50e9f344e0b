"""From counts to a cause: which op made the first value that is not finite and that matters, and why."""

import math

import torch

from safeops.debug import _advice, _scan
from safeops.debug._record import Slot
from safeops.debug._report import Frame, Operand, Report
from safeops.debug._source import line

_SINGULAR = frozenset("log log2 log10 log1p sqrt acos asin acosh atanh".split())
_SINGULAR_AT_ZERO = frozenset("div reciprocal rsqrt pow".split())

_INITIALIZERS = frozenset("uniform_ normal_ fill_ zero_ copy_ bernoulli_ random_ erfinv_ mul_ add_ clamp_".split())
_LINEAR = frozenset("add sub mul sum copy clone _to_copy cat stack lerp".split())  # NaN is none of their making


class Step:
    """The ops of one step and the counts of what they read and wrote."""

    def __init__(self, recorder, results):
        self.recorder, self.ops, self.results = recorder, recorder.ops, results
        self.backward = any(op.root or op.node for op in self.ops)
        self.table = recorder.table()
        bad = self.table[:, _scan.NAN : _scan.NEGATIVE_INF + 1].sum(1).gt(0)
        self.any_bad = bool(bad.any())
        if self.any_bad:
            self.bad, self.nan = bad.tolist(), self.table[:, _scan.NAN].gt(0).tolist()

    def writer(self, row):
        """Who wrote these values; where they are bad and were written piece by piece, the last bad piece."""
        last = op = self.recorder.meta[row][3]
        while self.bad[row] and op is not None and not self.is_bad(op):
            op = op.before
        return op or last

    def bad_inputs(self, op):
        return [row for row in op.inputs.values() if self.bad[row]]

    def is_bad(self, op):
        return any(self.bad[row] for row in op.outputs)

    def makes_bad(self, op):
        """It read finite values and wrote others, and not on purpose."""
        return self.is_bad(op) and not self.bad_inputs(op) and not _on_purpose(op)

    def forward_of(self, op):
        """Itself, or the forward op whose backward it is, where that is known."""
        return (self.recorder.by_sequence.get(op.sequence) if op.node and not op.in_engine else None) or op

    def has_nan(self, rows):
        return any(self.nan[row] for row in rows)

    def counts(self, row):
        return _scan.read(self.table[row], *self.recorder.meta[row][:3])

    # ---- what matters

    def sinks(self):
        """(op, row, what it is): losses, gradients and parameters that are not finite; without a backward pass, and if
        `results`, every result that nothing went on with."""
        # A gradient is final when no other backward op reads it, whatever the scaler and the optimizer do with it.
        readers = [op for op in self.ops if op.outputs]
        consumed = {id(self.writer(row)) for op in readers for row in op.inputs.values()}
        consumed_backward = {id(self.writer(row)) for op in readers if op.node for row in op.inputs.values()}
        rooted = any(op.root for op in self.ops)
        for op in self.ops:
            if op.root:
                for row in self.bad_inputs(op):
                    yield self.writer(row), row, "the loss"
            last = id(op) not in (consumed_backward if op.node else consumed)
            if not op.outputs or not last or not self.is_bad(op) or op.facts.scaler:
                continue
            if op.facts.fused and self.bad_inputs(op) and self.scale() is not None:
                continue  # a fused optimizer that the scaler told to update nothing
            row = next(row for row in op.outputs if self.bad[row])
            if op.node:
                yield op, row, "a gradient"
            elif op.leaf:
                yield op, row, "a parameter"
            elif not self.backward:
                if self.results:
                    yield op, row, "a result"
            # backward(gradient=...) makes no root; where there is one, other scalars are metrics
            elif op.differentiable and not rooted and self.counts(row).numel == 1:
                yield op, row, "the loss"

    # ---- where it came from

    def origin(self, sinks):
        """(op, row, what it reached): the earliest op behind a sink that read finite values and wrote others."""
        reached, outside = {}, []
        queue = list(sinks)
        while queue:
            op, row, what = queue.pop()
            if op is None:
                outside.append((row, what))
                continue
            if id(op) in reached:
                continue
            reached[id(op)] = (op, row, what)
            queue += [(self.writer(r), r, what) for r in self.bad_inputs(op)]
        ops = sorted(reached.values(), key=lambda found: found[0].index)
        for op, row, what in ops:
            if self.makes_bad(op):
                return op, row, what
        # Only what came in, or was written on purpose: the op that made NaN of it.
        for op, row, what in ops:
            if self.has_nan(op.outputs) and not self.has_nan(op.inputs.values()) and not _on_purpose(op):
                return op, row, what
        # What came in with the data: where a product with a mask was to remove it.
        for op, row, what in ops:
            if self.is_times_mask(op):
                return op, row, what
        if outside:
            row, what = min(outside)
            users = [op for op in self.ops if row in op.inputs.values()]
            return next(filter(self.is_bad, users), users[0]), row, what
        return ops[0] if ops else None

    def is_times_mask(self, op):
        """Whether it multiplies what is not finite by a mask that is 0 there, and so keeps it."""
        if op.facts.name.rstrip("_") != "mul" or op.node and not op.in_engine or not self.bad_inputs(op):
            return False
        slots = _slots(op)
        if any(slot.row is None for slot in slots):  # a bool or an integer
            return len(slots) == 2
        values = self.recorder.picked(op) if op.pick else []
        masks = [slot for slot in slots if slot.pick is not None and self.counts(slot.row).largest in (0, 1)]
        return any(values and values[slot.pick] == 0 for slot in masks)

    def report(self, number):
        """The first thing that went wrong in step `number`, or None."""
        if not self.any_bad:
            return None
        sinks = list(self.sinks())
        # A loss that is not finite came before any gradient, which may have gone wrong for a reason of its own.
        found = self.origin([sink for sink in sinks if sink[2] == "the loss"] or sinks)
        if found is None:
            return None
        op, row, reached = found
        output = next((r for r in op.outputs if self.bad[r]), None)
        came_in = self.bad_inputs(op)
        values = self.recorder.picked(op) if op.pick and not came_in else []
        kind, why, instead = self.explain(op, output, came_in, values)
        source = self.forward_of(op)
        lines = [line(pair) for pair in source.frames]
        if kind in ("undefined", "overflow") and lines:
            instead = _advice.of_call(lines[0], source.facts.name) or instead
        return Report(
            step=number,
            kind=kind,
            op=op.facts.name,
            node=op.node,
            phase="backward" if op.node and not op.in_engine else "forward",
            reached=reached,
            why=why,
            instead=instead,
            module=source.module,
            lines=lines,
            line_is_of="forward" if source is not op else "backward" if op.node and not op.in_engine else "op",
            inputs=self.operands(op, values),
            output=self.counts(output) if output is not None else None,
            scale=self.scale(),
            index=op.index,
            frames=[self.frame(op) for op in self.ops[: op.index + 1] if op.outputs and not _initializes(op)],
        )

    # ---- why

    def explain(self, op, output, came_in, values):
        """(kind, why, what to write instead)."""
        name = op.facts.name
        instead = _advice.advice(name, None if op.in_engine else op.node)  # in_engine: an op of the user's own
        if came_in and op.node and op.node.endswith("AccumulateGrad"):
            return "came in", "the parameter's .grad held it before this step", _advice.STALE
        if came_in:
            counts = self.counts(came_in[0])
            if self.is_times_mask(op):
                number = "NaN" if counts.nan else "inf"
                why = f"its input held {counts.kinds()}, {self.source(came_in[0])}, and {number} * 0 is NaN"
                return "came in", f"{why}: a product does not mask", _advice.FORWARD["mul"]
            if op.masked and counts.numel > 1:  # what it leaves out, an op of ours does not read
                why = f"its input held {counts.kinds()}, {self.source(came_in[0])}, and the mask keeps some of it"
                return "came in", why, _advice.INVERTED
            if self.writer(came_in[0]) is None:
                why = f"no op that was watched made this: a tensor with {counts.kinds()} came in"
                return "came in", why, _advice.CAME_IN
            why = f"its input held {counts.kinds()}, {self.source(came_in[0])}; {name} made NaN of it"
            return "undefined", why, instead or _advice.CAME_IN
        counts = self.counts(output)
        if _on_purpose(op):
            return "came in", f"{name} wrote {counts.kinds()}, and nothing hid it", _advice.CAME_IN
        if self.written_in_between(op, counts, values):
            why = (
                f"{name} makes no {counts.kinds()} of operands that were counted as finite: something that no op shows"
            )
            return "came in", f"{why} wrote them in between (another rank's collective, say)", _advice.CAME_IN
        wide = _in_double(op, values) if op.pick else None
        if wide is not None and not math.isfinite(wide):
            return "undefined", f"{_call(op, values)} is {wide:g}: there is no finite value for it", instead
        largest = torch.finfo(counts.dtype).max
        limit = f"{counts.type}, whose largest number is {largest:g}"
        if wide is not None:
            why = f"{_call(op, values)} is {wide:g}, too large for {limit}"
        else:
            top = max((self.counts(row).largest for row in op.inputs.values()), default=0)
            why = f"its operands are finite (at most {top:g}), and its result does not fit {limit}"
            if name in ("var", "std", "var_mean", "std_mean") and counts.nan:
                return "undefined", "there are not more elements than correction=", instead
            if self.singular(op) or not self.may_overflow(op, counts, top):
                return "undefined", f"{name} has no finite value for these operands (of at most {top:g})", instead
        size = top if wide is None else abs(wide)
        if self.handled(op, counts) and size / self.scale() <= torch.finfo(counts.dtype).max:
            why += f"; the scale was {self.scale():g}"
            forward = self.recorder.by_sequence.get(op.sequence, op)
            return "scaled overflow", why, _advice.SCALED_LOSS if forward.scaled else _advice.SCALED
        return "overflow", why, _advice.OVERFLOW if name.startswith("mul") else instead or _advice.OVERFLOW

    def written_in_between(self, op, counts, values):
        """The operands had been counted as finite, and were not any more when the op read them."""
        if values:
            return not all(math.isfinite(values[slot.pick]) for slot in _slots(op) if slot.pick is not None)
        top = max((self.counts(row).largest for row in op.inputs.values()), default=0)
        plain = op.facts.name.removeprefix("_foreach_").rstrip("_") in _LINEAR
        return bool(op.inputs) and plain and not self.may_overflow(op, counts, top)

    def singular(self, op):
        """Without the operand's value (it was overwritten): functions that overflow nowhere, or have met a zero."""
        name = op.facts.name.rstrip("_")
        zero = any(self.counts(row).zero for row in op.inputs.values())
        return name in _SINGULAR or name in _SINGULAR_AT_ZERO and zero

    def may_overflow(self, op, counts, top):
        """Products and sums of as many operands of this size could leave the dtype's range."""
        terms = max((self.counts(row).numel for row in op.inputs.values()), default=1)
        return max(top, 1.0) ** 2 * terms > torch.finfo(counts.dtype).max

    def source(self, row):
        """Where values that are not finite and were meant came from: 'from full at train.py:3'."""
        while (maker := self.writer(row)) is not None and (earlier := self.bad_inputs(maker)):
            row = earlier[0]
        if maker is None:
            return "from a tensor that came in so"
        return f"from {maker.facts.name}" + (f" at {line(maker.frames[0]).short}" if maker.frames else "")

    def scale(self):
        """GradScaler's scale in this step, if it was at work."""
        for op in self.ops:
            if op.facts.scaler and op.arguments and isinstance(op.arguments[-1], Slot):
                row = op.arguments[-1].row
                inverse = self.counts(row).largest if row is not None else 0
                if inverse == 1:  # also of a check alone, before a fused optimizer that unscales itself
                    return next((self.counts([*op.inputs.values()][-1]).largest for op in self.ops if op.scaled), 1)
                return 1 / inverse if inverse else None
        return None

    def handled(self, op, counts):
        """An overflow that is GradScaler's own doing: of a scaled value, in half, with a scale that can still fall."""
        scale = self.scale()
        return bool(op.node or op.scaled) and scale is not None and scale > 1 and counts.dtype is torch.float16

    # ---- what to show

    def operands(self, op, values):
        picks = {slot.row: slot.pick for slot in _slots(op) if slot.pick is not None}
        return [
            Operand(self.counts(row), values[picks[row]] if values and row in picks else None)
            for row in op.inputs.values()
        ]

    def frame(self, op):
        row = next((row for row in op.outputs if self.bad[row]), op.outputs[0])
        forward = self.forward_of(op)
        place = forward.frames and forward.frames[0]
        return Frame(op.index, op.facts.name, op.node, forward.module, place, self.counts(row))


def _initializes(op):
    """A parameter's first values."""
    return op.facts.name in _INITIALIZERS and (op.leaf or not op.inputs)


def _on_purpose(op):
    """A number that is not finite, written by the user: masked_fill(x, mask, -inf), full(n, nan)."""
    numbers = [x for x in (*op.arguments, *op.keywords.values()) if isinstance(x, float)]
    return op.facts.constant and any(not math.isfinite(x) for x in numbers)


def _slots(op):
    return [x for x in (*op.arguments, *op.keywords.values()) if isinstance(x, Slot)]


class _Unknown(Exception):
    """An operand whose value nobody kept."""


def _in_double(op, values):
    """The op on the picked values alone, in fp64: what the true value is."""

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
    """'div(1, 0)'."""
    shown = []
    for x in op.arguments:
        if isinstance(x, Slot):
            shown.append("..." if x.pick is None else f"{values[x.pick]:g}")
        elif isinstance(x, (int, float)) and not isinstance(x, bool):
            shown.append(f"{x:g}")
    return f"{op.facts.name}({', '.join(shown)})"
