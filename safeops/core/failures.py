"""The file of what `safeops verify` has seen fail: such an op is off on this machine until it passes.

A record is {"op", "gpu", "triton", "safeops", "date", "why"}: a failure of this version of safeops, on this model of
GPU, with this Triton (null for a kernel of C++). What passes has none.
"""

import contextlib
import functools
import json
import os
import pathlib
import sys
import tempfile
import warnings

from safeops.core import PACKAGE, VERSION

FIELDS = ("op", "gpu", "triton", "safeops", "date", "why")


def cache_folder() -> pathlib.Path:
    """$SAFEOPS_CACHE, else safeops in the user's cache folder (for a user without a home in "~", as Triton's is)."""
    if folder := os.environ.get("SAFEOPS_CACHE"):
        return pathlib.Path(folder)
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "safeops"


def path() -> pathlib.Path:
    return cache_folder() / "failed.json"


def read() -> list[dict]:
    """All records. A file that cannot be read holds none, and says so: no training stops for it."""
    try:
        result = json.loads(path().read_text(encoding="utf-8"))
        if not isinstance(result, list) or not all(map(_is_record, result)):
            raise ValueError(f"it is no list of records with {', '.join(FIELDS)}")
        return result
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        warn(f"{path()} is not used: {error}")
        return []


def _is_record(x):
    texts = isinstance(x, dict) and all(isinstance(x.get(name), str) for name in FIELDS if name != "triton")
    return texts and isinstance(x.get("triton", 0), (str, type(None)))


records = functools.cache(read)


def why(op, gpu, triton) -> str | None:
    """Why an op is off on this model of GPU, or None. What another version of safeops saw is told, and turns nothing
    off."""
    for record in records():
        if (record["op"], record["gpu"], record["triton"]) == (op, gpu, triton):
            if record["safeops"] == VERSION:
                return f"failed `safeops verify` on {record['date']}: {record['why']}"
            warn(f"{op} of safeops {record['safeops']} failed on this GPU ({record['why']}), which says nothing of "
                 f"{VERSION}: `safeops verify --ops {op}` judges that")  # fmt: skip
    return None


def save(judged, gpu, date):
    """Write what came of ops on a model of GPU: {(op, triton): why it failed, or None}. The others' records stay.
    Readers see the file before or after, never in between."""
    with locked():
        kept = [record for record in read() if (record["op"], record["triton"]) not in judged or record["gpu"] != gpu]
        for (op, triton), reason in judged.items():
            if reason is not None:
                kept.append(dict(zip(FIELDS, (op, gpu, triton, VERSION, date, reason))))
        kept.sort(key=lambda record: json.dumps(record, sort_keys=True))
        if kept:
            with tempfile.NamedTemporaryFile("w", dir=cache_folder(), delete=False, encoding="utf-8") as file:
                file.write(f"{json.dumps(kept, indent=1)}\n")
            os.chmod(file.name, 0o644)
            os.replace(file.name, path())
        else:
            path().unlink(missing_ok=True)
    records.cache_clear()


@contextlib.contextmanager
def locked():
    """One process at a time: of two that write none undoes the other. OSError where the folder cannot be written."""
    import fcntl  # (which Windows has not, where there are no kernels)

    cache_folder().mkdir(parents=True, exist_ok=True)
    with open(cache_folder() / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def warn(text):
    """A RuntimeWarning of the line outside this package that called it."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(f"safeops: {text}", RuntimeWarning, stacklevel=level)
