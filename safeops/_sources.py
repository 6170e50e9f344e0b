"""Which source files make a CUDA kernel, and one fingerprint of them: a record of a GPU holds for exactly those bytes.

Of the standard library alone: setup.py loads this file to compile the fingerprints of the C++ kernels into their
binary. Those of Triton are taken at run time, of the files as they are installed.
"""

import functools
import hashlib
import re

CPP, TRITON = "csrc/cuda", "kernels"  # where the two kinds lie, below a root

# What a file pulls in from the project: `#include "x"`; `from .x import y`, `from ..x.y import z`, `from .. import x`.
_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)
_IMPORT = re.compile(r"^\s*from\s+(\.+)([\w.]*)\s+import\s+(\([^)]*\)|.*)", re.MULTILINE)


@functools.cache
def kernel_files(root, kind):
    """{op: the files that compute it}: those whose first line names it, alone or in a list that ends in a colon
    ("// masked_fill: ...")."""
    found = {}
    for path in sorted((root / kind).rglob("*.cu" if kind == CPP else "*.py")):
        names, colon, _ = path.read_text(encoding="utf-8").partition("\n")[0].strip('"/ ').partition(":")
        for op in filter(str.isidentifier, re.split(r",\s*", names) if colon else ()):
            found.setdefault(op, []).append(path)
    return found


def _uses(path, root):
    """The files that this one pulls in, among names that do not exist."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield path.with_name(f"{path.stem}_backward.py")  # which the dispatcher calls, not the forward
        for dots, module, names in _IMPORT.findall(text):
            target = path.parents[len(dots) - 1].joinpath(*module.split("."))
            yield target.with_suffix(".py")
            yield from (target / f"{name}.py" for name in re.findall(r"\w+", names))
        return
    for name in _INCLUDE.findall(text):
        for header in ((path.parent / name).resolve(), (root / "csrc" / name).resolve()):
            # with what is declared there, host code too
            yield from (header, header.with_suffix(".cu"), header.with_suffix(".cpp"))


def sources(op, root, kind):
    """Every file of the project that the op's kernels are made of, sorted. LookupError where there is none."""
    root = root.resolve()
    pending = list(kernel_files(root, kind).get(op, ()))
    if not pending:
        raise LookupError(f"no file of {kind} names {op} in its first line")
    found = set()
    while pending:
        path = pending.pop()
        if path not in found and path.exists():
            found.add(path)
            pending += _uses(path, root)
    return sorted(found)


@functools.cache
def _digest(path):
    return hashlib.sha256(path.read_bytes()).digest()


def _fingerprint(files, root):
    """sha256 over the names and bytes of files."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(root.resolve()).as_posix()}\0".encode())
        digest.update(_digest(path))
    return digest.hexdigest()[:32]


def fingerprint(op, root, kind):
    """Of sources(op, root, kind)."""
    return _fingerprint(sources(op, root, kind), root)


def launch_fingerprint(root):
    """Of what launches Triton's kernels a second time (csrc/launch), which its binary tells."""
    return _fingerprint(sorted((root.resolve() / "csrc/launch").glob("*.[hc]*")), root)
