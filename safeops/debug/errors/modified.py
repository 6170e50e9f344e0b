"""Find the line that modified a tensor that backward needs; torch names only the op that made the tensor."""

import ast
import re

import torch

MODIFIED = re.compile(
    r"modified by an inplace operation: \[(?:torch\.)?(?:\w+\.)*(\w*)Tensor \[([\d, ]*)\]\]"
    r"(?:, which is output (\d+) of (\w+),)?.* is at version (\d+); expected version (\d+)"
)
_TYPES = {
    "Half": torch.float16, "BFloat16": torch.bfloat16, "Float": torch.float32, "Double": torch.float64,
}  # fmt: skip


def modified(match, lines, earlier, memory):
    """Find the in-place write that made backward fail, in the Memory of the previous step (`earlier`) and of this one.

    Returns LocatedError's arguments (message, site, candidates), and the line as well where no site is known."""
    type_name, shape, _, maker, _, expected = match.groups()
    shape = tuple(int(size) for size in shape.split(",") if size.strip())
    writes = []
    for step in (earlier, memory):
        for storage in step.storages.values():
            for version, written, dtype, site in storage.writes:
                exact = version == int(expected) and written == shape
                if version >= int(expected) and dtype is _TYPES.get(type_name.rpartition(".")[2], dtype):
                    is_maker = storage.writer is not None and bool(maker) and _same(storage.writer.op, maker)
                    rank = (site.node is None, exact, is_maker, step is memory, site.ordinal)
                    writes.append((rank, site, storage))
    if not writes:
        first = lines[0] if lines else None
        return f"locate_errors: {match.string}\n  by a line that ran outside this context", None, [], first
    _, site, storage = max(writes, key=lambda write: write[0])
    wanted = f"{type_name}Tensor of shape [{match[2]}]"
    text = f"locate_errors: {site.op} modified a tensor that backward needs, {wanted}\n  by {site}"
    if storage.writer is not None:
        text += f"\n  made by {storage.writer.place}"
    reads = [read for version, _, read in storage.reads if version == int(expected) and read.ordinal < site.ordinal]
    for place in list(dict.fromkeys(read.place for read in reads if read.op != "clone"))[:3]:
        text += f"\n  read before by {place}"
    if lines:
        text += f"\n  noticed at {lines[0].short}"
    return text + f"\n  instead: {_out_of_place(site)}", site, [site]


def _same(op, maker):
    """True if op and maker name the same op: 'mul' and 'MulBackward0' ('Mul' in torch 2.13)."""
    return maker.partition("Backward")[0].replace("_", "").lower() == op.rstrip("_").replace("_", "").lower()


def _out_of_place(site):
    written = _assignment(site.line.text) if site.line else None
    if written:
        return f"{written}, which makes a new tensor"
    name = site.op.rstrip("_")
    if name in ("index_put", "masked_fill", "copy", "fill"):
        return "safeops.masked_fill(x, mask, value), which makes a new tensor"
    return f"{name}, without the underscore, which makes a new tensor"


def _assignment(text):
    """'d = d / 3' for 'd /= 3'. None for other lines, and for a write into a part (x[0] += 1)."""
    try:
        (statement,) = ast.parse(text.strip()).body
    except (SyntaxError, ValueError):
        return None
    if not isinstance(statement, ast.AugAssign) or isinstance(statement.target, ast.Subscript):
        return None
    value = ast.BinOp(statement.target, statement.op, statement.value)
    return f"{ast.unparse(statement.target)} = {ast.unparse(value)}"
