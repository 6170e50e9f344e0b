"""Which source files make a CUDA kernel, and one fingerprint of them: a GPU record holds for exactly those bytes."""

import hashlib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# What a file pulls in from the project: `#include "x"`; `from .x import y`, `from ..x.y import z`, `from .. import x`.
_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)
_IMPORT = re.compile(r"^\s*from\s+(\.+)([\w.]*)\s+import\s+(\([^)]*\)|.*)", re.MULTILINE)


def kernel_files(op, root=ROOT):
    """The files that compute the op on CUDA: those whose first line names it, alone or in a list that ends in a colon
    ("// masked_fill: ..."). LookupError where there is none."""
    paths = [*(root / "csrc" / "cuda").rglob("*.cu"), *(root / "kernels").rglob("*.py")]
    found = [path for path in sorted(paths) if op in _names(path)]
    if not found:
        raise LookupError(f"no file of csrc/cuda or kernels names {op} in its first line")
    return found


def _names(path):
    names, colon, _ = path.read_text().partition("\n")[0].strip('"/ ').partition(":")
    return re.split(r",\s*", names) if colon else []


def _uses(path, root):
    """The files that this one pulls in, among names that do not exist."""
    text = path.read_text()
    if path.suffix == ".py":
        yield path.with_name(f"{path.stem}_backward.py")  # which the dispatcher calls, not the forward
        for dots, module, names in _IMPORT.findall(text):
            target = path.parents[len(dots) - 1].joinpath(*module.split("."))
            yield target.with_suffix(".py")
            yield from (target / f"{name}.py" for name in re.findall(r"\w+", names))
        return
    for name in _INCLUDE.findall(text):
        for header in ((path.parent / name).resolve(), (root / "csrc" / name).resolve()):
            yield from (header, header.with_suffix(".cu"), header.with_suffix(".cpp"))  # which define what it declares


def sources(op, root=ROOT):
    """Every file of the project that the op's kernels are made of, sorted."""
    root = root.resolve()
    found, pending = set(), kernel_files(op, root)
    while pending:
        path = pending.pop()
        if path not in found and path.exists():
            found.add(path)
            pending += _uses(path, root)
    return sorted(found)


def fingerprint(op, root=ROOT):
    """sha256 over the names and bytes of sources(op)."""
    digest = hashlib.sha256()
    for path in sources(op, root):
        digest.update(f"{path.relative_to(root.resolve()).as_posix()}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
