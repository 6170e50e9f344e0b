"""`[tool.safeops.lint]` of the nearest pyproject.toml that has that table."""

import dataclasses
import fnmatch
import functools
import os
import pathlib

KEYS = {"select": list, "ignore": list, "exclude": list, "per-file-ignores": dict}
# Folders that hold no source of the project. Only below a given path: who names one wants it linted.
SKIPPED = {
    ".git",
    ".hg",
    ".svn",
    ".venv",
    "venv",
    ".tox",
    ".nox",
    ".eggs",
    "build",
    "dist",
    "node_modules",
    "__pycache__",
    "site-packages",
}
SKIPPED |= {".ipynb_checkpoints", ".mypy_cache", ".ruff_cache", ".pytest_cache"}


class BadConfig(Exception):
    """Names the file, the key and the value."""


@dataclasses.dataclass(frozen=True)
class Config:
    root: str = ""
    select: tuple = ()
    ignore: tuple = ()
    exclude: tuple = ()
    per_file: tuple = ()  # of (pattern, codes)

    def excludes(self, path):
        return any(_matches(path, self.root, pattern) for pattern in self.exclude)

    def ignored_in(self, path):
        return tuple(code for pattern, codes in self.per_file for code in codes if _matches(path, self.root, pattern))


def _matches(path, root, pattern):
    """A pattern is about the path below pyproject.toml, about a folder on that path, or about the file's name."""
    relative = pathlib.PurePath(os.path.relpath(os.path.abspath(path), root or ".")).as_posix()
    pattern = pattern.rstrip("/")
    if fnmatch.fnmatch(relative, pattern) or fnmatch.fnmatch(relative, f"{pattern}/*"):
        return True
    return "/" not in pattern and any(fnmatch.fnmatch(part, pattern) for part in relative.split("/"))


def find(path):
    """The Config for a file or folder."""
    path = os.path.abspath(path)
    return _of_folder(path if os.path.isdir(path) else os.path.dirname(path))


@functools.cache
def _of_folder(folder):
    candidate = os.path.join(folder, "pyproject.toml")
    if os.path.isfile(candidate):
        config = load(candidate)
        if config is not None:
            return config
    parent = os.path.dirname(folder)
    return Config() if parent == folder else _of_folder(parent)


def load(path):
    """The Config in a pyproject.toml, None without a `[tool.safeops.lint]`."""
    text = pathlib.Path(path).read_bytes()
    if b"safeops" not in text:
        return None  # without a TOML parser, Python 3.10 can still lint
    try:
        data = _toml().loads(text.decode())
    except ValueError as error:
        raise BadConfig(f"{path}: {error}") from None
    tool = data.get("tool", {})
    table = (
        tool.get("safeops", {}).get("lint")
        if isinstance(tool, dict) and isinstance(tool.get("safeops", {}), dict)
        else None
    )
    if table is None:
        return None
    where = f"{path}: [tool.safeops.lint]"
    if not isinstance(table, dict):
        raise BadConfig(f"{where} is no table")
    for key, value in table.items():
        if key not in KEYS:
            raise BadConfig(f"{where} {key}: no such option (there are {', '.join(KEYS)})")
        if not isinstance(value, KEYS[key]):
            raise BadConfig(f"{where} {key}: {value!r} is no {'table' if KEYS[key] is dict else 'list of strings'}")
        for item in (
            value
            if isinstance(value, list)
            else [c for v in value.values() for c in (v if isinstance(v, list) else [v])]
        ):
            if not isinstance(item, str):
                raise BadConfig(f"{where} {key}: {item!r} is no string")
        _known(where, key, value)
    per_file = tuple(
        (k, tuple(v) if isinstance(v, list) else (v,)) for k, v in table.get("per-file-ignores", {}).items()
    )
    lists = {key: tuple(table.get(key, ())) for key in ("select", "ignore", "exclude")}
    return Config(os.path.dirname(os.path.abspath(path)), per_file=per_file, **lists)


def _known(where, key, value):
    from safeops_lint.rules import unknown

    codes = [] if key == "exclude" else value if isinstance(value, list) else [c for v in value.values() for c in v]
    if unknown(codes):
        raise BadConfig(f"{where} {key}: no rule has the code {unknown(codes)[0]!r}")


def _toml():
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        try:
            import tomli as tomllib
        except ModuleNotFoundError:
            raise BadConfig("pyproject.toml needs tomli on Python 3.10: pip install tomli") from None
    return tomllib
