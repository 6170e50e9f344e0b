"""Compiles plans (kernel, constants, launch options) to PTX, by the pinned or the oldest Triton. Later runs read the
results from a folder.

`python -m tests.kernels.executed.compiling` compiles requests from stdin, one line of JSON each, as
scripts/gpu_kernels.py writes them; it needs no torch. PYTHONPATH selects the Triton."""

import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "build" / "executed" / "ptx"


class Binary(NamedTuple):
    ptx: str
    warps: int
    shared: int


def pinned():
    return importlib.metadata.version("triton")


def oldest():
    return re.search(r"triton==(.*)", (ROOT / "requirements-triton.txt").read_text())[1]


def folder_of(version):
    """Returns the folder that contains this version of Triton, or None if it is the installed one."""
    return None if version == pinned() else Path(sys.prefix) / "oldest-triton"


@cache
def sources():
    """Returns the source texts of safeops' kernels. Kernels that tests declare are left out."""
    return "".join(path.read_text() for path in sorted((ROOT / "kernels").rglob("*.py")))


@cache
def server(version):
    folder = folder_of(version)
    path = {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"} if folder else {}
    command = [sys.executable, "-m", __name__]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ | path
    )


def compiled(plan, arch, version):
    """Returns the Binary of a plan for compute capability `arch` (e.g. 90) by this version of Triton."""
    from triton.backends.compiler import GPUTarget

    from tests.kernels.compiled import gpu_kernels

    request = gpu_kernels().encoded(plan.source(), plan.options(GPUTarget("cuda", arch, 32))) | {"arch": arch}
    text = json.dumps(request)
    key = hashlib.sha256(f"{version} {text} {sources()}".encode()).hexdigest()[:24]
    path = FOLDER / f"{key}.json"
    if not path.exists():
        process = server(version)
        process.stdin.write(text + "\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline() or '{"error": "Triton has crashed"}')
        if "error" in answer:
            raise RuntimeError(f"{plan.kernel.fn.__name__} by Triton {version}: {answer['error']}")
        if answer.pop("version") != version:
            raise RuntimeError(f"not Triton {version}")
        FOLDER.mkdir(parents=True, exist_ok=True)
        half = path.with_suffix(f".{os.getpid()}")
        half.write_text(json.dumps(answer))
        os.replace(half, path)
    return Binary(**json.loads(path.read_text()))


def main():
    from tests.kernels.compiled import gpu_kernels, lowered

    kernels = gpu_kernels()
    kernels.without_torch()
    import triton

    for line in sys.stdin:
        request = json.loads(line)
        try:
            source, options = kernels.decoded(request)
            ptx, metadata = lowered(source, options, ("ttir", "ttgir", "llir", "ptx"), request["arch"])
            if metadata.get("global_scratch_size") or metadata.get("profile_scratch_size"):
                raise RuntimeError("it needs scratch memory")
            answer = {"ptx": ptx, "warps": metadata["num_warps"], "shared": metadata["shared"]}
            answer["version"] = triton.__version__
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
