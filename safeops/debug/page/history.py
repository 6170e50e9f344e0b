"""The counts of a traced run, gathered by module and step: what the page and TensorBoard show."""

import dataclasses
import os

import torch

from safeops.debug.common import scan

COLUMNS = 1024  # at most; in a longer run neighboring steps share one
PHASES = ("forward", "backward")
LARGEST, READ, SUBNORMAL, LOST, NONFINITE, NUMEL = range(6)  # two maxima, then sums
ROUNDS_TO_INF = 65520.0  # in fp16; its largest number is 65504
MOST_LOST, MOST_SUBNORMAL = 0.01, 0.1  # the largest shares of a module's values with which it can run in half
VERDICTS = (
    "overflows", "not finite", "underflows", "runs in half", "could run in half", "stays in float32", "never ran",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ModuleCounts:
    """Statistics of the values that a module's ops wrote over the run. A pair is (forward, backward).

    verdict: "overflows" (an op made inf from finite operands because its dtype is too small, or an op read or wrote a
    number that fp16 would round to inf), "not finite" (an op made NaN from finite operands, or inf where no finite
    value exists: log(0)), "underflows" (more than 1 % of the values would be 0 in fp16, or more than 10 % subnormal or
    0), "runs in half" (it writes fp16 already), "could run in half", "stays in float32" (an optimizer or GradScaler,
    in any case), or "never ran". Not counted: NaN and inf that a module received, overflows of scaled gradients that
    GradScaler handled, and the loss scale in float32 gradients.
    """

    name: str  # "decoder.layers.3 (Linear)", "Adam", or outside modules "loss_function (train.py)"
    dtypes: tuple  # of the values that it wrote: ("float16", "float32")
    largest: tuple  # pair: the largest finite magnitude that its ops wrote
    read: tuple  # pair: the largest finite magnitude that its ops read
    subnormal: tuple  # pair: share of values with 0 < |x| < 2^-14, which lose digits in fp16 or become 0
    lost: tuple  # pair: share of values with 0 < |x| <= 2^-25, which become 0 in fp16
    nonfinite: tuple  # pair: share of NaN, inf and -inf
    verdict: str = "never ran"
    why: str = ""


class History:
    """Columns of one or more steps each, the oldest first: float32 (names, phases, quantities). A column has the names
    that were known when it was made."""

    def __init__(self, board=None):
        self.board = board
        self.names = {}  # name -> place: its index in a column's first dim
        self.columns, self.span, self.steps = [], 1, 0  # span: steps per column
        self.dtypes = []  # for each place: the dtypes written
        self.born = {}  # (place, phase) -> {"overflow" or "not finite": first step in which it made one}
        self.functions = {}  # code -> name
        self.judged = _zeros(0, 2)  # row 2 * place + phase: LARGEST, READ, without the loss scale in float32 gradients

    def add(self, step, report, new=True):
        """Add a step and its report. new: False if it belongs to the step before, with which it is merged."""
        meta, handled = step.recorder.meta, report is not None and not report.bug
        wrote, sizes, wrote_in = [], [], []  # rows of the table, their numels, their cells (2 * place + phase)
        read, read_in = [], []
        scale = (step.backward and step.scale()) or 1
        for op in step.ops:
            if not op.outputs:
                continue
            # A custom backward counts as backward, a recomputation (checkpoint's) as forward.
            again = op.in_engine and (op.module or op.differentiable)
            backward = op.facts.scaler or op.node is not None and not again
            place = self._place(self._name(step, op, backward))
            cell = 2 * place + backward
            for row in dict.fromkeys(op.outputs):
                wrote.append(row)
                sizes.append(scan.numel(*meta[row][:2]))
                wrote_in.append(cell)
                self.dtypes[place].add(meta[row][1])
            read += op.inputs.values()
            read_in += [cell] * len(op.inputs)
            # An overflow that GradScaler handles does not count against the module.
            if step.any_bad and not handled and step.makes_bad(op):
                overflow = not step.has_nan(op.outputs) and "overflow" in step.explained(op)[2][0]
                kind = "overflow" if overflow else "not finite"
                self.born.setdefault((place, int(backward)), {}).setdefault(kind, self.steps + new)
        tensors, wrote_in = _sums(step.table[wrote], sizes), _indices(wrote_in)
        column = _zeros(2 * len(self.names), NUMEL + 1)
        for quantity, rows, cells in ((LARGEST, wrote, wrote_in), (READ, read, _indices(read_in))):
            largest = _largest(step.table[rows])
            column[:, quantity].scatter_reduce_(0, cells, largest, "amax")
            if scale != 1:  # divide the backward pass (odd cells) by the loss scale, except in fp16
                halves = [meta[row][1] is torch.float16 for row in rows]
                largest = torch.where(torch.tensor(halves, device="cpu") | (cells % 2 == 0), largest, largest / scale)
            self.judged[:, quantity].scatter_reduce_(0, cells, largest, "amax")
        column[:, SUBNORMAL:].index_add_(0, wrote_in, tensors)
        column = column.view(len(self.names), 2, NUMEL + 1)
        if not new and self.columns:
            self.columns[-1] = _together(self.columns[-1], column.float())
            return
        self._append(column.float())
        if self.board is not None:
            self.board.add(self.steps, list(self.names), column)

    def _append(self, column):
        if self.steps % self.span:
            self.columns[-1] = _together(self.columns[-1], column)
        else:
            self.columns.append(column)
        self.steps += 1
        if len(self.columns) > COLUMNS:
            pairs = zip(self.columns[::2], [*self.columns[1::2], None])
            self.columns = [a if b is None else _together(a, b) for a, b in pairs]
            self.span *= 2

    def _place(self, name):
        place = self.names.setdefault(name, len(self.names))
        if place == len(self.dtypes):
            self.dtypes.append(set())
            self.judged = torch.cat([self.judged, _zeros(2, 2)])
        return place

    def _name(self, step, op, backward):
        """The name under which the op is counted: its module; outside modules the user's function; or GradScaler."""
        source = step.recorder.by_sequence.get(op.sequence) if backward else op
        if op.facts.scaler or source is not None and source.through == "scaler" and not source.module:
            return "GradScaler"
        if source is None:
            return op.node.rpartition("::")[2]  # AccumulateGrad
        if source.module or not source.frames:
            return source.module or "elsewhere"
        code = source.frames[0][0]
        if code not in self.functions:
            file = os.path.basename(code.co_filename)
            self.functions[code] = file if code.co_name == "<module>" else f"{code.co_name} ({file})"
        return self.functions[code]

    # ---- results

    def cells(self):
        """Float32 (6 quantities, 2 phases, names, columns): largest finite magnitudes, shares of the values, and the
        number of values; -1 where nothing was written."""
        cells = _zeros(len(self.columns), len(self.names), 2, NUMEL + 1).float()
        for to, column in zip(cells, self.columns):
            to[: len(column)] = column
        cells = cells.permute(3, 2, 1, 0).contiguous()
        cells[SUBNORMAL:NUMEL] /= cells[NUMEL].clamp(min=1)
        return torch.where(cells[NUMEL] > 0, cells, -1)

    def modules(self, stack):
        """The ModuleCounts of every name, the worst first. stack: the ModuleStack of the run."""
        totals = _zeros(len(self.names), 2, NUMEL + 1)
        for column in self.columns:
            totals[: len(column)] = _together(totals[: len(column)], column.double())
        totals[..., SUBNORMAL:NUMEL] /= totals[..., NUMEL:].clamp(min=1)
        results = []
        for name, place in self.names.items():
            dtypes = tuple(sorted(str(dtype).removeprefix("torch.") for dtype in self.dtypes[place]))
            quantities = map(tuple, totals[place, :, :NUMEL].T.tolist())
            module = ModuleCounts(name, dtypes, *quantities)
            verdict, why = self._verdict(place, module, name in stack.optimizers or name == "GradScaler")
            results.append(dataclasses.replace(module, verdict=verdict, why=why))
        results.sort(key=lambda module: (VERDICTS.index(module.verdict), -max(module.largest)))
        return results + [ModuleCounts(name, (), *[(0.0, 0.0)] * NUMEL) for name in stack.never_ran()]

    def _verdict(self, place, module, optimizes):
        phases = [(phase, word, self.born.get((place, phase), {})) for phase, word in enumerate(PHASES)]
        news = [f"{word}: NaN or inf made of finite operands, first in step {min(born.values())}"
                for _, word, born in phases if born]  # fmt: skip
        if optimizes:
            why = "updates and unscaled gradients are too small beside the weights for half"
            return "stays in float32", news[0] if news else why
        judged = self.judged[2 * place : 2 * place + 2].tolist()  # (largest, read) of each phase
        for phase, word, born in phases:
            largest = max(judged[phase])
            if "overflow" in born:
                return "overflows", f"{word}: an inf of finite operands, first in step {born['overflow']}"
            if largest >= ROUNDS_TO_INF:
                verb = "writes" if judged[phase][LARGEST] == largest else "reads"
                return "overflows", f"{word}: {verb} {largest:.3g}, beyond fp16's 65504"
        if news:
            return "not finite", news[0]
        for phase, word, _ in phases:
            for share, most, what in (
                (module.lost, MOST_LOST, "0"),
                (module.subnormal, MOST_SUBNORMAL, "subnormal or 0"),
            ):
                if share[phase] > most:
                    return "underflows", f"{word}: {share[phase]:.0%} of the values would be {what} in fp16"
        top, scaled = max(module.largest + module.read), ""
        if top >= ROUNDS_TO_INF:
            top, scaled = max(map(max, judged)), " without the loss scale"
        room = 65504 / top if top else 0
        room = f"{room:{',.0f' if room >= 10 else '.3g'}}"
        why = f"fp16's limit is {room} times its largest number{scaled}" if top else "all 0"
        if "float16" not in module.dtypes:
            return "could run in half", why
        for phase, word, _ in phases:
            if module.nonfinite[phase]:
                why = f"{word}: NaN or inf that came to it, was meant, or that GradScaler handled"
        return "runs in half", why


def _zeros(*shape):
    return torch.zeros(shape, dtype=torch.float64, device="cpu")  # not the user's default dtype and device


def _indices(cells):
    return torch.tensor(cells, dtype=torch.int64, device="cpu")


def _largest(counts):
    return counts[:, scan.LARGEST].contiguous().view(torch.float64).clamp(max=2.0**127)  # a float32 holds it


def _sums(counts, sizes):
    """Float64 (tensors, 4) from rows of the table: SUBNORMAL, LOST, NONFINITE and NUMEL, which a column sums."""
    nonfinite = counts[:, : scan.NEGATIVE_INF + 1].sum(1)
    sizes = torch.tensor(sizes, dtype=torch.int64, device="cpu")
    return torch.stack([counts[:, scan.SUBNORMAL], counts[:, scan.LOST], nonfinite, sizes], 1).double()


def _together(a, b):
    """Merge two columns: maxima of the magnitudes, sums of the counts. b has all names of a, and perhaps more."""
    a = torch.cat([a, a.new_zeros(len(b) - len(a), *a.shape[1:])])
    return torch.cat([torch.maximum(a, b)[..., :SUBNORMAL], (a + b)[..., SUBNORMAL:]], -1)
