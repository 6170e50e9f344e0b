"""The recorder behind `trace`: counts every floating tensor that an op reads or writes, on its device, and keeps which
op wrote it. Nothing is copied to the host until `Recorder.table` is called."""

import threading

import torch
from torch.nn.parameter import UninitializedTensorMixin

from safeops.core import private_torch
from safeops.debug.common import scan
from safeops.debug.common.facts import facts, is_plain, run, tensors_in
from safeops.debug.common.memory import Memory
from safeops.debug.common.op import Op, Slot
from safeops.debug.common.products import factors
from safeops.debug.common.source import called_by, user_frames
from safeops.debug.trace.block import PICKS, ROWS, Block

_VALUELESS = UninitializedTensorMixin, private_torch.FakeTensor  # tensors without values: LazyLinear's, fake ones
_PLAIN = frozenset([torch.Tensor, torch.nn.Parameter, torch.nn.Buffer])


class Recorder(private_torch.TorchDispatchMode):
    """Watches all ops of this thread and of the autograd engine's threads. Calls `after(op)` after each op."""

    def __init__(self, modules, after):
        super().__init__()
        self.modules, self.after = modules, after
        self.lock = threading.RLock()
        self.blocks, self.open, self.memory = [], {}, Memory()
        self.clear()

    def clear(self):
        """Forget what was recorded; memory blocks are kept and zeroed."""
        self.memory.clear()
        self.ops, self.by_sequence = [], {}
        self.meta = []  # for each row: (shape, dtype, device, the op that wrote it or None)
        self.places = []  # for each row: (block, row in the block)
        for block in self.open.values():
            block.clear()
        self.blocks = list(self.open.values())
        self.peek = private_torch.next_sequence()

    def __enter__(self):
        self.peek = private_torch.next_sequence()
        return super().__enter__()

    def table(self):
        """The counts of all rows, in order, on the CPU: one transfer for each block (ROWS rows of one device)."""
        parts = [block.counts[: block.used].cpu() for block in self.blocks]
        index = {id(block): i for i, block in enumerate(self.blocks)}
        starts = [0]
        for part in parts:
            starts.append(starts[-1] + len(part))
        order = torch.tensor([starts[index[id(block)]] + row for block, row in self.places], device="cpu")
        return torch.cat(parts)[order] if parts else torch.zeros(0, scan.COLUMNS, dtype=torch.int64)

    def picked(self, place):
        """The values kept at `place`, a (block, row). At op.pick: the operands' values at the result's first
        non-finite element."""
        block, row = place
        return block.picks[row].tolist()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if types and not _PLAIN.issuperset(types):
            if not any(issubclass(kind, _VALUELESS) for kind in types):
                return NotImplemented  # a subclass unwraps itself first; its inner ops come here
            return func(*args, **kwargs)
        if not isinstance(func, private_torch.OpOverload):
            return func(*args, **kwargs)
        op_facts = facts(func)
        if op_facts.returns_alias:
            result = func(*args, **kwargs)
            with self.lock:
                self._inherit(args, result)
            return result
        with self.lock:
            op = self._before(func, op_facts, args, kwargs)
        result = run(func, args, kwargs)
        with self.lock:
            self._behind(op, args, kwargs, result)
        self.after(op)
        return result

    # ---- before the op: its operands as they are, where it was called from

    def _before(self, func, op_facts, args, kwargs):
        op = Op()
        op.func, op.facts, op.pick = func, op_facts, None
        node = private_torch.current_node()
        op.node = op.sequence = None
        if node is not None:
            op.node, op.sequence = node.name(), private_torch.sequence(node)
        op.frames, op.in_engine, op.through = user_frames(3)
        op.module = self.modules.path()
        op.root = op_facts.name == "ones_like" and called_by(private_torch.MAKES_GRADIENTS, 3)
        op.scaled = op_facts.name == "mul" and called_by("scale", 3, "grad_scaler.py")
        # A differentiable op's node exists by now: the sequence numbers since the last op are this op's.
        peek = private_torch.next_sequence()
        op.differentiable = peek > self.peek
        for number in range(self.peek, peek):
            self.by_sequence[number] = op
        self.peek = peek
        op.inputs = {}  # id of the operand -> its row
        if not op_facts.valueless or op.root:
            read = (*args, *kwargs.values())
            if op_facts.unread:
                read = [x for i, x in enumerate(args) if all(i != place for place, _ in op_facts.unread)]
                read += [x for name, x in kwargs.items() if all(name != other for _, other in op_facts.unread)]
            operands = [x for x in tensors_in(read) if is_plain(x)]
            for operand, row in zip(operands, self._rows(operands)):
                op.inputs[id(operand)] = row
                if operand.requires_grad and operand.is_leaf:
                    self.memory.of(operand).leaf = True
        return op

    # ---- after the op: its results, and the arguments that may explain them

    def _behind(self, op, args, kwargs, result):
        op_facts = op.facts
        fresh = [x for x in tensors_in((result,)) if is_plain(x)]
        if op_facts.unfinished:
            fresh += [x for i, _ in op_facts.unread for x in tensors_in(args[i : i + 1]) if is_plain(x)]
        written, op.leaf, op.before = (), False, None
        if op_facts.writes:
            written = [args[i] if i < len(args) else kwargs.get(name) for i, name in op_facts.writes]
            written = {id(x): x for x in tensors_in(written) if is_plain(x)}
            fresh = list({**{id(x): x for x in fresh}, **written}.values())
        for x in fresh:
            storage = self.memory.of(x)
            op.leaf = op.leaf or storage.leaf
            storage.rows.clear()
            if written and x.nbytes < x.untyped_storage().nbytes():  # an earlier op wrote the rest of the storage
                op.before = storage.writer
            storage.writer = None if op_facts.valueless else op
        # Uninitialized memory has no values: garbage in it is no finding.
        # The results of a collective are counted by their first reader: they are not there yet.
        op.outputs = () if op_facts.valueless or op_facts.unfinished else self._rows(fresh)
        op.masked = op_facts.mask is not None and (*args, *[None] * op_facts.mask)[op_facts.mask] is not None
        # Products that the autograd engine computes itself are not meant as masks.
        op.met = self._met(op, args) if op_facts.product and (op.node is None or op.in_engine) else ()
        op.arguments, op.keywords = (), {}
        if (op_facts.pointwise or op_facts.constant) and len(op.outputs) == 1:
            block, row = self.places[op.outputs[0]]
            if not block.finite(row):
                op.arguments, op.keywords, operands = self._template(op, args, kwargs, written)
                if 0 < len(operands) <= PICKS and all(x.device == block.device for x in operands):
                    op.pick = (block, row)
                    scan.pick(block.picks, row, block.counts, row, operands, fresh[0].shape)
        elif op_facts.scaler:
            op.arguments, op.keywords, _ = self._template(op, args, kwargs, written)
        op.index = len(self.ops)
        if op.inputs or op.outputs:
            self.ops.append(op)

    def _met(self, op, args):
        """Returns [(row of a factor, place)]: picked(place)[0] is the value that multiplied the factor's first bad
        element. Only for factors that a mask may multiply: no parameters, and the other factor needs no gradient."""
        kept = []
        for x, read, other in factors(op.facts.name, args):
            row = op.inputs.get(id(x))
            learned = other.requires_grad or x.requires_grad and x.is_leaf
            if row is None or learned or x.is_complex() or other.is_complex() or x.device != other.device:
                continue
            if self.places[row][0].finite(self.places[row][1]):
                continue
            block = self._block(x.device, 1)
            scan.count(block.counts, block.used, [read])  # (again: x's own row counts x before it is broadcast)
            scan.pick(block.picks, block.used, block.counts, block.used, [other], read.shape)
            kept.append((row, (block, block.used)))
            block.used += 1
        return kept

    def _template(self, op, args, kwargs, overwritten):
        """Returns (args and kwargs with Slots in place of tensors, and the tensors whose values can be picked)."""
        operands = []

        def slot(x):
            if not isinstance(x, torch.Tensor):
                return tuple(map(slot, x)) if isinstance(x, (list, tuple)) else x
            pick = None
            if x.dtype.is_floating_point and id(x) in op.inputs and id(x) not in overwritten:
                pick = len(operands)
                operands.append(x)
            return Slot(op.inputs.get(id(x)), pick)

        arguments = tuple(map(slot, args))
        return arguments, {name: slot(x) for name, x in kwargs.items()}, operands

    # ---- memory

    def _rows(self, tensors):
        """The row of each tensor in the table of counts. A tensor without one gets a row and is counted now, up to 64
        tensors of a device per launch."""
        rows, new = [], {}
        for x in tensors:
            storage = self.memory.of(x)
            key = (x.storage_offset(), x.shape, x.stride(), x.dtype)
            row = storage.rows.get(key)
            if row is None:
                row = storage.rows[key] = len(self.meta)
                if storage.writer is not None and storage.writer.facts.unfinished:
                    storage.writer.outputs = (*storage.writer.outputs, row)
                self.meta.append((tuple(x.shape), x.dtype, str(x.device), storage.writer))
                self.places.append(None)
                new.setdefault(x.device, []).append((row, x))
            rows.append(row)
        for device, counted in new.items():
            for begin in range(0, len(counted), 64):
                self._count(device, counted[begin : begin + 64])
        return rows

    def _count(self, device, counted):
        block = self._block(device, len(counted))
        for i, (row, _) in enumerate(counted):
            self.places[row] = (block, block.used + i)
        scan.count(block.counts, block.used, [x for _, x in counted])
        block.used += len(counted)

    def _block(self, device, rows):
        """A block on `device` with room for `rows` more rows."""
        block = self.open.get(device)
        if block is None or block.used + rows > ROWS:
            block = self.open[device] = Block(device)
            self.blocks.append(block)
        return block

    def _inherit(self, args, result):
        """Let a view that has all elements of its base share the base's row of counts. A view of some elements gets
        its own when an op reads it."""
        base = args[0] if args else None
        if base is None or not is_plain(base):
            return
        row = self.memory.of(base).rows.get((base.storage_offset(), base.shape, base.stride(), base.dtype))
        if row is None:
            return
        for x in tensors_in((result,)):
            if x.numel() == base.numel() and x.dtype == base.dtype:
                key = (x.storage_offset(), x.shape, x.stride(), x.dtype)
                self.memory.of(x).rows.setdefault(key, row)
