"""Lists comments and docstrings whose first words leave the subject out. `make lint` runs it.

    python scripts/lint_comments.py [FILE ...]      (without files: all that git tracks)

"Of", "The same", "By", "What" and "Whether" begin half a sentence, whose subject a reader has to find elsewhere. Only
the first words of a comment or docstring count, however long it is. The exit status is 1 if any is listed.
"""

import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEGINS = re.compile(r"\W*(Of|The same|By|What|Whether)\b")
C_SUFFIXES = {".h", ".cuh", ".cpp", ".cu", ".c", ".js"}
C_COMMENT = re.compile(r"//(.*)|/\*(.*)")


def python_comments(text):
    """Yields (line, text) of each comment and docstring."""
    previous, comment_line = tokenize.NEWLINE, -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        line = token.start[0]
        if token.type == tokenize.COMMENT:
            # A comment on the line below another continues it, unless one of the two follows code on its line.
            if line != comment_line + 1 or token.line[: token.start[1]].strip():
                yield line, token.string.lstrip("#:! ")
            comment_line = -1 if token.line[: token.start[1]].strip() else line
        elif token.type == tokenize.STRING and previous in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            yield line, token.string.lstrip("rbuf").strip("\"'")
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            previous = token.type


def c_comments(text):
    """Yields (line, text) of each comment. A `//` inside a string counts as a comment, which is harmless."""
    before = False
    for line, source in enumerate(text.splitlines(), 1):
        match = C_COMMENT.search(source)
        alone = bool(match) and not source[: match.start()].strip()
        if match and not (alone and before):
            yield line, (match[1] or match[2] or "").strip("/!<* ")
        before = alone


def complaints(path):
    """Returns the lines `path:line: text` to print for a file."""
    text = path.read_text(encoding="utf-8")
    comments = python_comments(text) if path.suffix == ".py" else c_comments(text)
    return [f"{path}:{line}: {comment.split(chr(10))[0]}" for line, comment in comments if BEGINS.match(comment)]


def tracked():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\n") if Path(name).suffix in C_SUFFIXES | {".py"}]


if __name__ == "__main__":
    results = [line for path in (map(Path, sys.argv[1:]) if sys.argv[1:] else tracked()) for line in complaints(path)]
    print("\n".join(results))
    if results:
        sys.exit(f"lint: {len(results)} comments begin with Of, The same, By, What or Whether: give each its subject")
