"""The report of `trace`, as data and as text."""

import dataclasses

import torch

from safeops.debug.common.scan import Counts
from safeops.debug.common.source import Line, line


@dataclasses.dataclass(frozen=True)
class Operand:
    """An operand of the op: its counts, and its value at the first element of the result that is not finite."""

    counts: Counts
    value: float | None = None

    def __str__(self):
        seen = f"{self.counts}, largest magnitude {self.counts.largest:g}"
        if self.counts.nonfinite:
            seen += f", {self.counts.kinds()}"
        if self.counts.zero:
            seen += f", {self.counts.zero} zero"
        return seen + (f"; at that element {self.value:g}" if self.value is not None else "")


@dataclasses.dataclass(frozen=True)
class Frame:
    """One op of the step, for the table of what ran before."""

    index: int
    op: str
    node: str | None
    module: str
    place: tuple | None
    counts: Counts

    def cells(self):
        counts = self.counts
        small = f"{counts.subnormal / max(1, counts.numel):.0%}" if counts.dtype is torch.float16 else ""
        return (
            str(self.index),
            f"{self.op} < {self.node}" if self.node else self.op,
            self.module,
            line(self.place).short if self.place else "",
            f"{counts.type} {'x'.join(map(str, counts.shape)) or 'scalar'}",
            f"{counts.largest:.3g}",
            str(counts.nan or ""),
            str(counts.positive_inf + counts.negative_inf or ""),
            f"{counts.zero / max(1, counts.numel):.0%}",
            small,
        )


HEADER = ("#", "op < node", "module", "line", "result", "largest", "NaN", "inf", "zero", "subnormal")


@dataclasses.dataclass
class Report:
    """The first op of a step that made a value that is not finite, with its cause.

    kind: "undefined" (the true value does not exist: log(0), 0/0), "overflow" (the true value does not fit the dtype),
    "scaled overflow" (it does not fit because it is multiplied by GradScaler's scale; the scaler handles that), or
    "came in" (no op in the step computed it).
    """

    step: int
    kind: str
    op: str  # ATen's name: "log"
    phase: str  # "forward" or "backward"
    node: str | None  # the autograd node: "LogBackward0"
    reached: str  # what it spoiled: "the loss", "a gradient", ...
    why: str
    instead: str | None
    module: str
    lines: list[Line]  # innermost first
    line_is_of: str  # "op", "forward" (the op whose backward it is) or "backward" (the call; no op is known)
    inputs: list[Operand]
    output: Counts | None
    scale: float | None  # GradScaler's scale; None if it did not run
    frames: list[Frame] = dataclasses.field(repr=False, default_factory=list)
    last: int = 12  # frames that the text shows
    index: int = 0  # the op's index in the step
    rank: int | None = None  # the rank that saw it, if several trace together

    @property
    def bug(self):
        """False where GradScaler handles it."""
        return self.kind != "scaled overflow"

    @property
    def line(self):
        """The user's line: of the op, or of the forward op whose backward it is."""
        return self.lines[0] if self.lines else None

    def __str__(self):
        what = f"{self.op} in the backward of {self.node}" if self.phase == "backward" and self.node else self.op
        parts = [f"{self.when()}: {self.headline()}", f"  op       {what}"]
        for name, value in (
            ("module", self.module),
            ("line", self._lines()),
            ("why", self.why),
            ("instead", self.instead),
        ):
            if value:
                parts.append(f"  {name:<9}" + value.replace("\n", "\n" + " " * 11))
        parts += [f"  input {i}  {operand}" for i, operand in enumerate(self.inputs)]
        if self.output is not None:
            first = f", the first at {list(self.output.first)}" if self.output.first else ""
            parts.append(f"  output   {self.output}: {self.output.kinds()}{first}")
        if self.last and len(self.frames) > 1:
            parts += ["", "  what ran before:", *(f"  {row}" for row in self._table())]
        return "\n".join(parts)

    def when(self):
        return f"step {self.step}" + ("" if self.rank is None else f", rank {self.rank}")

    def headline(self):
        if self.kind == "scaled overflow":
            return f"a scaled gradient overflowed (scale {self.scale:g}): GradScaler skips this step"
        if self.kind == "came in":
            return f"{self.reached} is not finite: a tensor came in with NaN or inf"
        verb = "overflowed" if self.kind == "overflow" else "has no finite value"
        return f"{self.reached} is not finite: {self.op} {verb}"

    def _lines(self):
        if not self.lines:
            return ""
        note = {"forward": " (the forward op)", "backward": " (the call of backward)"}.get(self.line_is_of, "")
        head, _, rest = str(self.lines[0]).partition("\n")
        text = head + note + ("\n" + rest if rest else "")
        for outer in self.lines[1:]:
            text += f"\nfrom {outer.short} in {outer.function}"
        return text

    def _table(self):
        rows = [HEADER, *(frame.cells() for frame in self.frames[-self.last :])]
        keep = [i for i in range(len(HEADER)) if any(row[i] for row in rows[1:])]
        widths = {i: max(len(row[i]) for row in rows) for i in keep}
        left = {1, 2, 3, 4}
        return [
            "  ".join(row[i].ljust(widths[i]) if i in left else row[i].rjust(widths[i]) for i in keep).rstrip()
            for row in rows
        ]


class NonFiniteError(ArithmeticError):
    """Raised by `trace` and `recorder` at the end of a step in which a loss or gradient became NaN or inf. `.report`
    says why.

    elsewhere: True if another rank raises the full report.
    """

    def __init__(self, report, elsewhere=False, tool="trace"):
        text = f"{report.when()}: {report.headline()}; that rank tells more" if elsewhere else report
        super().__init__(f"safeops.debug.{tool}, {text}")
        self.report = report
