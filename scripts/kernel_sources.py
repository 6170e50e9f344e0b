"""Which source files make a CUDA kernel, and one fingerprint of them: a GPU record holds for exactly those bytes."""

import hashlib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# What a file pulls in from the project: `#include "x"`, `from .x import`, `from . import x, y`.
_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)
_FROM = re.compile(r"^\s*from\s+\.(\w+)\s+import", re.MULTILINE)
_FROM_PACKAGE = re.compile(r"^\s*from\s+\.\s+import\s+([\w, ]+)", re.MULTILINE)


def kernel_file(op, root=ROOT):
    """The file that owns the op on CUDA: csrc/cuda/<op>.cu or kernels/<op>.py. LookupError where it has none."""
    for path in (root / "csrc" / "cuda" / f"{op}.cu", root / "kernels" / f"{op}.py"):
        if path.exists():
            return path
    raise LookupError(f"{op} has neither csrc/cuda/{op}.cu nor kernels/{op}.py")


def _uses(path):
    text = path.read_text()
    if path.suffix == ".py":
        names = _FROM.findall(text)
        for group in _FROM_PACKAGE.findall(text):
            names += [name.split()[0] for name in group.split(",") if name.strip()]
        return [path.with_name(f"{name}.py") for name in names]
    names = [(path.parent / name).resolve() for name in _INCLUDE.findall(text)]
    return names + [name.with_suffix(".cu") for name in names]  # what a header declares and another source defines


def sources(op, root=ROOT):
    """Every file of the project that the kernel is made of, sorted."""
    found, pending = set(), [kernel_file(op, root).resolve()]
    while pending:
        path = pending.pop()
        if path not in found and path.exists():
            found.add(path)
            pending += _uses(path)
    return sorted(found)


def fingerprint(op, root=ROOT):
    """sha256 over the names and bytes of sources(op)."""
    digest = hashlib.sha256()
    for path in sources(op, root):
        digest.update(f"{path.relative_to(root.resolve()).as_posix()}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
