"""Reads files and notebooks as texts, and writes rewritten texts back."""

import codecs
import io
import json
import os
import re
import tempfile
import tokenize

from safeops_lint.finding import Problem

MAGIC = re.compile(r"^(\s*)(%|!|\?)|^(\s*)[\w.]+\?{1,2}\s*$")


class Unreadable(Exception):
    def __init__(self, path, message):
        super().__init__(message)
        self.problem = Problem(path, message)


def read(path):
    """Returns (text, encoding, BOM) of a Python file. The encoding is that of its BOM or its PEP 263 comment, else
    UTF-8. Line ends are kept."""
    data = read_bytes(path)
    bom = codecs.BOM_UTF8 if data.startswith(codecs.BOM_UTF8) else b""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    except SyntaxError as error:
        raise Unreadable(
            path, f"cannot be decoded: {error}; save it as UTF-8 or declare its encoding (PEP 263)"
        ) from None
    encoding = "utf-8" if encoding == "utf-8-sig" else encoding
    try:
        return data[len(bom) :].decode(encoding), encoding, bom
    except UnicodeDecodeError as error:
        place = data[: error.start + len(bom)].count(b"\n") + 1
        message = f"cannot be decoded as {encoding} (line {place}, byte {data[error.start + len(bom)]:#04x}); "
        raise Unreadable(path, message + "save it as UTF-8 or declare its encoding (PEP 263)") from None


def read_bytes(path):
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise Unreadable(path, f"cannot be read: {error.strerror}") from None


def write(path, text, encoding, bom):
    """Replace a file atomically: a reader sees the old text or the new one, also after a crash."""
    real = os.path.realpath(path)
    try:
        data = bom + text.encode(encoding)
        handle, temporary = tempfile.mkstemp(prefix=".safeops-lint-", dir=os.path.dirname(real))
    except (OSError, UnicodeEncodeError) as error:
        raise Unreadable(path, f"cannot be written: {error}") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, os.stat(real).st_mode & 0o7777)
        os.replace(temporary, real)
    except OSError as error:
        os.unlink(temporary)
        raise Unreadable(path, f"cannot be written: {error.strerror}") from None


def notebook(path):
    """Returns [(cell number, source), ...] of a notebook's code cells. Numbers count all cells from 1. Lines with a
    magic become `pass`; cells that begin with %% are left out."""
    try:
        data = json.loads(read_bytes(path).decode("utf-8-sig"))
        cells = data["cells"]
        language = data.get("metadata", {}).get("kernelspec", {}).get("language", "python")
        sources = [
            (c["cell_type"], c["source"] if isinstance(c["source"], str) else "".join(c["source"])) for c in cells
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise Unreadable(path, f"is no notebook of format 4 ({reason}); convert it with `jupyter nbconvert`") from None
    if language.lower() != "python":
        return []
    code = [(i, source) for i, (kind, source) in enumerate(sources, 1) if kind == "code"]
    return [(i, _plain(source)) for i, source in code if not source.lstrip().startswith("%%")]


def _plain(source):
    lines = []
    for line in source.splitlines(keepends=True):
        end = line[len(line.rstrip("\r\n")) :]
        indent = line[: len(line) - len(line.lstrip())]
        lines.append(f"{indent}pass{end}" if MAGIC.match(line) else line)
    text = "".join(lines)
    return text if text.endswith("\n") else text + "\n"
