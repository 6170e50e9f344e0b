"""From counts to a cause: which op made the first value that is not finite and that matters."""

from safeops.debug.common import advice, scan
from safeops.debug.common.op import Slot
from safeops.debug.common.source import line
from safeops.debug.trace.report import Frame, Operand, Report
from safeops.debug.trace.why import explain


class Step:
    """The ops of one step and the counts of what they read and wrote."""

    def __init__(self, recorder, results):
        self.recorder, self.ops, self.results = recorder, recorder.ops, results
        self.backward = any(op.root or op.node for op in self.ops)
        self.table = recorder.table()
        bad = self.table[:, scan.NAN : scan.NEGATIVE_INF + 1].sum(1).gt(0)
        self.any_bad = bool(bad.any())
        if self.any_bad:
            self.bad, self.nan = bad.tolist(), self.table[:, scan.NAN].gt(0).tolist()

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
        return self.is_bad(op) and not self.bad_inputs(op) and not op.on_purpose()

    def forward_of(self, op):
        """Itself, or the forward op whose backward it is, where that is known."""
        return (self.recorder.by_sequence.get(op.sequence) if op.node and not op.in_engine else None) or op

    def has_nan(self, rows):
        return any(self.nan[row] for row in rows)

    def counts(self, row):
        return scan.read(self.table[row], *self.recorder.meta[row][:3])

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
        ops = sorted(reached.values(), key=lambda entry: entry[0].index)
        for op, row, what in ops:
            if self.makes_bad(op):
                return op, row, what
        # Only what came in, or was written on purpose: the op that made NaN of it.
        for op, row, what in ops:
            if self.has_nan(op.outputs) and not self.has_nan(op.inputs.values()) and not op.on_purpose():
                return op, row, what
        # Finite, and of a gradient that is not: the operands of what was selected too late held it.
        if all(what != "the loss" for _, _, what in reached.values()):
            read = {row for op, _, _ in ops for row in self.bad_inputs(op)}
            late = next((op for op in self.ops if self.selects_late(op, read)), None)
            if late is not None:
                return late, self.bad_inputs(late)[0], ops[-1][2]
        # The value came in with the data, and a product with a mask was to remove it.
        for op, row, what in ops:
            if self.is_times_mask(op):
                return op, row, what
        if outside:
            row, what = min(outside)
            users = [op for op in self.ops if row in op.inputs.values()]
            return next(filter(self.is_bad, users), users[0]), row, what
        return ops[0] if ops else None

    def is_times_mask(self, op):
        """True for an op that multiplies a value that is not finite by a mask that is 0 there, and so keeps it."""
        return any(self.bad[row] and self.recorder.picked(place)[0] == 0 for row, place in op.met)

    def selects_late(self, op, read):
        """True for an op that hides values of the rows `read`, which the gradient of the op before it meets again."""
        if not op.facts.selects or op.node and not op.in_engine or self.is_bad(op):
            return False
        rows = [row for row in self.bad_inputs(op) if (maker := self.writer(row)) and maker.differentiable]
        for row in rows:  # and those that are found on the way
            if row in read:
                return True
            maker = self.writer(row)
            rows += [r for r in self.bad_inputs(maker) if r not in rows] if maker else []
        return False

    def explained(self, op):
        """(its first bad row, its operands' values there, (kind, why, what to write instead))."""
        output = next((r for r in op.outputs if self.bad[r]), None)
        came_in = self.bad_inputs(op)
        values = self.recorder.picked(op.pick) if op.pick and not came_in else []
        return output, values, explain(self, op, output, came_in, values)

    def report(self, number):
        """The first thing that went wrong in step `number`, or None."""
        if not self.any_bad:
            return None
        sinks = list(self.sinks())
        # A loss that is not finite came before any gradient, which may have gone wrong for a reason of its own.
        result = self.origin([sink for sink in sinks if sink[2] == "the loss"] or sinks)
        if result is None:
            return None
        op, row, reached = result
        output, values, (kind, why, instead) = self.explained(op)
        source = self.forward_of(op)
        lines = [line(pair) for pair in source.frames]
        # or one of torch's losses that multiplies by a 0 inside
        times_mask = instead == advice.FORWARD["mul"] and source.facts.name.startswith("mul")
        if (kind in ("undefined", "overflow") or times_mask) and lines:
            instead = advice.of_call(lines[0], source.facts, or_line=not times_mask) or instead
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
            frames=[self.frame(op) for op in self._before(op)],
        )

    # ---- what to show

    def operands(self, op, values):
        picks = {slot.row: slot.pick for slot in op.slots() if slot.pick is not None}
        return [
            Operand(self.counts(row), values[picks[row]] if values and row in picks else None)
            for row in op.inputs.values()
        ]

    def _before(self, last):
        """The ops up to this one, without first values: what torch.nn.init computed, and writes that read nothing."""
        for op in self.ops[: last.index + 1]:
            if op is last or op.outputs and op.through != "init" and not (op.facts.writes and not op.inputs):
                yield op

    def frame(self, op):
        row = next((row for row in op.outputs if self.bad[row]), op.outputs[0])
        forward = self.forward_of(op)
        place = forward.frames and forward.frames[0]
        return Frame(op.index, op.facts.name, op.node, forward.module, place, self.counts(row))
