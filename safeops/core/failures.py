"""The file of ops that failed `safeops verify`: the kernels of such an op are off on this machine until it passes.

A record is {"op", "gpu", "triton", "safeops", "date", "why"}: `op` failed in this version of safeops, on this model of
GPU, with this version of Triton (null for a C++ kernel). An op that passes has no record.
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
    """$SAFEOPS_CACHE, else $XDG_CACHE_HOME/safeops, else ~/.cache/safeops (in a folder "~" if there is no home)."""
    if folder := os.environ.get("SAFEOPS_CACHE"):
        return pathlib.Path(folder)
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "safeops"


def path() -> pathlib.Path:
    return cache_folder() / "failed.json"


def read() -> list[dict]:
    """All records. A file that cannot be read warns and counts as empty: it must not stop a training."""
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
    """Why an op is off on this model of GPU, or None. A failure in another version of safeops only warns."""
    for record in records():
        if (record["op"], record["gpu"], record["triton"]) == (op, gpu, triton):
            if record["safeops"] == VERSION:
                return f"failed `safeops verify` on {record['date']}: {record['why']}"
            warn(f"{op} of safeops {record['safeops']} failed on this GPU ({record['why']}), which says nothing of "
                 f"{VERSION}: `safeops verify --ops {op}` judges that")  # fmt: skip
    return None


def save(judged, gpu, date):
    """Store verdicts for a model of GPU. judged: {(op, triton): why it failed, or None}. Other ops' and GPUs' records
    stay. The file is replaced atomically: a reader sees the old or the new one."""
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
    """Hold a file lock, so that two writers keep each other's records. OSError if the folder is not writable."""
    import fcntl  # (Windows has no fcntl, and no kernels to verify)

    cache_folder().mkdir(parents=True, exist_ok=True)
    with open(cache_folder() / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def warn(text):
    """A RuntimeWarning that shows the line outside this package from which the call came."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(f"safeops: {text}", RuntimeWarning, stacklevel=level)
