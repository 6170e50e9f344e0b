"""Reads the configuration: the table `[tool.safeops.lint]` of the nearest pyproject.toml that has it."""

import dataclasses
import fnmatch
import functools
import os
import pathlib

from safeops_lint.rules import unknown

KEYS = {"select": list, "ignore": list, "exclude": list, "per-file-ignores": dict}
# Folders without source code of the project. A folder of such a name is skipped, unless it was given as a path itself.
SKIPPED = set(
    """.git .hg .svn .venv venv .tox .nox .eggs build dist node_modules __pycache__ site-packages .ipynb_checkpoints
    .mypy_cache .ruff_cache .pytest_cache""".split()
)


class BadConfig(Exception):
    """Raised for a wrong configuration. The message names the file, the key and the value."""


@dataclasses.dataclass(frozen=True)
class Config:
    root: str = ""
    select: tuple = ()
    ignore: tuple = ()
    exclude: tuple = ()
    per_file: tuple = ()  # (pattern, codes) pairs

    def excludes(self, path):
        return any(_matches(path, self.root, pattern) for pattern in self.exclude)

    def ignored_in(self, path):
        return tuple(code for pattern, codes in self.per_file for code in codes if _matches(path, self.root, pattern))


def _matches(path, root, pattern):
    """True if the pattern matches the path relative to pyproject.toml, a folder on that path, or the file's name."""
    relative = pathlib.PurePath(os.path.relpath(os.path.abspath(path), root or ".")).as_posix()
    pattern = pattern.rstrip("/")
    if fnmatch.fnmatch(relative, pattern) or fnmatch.fnmatch(relative, f"{pattern}/*"):
        return True
    return "/" not in pattern and any(fnmatch.fnmatch(part, pattern) for part in relative.split("/"))


def find(path):
    """Returns the Config that applies to a file or folder."""
    path = os.path.abspath(path)
    return _of_folder(path if os.path.isdir(path) else os.path.dirname(path))


@functools.cache
def _of_folder(folder):
    candidate = os.path.join(folder, "pyproject.toml")
    config = load(candidate) if os.path.isfile(candidate) else None
    parent = os.path.dirname(folder)
    return config or (Config() if parent == folder else _of_folder(parent))


def load(path):
    """Returns the Config in a pyproject.toml; None if it has no table `[tool.safeops.lint]`."""
    text = pathlib.Path(path).read_bytes()
    if b"safeops" not in text:
        return None  # so that Python 3.10, which has no TOML parser, can still lint
    try:
        table = _toml().loads(text.decode()).get("tool", {}).get("safeops", {}).get("lint")
    except (ValueError, AttributeError) as error:
        raise BadConfig(f"{path}: {error}") from None
    if table is None:
        return None
    where = f"{path}: [tool.safeops.lint]"
    if not isinstance(table, dict):
        raise BadConfig(f"{where} is no table")
    for key, value in table.items():
        _check(where, key, value)
    lists = {key: tuple(table.get(key, ())) for key in ("select", "ignore", "exclude")}
    per_file = tuple((pattern, tuple(codes)) for pattern, codes in table.get("per-file-ignores", {}).items())
    return Config(os.path.dirname(os.path.abspath(path)), per_file=per_file, **lists)


def _check(where, key, value):
    if key not in KEYS:
        raise BadConfig(f"{where} {key}: no such option (there are {', '.join(KEYS)})")
    lists = list(value.values()) if KEYS[key] is dict and isinstance(value, dict) else [value]
    for items in lists:
        if not isinstance(items, list):
            raise BadConfig(f"{where} {key}: {items!r} is no list of strings")
        wrong = [item for item in items if not isinstance(item, str)]
        if wrong:
            raise BadConfig(f"{where} {key}: {wrong[0]!r} is no string")
        if key != "exclude" and unknown(items):
            raise BadConfig(f"{where} {key}: no rule has the code {unknown(items)[0]!r}")


def _toml():
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        try:
            import tomli as tomllib
        except ModuleNotFoundError:
            raise BadConfig("pyproject.toml needs tomli on Python 3.10: pip install tomli") from None
    return tomllib
