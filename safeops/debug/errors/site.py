"""Where an op ran, and with which operands."""

import dataclasses

import torch

from safeops.debug.common.source import line


@dataclasses.dataclass
class Site:
    """An op that ran: its name, its place in the source, its operands as text, its ordinal in the step."""

    op: str
    node: str | None
    module: str
    frames: list
    operands: list[str]
    ordinal: int

    @property
    def line(self):
        return line(self.frames[0]) if self.frames else None

    @property
    def place(self):
        return f"{self.op} at {self.line.short}" if self.line else self.op

    def __str__(self):
        within = f" in the backward of {self.node}" if self.node else ""
        text = f"{self.op}{within}" + (f", module {self.module}" if self.module else "")
        text += f"\n  at {self.line}".replace("\n", "\n  ") if self.line else ""
        return text + "".join(f"\n  operand {i}: {operand}" for i, operand in enumerate(self.operands))


def describe(x):
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)} on {x.device}, stride {_stride(x)}"


def _stride(x):
    return tuple(x.stride()) if x.layout is torch.strided else x.layout


def has_storage(x):
    return x.layout is torch.strided and x.device.type != "meta"
