"""From counts to a cause: find the op that made the first NaN or inf that reached a loss, gradient or parameter."""

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
        """The op that wrote the row's tensor. If the tensor holds NaN or inf, and several ops wrote parts of it, the
        last op that wrote a part with NaN or inf."""
        last = op = self.recorder.meta[row][3]
        while self.bad[row] and op is not None and not self.is_bad(op):
            op = op.before
        return op or last

    def bad_inputs(self, op):
        return [row for row in op.inputs.values() if self.bad[row]]

    def is_bad(self, op):
        return any(self.bad[row] for row in op.outputs)

    def makes_bad(self, op):
        """True if the op read finite values and wrote NaN or inf, not on purpose."""
        return self.is_bad(op) and not self.bad_inputs(op) and not op.on_purpose()

    def forward_of(self, op):
        """The forward op whose backward `op` is, if that is known; else `op` itself."""
        return (self.recorder.by_sequence.get(op.sequence) if op.node and not op.in_engine else None) or op

    def has_nan(self, rows):
        return any(self.nan[row] for row in rows)

    def counts(self, row):
        return scan.read(self.table[row], *self.recorder.meta[row][:3])

    def scale(self):
        """GradScaler's scale in this step, or None if it did not run."""
        for op in self.ops:
            if op.facts.scaler and op.arguments and isinstance(op.arguments[-1], Slot):
                row = op.arguments[-1].row
                inverse = self.counts(row).largest if row is not None else 0
                if inverse == 1:  # then GradScaler only checked: a fused optimizer unscales by itself
                    return next((self.counts([*op.inputs.values()][-1]).largest for op in self.ops if op.scaled), 1)
                return 1 / inverse if inverse else None
        return None

    # ---- what matters

    def sinks(self):
        """Yield (op, row, what) for each loss, gradient and parameter that is not finite; in a step without backward
        and if `results`, for each result that no other op reads."""
        # A gradient is final when no other backward op reads it; the scaler and the optimizer may read it.
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
                continue  # the scaler told this fused optimizer to update nothing
            row = next(row for row in op.outputs if self.bad[row])
            if op.node:
                yield op, row, "a gradient"
            elif op.leaf:
                yield op, row, "a parameter"
            elif not self.backward:
                if self.results:
                    yield op, row, "a result"
            # (a root op is the ones_like with which backward() begins; backward(gradient=...) runs none. If one ran,
            # the other scalars are metrics.)
            elif op.differentiable and not rooted and self.counts(row).numel == 1:
                yield op, row, "the loss"

    # ---- where it came from

    def origin(self, sinks):
        """Returns (op, row, what it reached): the earliest op on the way to a sink that read finite values and wrote
        NaN or inf, or the next best."""
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
        # The bad values came in or were written on purpose: take the op that made NaN of inf.
        for op, row, what in ops:
            if self.has_nan(op.outputs) and not self.has_nan(op.inputs.values()) and not op.on_purpose():
                return op, row, what
        # Only gradients are bad: a select in the forward pass hid bad values too late, after the arithmetic on them.
        if all(what != "the loss" for _, _, what in reached.values()):
            read = {row for op, _, _ in ops for row in self.bad_inputs(op)}
            late = next((op for op in self.ops if self.selects_late(op, read)), None)
            if late is not None:
                return late, self.bad_inputs(late)[0], ops[-1][2]
        # The value came in with the data, and a product with a mask failed to remove it.
        for op, row, what in ops:
            if self.is_times_mask(op):
                return op, row, what
        if outside:
            row, what = min(outside)
            users = [op for op in self.ops if row in op.inputs.values()]
            return next(filter(self.is_bad, users), users[0]), row, what
        return ops[0] if ops else None

    def is_times_mask(self, op):
        """True if the op multiplies NaN or inf by a mask's 0, whose product is NaN: the mask removes nothing."""
        return any(self.bad[row] and self.recorder.picked(place)[0] == 0 for row, place in op.met)

    def selects_late(self, op, read):
        """True if the op is a select (where, masked_fill) that hides NaN or inf, which is in a row of `read` or was
        computed from such a row. read: the rows with NaN or inf that the backward ops read."""
        if not op.facts.selects or op.node and not op.in_engine or self.is_bad(op):
            return False
        rows = [row for row in self.bad_inputs(op) if (maker := self.writer(row)) and maker.differentiable]
        for row in rows:  # the loop also visits the rows that it appends
            if row in read:
                return True
            maker = self.writer(row)
            rows += [r for r in self.bad_inputs(maker) if r not in rows] if maker else []
        return False

    def explained(self, op):
        """Returns (the row of the op's first result with NaN or inf, or None; the operands' values at its first such
        element, or []; (kind, why, what to write instead))."""
        output = next((r for r in op.outputs if self.bad[r]), None)
        came_in = self.bad_inputs(op)
        values = self.recorder.picked(op.pick) if op.pick and not came_in else []
        return output, values, explain(self, op, output, came_in, values)

    def report(self, number):
        """The first thing that went wrong in step `number`, or None."""
        if not self.any_bad:
            return None
        sinks = list(self.sinks())
        # A bad loss comes before any gradient, and a gradient may be bad for another reason.
        result = self.origin([sink for sink in sinks if sink[2] == "the loss"] or sinks)
        if result is None:
            return None
        op, row, reached = result
        output, values, (kind, why, instead) = self.explained(op)
        source = self.forward_of(op)
        lines = [line(pair) for pair in source.frames]
        # the product may also be inside a torch loss that multiplies by 0
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
        """Yield the ops up to `last`, without initial values: ops of torch.nn.init, and writes that read nothing."""
        for op in self.ops[: last.index + 1]:
            if op is last or op.outputs and op.through != "init" and not (op.facts.writes and not op.inputs):
                yield op

    def frame(self, op):
        row = next((row for row in op.outputs if self.bad[row]), op.outputs[0])
        forward = self.forward_of(op)
        place = forward.frames and forward.frames[0]
        return Frame(op.index, op.facts.name, op.node, forward.module, place, self.counts(row))
