"""Write the page of `trace(html=...)`: one file that contains its style, script and data."""

import base64
import ctypes
import dataclasses
import json
import os
import zlib
from pathlib import Path

import torch

from safeops.debug.page.history import LARGEST, LOST, NONFINITE, SUBNORMAL

PLANES = {"largest": LARGEST, "subnormal": SUBNORMAL, "lost": LOST, "nonfinite": NONFINITE}
PARTS = ("page.html", "page_draw.js", "page_chart.js", "page.js")  # files in this folder
MOST_FINDINGS = 50


def path(file):
    """The absolute path of `file`. Raises now, not at the end of a run, if it cannot be written."""
    file = os.path.abspath(os.fsdecode(file))
    if not os.path.isdir(os.path.dirname(file)):
        raise FileNotFoundError(f"trace: html={file!r}: no such folder")
    if os.path.isdir(file):
        raise IsADirectoryError(f"trace: html={file!r} is a folder")
    return file


def style():
    """The style sheet of the page, for other reports."""
    text = (Path(__file__).parent / PARTS[0]).read_text(encoding="utf-8")
    return text.partition("<style>")[2].partition("</style>")[0]


def write(file, tracer):
    parts = {name: (Path(__file__).parent / name).read_text(encoding="utf-8") for name in PARTS}
    page = parts["page.html"]
    for name in PARTS[1:]:
        page = page.replace(f"@{name}@", parts[name])
    Path(file).write_text(page.replace("@data@", _data(tracer)), encoding="utf-8")


def _data(tracer):
    """The page's data, as JSON that a script element can hold."""
    history = tracer._history
    reports = [*tracer.reports, *tracer.overflows]  # the page opens on the first: what GradScaler handled comes last
    cells = history.cells()
    data = {
        "steps": history.steps,
        "span": history.span,
        "columns": len(history.columns),
        "rows": list(history.names),
        "planes": {name: pack(cells[quantity]) for name, quantity in PLANES.items()},
        "modules": [dataclasses.asdict(module) for module in tracer.modules],
        "findings": [
            {"step": r.step, "module": r.module, "phase": r.phase, "text": str(r)} for r in reports[:MOST_FINDINGS]
        ],
        "found": len(reports),
        "marks": sorted({(r.step - 1) // history.span for r in reports}),  # the columns to mark
    }
    return json.dumps(data, allow_nan=False).replace("<", "\\u003c")


def pack(plane):
    """float32 numbers as base64 of zlib. They are rounded to 11 significant bits, enough for three digits. The lowest
    bytes of all numbers come first, then the next bytes. 1,000 modules by 1,000 steps: at most 5 MB, usually < 1 MB."""
    bits = (plane.contiguous().view(torch.int32) + (1 << 12)) & -(1 << 13)
    apart = bits.view(torch.uint8).view(-1, 4).T.contiguous()
    return base64.b64encode(zlib.compress(ctypes.string_at(apart.data_ptr(), apart.numel()), 6)).decode()
