"""Builds wheels from this tree, once a run, and environments that have only the wheel, torch and torch's needs."""

import os
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
EVERY = pytest.param("all", marks=[pytest.mark.slow, pytest.mark.exhaustive])
PLATFORM = f"manylinux_2_28_{os.uname().machine}"


def clean(**variables) -> dict:
    """Returns the environment variables without those by which a Python process would find this tree."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "SAFEOPS_", "PYTEST_", "COV_"))}
    return {**kept, **variables}


def run(command, *, cwd, check=True, **variables):
    result = subprocess.run([*map(str, command)], cwd=cwd, env=clean(**variables), capture_output=True, text=True)
    if check and result.returncode:
        pytest.fail(f"{result.args} exited {result.returncode}\n{result.stdout[-4000:]}\n{result.stderr[-8000:]}")
    return result


def build_wheel(folder: Path, **variables) -> Path:
    """Builds the wheel of `make wheel` and returns its path; ninja reuses the objects in the tree's build folder."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-qq", "--no-deps"]
    run([*pip, "--no-build-isolation", "--wheel-dir", folder, ROOT], cwd=folder, SAFEOPS_PLATFORM=PLATFORM, **variables)
    (wheel,) = folder.glob("*.whl")
    return wheel


def closure(name: str, extras=(), seen=None) -> dict:
    """Returns {(name, *extras): distribution} of `name[extras]` and of all distributions that it needs."""
    seen = {} if seen is None else seen
    key = (re.sub(r"[-_.]+", "-", name).lower(), *sorted(extras))
    if key not in seen:
        seen[key] = metadata.distribution(name)
        for need in map(Requirement, seen[key].requires or ()):
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                closure(need.name, need.extras, seen)
    return seen


def make_environment(folder: Path, wheel: Path) -> Path:
    """Makes an environment with links to torch (too large to copy) and the wheel installed. Returns its interpreter."""
    run([sys.executable, "-m", "venv", "--without-pip", folder], cwd=folder.parent)
    (site,) = folder.glob("lib/python3*/site-packages")
    files = ((distribution, file) for distribution in closure("torch").values() for file in distribution.files)
    tops = {owner.locate_file(file.parts[0]) for owner, file in files if file.parts[0] not in ("..", "__pycache__")}
    for top in tops:  # CUDA's distributions share one folder
        (site / top.name).symlink_to(top)
    python = folder / "bin" / "python"
    # No index, but no --no-deps either: pip itself checks that torch satisfies the wheel's requirements.
    # --isolated and PIP_CONFIG_FILE: if pip found a torch by the machine's settings, it would overwrite the linked one.
    pip = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", "--python", python]
    run([*pip, "install", "-qq", "--no-index", wheel], cwd=folder, PIP_CONFIG_FILE=os.devnull)
    return python


@pytest.fixture(scope="session", params=["native", pytest.param("9.0", marks=pytest.mark.slow), EVERY])
def architectures(request):
    """Sets the architectures of the wheel's CUDA kernels: those of this machine's GPUs, a single one, or all, as
    published."""
    if request.param == "9.0" and not Path(sys.prefix, "cuda-9.0").exists():
        pytest.skip("make test-kernels compiles them first: ten minutes")
    return request.param


@pytest.fixture(scope="session")
def wheel(architectures, tmp_path_factory):
    return build_wheel(tmp_path_factory.mktemp("wheel"), SAFEOPS_CUDA_ARCH=architectures)


@pytest.fixture(scope="session")
def contents(wheel, tmp_path_factory):
    """Returns the folder with the unpacked wheel."""
    folder = tmp_path_factory.mktemp("contents")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


@pytest.fixture(scope="session")
def python(wheel, tmp_path_factory):
    return make_environment(tmp_path_factory.mktemp("clean") / "venv", wheel)


@pytest.fixture(scope="session")
def pure_wheel(tmp_path_factory):
    return build_wheel(tmp_path_factory.mktemp("pure-wheel"), SAFEOPS_NO_EXT="1")


@pytest.fixture(scope="session")
def pure_python(pure_wheel, tmp_path_factory):
    return make_environment(tmp_path_factory.mktemp("pure") / "venv", pure_wheel)
