"""The body of a `for` loop over batches as a function, for a script that has no `recorder.step`."""

import ast
import dataclasses
import inspect
import opcode
import types

from safeops.debug.recorder.body import Body, Unreadable, _block, replace

_FOR_ITER = opcode.opmap["FOR_ITER"]


@dataclasses.dataclass(eq=False)
class Asker:
    """The code that asked a DataLoader for a batch. offset: of the instruction of its `for` loop, or None.

    The loop may ask through generators and iterators, whose frames lie between. is_direct: none that could change the
    batch, or give another one, lies between; tqdm's do neither."""

    frame: types.FrameType
    offset: int | None
    is_direct: bool

    @classmethod
    def of(cls, frame):
        is_direct = True
        while frame.f_back and (frame.f_code.co_flags & inspect.CO_GENERATOR or frame.f_code.co_name == "__next__"):
            is_direct = is_direct and frame.f_globals.get("__name__", "").startswith("tqdm.")
            frame = frame.f_back
        offset = frame.f_lasti
        return cls(frame, offset if offset >= 0 and frame.f_code.co_code[offset] == _FOR_ITER else None, is_direct)

    def is_same(self, other):
        """True if both are one loop."""
        return self.offset is not None and (self.frame, self.offset) == (other.frame, other.offset)

    @property
    def package(self):
        return self.frame.f_globals.get("__name__", "").partition(".")[0]


class LoopBody(Body):
    """The body of the asker's loop. The variables have the values of now, before the loop sets its target; `bind` gives
    the target its values. is_loader(x): whether an object gives batches.

    others: (source, batch) of what the body takes from other loaders by next(); a replay gives them again."""

    running = None  # the body that runs again

    def __init__(self, asker, is_loader):
        frame = asker.frame
        self._read(_block(frame.f_code, frame.f_lineno, asker.offset), frame)
        self.is_direct, self.is_loader, self.is_bound, self.others = asker.is_direct, is_loader, False, []
        target = self.block.node.target
        parts = [x for x in ast.walk(target) if not isinstance(x, ast.expr_context)]
        if not all(isinstance(x, (ast.Name, ast.Tuple, ast.List)) for x in parts):
            raise Unreadable(f"the loop sets {ast.unparse(target)}, which is more than names")
        self.targets = {self.block.mangle.name(x.id) for x in parts if isinstance(x, ast.Name)}
        self.unset = {name: x for name, x in self.unset.items() if name not in self.targets}
        self.values = {name: x for name, x in self.values.items() if name not in self.targets}

    def bind(self, variables, batches):
        """Set the loop's target. variables: of the frame, while or after the body runs. batches: what the loaders gave,
        for the names of the target that the body sets anew."""
        self.is_bound = True
        anew = self.targets & self.block.stores & self.block.reads
        if anew and not self.is_direct:
            raise Unreadable(f"the body sets {min(anew)} of the loop's target anew, and a generator gave its value")
        node, batches = self.block.node, iter(batches)
        of_batch = self._assigned(node.target, node.iter, batches, variables) if anew else {}
        for name in self.targets & self.block.reads:
            if name not in anew and name in variables:
                self.values[name] = variables[name]
            elif name in of_batch:
                self.values[name] = of_batch[name]
            else:
                raise Unreadable(f"the body sets {name} of the loop's target anew, and its first value is not known")

    def __call__(self, replaced):
        before, LoopBody.running = LoopBody.running, self
        self.left = [(source, replace(batch, replaced)) for source, batch in self.others]
        try:
            return super().__call__(replaced)
        finally:
            LoopBody.running = before

    def again(self, source):
        """The batch that the loader gave, the next one of them; IndexError if it gave no more."""
        place = [other for other, _ in self.left].index(source) if source in dict(self.left) else len(self.left)
        return self.left.pop(place)[1]

    def contains(self, line):
        return self.block.body[0].lineno <= line <= self.block.body[-1].end_lineno

    def holds(self, tensors):
        return True

    def _assigned(self, target, source, batches, variables):
        """{name: value} of the target's names that get their values from a batch. source: what the loop iterates."""
        kind = source.func if isinstance(source, ast.Call) else None
        kind = getattr(kind, "id", getattr(kind, "attr", None))
        iterates = variables.get(source.id) if isinstance(source, ast.Name) else None
        parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else ()
        if kind == "enumerate" or isinstance(iterates, enumerate):
            inner = source.args[0] if kind else ast.Constant(None)
            return self._assigned(parts[1], inner, batches, variables) if len(parts) == 2 else {}
        if kind == "zip" and len(parts) == len(source.args):
            result = {}
            for part, argument in zip(parts, source.args):
                names = [x for x in ast.walk(argument) if isinstance(x, (ast.Name, ast.Attribute))]
                if any(self.is_loader(_value(x, variables, self.globals)) for x in names):
                    result |= self._assigned(part, argument, batches, variables)
            return result
        if kind is not None and source.args:
            return self._assigned(target, source.args[0], batches, variables)
        return _unpacked(target, next(batches, None))


def _value(node, variables, globals):
    """The value of `name`, or `name.attribute`; None if there is none."""
    if isinstance(node, ast.Name):
        return variables.get(node.id, globals.get(node.id))
    return getattr(_value(node.value, variables, globals), node.attr, None) if hasattr(node, "attr") else None


def _unpacked(target, value):
    if isinstance(target, ast.Name):
        return {target.id: value}
    items = list(value) if isinstance(value, (list, tuple, dict)) else []
    if len(items) != len(target.elts):
        return {}
    return {name: x for part, item in zip(target.elts, items) for name, x in _unpacked(part, item).items()}
