"""The report of a recorded step that was not finite."""

import dataclasses

from safeops.debug.trace.report import Report

UNKNOWN = "not repeated"


@dataclasses.dataclass
class Recording(Report):
    """The `Report` of a replayed step, and what the recorder knows beside it.

    kind: as a `Report`'s, or "not repeated": the replay was finite, or there was none; `why` says which.
    """

    notes: list[str] = dataclasses.field(default_factory=list)  # what the recorder saw, a sentence each
    folder: str = ""  # where the step is kept
    where: str = ""  # the rank's coordinates in the device mesh
    is_elsewhere: bool = False  # True if another rank tells the whole report

    @classmethod
    def of(cls, report, **more):
        return cls(**{field.name: getattr(report, field.name) for field in dataclasses.fields(Report)}, **more)

    @property
    def is_unknown(self):
        return self.kind == UNKNOWN

    def when(self):
        return super().when() + (f" ({self.where})" if self.where and self.rank is not None else "")

    def headline(self):
        if self.is_unknown:
            return "the loss or a gradient is not finite, and no replay shows where"
        return super().headline()

    def __str__(self):
        notes = [f"  note     {note}" for note in self.notes]
        return "\n".join([super().__str__(), *notes, *([f"  kept in  {self.folder}"] if self.folder else [])])


def unexplained(step, why):
    """The report of a step whose replay was finite, or that could not run again."""
    return Report(
        step, UNKNOWN, op="", phase="forward", node=None, reached="", why=why, instead=None, module="", lines=[],
        line_is_of="op", inputs=[], output=None, scale=None,
    )  # fmt: skip
