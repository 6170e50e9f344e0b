"""Compare the sketches of two runs, entry by entry in the order of execution."""

import dataclasses
import math

from safeops.debug.compare.budget import Budget
from safeops.debug.compare.entry import BACKWARD, FORWARD, PARAMETERS, RESULT, Entry, label
from safeops.debug.compare.projection import LARGEST, STATS

WHAT = {FORWARD: "output", BACKWARD: "gradient of its output", PARAMETERS: "gradient of its parameters"}


@dataclasses.dataclass
class Difference:
    """One tensor of both runs (`phase` "forward" or "backward"), or a module's parameters' gradients ("parameters").

    module: "blocks.1.attn (Attention)". difference: the length of the difference over that of the longer of the two,
    from their projections; or that of their largest magnitudes, if it is larger; inf if NaN or inf are not as many.
    budget: how much of it rounding explains (safeops/debug/compare/budget.py). a, b: the entries.
    """

    phase: str
    module: str
    call: int
    path: str
    difference: float
    budget: float
    a: Entry
    b: Entry

    @property
    def key(self):
        return self.phase, self.a.module, self.call, "" if self.phase == PARAMETERS else self.path

    @property
    def ratio(self):
        return self.difference / self.budget

    @property
    def differs(self):
        return not self.ratio <= 1  # NaN differs

    @property
    def what(self):
        path = "" if self.phase == PARAMETERS else self.path
        return f"{WHAT[self.phase]}{path and ' ' + path}"


class Comparison:
    """The result of `safeops.debug.compare`, which `safeops compare` prints.

    forward: the first Difference, in the order of execution, beyond its budget in the forward pass, or None.
    backward: the first in the backward pass, or None: gradients of outputs and of parameters.
    differences: all that were compared, in that order, within their budgets or not.
    only_a, only_b: names of modules whose outputs only one of the runs has.
    shapes: (name, shape in a, shape in b) of what could not be compared for its shape.
    notes: what else to know, a line each.
    """

    def __init__(self, a, b, slack=1.0, notes=(), inside=None):
        """a, b: Runs. inside: the Comparison of the same runs that shows more modules, and so the dtypes of all: its
        budgets hold here, too."""
        self.names, self.facts, self.ranks = (a.name, b.name), (a.facts, b.facts), (a.ranks, b.ranks)
        self.notes, self.shapes, self.differences = list(notes), [], []
        # The run that shows more has the order: what is inside a compiled function is only in the other one.
        swapped = len(b.of(FORWARD)) > len(a.of(FORWARD))
        first, second = (b, a) if swapped else (a, b)
        self._known = {d.key: d.budget for d in inside.differences} if inside is not None else {}
        self._compare(first, second, swapped, Budget(a, b, slack))
        self.only_a, self.only_b = _only(a, b), _only(b, a)

    @property
    def forward(self):
        return next((d for d in self.differences if d.phase == FORWARD and d.differs), None)

    @property
    def backward(self):
        return next((d for d in self.differences if d.phase != FORWARD and d.differs), None)

    @property
    def equal(self):
        """True if no difference is beyond its budget."""
        return self.forward is None and self.backward is None

    @property
    def largest_ratio(self):
        """The largest difference over its budget: how much room there was, or was not."""
        return max((d.ratio for d in self.differences), default=0.0)

    def require_common(self):
        """Raise ValueError if the runs have no tensor in common."""
        if not self.differences:
            facts = [f"{name}: {x} and {y}" for name, x, y in self.shapes[:3]]
            for name, modules in zip(self.names, (self.only_a, self.only_b)):
                if modules:
                    facts.append(f"only in {name}: {', '.join(modules[:3])}{', ...' if len(modules) > 3 else ''}")
            raise ValueError(f"compare: nothing to compare: {'; '.join(facts)}")

    def _compare(self, first, second, swapped, budget):
        others = {entry.key: entry for entry in second.entries}
        for group in _in_order(first):
            limits = [budget.add(entry, others.get(entry.key)) for entry in group]
            pairs = [self._pair(entry, others[entry.key], first, second) for entry in group if entry.key in others]
            pairs = [pair for pair in pairs if pair is not None]
            if not pairs:
                continue
            difference = _difference(pairs)
            a, b = pairs[0][::-1] if swapped else pairs[0]
            where = label(a.module, a.kind or b.kind)
            result = Difference(a.phase, where, a.call, a.path, difference, max(limits), a, b)
            result.budget = max(result.budget, self._known.get(result.key, 0.0))
            budget.compared(a.phase, difference, result.budget)
            self.differences.append(result)

    def _pair(self, x, y, first, second):
        """The two entries as tensors of one shape; None if they have none."""
        for a, b in (
            (x, y),
            (_whole(x, first), _whole(y, second)),
            (_whole(x, first), y),
            (x, _whole(y, second)),
        ):
            if a is not None and b is not None and a.shape == b.shape:
                # Both on several ranks: each rank's part counts, not their mean.
                if a.of_all is not None and b.of_all is not None and first.ranks == second.ranks:
                    return _whole(x, first), _whole(y, second)
                return a, b
        shapes = (x.shape, y.shape)
        self.shapes.append((f"{label(x.module, x.kind)}, {x.phase}{x.path and ' ' + x.path}", *shapes))
        return None

    def __str__(self):
        from safeops.debug.compare.report import text

        return text(self)

    def __repr__(self):
        return f"<Comparison of {self.names[0]} and {self.names[1]}: {'equal' if self.equal else 'different'}>"


def _whole(entry, run):
    return entry.whole(run.ranks) if entry.of_all is not None else None


def _in_order(run):
    """Yields lists of entries: one output, one output's gradient, or all gradients of a module's parameters, which
    come after the last gradient of its outputs."""
    parameters = {}
    for entry in run.of(PARAMETERS):
        parameters.setdefault(entry.module, []).append(entry)
    for entry in run.of(FORWARD):
        yield [entry]
    backward = run.of(BACKWARD)
    last = {entry.module: i for i, entry in enumerate(backward)}
    for i, entry in enumerate(backward):
        yield [entry]
        if last[entry.module] == i and entry.module in parameters:
            yield parameters.pop(entry.module)
    yield from reversed(parameters.values())


def _difference(pairs):
    """The relative difference of all pairs together, each (Entry, Entry) of one shape."""
    squares = lengths_a = lengths_b = 0.0
    largest = 0.0
    for a, b in pairs:
        if a.nonfinite != b.nonfinite:
            return math.inf
        squares += sum((x - y) ** 2 for x, y in zip(a.stats[STATS:], b.stats[STATS:]))
        lengths_a += a.norm**2
        lengths_b += b.norm**2
        if a.phase == FORWARD:  # (a gradient's largest element may come or go with a kink)
            top = max(a.stats[LARGEST], b.stats[LARGEST])
            largest = max(largest, abs(a.stats[LARGEST] - b.stats[LARGEST]) / top if top else 0.0)
    length = math.sqrt(max(lengths_a, lengths_b))
    return max(math.sqrt(squares) / length if length else 0.0, largest)


def _only(run, other):
    """Names of modules whose outputs `other` does not have."""
    seen = {entry.module for entry in other.of(FORWARD)}
    missing = (label(entry.module, entry.kind) for entry in run.of(FORWARD) if entry.module not in seen)
    return list(dict.fromkeys(name for name in missing if not name.startswith(RESULT)))
